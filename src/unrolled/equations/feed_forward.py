"""The feed-forward layer of the Transformer, plain and gated."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from unrolled.equations.activations import Kind, activate, activation_derivative
from unrolled.equations.dropout import Dropping


class FeedForwardSaved(NamedTuple):
    x: Float[Tensor, "N D"]
    a: Float[Tensor, "N F"]  # before the activation, or what the gate multiplies
    gate: Float[Tensor, "N F"] | None  # before the activation of the gate
    weight1: Float[Tensor, "F D"]
    weight2: Float[Tensor, "D F"]
    weight_gate: Float[Tensor, "F D"] | None
    activation: Kind
    dropping: Dropping | None


class FeedForwardGrads(NamedTuple):
    dx: Float[Tensor, "N D"]
    dweight1: Float[Tensor, "F D"]
    dbias1: Float[Tensor, "F"]
    dweight2: Float[Tensor, "D F"]
    dbias2: Float[Tensor, "D"]
    dweight_gate: Float[Tensor, "F D"] | None
    dbias_gate: Float[Tensor, "F"] | None


def feed_forward_forward(
    x: Float[Tensor, "N D"],
    weight1: Float[Tensor, "F D"],
    bias1: Float[Tensor, "F"] | None,
    weight2: Float[Tensor, "D F"],
    bias2: Float[Tensor, "D"] | None,
    activation: Kind,
    weight_gate: Float[Tensor, "F D"] | None = None,
    bias_gate: Float[Tensor, "F"] | None = None,
    dropping: Dropping | None = None,
) -> tuple[Float[Tensor, "N D"], FeedForwardSaved]:
    """Each token by itself, into F hidden units and back; with a gate, half of the hidden units multiply the others.

    Definition, with phi the activation and m the dropout mask of the hidden units (1 without dropout)::

        a = x W1^T + b1                                     (1)
        g = x Wg^T + bg                                     (2)
        h = m * phi(a), with a gate h = m * phi(g) * a      (3)
        y = h W2^T + b2                                     (4)

    Gradient::

        dh = dy W2
        da = m * dh * phi'(a), with a gate da = m * dh * phi(g) and dg = m * dh * a * phi'(g)
        dx = da W1 + dg Wg
        dW1 = da^T x,   db1 = sum over tokens of da
        dWg = dg^T x,   dbg = sum over tokens of dg
        dW2 = dy^T h,   db2 = sum over tokens of dy

    Shapes: x and y (N, D); weight1 and weight_gate (F, D), weight2 (D, F); the biases (F,) and (D,), or None.
    Edges: N = 0 gives an empty y and zero gradients of the parameters. `saved` keeps a and g; h is computed again.
    Source: Vaswani 2017, equation 2; the gate, Shazeer 2020, equation 5.
    Derivation: docs/en/transformer.md.
    """
    a = _linear(x, weight1, bias1)  # (1)
    gate = None if weight_gate is None else _linear(x, weight_gate, bias_gate)  # (2)
    saved = FeedForwardSaved(x, a, gate, weight1, weight2, weight_gate, activation, dropping)
    return _linear(_hidden(saved), weight2, bias2), saved  # (4)


def feed_forward_backward(dy: Float[Tensor, "N D"], saved: FeedForwardSaved) -> FeedForwardGrads:
    x, a, gate, weight1, weight2, weight_gate, activation, _ = saved
    h, dh = _hidden(saved), _drop(dy @ weight2, saved)  # (4), (3)
    dgate = None if gate is None else dh * a * activation_derivative(gate, activation)  # (3)
    da = dh * (activation_derivative(a, activation) if gate is None else activate(gate, activation))  # (3)
    dx = da @ weight1  # (1)
    if dgate is None or weight_gate is None:
        return FeedForwardGrads(dx, da.T @ x, da.sum(0), dy.T @ h, dy.sum(0), None, None)  # (1), (4)
    dx = dx + dgate @ weight_gate  # (2)
    return FeedForwardGrads(dx, da.T @ x, da.sum(0), dy.T @ h, dy.sum(0), dgate.T @ x, dgate.sum(0))  # (1), (4), (2)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = x @ weight.T
    return y if bias is None else y + bias


def _hidden(saved: FeedForwardSaved) -> Float[Tensor, "N F"]:
    h = activate(saved.a, saved.activation) if saved.gate is None else activate(saved.gate, saved.activation) * saved.a
    return _drop(h, saved)  # (3)


def _drop(h: Float[Tensor, "N F"], saved: FeedForwardSaved) -> Float[Tensor, "N F"]:
    return h if saved.dropping is None else h * saved.dropping.mask(h.shape[1]).to(h.dtype)
