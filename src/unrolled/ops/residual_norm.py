"""The operator of residual connection, dropout and normalisation in one: the sum is all that is kept, and no mask."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from unrolled.equations.dropout import Dropping
from unrolled.equations.residual_norm import Kind, residual_norm_forward
from unrolled.ops import _norm
from unrolled.ops._backend import check_dropping, equations_only
from unrolled.ops._register import backward_op, call, with_signature
from unrolled.ops.dropout import dropout


def residual_norm(
    x: Tensor,
    s: Tensor,
    gain: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    kind: Kind,
    epsilon: float | None,
    dropping: Dropping | None = None,
) -> tuple[Tensor, Tensor]:
    """`r = x + m * s` and `y = norm(r)`, for x and s (N, F), gain and bias (F,); m is the mask of `dropping`, else 1;
    `epsilon` None: that of the arithmetic's dtype.

    The equation is in `equations.residual_norm`. Half precision is computed in float32 and rounded once.
    Errors: ValueError for another kind than "layer" and "rms", a bias with "rms", sizes that do not fit and a
    probability outside [0, 1]; TypeError for different dtypes.
    """
    if kind not in ("layer", "rms"):
        raise ValueError(f'residual_norm: kind must be "layer" or "rms", found {kind!r}')
    if kind == "rms" and bias is not None:
        raise ValueError('residual_norm: kind "rms" has no bias')
    if x.ndim != 2 or x.shape != s.shape:
        raise ValueError(f"residual_norm: expected x and s (N, F), found {tuple(x.shape)} and {tuple(s.shape)}")
    _norm.check_row("residual_norm", x.shape[1], epsilon, gain=gain, bias=bias)
    if dropping is not None:
        check_dropping(dropping, x.shape[0])
    dropping = None if dropping is None or dropping.p == 0 else dropping
    dtype = _norm.out_dtype(x)
    x, s, gain, bias = _norm.in_float("residual_norm", x, s, gain, bias)
    epsilon = torch.finfo(x.dtype).eps if epsilon is None else epsilon
    if equations_only():
        r, y, _ = residual_norm_forward(x, s, gain, bias, kind, epsilon, dropping)
    else:
        where = _norm.NO_DROPPING
        if dropping is not None:
            where = dropping.seed, dropping.key, dropping.t, dropping.layer, dropping.p  # type: ignore[assignment]
        r, y, *_ = call(_ResidualNorm, _norm.forward, x, s, gain, bias, kind == "layer", epsilon, *where)
    return r.to(dtype), y.to(dtype)


@with_signature
class _ResidualNorm(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> Any:
        return _norm.forward(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, _, gain, bias, ctx.centred, _, seed, key, t, ctx.layer, ctx.p = inputs
        r, _, mean, scale = output
        ctx.has = gain is not None, bias is not None
        ctx.mark_non_differentiable(mean, scale)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(r, mean, scale, gain, seed, key, t)

    @staticmethod
    def backward(ctx: Any, dr: Tensor | None, dy: Tensor | None, *_: Any) -> Any:
        r, mean, scale, gain, seed, key, t = ctx.saved_tensors
        nothing = [None] * 9
        if dy is None:  # only the sum was used
            ds = dr if dr is None or seed is None else dropout(dr, ctx.p, seed, ctx.layer, key, t)
            return dr, ds, *nothing
        where = seed, key, t, ctx.layer, ctx.p
        dx, ds, dgain, dbias = _backward_once(dr, dy, r, mean, scale, gain, ctx.centred, ctx.has[1], *where)
        own = (dgain if ctx.has[0] else None, dbias if ctx.has[1] else None)
        return dx, dx if seed is None else ds, *own, *nothing[2:]


_backward_once = backward_op(_norm.backward, "residual_norm")
