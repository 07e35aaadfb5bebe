"""The linear map."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor


class LinearSaved(NamedTuple):
    x: Float[Tensor, "N I"]
    weight: Float[Tensor, "O I"]


class LinearGrads(NamedTuple):
    dx: Float[Tensor, "N I"]
    dweight: Float[Tensor, "O I"]
    dbias: Float[Tensor, "O"]


def linear_forward(
    x: Float[Tensor, "N I"], weight: Float[Tensor, "O I"], bias: Float[Tensor, "O"] | None
) -> tuple[Float[Tensor, "N O"], LinearSaved]:
    """One linear map of every token.

    Definition::

        y = x W^T + b       (1)

    Gradient::

        dx = dy W
        dW = dy^T x
        db = sum over tokens of dy

    Shapes: x (N, I), weight (O, I), bias (O,) or None; y (N, O).
    Edges: N = 0 gives an empty y and zero gradients of weight and bias.
    Source: torch.nn.Linear's orientation of the weight.
    Derivation: docs/en/rnn.md.
    """
    y = x @ weight.T  # (1)
    return y if bias is None else y + bias, LinearSaved(x, weight)


def linear_backward(dy: Float[Tensor, "N O"], saved: LinearSaved) -> LinearGrads:
    x, weight = saved
    return LinearGrads(dx=dy @ weight, dweight=dy.T @ x, dbias=dy.sum(0))  # (1)
