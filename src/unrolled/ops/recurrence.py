"""The recurrent operator: one layer of any cell, all its directions, over sequences wherever their rows lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unrolled.equations.gru import GRU, GRUGates
from unrolled.equations.lstm import LSTM, LSTMGates
from unrolled.equations.recurrence import Cell, RecurrenceSaved, recurrence_backward, recurrence_forward
from unrolled.equations.rnn import RNN_RELU, RNN_TANH, Nothing
from unrolled.ops._backend import arrays, core, equations_only, forward_mode, full_precision, on_core, one_kind
from unrolled.ops._register import apply, backward_op, register, with_signature
from unrolled.ragged import Rows, live_rows


class Kind(NamedTuple):
    """A cell as the operator sees it."""

    equation: Cell
    gates: int  # blocks of H rows in its weights
    states: int  # h, or h and c
    kept: Any  # the NamedTuple of what it keeps for the backward


CELLS = {
    "rnn_tanh": Kind(RNN_TANH, 1, 1, Nothing),
    "rnn_relu": Kind(RNN_RELU, 1, 1, Nothing),
    "lstm": Kind(LSTM, 4, 2, LSTMGates),
    "gru": Kind(GRU, 3, 1, GRUGates),
}


def recurrence(
    cell: str,
    x: Tensor,
    state0: Sequence[Tensor],
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor | None,
    bias_hh: Tensor | None,
    rows: Rows,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """One recurrent layer in D = 1 or 2 directions; the equations are in `equations.recurrence` and the cell's file.

    Shapes: x (R, I); state0 (h0,), for the LSTM (h0, c0), each (D, B, H); weight_ih (D * G * H, I), weight_hh
    (D * G * H, H), bias_ih and bias_hh (D * G * H,) or None: the directions one below the other; `rows` says where the
    steps of each sequence lie among the R. Returns y (R, D * H), the directions side by side, and the last states, like
    state0. A row of no sequence has y = 0.
    Errors: a second derivative is refused unless `unrolled.use("equations")`.
    """
    x, *states = full_precision(x, *state0)
    one_kind(cell, x, *states, weight_ih, weight_hh, bias_ih, bias_hh)
    if equations_only():
        y, last, _, _ = _equation_forward(cell, x, states, weight_ih, weight_hh, bias_ih, bias_hh, rows)
        return y, last
    c0 = states[1] if len(states) == 2 else None
    tensors = x, states[0], c0, weight_ih, weight_hh, bias_ih, bias_hh
    where = rows.start, rows.length, rows.step
    if forward_mode() or (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)):
        y, h_last, c_last, *_ = apply(_Recurrence, cell, *tensors, *where)
    else:
        y, h_last, c_last, *_ = _forward(cell, *tensors, *where, False)
    return y, (h_last,) if c0 is None else (h_last, c_last)


@with_signature
class _Recurrence(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> Any:
        return _forward(*args, True)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.cell, x, _, _, weight_ih, weight_hh, bias_ih, bias_hh, start, length, ctx.step = inputs
        _, _, _, *saved = output
        ctx.mark_non_differentiable(*saved)
        ctx.has_bias = bias_ih is not None, bias_hh is not None
        ctx.save_for_backward(x, weight_ih, weight_hh, *saved, start, length)

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dh_last: Tensor, dc_last: Tensor, *_: Any) -> Any:
        need_dx = ctx.needs_input_grad[1]
        grads = _backward_once(ctx.cell, dy, dh_last, dc_last, *ctx.saved_tensors, ctx.step, need_dx)
        dx, dh0, dc0, dweight_ih, dweight_hh, dbias_ih, dbias_hh = grads
        biases = (db if has else None for db, has in zip((dbias_ih, dbias_hh), ctx.has_bias, strict=True))
        return (
            *(None, dx if need_dx else None, dh0, dc0 if ctx.needs_input_grad[3] else None),
            *(dweight_ih, dweight_hh, *biases, None, None, None),
        )


def _forward_kernel(
    cell: str,
    x: Tensor,
    h0: Tensor,
    c0: Tensor | None,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor | None,
    bias_hh: Tensor | None,
    start: Tensor,
    length: Tensor,
    step: int,
    need_saved: bool,
) -> tuple[Tensor, ...]:
    kind = CELLS[cell]
    if not on_core(x, h0, weight_ih, weight_hh):
        states = (h0,) if c0 is None else (h0, c0)
        weights = weight_ih, weight_hh, bias_ih, bias_hh
        result = _equation_forward(cell, x, states, *weights, Rows(start, step, length))
        return _outputs(x, *result, need_saved)

    def new(wanted: object, *shape: int) -> Tensor | None:
        return x.new_empty(shape) if wanted else None

    directions, _, hidden = h0.shape
    width, memory, fields = directions * hidden, c0 is not None, len(kind.kept._fields)
    y, h_last = new(True, x.shape[0], width), new(True, *h0.shape)
    c_last = new(memory, *h0.shape)
    h_prev, c_prev = new(need_saved, x.shape[0], width), new(need_saved and memory, x.shape[0], width)
    kept = new(need_saved and fields, x.shape[0], width * fields)
    core.recurrent_forward(
        cell,
        *arrays(x, h0, c0, weight_ih, weight_hh, bias_ih, bias_hh, start, length),
        *arrays(y, h_last, c_last, h_prev, c_prev, kept),
        step,
        torch.get_num_threads(),
    )
    ends = [None if t is None or not need_saved else t.clone() for t in (h_last, c_last)]
    return tuple(x.new_empty(0) if t is None else t for t in (y, h_last, c_last, h_prev, c_prev, kept, *ends))


def _outputs(
    x: Tensor, y: Tensor, last: tuple[Tensor, ...], before: tuple[Tensor, ...], kept: Tensor, need_saved: bool
) -> tuple[Tensor, ...]:
    """What the operator returns, from what the equation gives; an empty tensor stands for what there is not."""
    h_last, c_last = (*last, x.new_empty(0))[:2]
    h_prev, c_prev = (*before, x.new_empty(0))[:2]
    saved = (h_prev, c_prev, kept if kept.shape[1] else x.new_empty(0), h_last.clone(), c_last.clone())
    return y, h_last, c_last, *(saved if need_saved else (x.new_empty(0) for _ in saved))


def _forward_fake(
    cell: str,
    x: Tensor,
    h0: Tensor,
    c0: Tensor | None,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor | None,
    bias_hh: Tensor | None,
    start: Tensor,
    length: Tensor,
    step: int,
    need_saved: bool,
) -> tuple[Tensor, ...]:
    width = h0.shape[0] * h0.shape[2]
    fields = len(CELLS[cell].kept._fields)
    y = x.new_empty(x.shape[0], width)
    nothing = [0]
    shapes = [h0.shape, nothing if c0 is None else h0.shape]
    shapes += [y.shape if need_saved else nothing, y.shape if need_saved and c0 is not None else nothing]
    shapes += [[x.shape[0], width * fields] if need_saved and fields else nothing]
    shapes += [h0.shape if need_saved else nothing, h0.shape if need_saved and c0 is not None else nothing]
    return y, *(x.new_empty(shape) for shape in shapes)


def _backward_kernel(
    cell: str,
    dy: Tensor,
    dh_last: Tensor,
    dc_last: Tensor,
    x: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    h_prev: Tensor,
    c_prev: Tensor,
    kept: Tensor,
    h_end: Tensor,
    c_end: Tensor,
    start: Tensor,
    length: Tensor,
    step: int,
    need_dx: bool,
) -> tuple[Tensor, ...]:
    memory, keeps = CELLS[cell].states == 2, bool(CELLS[cell].kept._fields)
    if not on_core(x, dy, weight_ih, weight_hh):
        states = 2 if memory else 1
        dlast, before, ends = ((h, c)[:states] for h, c in ((dh_last, dc_last), (h_prev, c_prev), (h_end, c_end)))
        rows = Rows(start, step, length)
        return _equation_backward(cell, dy, dlast, x, weight_ih, weight_hh, before, kept, ends, rows)
    dx = x.new_empty(h_end.shape[0], *x.shape) if need_dx else None
    dh0 = torch.empty_like(h_end)
    dc0 = torch.empty_like(h_end) if memory else None
    dweights = [torch.empty_like(w, memory_format=torch.contiguous_format) for w in (weight_ih, weight_hh)]
    dbiases = [x.new_empty(weight_hh.shape[0]) for _ in range(2)]
    optional = (dc_last if memory else None, c_prev if memory else None, c_end if memory else None)
    core.recurrent_backward(
        cell,
        *arrays(dy, dh_last, optional[0], x, weight_ih, weight_hh, h_prev, h_end, *optional[1:]),
        *arrays(kept if keeps else None, start, length, dx, dh0, dc0, *dweights, *dbiases),
        step,
        torch.get_num_threads(),
    )
    if dx is not None and h_end.shape[0] == 2:
        dx[0].add_(dx[1])
    nothing = x.new_empty(0)
    return nothing if dx is None else dx[0], dh0, x.new_empty(0) if dc0 is None else dc0, *dweights, *dbiases


def _backward_fake(
    cell: str,
    dy: Tensor,
    dh_last: Tensor,
    dc_last: Tensor,
    x: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    h_prev: Tensor,
    c_prev: Tensor,
    kept: Tensor,
    h_end: Tensor,
    c_end: Tensor,
    start: Tensor,
    length: Tensor,
    step: int,
    need_dx: bool,
) -> tuple[Tensor, ...]:
    shapes = [x.shape if need_dx else [0], h_end.shape, c_end.shape, weight_ih.shape, weight_hh.shape]
    return tuple(x.new_empty(shape) for shape in (*shapes, weight_hh.shape[:1], weight_hh.shape[:1]))


def _equation_forward(
    cell: str,
    x: Tensor,
    state0: Sequence[Tensor],
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor | None,
    bias_hh: Tensor | None,
    rows: Rows,
) -> tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...], Tensor]:
    """y, the last states, the states before each row, and what is kept, as the core lays them out."""
    directions, outputs = len(state0[0]), []
    for d in range(directions):
        order, steps = live_rows(rows.reverse() if d else rows)
        weights = weight_ih.chunk(directions)[d], weight_hh.chunk(directions)[d]
        own_ih, own_hh = (None if b is None else b.chunk(directions)[d] for b in (bias_ih, bias_hh))
        own = tuple(s[d][order] for s in state0)
        y, last, saved = recurrence_forward(CELLS[cell].equation, x, own, *weights, own_ih, own_hh, steps)
        back = order.argsort()
        kept = saved.kept or CELLS[cell].kept(*[torch.zeros_like(y)] * len(CELLS[cell].kept._fields))
        outputs.append((y, tuple(s[back] for s in last), saved.before, torch.cat([y[:, :0], *kept], 1)))
    ys, lasts, befores, kepts = zip(*outputs, strict=True)
    states = tuple(torch.stack(parts) for parts in zip(*lasts, strict=True))
    before = tuple(torch.cat(parts, 1) for parts in zip(*befores, strict=True))
    return torch.cat(ys, 1), states, before, torch.cat(kepts, 1)


def _equation_backward(
    cell: str,
    dy: Tensor,
    dlast: Sequence[Tensor],
    x: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    before: Sequence[Tensor],
    kept: Tensor,
    ends: Sequence[Tensor],
    rows: Rows,
) -> tuple[Tensor, ...]:
    kind, directions, grads = CELLS[cell], len(ends[0]), []
    for d in range(directions):
        order, steps = live_rows(rows.reverse() if d else rows)
        back = order.argsort()
        fields = len(kind.kept._fields)
        own_kept = kind.kept(*kept.chunk(directions, 1)[d].chunk(fields, 1)) if fields else kind.kept()
        own = (weight_ih.chunk(directions)[d], weight_hh.chunk(directions)[d])
        states = tuple(b.chunk(directions, 1)[d] for b in before), tuple(e[d][order] for e in ends)
        saved = RecurrenceSaved(x, *states, own_kept, *own, steps, kind.equation)
        g = recurrence_backward(dy.chunk(directions, 1)[d], tuple(s[d][order] for s in dlast), saved)
        grads.append((g.dx, tuple(s[back] for s in g.dstate0), g.dweight_ih, g.dweight_hh, g.dbias_ih, g.dbias_hh))
    dxs, dstates, *dweights = zip(*grads, strict=True)
    dh0, dc0 = [torch.stack(parts) for parts in zip(*dstates, strict=True)] + [x.new_empty(0)] * (2 - kind.states)
    return torch.stack(dxs).sum(0), dh0, dc0, *(torch.cat(d) for d in dweights)


_forward = register(
    "recurrence_forward(str cell, Tensor x, Tensor h0, Tensor? c0, Tensor weight_ih, Tensor weight_hh, "
    "Tensor? bias_ih, Tensor? bias_hh, Tensor start, Tensor length, SymInt step, bool need_saved) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _forward_kernel,
    _forward_fake,
)
_backward = register(
    "recurrence_backward(str cell, Tensor dy, Tensor dh_last, Tensor dc_last, Tensor x, Tensor weight_ih, "
    "Tensor weight_hh, Tensor h_prev, Tensor c_prev, Tensor kept, Tensor h_end, Tensor c_end, Tensor start, "
    "Tensor length, SymInt step, bool need_dx) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward_kernel,
    _backward_fake,
)
_backward_once = backward_op(_backward, "recurrence")
