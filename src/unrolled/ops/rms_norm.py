"""The operator of normalisation by the root of the mean square: of each row its scale is all that is kept."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from unrolled.equations.rms_norm import rms_norm_forward
from unrolled.ops import _norm
from unrolled.ops._backend import equations_only
from unrolled.ops._register import backward_op, call, with_signature


def rms_norm(x: Tensor, gain: Tensor | None = None, epsilon: float | None = None) -> Tensor:
    """Each row of x (..., F) to mean square 1, times gain (F,); `epsilon` None: that of the arithmetic's dtype.

    The equation is in `equations.rms_norm`. Half precision is computed in float32 and rounded once.
    Errors: ValueError for a scalar and for a gain of another size; TypeError for different dtypes.
    """
    if x.ndim == 0:
        raise ValueError("rms_norm: expected x (..., F), found a scalar")
    dtype, width = _norm.out_dtype(x), x.shape[-1]
    _norm.check_row("rms_norm", width, epsilon, gain=gain)
    wide, gain = _norm.in_float("rms_norm", x, gain)
    flat = wide if x.ndim == 2 else wide.reshape(math.prod(x.shape[:-1]), width)
    epsilon = torch.finfo(flat.dtype).eps if epsilon is None else epsilon
    if equations_only():
        y, _ = rms_norm_forward(flat, gain, epsilon)
    else:
        y = call(_RMSNorm, _forward, flat, gain, epsilon)[0]
    return (y if x.ndim == 2 else y.reshape(x.shape)).to(dtype)


def _forward(x: Tensor, gain: Tensor | None, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    _, y, mean, scale = _norm.forward(x, None, gain, None, False, epsilon, *_norm.NO_DROPPING)
    return y, mean, scale


@with_signature
class _RMSNorm(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, gain: Tensor | None, epsilon: float) -> Any:
        return _forward(x, gain, epsilon)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, gain, _ = inputs
        _, mean, scale = output
        ctx.has_gain = gain is not None
        ctx.mark_non_differentiable(mean, scale)
        ctx.save_for_backward(x, mean, scale, gain)

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *_: Any) -> Any:
        dx, _, dgain, _ = _backward_once(None, dy, *ctx.saved_tensors, False, False, *_norm.NO_DROPPING)
        return dx, dgain if ctx.has_gain else None, None


_backward_once = backward_op(_norm.backward, "rms_norm")
