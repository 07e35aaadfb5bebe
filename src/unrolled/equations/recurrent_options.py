"""The recurrence with every option: layer norm, recurrent dropout, projection, zoneout, truncation, a reset before."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils import _pytree as pytree

from unrolled.equations.layer_norm import LayerNormSaved, layer_norm_backward, layer_norm_forward
from unrolled.equations.recurrence import Cell, State, cuts
from unrolled.equations.zoneout import zoneout_backward, zoneout_forward
from unrolled.ragged import all_rows

Steps = Sequence[Int[Tensor, "_"]]
Norms = tuple[LayerNormSaved, ...]  # of each product, or none


class Weights(NamedTuple):
    """The parameters of one layer in one direction. Without a projection P = H."""

    weight_ih: Float[Tensor, "GH I"]
    weight_hh: Float[Tensor, "GH P"]
    bias_ih: Float[Tensor, "GH"] | None = None
    bias_hh: Float[Tensor, "GH"] | None = None
    weight_hr: Float[Tensor, "P H"] | None = None  # the projection
    norm_ih: Float[Tensor, "GH"] | None = None  # gain of the layer norm of W_ih x
    norm_hh: Float[Tensor, "GH"] | None = None  # and of W_hh h
    peephole: Float[Tensor, "HHH"] | None = None  # the LSTM's own, and so are the next two
    norm_c: Float[Tensor, "H"] | None = None
    bias_c: Float[Tensor, "H"] | None = None


class StepSaved(NamedTuple):
    """Of the sequences in one step, or of all tokens."""

    before: State  # h (n, P) and c (n, H) before the step
    out: State  # (n, H) each: what the cell gave, before projection and zoneout
    kept: Any  # the cell's own, by name
    norms: Norms  # of W_hh h, and of what is reset first


class OptionsSaved(NamedTuple):
    x: Float[Tensor, "N I"]
    trail: StepSaved
    norm_x: Norms  # of W_ih x
    weights: Weights
    steps: Steps
    cell: Cell
    mask: Float[Tensor, "B P"] | None
    zoneout: State
    bptt: int


class OptionsGrads(NamedTuple):
    dx: Float[Tensor, "N I"]
    dstate0: State
    dweights: Weights  # None where there is no such weight
    dstate: State  # (N, P or H): the total derivatives with respect to h after each token, and to c as the cell gave it


class StepGrads(NamedTuple):
    du: Tensor
    dv: Tensor
    dp: Tensor  # of the bare products of (3) and (4), inside the layer norm
    left: tuple[Tensor, ...]  # what these multiply: g, and r * g in a cell that resets before
    dprojected: Tensor  # of h' in (5)
    total: State  # to h_t, and to c_t as the cell gave it, if wanted


def step_forward(
    cell: Cell, u: Tensor, before: State, w: Weights, mask: Tensor | None, z: State
) -> tuple[State, StepSaved]:
    """One step.

    Definition, N being the layer norm where there is one, K the rows of W_hh that multiply h; only in a cell that
    resets before the product are there others::

        g_t = mask * h_{t-1}                        (2)
        v_t = N(W_hh[:K] g_t) + b_hh[:K]            (3)
        v_t = v_t, N(W_hh[K:] (r * g_t)) + b_hh[K:]  (4)
        m_t, c'_t = cell(u_t, v_t, h_{t-1}, c_{t-1})
        h'_t = W_hr m_t                             (5)
        h_t = zoneout(h'_t, h_{t-1}),  c_t = zoneout(c'_t, c_{t-1})

    Shapes: u (n, G * H); mask (n, P); z for each state (n, its width), or ().
    """
    K = _rows_of_h(cell, w)
    g = before[0] if mask is None else before[0] * mask  # (2)
    gains, biases = (_cut(b, K) for b in (w.norm_hh, w.bias_hh))
    v, norms = _normed(g @ w.weight_hh[:K].T, gains[0], biases[0])  # (3)
    if cell.reset:
        s = cell.reset.forward(u, v) * g
        v_s, norm_s = _normed(s @ w.weight_hh[K:].T, gains[1], biases[1])  # (4)
        v, norms = torch.cat([v, v_s], 1), norms + norm_s
    out, kept = cell.forward(u, v, *before, *_own(cell, w))
    after = out if w.weight_hr is None else (out[0] @ w.weight_hr.T, *out[1:])  # (5)
    if z:
        after = tuple(zoneout_forward(*states) for states in zip(after, before, z, strict=True))
    return after, StepSaved(before, out, kept, norms)


def step_backward(
    cell: Cell, dafter: State, saved: StepSaved, w: Weights, mask: Tensor | None, z: State, per_step: bool = True
) -> tuple[State, StepGrads, tuple[Tensor | None, ...]]:
    """The gradients of the state before, by token, and of the cell's own weights."""
    before, out, kept, norms = saved
    K = _rows_of_h(cell, w)
    dout, dbefore = dafter, tuple(torch.zeros_like(d) for d in dafter)
    if z:
        dout, dbefore = zip(*(zoneout_backward(*pair) for pair in zip(dafter, z, strict=True)), strict=True)
    dprojected = dout[0]
    if w.weight_hr is not None:
        dout = dprojected @ w.weight_hr, *dout[1:]  # (5)
    du, dv, dpath, *dcell = cell.backward(dout, out, before, kept, *_own(cell, w))
    total = (dafter[0], *cell.total(dout, out, kept, *_own(cell, w))[1:]) if per_step else ()
    gain, gain_s = _cut(w.norm_hh, K)
    g = before[0] if mask is None else before[0] * mask  # (2)
    left: tuple[Tensor, ...] = (g,)
    dg, dp_s = torch.zeros_like(g), dv[:, K:]
    if cell.reset:
        dp_s = _bare(dv[:, K:], gain_s, norms[1:])  # (4)
        ds, left = dp_s @ w.weight_hh[K:], (g, kept.r * g)  # (4)
        dg, da = ds * kept.r, cell.reset.backward(ds * g, kept)  # (4)
        du, dv = (torch.cat([da, d[:, da.shape[1] :]], 1) for d in (du, dv))
    dp = _bare(dv[:, :K], gain, norms)  # (3)
    dg = dg + dp @ w.weight_hh[:K]  # (3)
    dh = dg if mask is None else dg * mask  # (2)
    dh = dh if w.weight_hr is not None else dh + dpath[0]
    dbefore = dbefore[0] + dh, *map(torch.add, dbefore[1:], dpath[1:])
    return dbefore, StepGrads(du, dv, torch.cat([dp, dp_s], 1), left, dprojected, total), dcell[0] if dcell else ()


