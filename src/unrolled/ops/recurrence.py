"""The recurrent operator: one layer of any cell, all its directions, over sequences wherever their rows lie."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unrolled.equations.recurrent_options import Weights as Weights
from unrolled.ops._backend import (
    arrays,
    check_numbers,
    check_rows,
    core,
    equations_only,
    forward_mode,
    full_precision,
    on_core,
    one_kind,
)
from unrolled.ops._recurrent import CELLS as CELLS
from unrolled.ops._recurrent import SCALES, Inputs, Saved
from unrolled.ops._recurrent_by_equation import equation_backward, equation_forward
from unrolled.ops._register import apply, backward_op, register, with_signature
from unrolled.ragged import Rows


class Zoneout(NamedTuple):
    """With which probability a unit of h, and of c, keeps its old value; without a seed, that share of it."""

    h: float
    c: float
    seed: Tensor | None  # int64 scalar
    keys: Tensor  # (B,) int64, in the place of a sequence's index
    layer: int


class Record(NamedTuple):
    """One layer's pass, for analysis: `gates` by name (R, D, H); `gradients` has "dh" and "dc" after the backward.

    dh (R, D * P) and dc (R, D * H): the total derivatives of the loss with respect to h after each token, and to c as
    the cell gave it, before zoneout.
    """

    cell: str
    rows: Rows
    y: Tensor
    gates: dict[str, Tensor]
    gradients: dict[str, Tensor]


_records: ContextVar[list[Record] | None] = ContextVar("records", default=None)


@contextmanager
def record() -> Iterator[list[Record]]:
    """Within, each recurrent layer that is to be differentiated adds a Record, in the order of the forward passes.

    Not compiled code, and not under `use("equations")`: there autograd differentiates, and no backward of ours runs.
    """
    records: list[Record] = []
    token = _records.set(records)
    try:
        yield records
    finally:
        _records.reset(token)


def recurrence(
    cell: str,
    x: Tensor,
    state0: Sequence[Tensor],
    weights: Weights,
    rows: Rows,
    *,
    mask: Tensor | None = None,
    zoneout: Zoneout | None = None,
    bptt: int = 0,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """One recurrent layer in D = 1 or 2 directions; the equations are in `equations.recurrence` and the cell's file.

    Shapes: x (R, I); state0 (h0,), for an LSTM (h0, c0): (D, B, P) and (D, B, H), P = H without a projection; weights
    as in `equations.recurrent_options`, the directions one below the other: weight_ih (D * G * H, I) ...; `rows` says
    where the steps of each sequence lie among the R; mask (D, B, P). Returns y (R, D * P), the directions side by side,
    and the last states, like state0. A row of no sequence has y = 0.
    Errors: ValueError for weights that do not belong together and for rows outside x; TypeError for dtypes. A second
    derivative is refused unless `unrolled.use("equations")`.
    """
    w = weights
    if (w.norm_ih is None) != (w.norm_hh is None) or (w.norm_ih is None and w.norm_c is not None):
        raise ValueError("norm_ih and norm_hh come together, and norm_c only with them")
    if w.weight_hr is not None and cell in ("gru", "gru_before"):
        raise ValueError("a GRU has no projection weight_hr: its state goes into the next one as it is")
    x, h0, c0, *own = full_precision(x, *(*state0, None)[:2], *weights)
    mask = mask if mask is None else mask.to(x.dtype)
    one_kind("recurrence", x, h0, c0, *own, mask)
    check_rows(rows, h0.shape[1])
    if zoneout is not None:
        _check_zoneout(zoneout, h0.shape[1])
    z = zoneout or Zoneout(0.0, 0.0, None, rows.start, 0)
    seed, keys = (z.seed, z.keys) if zoneout else (None, None)
    where = rows.start, rows.length
    p = Inputs._make((cell, x, h0, c0, *own, mask, seed, keys, *where, z.h, z.c, z.layer, bptt, rows.step))
    if equations_only():
        y, last, _ = equation_forward(p)
        return y, last
    wanted = (x, h0, c0, *own)
    if forward_mode() or (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in wanted)):
        y, h_last, c_last, *_ = apply(_Recurrence, *p)
    else:
        y, h_last, c_last, *_ = _forward(*p, False)
    return y, (h_last,) if c0 is None else (h_last, c_last)


def _check_zoneout(zoneout: Zoneout, sequences: int) -> None:
    if not (0 <= zoneout.h <= 1 and 0 <= zoneout.c <= 1):
        raise ValueError(f"zoneout: the rates must lie in [0, 1], found {zoneout.h} and {zoneout.c}")
    check_numbers("zoneout: keys", zoneout.keys, (sequences,))
    if zoneout.seed is not None:
        check_numbers("zoneout: seed", zoneout.seed, ())


@with_signature
class _Recurrence(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> Any:
        return _forward(*args, True)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        p = Inputs(*inputs)
        y, _, _, *saved = output
        ctx.mark_non_differentiable(*saved)
        ctx.set_materialize_grads(False)  # else autograd makes a gradient of zeros, as large as all that is kept
        given = p._replace(h0=None, c0=None)  # nothing of the gradient depends on them
        ctx.tensors = [i for i, v in enumerate(given) if isinstance(v, Tensor)]
        ctx.given = [None if isinstance(v, Tensor) else v for v in given]
        ctx.save_for_backward(*(given[i] for i in ctx.tensors), *saved)
        records, ctx.record = None if torch.compiler.is_compiling() else _records.get(), None
        if records is not None:
            ctx.record = Record(p.cell, p.rows, y.detach().clone(), _gates(p, Saved(*saved)), {})
            records.append(ctx.record)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dh_last: Tensor | None, dc_last: Tensor | None, *_: Any) -> Any:
        given, tensors = list(ctx.given), ctx.saved_tensors
        for i, tensor in zip(ctx.tensors, tensors, strict=False):
            given[i] = tensor
        saved = Saved(*tensors[len(ctx.tensors) :])
        dy, dh_last, dc_last = (
            torch.zeros_like(like) if d is None else d
            for d, like in ((dy, saved.h_prev), (dh_last, saved.h_end), (dc_last, saved.c_end))
        )
        need_dx, keep = ctx.needs_input_grad[1], ctx.record is not None
        grads = _backward_once(dy, dh_last, dc_last, *given, *saved, need_dx, keep)
        *grads, dh, dc = grads
        if keep:
            ctx.record.gradients.update({"dh": dh} | ({"dc": dc} if Inputs(*given).memory else {}))
        wanted = zip(grads, ctx.needs_input_grad[1:14], strict=True)
        return None, *(d if needed else None for d, needed in wanted), *[None] * (len(Inputs._fields) - 14)


def _gates(p: Inputs, saved: Saved) -> dict[str, Tensor]:
    names = CELLS[p.cell].kept
    kept = saved.kept.view(-1, p.directions, p.kept_blocks, p.hidden) if names else saved.kept
    return {name: kept[:, :, i] for i, name in enumerate(names)}


def _shapes(p: Inputs, need_saved: bool) -> list[list[Any]]:
    """Of y, h_last, c_last and Saved; [0] for what there is not."""
    assert p.h0 is not None
    D, R, P, H, nothing = p.directions, p.x.shape[0], p.h0.shape[2], p.hidden, [0]
    h, c = list(p.h0.shape), [*p.h0.shape[:2], H] if p.memory else nothing
    saved = [[R, D * P], [R, D * H] if p.memory else nothing, [R, D * p.kept_blocks * H] if p.kept_blocks else nothing]
    saved += [[R, D * SCALES] if p.norm_ih is not None else nothing, h, c]
    return [[R, D * P], h, c, *(saved if need_saved else [nothing] * len(saved))]


def _present(tensors: Iterable[Tensor]) -> list[Tensor | None]:
    """None where an empty tensor of one dimension says that there is nothing."""
    return [None if t.shape == (0,) else t for t in tensors]


def _forward_kernel(*args: Any) -> tuple[Tensor, ...]:
    p, need_saved = Inputs(*args[:-1]), args[-1]
    nothing = p.x.new_empty(0)
    if not on_core(p.x, p.weight_ih, p.weight_hh):
        y, last, saved = equation_forward(p)
        saved = saved._replace(h_end=saved.h_end.clone(), c_end=saved.c_end.clone())  # outputs never alias what is kept
        own = saved if need_saved else [nothing] * len(Saved._fields)
        return y, *(*last, nothing)[:2], *own
    *new, h_end, c_end = (p.x.new_empty(shape) for shape in _shapes(p, need_saved))
    core.recurrent_forward(p.cell, *arrays(*p.tensors, *_present(new)), *p.numbers, torch.get_num_threads())
    if need_saved:
        h_end.copy_(new[1])
        c_end.copy_(new[2])
    return *new, h_end, c_end


def _forward_fake(*args: Any) -> tuple[Tensor, ...]:
    p, need_saved = Inputs(*args[:-1]), args[-1]
    return tuple(p.x.new_empty(shape) for shape in _shapes(p, need_saved))


def _backward_shapes(p: Inputs, saved: Saved, need_dx: bool, need_dstate: bool) -> list[list[Any]]:
    """Of dx, dh0, dc0, the weights', dh, dc."""
    given = [[0] if w is None else list(w.shape) for w in p.weights]
    given[2] = given[3] = [p.weight_hh.shape[0]]
    steps = [list(s.shape) if need_dstate else [0] for s in (saved.h_prev, saved.c_prev)]
    return [list(p.x.shape) if need_dx else [0], list(saved.h_end.shape), list(saved.c_end.shape), *given, *steps]


