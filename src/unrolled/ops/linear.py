"""The linear operator."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from unrolled.equations.linear import LinearSaved, linear_backward, linear_forward
from unrolled.ops._backend import arrays, core, equations_only, full_precision, on_core, one_kind
from unrolled.ops._register import backward_op, call, register, with_signature


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x W^T + b` for x (..., I), weight (O, I), bias (O,) or None; the equation is in `equations.linear`."""
    x, weight, bias = full_precision(x, weight, bias)
    one_kind("linear", x, weight, bias)
    if x.ndim == 0 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"expected x (..., {weight.shape[1]}), found shape {tuple(x.shape)}")
    flat = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    if equations_only():
        y, _ = linear_forward(flat, weight, bias)
    else:
        y = call(_Linear, _forward, flat, weight, bias)
    return y.reshape(*x.shape[:-1], weight.shape[0])


@with_signature
class _Linear(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y: Tensor = _forward(x, weight, bias)
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, weight, bias = inputs
        ctx.has_bias = bias is not None
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        dx, dweight, dbias = _backward_once(dy, *ctx.saved_tensors, ctx.needs_input_grad[0])
        return (dx if ctx.needs_input_grad[0] else None), dweight, (dbias if ctx.has_bias else None)


def _forward_kernel(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if not on_core(x, weight):
        return linear_forward(x, weight, bias)[0]
    y = x.new_empty(len(x), len(weight))
    core.linear_forward(*arrays(x, weight, bias, y), torch.get_num_threads())
    return y


def _backward_kernel(dy: Tensor, x: Tensor, weight: Tensor, need_dx: bool) -> tuple[Tensor, Tensor, Tensor]:
    if not on_core(dy, x, weight):
        return linear_backward(dy, LinearSaved(x, weight))
    dx = x.new_empty(x.shape if need_dx else 0)
    dweight = torch.empty_like(weight, memory_format=torch.contiguous_format)
    dbias = x.new_empty(len(weight))
    core.linear_backward(*arrays(dy, x, weight, dx, dweight, dbias), torch.get_num_threads())
    return dx, dweight, dbias


_forward = register(
    "linear_forward(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    _forward_kernel,
    lambda x, weight, bias: x.new_empty(x.shape[0], weight.shape[0]),
)
_backward = register(
    "linear_backward(Tensor dy, Tensor x, Tensor weight, bool need_dx) -> (Tensor, Tensor, Tensor)",
    _backward_kernel,
    lambda dy, x, weight, need_dx: (
        x.new_empty(x.shape if need_dx else 0),
        weight.new_empty(weight.shape),
        weight.new_empty(weight.shape[0]),
    ),
)
_backward_once = backward_op(_backward, "linear")