def options_forward(
    cell: Cell,
    x: Float[Tensor, "N I"],
    state0: State,
    weights: Weights,
    steps: Steps,
    mask: Float[Tensor, "B P"] | None = None,
    zoneout: State = (),
    bptt: int = 0,
) -> tuple[Float[Tensor, "N P"], State, OptionsSaved]:
    """`recurrence_forward` with options; without any it gives the same.

    Definition, besides the step's::

        u_t = N(W_ih x_t) + b_ih                    (1)

    Gradient: that of `recurrence_forward`, with the gradient of the bare product in the place of dv in dW_hh, and g_t,
    or r * g_t, in the place of h_{t-1}.

    Shapes: as there; state0 h (B, P) and c (B, H); mask (B, P), the same at all steps of a sequence; `zoneout` for each
    state (N, its width), z of each token, or (). With `bptt` = k no gradient passes from step t + 1 to step t where k
    divides t; 0: it passes everywhere.
    Source: mask: Gal and Ghahramani 2016; layer norm: Ba 2016, equations 20 to 22; projection: Sak 2014.
    Derivation: docs/en/recurrent_options.md.
    """
    w, tokens = weights, all_rows(steps, x.device)
    u, norm_x = _normed(x[tokens] @ w.weight_ih.T, w.norm_ih, w.bias_ih)  # (1)
    state, hs, trail, done = state0, [], [], 0
    for t, rows in enumerate(steps or [tokens]):
        n = len(rows)
        before = tuple(s[:n].detach() if cuts(bptt, t) else s[:n] for s in state)
        own_mask, z = None if mask is None else mask[:n], tuple(z[rows] for z in zoneout)
        after, saved = step_forward(cell, u[done : done + n], before, w, own_mask, z)
        hs.append(after[0])
        trail.append(saved)
        state, done = tuple(torch.cat([a, s[n:]]) for a, s in zip(after, state, strict=True)), done + n
    by_token = partial(_by_token, x, tokens)
    y, trail = by_token(*hs), pytree.tree_map(by_token, *trail)
    norm_x = pytree.tree_map(by_token, norm_x)
    return y, state, OptionsSaved(x, trail, norm_x, w, steps, cell, mask, zoneout, bptt)


