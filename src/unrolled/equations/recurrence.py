"""The recurrence that every cell shares: the loop over time, the products, and back-propagation through time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unrolled.ragged import all_rows

State = tuple[Tensor, ...]  # (h,) or (h, c), each (n, H)


class Reset(NamedTuple):
    """A gate that multiplies h before the last H rows of W_hh do: `forward(u, v) -> r`, of the rows of v before them.

    `backward(dr, kept) -> da`, the gradient of the first H numbers of u and of v.
    """

    forward: Callable[[Tensor, Tensor], Tensor]
    backward: Callable[[Tensor, Any], Tensor]


class Cell(NamedTuple):
    """The pointwise algebra of one step and its gradient; a new cell is such a pair.

    `forward(u, v, *before) -> (after, kept)` with u = W_ih x + b_ih and v = W_hh h + b_hh, both (n, G * H).
    `backward(dafter, after, before, kept) -> (du, dv, dbefore)`, dbefore without what h receives through v.
    `total(dafter, after, kept) -> dafter`, where c influences the loss through h of the same step too: with that path.
    Cells with `weights` of their own or a `reset` need `recurrent_options`: all functions take those weights at the
    end, and the backward gives their gradients at the end, a tuple.
    """

    forward: Callable[..., tuple[State, Any]]
    backward: Callable[..., Any]
    weights: tuple[str, ...] = ()
    reset: Reset | None = None
    total: Callable[..., State] = lambda dafter, *_: dafter


class RecurrenceSaved(NamedTuple):
    """What the backward needs; `before` and `last` together are all `N + B` states, `kept` the cell's own, by name."""

    x: Float[Tensor, "N I"]
    before: State  # each (N, H): the state before each token, the initial one at a sequence's first step
    last: State  # each (B, H)
    kept: Any  # a NamedTuple of the cell's, each (N, H)
    weight_ih: Float[Tensor, "GH I"]
    weight_hh: Float[Tensor, "GH H"]
    steps: Sequence[Int[Tensor, "_"]]
    cell: Cell
    bptt: int


class RecurrenceGrads(NamedTuple):
    dx: Float[Tensor, "N I"]
    dstate0: State  # each (B, H)
    dweight_ih: Float[Tensor, "GH I"]
    dweight_hh: Float[Tensor, "GH H"]
    dbias_ih: Float[Tensor, "GH"]
    dbias_hh: Float[Tensor, "GH"]
    dstate: State  # each (N, H): the total derivative with respect to the state after each token, if wanted


def cuts(bptt: int, t: int) -> bool:
    """Whether truncated back-propagation lets no gradient pass from step t (from 0) to the one before."""
    return bptt > 0 and t > 0 and t % bptt == 0


