"""The dropout operator. It is linear in x, so its backward is the operator itself, at any order."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from unrolled.equations.dropout import Dropping, dropout_forward
from unrolled.ops._backend import arrays, check_dropping, core, equations_only, full_precision, on_core, one_kind
from unrolled.ops._register import apply, call, register, with_signature


def dropout(x: Tensor, p: float, seed: Tensor, layer: int, key: Tensor, t: Tensor) -> Tensor:
    """Drops units of x (N, F) with probability p; the mask is a function of (seed, layer, key[n], t[n], unit).

    The equation is in `equations.dropout`. Shapes: seed an int64 scalar, key and t int64 (N,).
    Errors: ValueError for a probability outside [0, 1] and for another shape; TypeError for another dtype.
    """
    (x,) = full_precision(x)
    one_kind("dropout", x)
    check_dropping(Dropping(p, seed, layer, key, t), x.shape[0])
    if equations_only():
        return dropout_forward(x, seed, layer, key, t, p)[0]
    y: Tensor = call(_Dropout, _forward, x, seed, layer, key, t, p)
    return y


@with_signature
class _Dropout(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, seed: Tensor, layer: int, key: Tensor, t: Tensor, p: float) -> Tensor:
        y: Tensor = _forward(x, seed, layer, key, t, p)
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, seed, ctx.layer, key, t, ctx.p = inputs
        ctx.save_for_backward(seed, key, t)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        seed, key, t = ctx.saved_tensors
        again = partial(apply, _Dropout) if torch.is_grad_enabled() else _forward
        dx = again(dy, seed, ctx.layer, key, t, ctx.p)
        return dx, None, None, None, None, None


def _forward_kernel(x: Tensor, seed: Tensor, layer: int, key: Tensor, t: Tensor, p: float) -> Tensor:
    if not on_core(x):
        return dropout_forward(x, seed, layer, key, t, p)[0]
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    core.dropout_forward(*arrays(x, seed, key, t, y), layer, p, torch.get_num_threads())
    return y


_forward = register(
    "dropout_forward(Tensor x, Tensor seed, int layer, Tensor key, Tensor t, float p) -> Tensor",
    _forward_kernel,
    lambda x, seed, layer, key, t, p: x.new_empty(x.shape),
)
