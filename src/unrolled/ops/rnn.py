"""The recurrent operator: one layer, all its directions, over sequences wherever their rows lie."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from unrolled.equations.rnn import RNNSaved, rnn_backward, rnn_forward
from unrolled.ops._backend import arrays, core, equations_only, full_precision, on_core
from unrolled.ops._register import apply, backward_op, register, with_signature
from unrolled.ragged import Rows, live_rows


def rnn(
    x: Tensor,
    h0: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor | None,
    bias_hh: Tensor | None,
    rows: Rows,
    nonlinearity: str = "tanh",
) -> tuple[Tensor, Tensor]:
    """One recurrent layer in D = 1 or 2 directions; the equations are in `equations.rnn`.

    Shapes: x (R, I); h0 (D, B, H); weight_ih (D * H, I), weight_hh (D * H, H), bias_ih and bias_hh (D * H,) or None:
    the directions one below the other; `rows` says where the steps of each sequence lie among the R. Returns y
    (R, D * H), the directions side by side, and h_last (D, B, H). A row of no sequence has y = 0.
    Errors: ValueError for another nonlinearity. A second derivative is refused unless `unrolled.use("equations")`.
    """
    if nonlinearity not in ("tanh", "relu"):
        raise ValueError(f'nonlinearity must be "tanh" or "relu", found {nonlinearity!r}')
    x, h0 = full_precision(x, h0)
    if equations_only():
        y, h_last, _ = _equation_forward(x, h0, weight_ih, weight_hh, bias_ih, bias_hh, rows, nonlinearity)
        return y, h_last
    args = (x, h0, weight_ih, weight_hh, bias_ih, bias_hh, rows.start, rows.length, rows.step, nonlinearity)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in args[:6]):
        y, h_last, _, _ = apply(_RNN, *args)
    else:
        y, h_last, _, _ = _forward(*args, False)
    return y, h_last


@with_signature
class _RNN(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> Any:
        return _forward(*args, True)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, _, weight_ih, weight_hh, bias_ih, bias_hh, start, length, ctx.step, ctx.nonlinearity = inputs
        _, _, h_prev, h_end = output
        ctx.mark_non_differentiable(h_prev, h_end)
        ctx.set_materialize_grads(True)
        ctx.has_bias = bias_ih is not None, bias_hh is not None
        ctx.save_for_backward(x, weight_ih, weight_hh, h_prev, h_end, start, length)

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dh_last: Tensor, *_: Any) -> Any:
        need_dx = ctx.needs_input_grad[0]
        grads = _backward_once(dy, dh_last, *ctx.saved_tensors, ctx.step, ctx.nonlinearity, need_dx)
        dx, dh0, dweight_ih, dweight_hh, dbias = grads
        dbias_ih = dbias if ctx.has_bias[0] else None
        dbias_hh = dbias.clone() if ctx.has_bias[1] else None  # two parameters must not share one gradient
        return (dx if need_dx else None), dh0, dweight_ih, dweight_hh, dbias_ih, dbias_hh, None, None, None, None


def _forward_kernel(
    x: Tensor,
    h0: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor | None,
    bias_hh: Tensor | None,
    start: Tensor,
    length: Tensor,
    step: int,
    nonlinearity: str,
    need_saved: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = Rows(start, step, length)
    if not on_core(x, h0, weight_ih, weight_hh):
        y, h_last, h_prev = _equation_forward(x, h0, weight_ih, weight_hh, bias_ih, bias_hh, rows, nonlinearity)
        return y, h_last, h_prev if need_saved else h_prev[:0].clone(), h_last.clone()
    width = weight_hh.shape[0]
    y = x.new_empty(x.shape[0], width)
    h_prev = x.new_empty(x.shape[0] if need_saved else 0, width)
    h_last = torch.empty_like(h0, memory_format=torch.contiguous_format)
    core.rnn_forward(
        *arrays(x, h0, weight_ih, weight_hh, bias_ih, bias_hh, start, length, y, h_last, h_prev),
        step,
        nonlinearity == "relu",
        torch.get_num_threads(),
    )
    return y, h_last, h_prev, h_last.clone()


def _forward_fake(
    x: Tensor,
    h0: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor | None,
    bias_hh: Tensor | None,
    start: Tensor,
    length: Tensor,
    step: int,
    nonlinearity: str,
    need_saved: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    y = x.new_empty(x.shape[0], weight_hh.shape[0])
    h_prev = x.new_empty(x.shape[0] if need_saved else 0, weight_hh.shape[0])
    return y, x.new_empty(h0.shape), h_prev, x.new_empty(h0.shape)


def _backward_kernel(
    dy: Tensor,
    dh_last: Tensor,
    x: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    h_prev: Tensor,
    h_end: Tensor,
    start: Tensor,
    length: Tensor,
    step: int,
    nonlinearity: str,
    need_dx: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    rows = Rows(start, step, length)
    if not on_core(x, dy, weight_ih, weight_hh):
        return _equation_backward(dy, dh_last, x, weight_ih, weight_hh, h_prev, h_end, rows, nonlinearity)
    directions = h_end.shape[0]
    dx = x.new_empty(directions if need_dx else 0, *x.shape)
    dh0 = torch.empty_like(h_end)
    dweight_ih, dweight_hh = (
        torch.empty_like(w, memory_format=torch.contiguous_format) for w in (weight_ih, weight_hh)
    )
    dbias = x.new_empty(weight_hh.shape[0])
    core.rnn_backward(
        *arrays(dy, dh_last, x, weight_ih, weight_hh, h_prev, h_end, start, length),
        *arrays(dx, dh0, dweight_ih, dweight_hh, dbias),
        step,
        nonlinearity == "relu",
        torch.get_num_threads(),
    )
    if need_dx and directions == 2:
        dx[0].add_(dx[1])
    return (dx[0] if need_dx else dx.view(0)), dh0, dweight_ih, dweight_hh, dbias


def _backward_fake(
    dy: Tensor,
    dh_last: Tensor,
    x: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    h_prev: Tensor,
    h_end: Tensor,
    start: Tensor,
    length: Tensor,
    step: int,
    nonlinearity: str,
    need_dx: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dx = x.new_empty(x.shape) if need_dx else x.new_empty(0)
    dweights = weight_ih.new_empty(weight_ih.shape), weight_hh.new_empty(weight_hh.shape)
    return dx, h_end.new_empty(h_end.shape), *dweights, weight_hh.new_empty(weight_hh.shape[0])


def _equation_forward(
    x: Tensor,
    h0: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor | None,
    bias_hh: Tensor | None,
    rows: Rows,
    nonlinearity: str,
) -> tuple[Tensor, Tensor, Tensor]:
    directions, _, hidden = h0.shape
    outputs = []
    for d in range(directions):
        order, steps = live_rows(rows.reverse() if d else rows)
        own = slice(d * hidden, (d + 1) * hidden)
        own_ih, own_hh = (None if b is None else b[own] for b in (bias_ih, bias_hh))
        weights = weight_ih[own], weight_hh[own]
        y, h_last, saved = rnn_forward(x, h0[d][order], *weights, own_ih, own_hh, steps, nonlinearity)
        outputs.append((y, h_last[order.argsort()], saved.h_prev))
    ys, h_lasts, h_prevs = zip(*outputs, strict=True)
    return torch.cat(ys, 1), torch.stack(h_lasts), torch.cat(h_prevs, 1)


def _equation_backward(
    dy: Tensor,
    dh_last: Tensor,
    x: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    h_prev: Tensor,
    h_end: Tensor,
    rows: Rows,
    nonlinearity: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    directions, _, hidden = h_end.shape
    grads = []
    for d in range(directions):
        order, steps = live_rows(rows.reverse() if d else rows)
        own = slice(d * hidden, (d + 1) * hidden)
        saved = RNNSaved(x, h_prev[:, own], h_end[d][order], weight_ih[own], weight_hh[own], steps, nonlinearity)
        g = rnn_backward(dy[:, own], dh_last[d][order], saved)
        grads.append((g.dx, g.dh0[order.argsort()], g.dweight_ih, g.dweight_hh, g.dbias_ih))
    dx, dh0, *dweights = zip(*grads, strict=True)
    dweight_ih, dweight_hh, dbias = (torch.cat(d) for d in dweights)
    return torch.stack(dx).sum(0), torch.stack(dh0), dweight_ih, dweight_hh, dbias


_forward = register(
    "rnn_forward(Tensor x, Tensor h0, Tensor weight_ih, Tensor weight_hh, Tensor? bias_ih, Tensor? bias_hh, "
    "Tensor start, Tensor length, SymInt step, str nonlinearity, bool need_saved) -> (Tensor, Tensor, Tensor, Tensor)",
    _forward_kernel,
    _forward_fake,
)
_backward = register(
    "rnn_backward(Tensor dy, Tensor dh_last, Tensor x, Tensor weight_ih, Tensor weight_hh, Tensor h_prev, "
    "Tensor h_end, Tensor start, Tensor length, SymInt step, str nonlinearity, bool need_dx) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward_kernel,
    _backward_fake,
)
_backward_once = backward_op(_backward, "rnn")