def options_backward(
    dy: Float[Tensor, "N P"], dlast: State, saved: OptionsSaved, per_step: bool = True
) -> OptionsGrads:
    x, trail, norm_x, w, steps, cell, mask, zoneout, bptt = saved
    tokens = all_rows(steps, x.device)
    dstate, parts, dcell = dlast, [], [None if p is None else torch.zeros_like(p) for p in _own(cell, w)]
    for t, rows in reversed(list(enumerate(steps or [tokens]))):
        n = len(rows)
        dafter = dy[rows] + dstate[0][:n], *(d[:n] for d in dstate[1:])
        own, own_mask = pytree.tree_map(lambda a, r=rows: a[r], trail), None if mask is None else mask[:n]
        dbefore, grads, dw = step_backward(cell, dafter, own, w, own_mask, tuple(z[rows] for z in zoneout), per_step)
        dbefore = tuple(torch.zeros_like(d) if cuts(bptt, t) else d for d in dbefore)
        dstate = tuple(torch.cat([d, rest[n:]]) for d, rest in zip(dbefore, dstate, strict=True))
        dcell = [None if d is None or part is None else d + part for d, part in zip(dcell, dw, strict=True)]
        parts.append(grads)
    du, dv, dp, left, dprojected, dall = pytree.tree_map(partial(_by_token, x, tokens), *parts[::-1])
    da = _bare(du, w.norm_ih, norm_x)  # (1)
    cut = _cut(dp, _rows_of_h(cell, w), 1)
    own_dweights: Any = dict(zip(cell.weights, dcell, strict=True))
    dweights = Weights(
        da[tokens].T @ x[tokens],  # (1): what lies in the padding of x may be anything
        torch.cat([d.T @ a for d, a in zip(cut, left, strict=False)]),  # (3), (4)
        None if w.bias_ih is None else du.sum(0),  # (1)
        None if w.bias_hh is None else dv.sum(0),  # (3), (4)
        None if w.weight_hr is None else dprojected.T @ trail.out[0],  # (5)
        None if w.norm_ih is None else (du * norm_x[0].normal).sum(0),  # (1)
        None if w.norm_hh is None else (dv * torch.cat([n.normal for n in trail.norms], 1)).sum(0),  # (3), (4)
    )._replace(**own_dweights)
    return OptionsGrads(da @ w.weight_ih, dstate, dweights, dall)  # (1)


def _by_token(x: Tensor, tokens: Tensor, *parts: Tensor) -> Tensor:
    """(N, ...) of the parts, one for each step; 0 where there is no token."""
    return x.new_zeros(len(x), *parts[0].shape[1:]).index_copy(0, tokens, torch.cat(parts))


def _rows_of_h(cell: Cell, w: Weights) -> int:
    """K: the rows of W_hh that multiply h."""
    return len(w.weight_hh) - (w.weight_hh.shape[1] if cell.reset else 0)


def _own(cell: Cell, w: Weights) -> list[Tensor | None]:
    return [getattr(w, name) for name in cell.weights]


def _cut(a: Tensor | None, K: int, axis: int = 0) -> tuple[Any, Any]:
    return (None, None) if a is None else (a.narrow(axis, 0, K), a.narrow(axis, K, a.shape[axis] - K))


def _normed(p: Tensor, gain: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Norms]:
    if gain is None:
        return p if bias is None else p + bias, ()
    y, saved = layer_norm_forward(p, gain, bias)
    return y, (saved,)


def _bare(dy: Tensor, gain: Tensor | None, norms: Norms) -> Tensor:
    """The gradient of what `_normed` was given."""
    return dy if gain is None else layer_norm_backward(dy, norms[0], gain).dx
