"""The recurrent operator by its equations: one direction after the other, what is kept laid out as in the core."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from unrolled.equations.dropout import dropout_mask
from unrolled.equations.layer_norm import LayerNormSaved
from unrolled.equations.lstm_options import LSTMOptionsKept
from unrolled.equations.recurrence import RecurrenceSaved, State, recurrence_backward, recurrence_forward
from unrolled.equations.recurrent_options import (
    Norms,
    OptionsSaved,
    StepSaved,
    Weights,
    options_backward,
    options_forward,
)
from unrolled.ops._recurrent import CELLS, SCALES, Inputs, Saved
from unrolled.ragged import live_rows

Parts = list[Tensor]


def equation_forward(p: Inputs) -> tuple[Tensor, State, Saved]:
    p.rows.check(p.x.shape[0])
    cell, outputs = CELLS[p.cell].equation, []
    for d in range(p.directions):
        order, steps = live_rows(p.rows.reverse() if d else p.rows)
        back, w = order.argsort(), _weights(p, d)
        state0 = tuple(s[d][order] for s in (p.h0, p.c0) if s is not None)
        if p.plain:
            y, last, saved = recurrence_forward(cell, p.x, state0, *w[:4], steps, p.bptt)
            before, own_kept, own_scales = saved.before, [*saved.kept], Parts()
        else:
            mask = None if p.mask is None else p.mask[d][order]
            y, last, own = options_forward(cell, p.x, state0, w, steps, mask, _zoneout(p, d), p.bptt)
            before, (own_kept, own_scales) = own.trail.before, _flat(own, p)
        outputs.append((y, tuple(s[back] for s in last), before, own_kept, own_scales))
    ys, lasts, befores, kepts, all_scales = zip(*outputs, strict=True)
    last = tuple(torch.stack(parts) for parts in zip(*lasts, strict=True))
    before = tuple(torch.cat(parts, 1) for parts in zip(*befores, strict=True))
    kept, scales = (
        torch.cat([part for own in parts for part in own], 1) if parts[0] else p.x.new_empty(0)
        for parts in (kepts, all_scales)
    )
    h_prev, c_prev = (*before, p.x.new_empty(0))[:2]
    h_end, c_end = (*last, p.x.new_empty(0))[:2]
    return torch.cat(ys, 1), last, Saved(h_prev, c_prev, kept, scales, h_end, c_end)


def equation_backward(dy: Tensor, dlast: Sequence[Tensor], p: Inputs, saved: Saved, per_step: bool) -> Sequence[Tensor]:
    """dx, dh0, dc0, the gradients of the weights, dh and dc of each step; an empty tensor for what there is not."""
    kind, grads, nothing = CELLS[p.cell], [], p.x.new_empty(0)
    for d in range(p.directions):
        order, steps = live_rows(p.rows.reverse() if d else p.rows)
        back, w = order.argsort(), _weights(p, d)
        before = tuple(s.chunk(p.directions, 1)[d] for s in saved[: kind.states])
        last = tuple(s[d][order] for s in saved[4 : 4 + kind.states])
        own_kept = saved.kept.chunk(p.directions, 1)[d] if p.kept_blocks else None
        blocks = () if own_kept is None else own_kept.chunk(p.kept_blocks, 1)
        dy_d, dlast_d = dy.chunk(p.directions, 1)[d], tuple(s[d][order] for s in dlast)
        if p.plain:
            kept = kind.fields(*blocks)
            plain = RecurrenceSaved(p.x, before, last, kept, *w[:2], steps, kind.equation, p.bptt)
            g = recurrence_backward(dy_d, dlast_d, plain, per_step)
            dweights = Weights(g.dweight_ih, g.dweight_hh, g.dbias_ih, g.dbias_hh)
            dx, dstate0, dstate = g.dx, g.dstate0, g.dstate
        else:
            mask = None if p.mask is None else p.mask[d][order]
            scales = () if p.norm_ih is None else torch.tensor_split(saved.scales, p.directions, 1)[d].chunk(SCALES, 1)
            trail, norm_x = _unflat(p, before, blocks, scales)
            own = OptionsSaved(p.x, trail, norm_x, w, steps, kind.equation, mask, _zoneout(p, d), p.bptt)
            dx, dstate0, dweights, dstate = options_backward(dy_d, dlast_d, own, per_step)
        grads.append((dx, tuple(s[back] for s in dstate0), dweights, dstate))
    dxs, dstates0, all_dweights, dstates = zip(*grads, strict=True)
    dfirst = [torch.stack(parts) for parts in zip(*dstates0, strict=True)]
    joined = [nothing if parts[0] is None else torch.cat(parts) for parts in zip(*all_dweights, strict=True)]
    joined[2:4] = [b if b.numel() else dy.new_zeros(len(p.weight_hh)) for b in joined[2:4]]
    every = [torch.cat(parts, 1) for parts in zip(*dstates, strict=True)]
    return torch.stack(dxs).sum(0), *(*dfirst, nothing)[:2], *joined, *(*every, nothing, nothing)[:2]


def _weights(p: Inputs, d: int) -> Weights:
    own: Any = (None if w is None else w.chunk(p.directions)[d] for w in p.weights)
    return Weights(*own)


def _zoneout(p: Inputs, d: int) -> State:
    """z of each token, for h and c."""
    if p.zoneout_h == 0 and p.zoneout_c == 0:
        return ()
    widths = (p.weight_hh.shape[1], p.hidden)[: 1 + p.memory]
    rates = (p.zoneout_h, p.zoneout_c)
    if p.seed is None:
        return tuple(p.x.new_full((len(p.x), width), rate) for width, rate in zip(widths, rates, strict=False))
    order, steps = live_rows(p.rows)
    key, t = (torch.zeros(len(p.x), dtype=torch.int64, device=p.x.device) for _ in range(2))
    assert p.keys is not None
    for step, rows in enumerate(steps):
        key[rows], t[rows] = p.keys[order[: len(rows)]], step
    streams = (4 * p.layer + 2 * d, 4 * p.layer + 2 * d + 1)
    return tuple(
        (dropout_mask(p.seed, stream, key, t, width, rate) == 0).to(p.x.dtype)
        for stream, width, rate in zip(streams, widths, rates, strict=False)
    )


def _flat(own: OptionsSaved, p: Inputs) -> tuple[Parts, Parts]:
    """The blocks of `Saved.kept` and `Saved.scales` for one direction."""
    trail = own.trail
    gates = [k for k in trail.kept if isinstance(k, Tensor)]
    norm_c = trail.kept.norm if isinstance(trail.kept, LSTMOptionsKept) else ()
    norms = [*own.norm_x, *trail.norms]
    kept = [*gates, *trail.out, *(n.normal for n in norms), *(n.normal for n in norm_c)]
    if not norms:
        return kept, []
    none = torch.zeros_like(norms[0].scale)
    scales = [n.scale for n in norms] + [none] * (3 - len(norms))
    return kept, [*scales[:2], *([n.scale for n in norm_c] or [none]), scales[2]]


def _unflat(
    p: Inputs, before: State, blocks: tuple[Tensor, ...], scales: tuple[Tensor, ...]
) -> tuple[StepSaved, Norms]:
    kind, G = CELLS[p.cell], CELLS[p.cell].gates
    fields, cut = len(kind.kept), 2 * G - 1 if kind.equation.reset else 2 * G
    gates, out, normals = blocks[:fields], blocks[fields : fields + kind.states], blocks[fields + kind.states :]
    kept = kind.fields(*gates)
    if not scales:
        return StepSaved(before, out, kept, ()), ()
    if p.norm_c is not None:
        kept = kept._replace(norm=(LayerNormSaved(normals[-1], scales[2]),))
    norms: Norms = (LayerNormSaved(torch.cat(normals[G:cut], 1), scales[1]),)
    if kind.equation.reset:
        norms += (LayerNormSaved(normals[cut], scales[3]),)
    return StepSaved(before, out, kept, norms), (LayerNormSaved(torch.cat(normals[:G], 1), scales[0]),)