def recurrence_forward(
    cell: Cell,
    x: Float[Tensor, "N I"],
    state0: State,
    weight_ih: Float[Tensor, "GH I"],
    weight_hh: Float[Tensor, "GH H"],
    bias_ih: Float[Tensor, "GH"] | None,
    bias_hh: Float[Tensor, "GH"] | None,
    steps: Sequence[Int[Tensor, "_"]],
    bptt: int = 0,
) -> tuple[Float[Tensor, "N H"], State, RecurrenceSaved]:
    """One layer in one direction over sequences of any lengths.

    Definition, for each sequence, t = 1 ... T_b::

        u_t = W_ih x_t + b_ih                       (1)
        v_t = W_hh h_{t-1} + b_hh                   (2)
        h_t, c_t = cell(u_t, v_t, h_{t-1}, c_{t-1})

    Gradient, dh_t being the total derivative of the loss with respect to h_t and dy_t the part that reaches h_t
    directly, through the output of step t::

        dh_t = dy_t + W_hh^T dv_{t+1} + the cell's own path; at t = T_b: dy_t + dh_last
        du_t, dv_t = the cell's gradient
        dW_hh = sum_t dv_t h_{t-1}^T                one product over all tokens, and so are the next two
        dW_ih = sum_t du_t x_t^T
        dx_t = W_ih^T du_t
        db_ih = sum_t du_t,  db_hh = sum_t dv_t

    Shapes: x (N, I), one row per token; state0 each (B, H), longest sequence first; G gates one below the other in the
    weights; `steps[t]` (n_t,) the rows of `x` that hold step t of the n_t sequences still alive (`ragged.live_rows`).
    Returns y (N, H), the last states and `saved`. A row in no step (padding) has y = 0. With `bptt` = k no gradient
    passes from step t + 1 to step t where k divides t; 0: it passes everywhere.
    Edges: a sequence of length 0 has no row, its last state is the initial one, and so is the gradient.
    Source: Werbos 1990.
    Derivation: docs/en/backpropagation_through_time.md.
    """
    tokens = all_rows(steps, x.device)
    u = x[tokens] @ weight_ih.T  # (1)
    u = u if bias_ih is None else u + bias_ih
    state, trail = state0, []
    for t, u_t in enumerate(torch.split(u, [len(rows) for rows in steps] or [0])):
        n = len(u_t)
        before = tuple(s[:n].detach() if cuts(bptt, t) else s[:n] for s in state)
        v_t = before[0] @ weight_hh.T  # (2)
        v_t = v_t if bias_hh is None else v_t + bias_hh
        after, kept = cell.forward(u_t, v_t, *before)
        trail.append((after[0], before, kept))
        state = tuple(
            torch.cat([a, s[n:]]) for a, s in zip(after, state, strict=True)
        )  # the ended keep their last state

    by_token = partial(_by_token, len(x), tokens)
    h, befores, kepts = zip(*trail, strict=True)
    before = tuple(by_token(tuple(b[i] for b in befores)) for i in range(len(state0)))
    kept = type(kepts[0])(*map(by_token, zip(*kepts, strict=True)))
    return by_token(h), state, RecurrenceSaved(x, before, state, kept, weight_ih, weight_hh, steps, cell, bptt)


def _by_token(N: int, tokens: Tensor, parts: tuple[Tensor, ...]) -> Tensor:
    """(N, H) of the parts, one for each step; 0 where there is no token."""
    return parts[0].new_zeros(N, parts[0].shape[1]).index_copy(0, tokens, torch.cat(parts))


def recurrence_backward(
    dy: Float[Tensor, "N H"], dlast: State, saved: RecurrenceSaved, per_step: bool = True
) -> RecurrenceGrads:
    """Back-propagation through time: only the gradient of the state travels, every weight gradient is one product.

    `per_step`: give the gradient of the state after each token too.
    """
    x, before, state, kept, weight_ih, weight_hh, steps, cell, bptt = saved
    du = dy.new_zeros(len(x), len(weight_hh))
    dv, dstate, dall = torch.zeros_like(du), dlast, tuple(torch.zeros_like(b) for b in before if per_step)
    for t, rows in reversed(list(enumerate(steps))):
        n = len(rows)
        dafter = dy[rows] + dstate[0][:n], *(d[:n] for d in dstate[1:])
        after, before_t = tuple(s[:n] for s in state), tuple(b[rows] for b in before)
        kept_t = tuple(k[rows] for k in kept)
        if per_step:
            for total, part in zip(dall, cell.total(dafter, after, kept_t), strict=True):
                total[rows] = part
        du[rows], dv[rows], dbefore = cell.backward(dafter, after, before_t, kept_t)
        dbefore = dbefore[0] + dv[rows] @ weight_hh, *dbefore[1:]  # (2)
        dbefore = tuple(torch.zeros_like(d) if cuts(bptt, t) else d for d in dbefore)
        dstate = tuple(torch.cat([d, rest[n:]]) for d, rest in zip(dbefore, dstate, strict=True))
        state = tuple(torch.cat([b, rest[n:]]) for b, rest in zip(before_t, state, strict=True))
    tokens = all_rows(steps, x.device)
    dweight_hh = dv.T @ before[0]  # (2)
    dbias_hh = dv.sum(0)  # (2)
    dweight_ih = du[tokens].T @ x[tokens]  # (1): what lies in the padding of x may be anything
    dbias_ih = du.sum(0)  # (1)
    dx = du @ weight_ih  # (1)
    return RecurrenceGrads(dx, dstate, dweight_ih, dweight_hh, dbias_ih, dbias_hh, dall)
