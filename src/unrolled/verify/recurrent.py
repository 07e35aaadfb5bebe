"""The recurrent operator as its judges see it: every cell, every option, states and weights by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unrolled.equations.recurrence import RecurrenceSaved, State, recurrence_backward, recurrence_forward
from unrolled.equations.recurrent_options import options_backward, options_forward
from unrolled.ops import _recurrent as operator
from unrolled.ops._recurrent_by_equation import equation_forward
from unrolled.ops.recurrence import CELLS, Weights, Zoneout, recurrence
from unrolled.ragged import Rows, live_rows
from unrolled.verify.judges import Inputs
from unrolled.verify.recurrences import zoneout_share


def recurrent_operator(
    cell: str, x: Tensor, h0: Tensor, rows: Rows, c0: Tensor | None = None, **weights_and_options: Any
) -> tuple[Tensor, ...]:
    options = dict(weights_and_options)
    weights = Weights(**{name: options.pop(name) for name in Weights._fields if name in options})
    y, last = recurrence(cell, x, (h0,) if c0 is None else (h0, c0), weights, rows, **options)
    return y, *last


def recurrent_forward(
    cell: str,
    x: Tensor,
    h0: Tensor,
    steps: Sequence[Tensor],
    c0: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    zoneout: State = (),
    bptt: int = 0,
    **weights: Any,
) -> tuple[Any, ...]:
    """The equation without options where that is enough, else the one with."""
    state0, w, equation = (h0,) if c0 is None else (h0, c0), Weights(**weights), CELLS[cell].equation
    if mask is None and not zoneout and not any(w is not None for w in w[4:]) and not equation.reset:
        y, last, saved = recurrence_forward(equation, x, state0, *w[:4], steps, bptt)
        return y, *last, saved
    y, last, saved_options = options_forward(equation, x, state0, w, steps, mask, zoneout, bptt)
    return y, *last, saved_options


class RecurrentGrads(NamedTuple):
    """None for what there is not; `dh` with respect to h after each token, `dc` to c as the cell gave it."""

    dx: Tensor
    dh0: Tensor
    dc0: Tensor | None
    dweight_ih: Tensor
    dweight_hh: Tensor
    dbias_ih: Tensor | None
    dbias_hh: Tensor | None
    dweight_hr: Tensor | None
    dnorm_ih: Tensor | None
    dnorm_hh: Tensor | None
    dpeephole: Tensor | None
    dnorm_c: Tensor | None
    dbias_c: Tensor | None
    dh: Tensor
    dc: Tensor | None


def recurrent_backward(*args: Any, backward: Callable[..., Any] | None = None) -> RecurrentGrads:
    """`(dy, dh_last, saved)` or `(dy, dh_last, dc_last, saved)`; `backward` may be another than the equation's."""
    dy, *dlast, saved = args
    if isinstance(saved, RecurrenceSaved):
        g = (backward or recurrence_backward)(dy, tuple(dlast), saved)
        dweights = Weights(g.dweight_ih, g.dweight_hh, g.dbias_ih, g.dbias_hh)
    else:
        g = (backward or options_backward)(dy, tuple(dlast), saved)
        dweights = g.dweights
    (dh0, dc0), (dh, dc) = ((*states, None)[:2] for states in (g.dstate0, g.dstate))
    return RecurrentGrads(g.dx, dh0, dc0, *dweights, dh, dc)


def recurrent_equation(inputs: Inputs) -> dict[str, Any] | None:
    """The equation reads one direction, the longest sequence first."""
    rows = inputs["rows"]
    order, steps = live_rows(rows)
    if len(inputs["h0"]) != 1 or not torch.equal(order, torch.arange(len(order))):
        return None
    own = {k: v.detach()[0].requires_grad_() if k in ("h0", "c0") else v for k, v in inputs.items() if k != "rows"}
    if "mask" in own:
        own["mask"] = own["mask"][0]
    if "zoneout" in own:
        own["zoneout"] = _shares(own["zoneout"], rows, [own[name] for name in ("h0", "c0") if name in own], inputs["x"])
    return {**own, "steps": steps}


def _shares(zoneout: Zoneout, rows: Rows, states: Sequence[Tensor], x: Tensor) -> State:
    """For each state how much of its old value each token keeps."""
    shares = []
    for i, (p, state) in enumerate(zip((zoneout.h, zoneout.c), states, strict=False)):
        share = x.new_zeros(len(x), state.shape[1])
        for b, key in enumerate(zoneout.keys.tolist()):
            for t in range(int(rows.length[b])):
                stream = 4 * zoneout.layer + i
                own = zoneout_share(p, stream, zoneout.seed, key, t, state.shape[1])
                share[int(rows.start[b]) + t * rows.step] = own
        shares.append(share)
    return tuple(shares)


def terms(inputs: Inputs) -> int:
    """In the longest sum; a layer norm adds the three over its row: mean, variance, and the slope in its gradient."""
    width: int = inputs["weight_hh"].shape[1]
    projected: int = inputs["weight_hr"].shape[1] if "weight_hr" in inputs else 0
    normed: int = 3 * len(inputs["weight_hh"]) // len(inputs["h0"]) if "norm_hh" in inputs else 0
    return len(inputs["x"]) + int(inputs["x"].shape[1]) + width + projected + normed


def cancels(inputs: Inputs) -> float:
    """A layer norm takes a mean away and multiplies what is left, rounding too, up to 1 / sqrt(1e-5) times."""
    if "norm_hh" not in inputs:
        return 1.0
    zoneout = inputs.get("zoneout", Zoneout(0.0, 0.0, None, inputs["rows"].start, 0))
    given: dict[str, Any] = {name: inputs.get(name) for name in operator.Inputs._fields}
    given |= {"start": inputs["rows"].start, "length": inputs["rows"].length, "step": inputs["rows"].step}
    given |= {"zoneout_h": zoneout.h, "zoneout_c": zoneout.c, "seed": zoneout.seed, "keys": zoneout.keys}
    given |= {"layer": zoneout.layer, "bptt": 0}
    with torch.no_grad():
        _, _, saved = equation_forward(operator.Inputs(**given))
    return max(1.0, float(saved.scales.max())) if saved.scales.numel() else 1.0