def _backward_kernel(dy: Tensor, dh_last: Tensor, dc_last: Tensor, *args: Any) -> tuple[Tensor, ...]:
    count = len(Inputs._fields)
    p, saved, need_dx, need_dstate = Inputs(*args[:count]), Saved(*args[count:-2]), args[-2], args[-1]
    if not on_core(p.x, dy, p.weight_ih, p.weight_hh):
        dlast = (dh_last, dc_last)[: CELLS[p.cell].states]
        grads = equation_backward(dy, dlast, p, saved, need_dstate)
        shapes = _backward_shapes(p, saved, need_dx, need_dstate)
        return tuple(g if shape != [0] else p.x.new_empty(0) for g, shape in zip(grads, shapes, strict=True))
    new = [p.x.new_empty(shape) for shape in _backward_shapes(p, saved, need_dx, need_dstate)]
    dx = p.x.new_empty(p.directions, *p.x.shape) if need_dx else None
    own = p.weights
    options = *own[4:], p.mask, p.seed, p.keys
    given = (dy, dh_last, dc_last if p.memory else None, p.x, *own[:2], *options, p.start, p.length)  # no bias
    core.recurrent_backward(
        p.cell, *arrays(*given, *_present(saved), dx, *_present(new[1:])), *p.numbers, torch.get_num_threads()
    )
    if dx is not None:
        new[0] = dx[0] + dx[1] if len(dx) == 2 else dx[0]  # not in place: a view would hold on to both parts
    return tuple(new)


