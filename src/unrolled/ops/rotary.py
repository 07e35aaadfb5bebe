"""The operator of rotary positions. It is linear in x, so its backward is the operator itself, at any order."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from unrolled.equations.positions import BASE, frequencies, rotary_forward
from unrolled.ops._backend import arrays, core, equations_only, full_precision, on_core, one_kind
from unrolled.ops._register import apply, call, register, with_signature


def rotary(x: Tensor, t: Tensor, *, heads: int, columns: int | None = None, base: float = BASE) -> Tensor:
    """Turns the pairs of neighbours in each head of x (N, D) by an angle that grows with the position t (N,).

    The equation is in `equations.positions`. `heads` heads of columns / heads numbers each lie in the first `columns`
    columns (None: in all of them); the others are copied. For q|k|v of A heads of F numbers in one row, to turn q and
    k: heads 2 A, columns 2 A F.
    Errors: ValueError for shapes that do not fit and for heads of an odd size; TypeError for positions that are not
    whole numbers.
    """
    (x,) = full_precision(x)
    one_kind("rotary", x)
    if x.ndim != 2 or t.shape != x.shape[:1]:
        raise ValueError(f"rotary: expected x (N, D) and t (N,), found {tuple(x.shape)} and {tuple(t.shape)}")
    if t.is_floating_point() or t.is_complex() or t.dtype == torch.bool:
        raise TypeError(f"rotary: positions must be whole numbers, found {t.dtype}")
    columns = x.shape[1] if columns is None else columns
    if not 0 <= columns <= x.shape[1]:
        raise ValueError(f"rotary: columns must lie in [0, {x.shape[1]}], found {columns}")
    if heads < 1 or columns % (2 * heads):
        raise ValueError(f"rotary: {columns} columns are not {heads} heads of an even size")
    if base <= 0:
        raise ValueError(f"rotary: base must be above 0, found {base}")
    t = t.to(torch.int64)
    if equations_only():
        return rotary_forward(x, t, heads, columns, base)[0]
    y: Tensor = call(_Rotary, _forward, x, t, heads, columns, base)
    return y


@with_signature
class _Rotary(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, t: Tensor, heads: int, columns: int, base: float) -> Tensor:
        y: Tensor = _forward(x, t, heads, columns, base)
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, t, *ctx.sizes = inputs
        ctx.save_for_backward(t)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        (t,) = ctx.saved_tensors
        again = partial(apply, _Rotary) if torch.is_grad_enabled() else _forward
        return again(dy, -t, *ctx.sizes), None, None, None, None


def _kernel(x: Tensor, t: Tensor, heads: int, columns: int, base: float) -> Tensor:
    if not on_core(x):
        return rotary_forward(x, t, heads, columns, base)[0]
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    frequency = frequencies(columns // heads, x.device, base)
    core.rotary(*arrays(x, t, frequency, y), heads, columns, torch.get_num_threads())
    return y


_forward = register(
    "rotary(Tensor x, Tensor t, SymInt heads, SymInt columns, float base) -> Tensor",
    _kernel,
    lambda x, t, heads, columns, base: x.new_empty(x.shape),
)
