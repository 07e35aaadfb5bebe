"""The layer normalisation operator: of each row its mean and scale are all that is kept."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from unrolled.equations.layer_norm import EPSILON, layer_norm_forward
from unrolled.ops import _norm
from unrolled.ops._backend import equations_only
from unrolled.ops._register import backward_op, call, with_signature


def layer_norm(x: Tensor, gain: Tensor | None = None, bias: Tensor | None = None, epsilon: float = EPSILON) -> Tensor:
    """Each row of x (..., F) to mean 0 and variance 1, times gain (F,), plus bias (F,).

    The equation is in `equations.layer_norm`. Half precision is computed in float32 and rounded once.
    Errors: ValueError for a scalar and for a gain or a bias of another size; TypeError for different dtypes.
    """
    if x.ndim == 0:
        raise ValueError("layer_norm: expected x (..., F), found a scalar")
    dtype, width = _norm.out_dtype(x), x.shape[-1]
    _norm.check_row("layer_norm", width, epsilon, gain=gain, bias=bias)
    wide, gain, bias = _norm.in_float("layer_norm", x, gain, bias)
    flat = wide if x.ndim == 2 else wide.reshape(math.prod(x.shape[:-1]), width)
    if equations_only():
        y, _ = layer_norm_forward(flat, gain, bias, epsilon)
    else:
        y = call(_LayerNorm, _forward, flat, gain, bias, epsilon)[0]
    return (y if x.ndim == 2 else y.reshape(x.shape)).to(dtype)


def _forward(x: Tensor, gain: Tensor | None, bias: Tensor | None, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    _, y, mean, scale = _norm.forward(x, None, gain, bias, True, epsilon, *_norm.NO_DROPPING)
    return y, mean, scale


@with_signature
class _LayerNorm(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, gain: Tensor | None, bias: Tensor | None, epsilon: float) -> Any:
        return _forward(x, gain, bias, epsilon)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, gain, bias, _ = inputs
        _, mean, scale = output
        ctx.has = gain is not None, bias is not None
        ctx.mark_non_differentiable(mean, scale)
        ctx.save_for_backward(x, mean, scale, gain)

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *_: Any) -> Any:
        dx, _, dgain, dbias = _backward_once(None, dy, *ctx.saved_tensors, True, ctx.has[1], *_norm.NO_DROPPING)
        return dx, dgain if ctx.has[0] else None, dbias if ctx.has[1] else None, None


_backward_once = backward_op(_norm.backward, "layer_norm")