def _backward_fake(dy: Tensor, dh_last: Tensor, dc_last: Tensor, *args: Any) -> tuple[Tensor, ...]:
    count = len(Inputs._fields)
    p, saved = Inputs(*args[:count]), Saved(*args[count:-2])
    return tuple(p.x.new_empty(shape) for shape in _backward_shapes(p, saved, args[-2], args[-1]))


_TYPES = {"cell": "str", "zoneout_h": "float", "zoneout_c": "float", "layer": "int", "bptt": "int", "step": "SymInt"}
_OPTIONAL = {"h0", "c0", "bias_ih", "bias_hh", "mask", "seed", "keys", *Weights._fields[4:]}
_INPUTS = ", ".join(
    f"{_TYPES.get(name, 'Tensor?' if name in _OPTIONAL else 'Tensor')} {name}" for name in Inputs._fields
)


def _tensors(count: int) -> str:
    return f"({', '.join(['Tensor'] * count)})"


_forward = register(
    f"recurrence_forward({_INPUTS}, bool need_saved) -> {_tensors(3 + len(Saved._fields))}",
    _forward_kernel,
    _forward_fake,
)
_backward = register(
    f"recurrence_backward(Tensor dy, Tensor dh_last, Tensor dc_last, {_INPUTS}, "
    f"{', '.join(f'Tensor {name}' for name in Saved._fields)}, bool need_dx, bool need_dstate) "
    f"-> {_tensors(3 + len(Weights._fields) + 2)}",
    _backward_kernel,
    _backward_fake,
)
_backward_once = backward_op(_backward, "recurrence")
