"""The mean squared error operator."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from unrolled.equations.mean_squared_error import (
    MeanSquaredErrorSaved,
    mean_squared_error_backward,
    mean_squared_error_forward,
)
from unrolled.ops._backend import arrays, core, equations_only, full_precision, on_core, one_kind
from unrolled.ops._register import apply, backward_op, register, with_signature


def mean_squared_error(y: Tensor, target: Tensor) -> Tensor:
    """The mean of (y - target)^2 over all elements, 0 over none; the equation is in `equations.mean_squared_error`.

    Errors: ValueError where the shapes differ (torch would broadcast, nearly always by mistake); TypeError for y of
    whole numbers.
    """
    if y.shape != target.shape:
        raise ValueError(f"y and target must have one shape, found {tuple(y.shape)} and {tuple(target.shape)}")
    y, target = full_precision(y, target)
    one_kind("mean_squared_error", y)
    if equations_only():
        return mean_squared_error_forward(y, target)[0]
    loss: Tensor = apply(_MeanSquaredError, y, target)
    return loss


@with_signature
class _MeanSquaredError(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(y: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = _forward(y, target)
        return loss

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> Any:
        dy = _backward_once(dloss, *ctx.saved_tensors)
        return dy, (-dy if ctx.needs_input_grad[1] else None)


def _forward_kernel(y: Tensor, target: Tensor) -> Tensor:
    if not on_core(y, target):
        return mean_squared_error_forward(y, target)[0]
    loss = y.new_empty(())
    core.mean_squared_error_forward(*arrays(y.reshape(-1), target.reshape(-1), loss), torch.get_num_threads())
    return loss


def _backward_kernel(dloss: Tensor, y: Tensor, target: Tensor) -> Tensor:
    if not on_core(y, target, dloss):
        return mean_squared_error_backward(dloss, MeanSquaredErrorSaved(y - target))[0]
    dy = torch.empty_like(y, memory_format=torch.contiguous_format)
    core.mean_squared_error_backward(
        *arrays(dloss, y.reshape(-1), target.reshape(-1), dy.view(-1)), torch.get_num_threads()
    )
    return dy


_forward = register(
    "mean_squared_error_forward(Tensor y, Tensor target) -> Tensor", _forward_kernel, lambda y, target: y.new_empty(())
)
_backward = register(
    "mean_squared_error_backward(Tensor dloss, Tensor y, Tensor target) -> Tensor",
    _backward_kernel,
    lambda dloss, y, target: y.new_empty(y.shape),
)
_backward_once = backward_op(_backward, "mean_squared_error")
