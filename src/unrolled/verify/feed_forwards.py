"""The operators of the activations and the feed-forward layer as their judges see them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from unrolled.equations import activations, feed_forward
from unrolled.equations.dropout import Dropping
from unrolled.ops.activation import activation as activation_op
from unrolled.ops.feed_forward import feed_forward as feed_forward_op
from unrolled.verify.formulations import plain_dropout
from unrolled.verify.inputs import normal
from unrolled.verify.judges import Inputs
from unrolled.verify.operator import Operator

_PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": lambda x: (x + x.abs()) / 2,
    "gelu": lambda x: x * torch.special.ndtr(x),
    "gelu_tanh": lambda x: x * torch.sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x * x * x)),
    "silu": lambda x: x / (1 + torch.exp(-x)),
}
_TORCH: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


def make_activation(
    generator: Generator, dtype: torch.dtype, shape: tuple[int, ...] = (4, 3), kind: str = "relu", scale: float = 2.0
) -> dict[str, Any]:
    return {"x": normal(generator, dtype, *shape, scale=scale), "kind": kind}


def plain_activation(x: Tensor, kind: str) -> Tensor:
    return _PLAIN[kind](x)


def torch_activation(x: Tensor, kind: str) -> Tensor:
    return _TORCH[kind](x)


def make_feed_forward(
    generator: Generator,
    dtype: torch.dtype,
    tokens: int = 4,
    width: int = 3,
    units: int = 5,
    activation: str = "gelu",
    gated: bool = False,
    bias: bool = True,
    p: float = 0.0,
    layer: int = 2,
) -> dict[str, Any]:
    """In sixty-fourths, so that rounding takes no hidden unit over the kink of relu."""

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        exact = normal(generator, torch.float64, *shape, scale=scale).detach()
        return ((exact * 64).round() / 64).to(dtype).requires_grad_()

    inputs: dict[str, Any] = {
        "x": draw(tokens, width),
        "weight1": draw(units, width, scale=1.5 / max(width, 1) ** 0.5),
        "bias1": draw(units) if bias else None,
        "weight2": draw(width, units, scale=1.5 / max(units, 1) ** 0.5),
        "bias2": draw(width) if bias else None,
        "activation": activation,
    }
    if gated:
        inputs["weight_gate"] = draw(units, width, scale=1.5 / max(width, 1) ** 0.5)
        inputs["bias_gate"] = draw(units) if bias else None
    if p:
        key, t = (torch.randint(2**40, (tokens,), generator=generator) for _ in range(2))
        inputs["dropping"] = Dropping(p, torch.randint(2**63 - 1, (), generator=generator), layer, key, t)
    return inputs


def plain_feed_forward(
    x: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    activation: str,
    weight_gate: Tensor | None = None,
    bias_gate: Tensor | None = None,
    dropping: Dropping | None = None,
) -> Tensor:
    """One hidden unit at a time, each with what it adds to the output of every token."""
    y = (x @ torch.zeros_like(weight2)[:, :1]).expand(len(x), len(weight2))
    y = y if bias2 is None else y + bias2
    for unit in range(len(weight1)):
        a = _projection(x, weight1, bias1, unit)
        g = a if weight_gate is None else _projection(x, weight_gate, bias_gate, unit)
        h = plain_activation(g, activation) if weight_gate is None else plain_activation(g, activation) * a
        if dropping is not None:
            before = h.new_zeros(len(x), unit)  # the mask counts the units
            p, seed, layer, key, t = dropping
            h = plain_dropout(torch.cat([before, h[:, None]], 1), p, seed, layer, key, t)[:, unit]
        y = y + torch.outer(h, weight2[:, unit])
    return y


def _projection(x: Tensor, weight: Tensor, bias: Tensor | None, unit: int) -> Tensor:
    a = (x * weight[unit]).sum(1)
    return a if bias is None else a + bias[unit]


def torch_feed_forward(
    x: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    activation: str,
    weight_gate: Tensor | None = None,
    bias_gate: Tensor | None = None,
) -> Tensor:
    a = F.linear(x, weight1, bias1)
    if weight_gate is None:
        h = torch_activation(a, activation)
    else:
        h = torch_activation(F.linear(x, weight_gate, bias_gate), activation) * a
    return F.linear(h, weight2, bias2)


def _terms(inputs: Inputs) -> int:
    """A rounding of the first map passes through the second."""
    units, width = inputs["weight1"].shape
    return int(units + width + len(inputs["x"]))


_GATED = {"gated": True, "activation": "silu"}

FEED_FORWARDS: dict[str, Operator] = {
    "activation": Operator(
        make_activation,
        activation_op,
        activations.activation_forward,
        activations.activation_backward,
        plain_activation,
        torch_activation,
        lambda inputs: 4,  # the terms of the longest formula
        tuple({"kind": kind, "shape": shape} for kind in _PLAIN for shape in ((4, 3), (67,))),
        cancels=lambda inputs: 1.0,  # 1 and an erf or tanh of nearly -1
    ),
    "feed_forward": Operator(
        make_feed_forward,
        feed_forward_op,
        feed_forward.feed_forward_forward,
        feed_forward.feed_forward_backward,
        plain_feed_forward,
        torch_feed_forward,
        _terms,
        (
            {},
            {"activation": "relu", "p": 0.4, "units": 67, "width": 19, "tokens": 11},
            {"activation": "gelu_tanh", "bias": False, "units": 33, "width": 8, "tokens": 17},
            _GATED,
            {**_GATED, "p": 0.4, "units": 35, "tokens": 13, "width": 17},
        ),
        cancels=lambda inputs: 1.0,
        peer_has=lambda inputs: "dropping" not in inputs,
    ),
}
