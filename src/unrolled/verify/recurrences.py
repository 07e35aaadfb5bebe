"""The recurrence in other words: a plain one that shares nothing with the equations, and torch's own.

Slow on purpose: one sequence and one step at a time, and where it is plainer one unit at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from unrolled.ops.recurrence import Zoneout
from unrolled.ragged import Rows
from unrolled.verify.formulations import philox

Parameters = Mapping[str, Tensor]
Product = Callable[[Tensor, int, int], Tensor]


def plain_recurrence(
    cell: str,
    x: Tensor,
    h0: Tensor,
    rows: Rows,
    c0: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    zoneout: Zoneout | None = None,
    bptt: int = 0,
    added: tuple[Tensor, ...] = (),
    **weights: Tensor | None,
) -> tuple[Tensor, ...]:
    """`added`, (R, D * P) and for an LSTM (R, D * H), joins h after each step and c as soon as the cell has made it.

    The derivative with respect to it is the total one with respect to the state.
    """
    directions, sequences, width = h0.shape
    y = [[x.new_zeros(width)] * directions for _ in range(len(x))]
    ends = []
    for d in range(directions):
        w = {name: both.chunk(directions)[d] for name, both in weights.items() if both is not None}
        for b in range(sequences):
            states = [h0[d, b], *([] if c0 is None else [c0[d, b]])]
            times = list(range(int(rows.length[b])))
            for walked, t in enumerate(reversed(times) if d else times):
                row = int(rows.start[b]) + t * rows.step
                if bptt and walked and walked % bptt == 0:
                    states = [s.detach() for s in states]
                more = [part[row].chunk(directions)[d] for part in added]
                of_c = {"added": more[1]} if len(more) > 1 else {}
                new = _step(cell, x[row], states, {**w, **of_c}, None if mask is None else mask[d, b])
                if zoneout is not None:
                    streams = [(zoneout.h, 4 * zoneout.layer + 2 * d), (zoneout.c, 4 * zoneout.layer + 2 * d + 1)]
                    for i, old in enumerate(states):
                        stays = zoneout_share(*streams[i], zoneout.seed, int(zoneout.keys[b]), t, len(old))
                        new[i] = stays.to(old) * (old - new[i]) + new[i]
                states = [new[0] + more[0], *new[1:]] if more else new
                y[row] = [*y[row][:d], states[0], *y[row][d + 1 :]]
            ends.append(states)
    stacked = torch.stack([torch.cat(parts) for parts in y]) if y else x.new_zeros(0, directions * width)
    initial = [h0, *([] if c0 is None else [c0])]
    if not ends:
        return stacked, *(s.clone() for s in initial)
    return stacked, *(torch.stack(s).view_as(s0) for s, s0 in zip(zip(*ends, strict=True), initial, strict=True))


def zoneout_share(p: float, stream: int, seed: Tensor | None, key: int, t: int, units: int) -> Tensor:
    """How much of each unit's old value stays: all or nothing by its random number, without a seed p."""
    if seed is None:
        return torch.full((units,), p, dtype=torch.float64)
    numbers = [philox((16 * (f // 64) + f % 16, t, key, stream), int(seed))[f // 16 % 4] for f in range(units)]
    return torch.tensor([float(number < round(p * 2**32)) for number in numbers], dtype=torch.float64)


def _step(cell: str, x: Tensor, states: list[Tensor], w: Parameters, mask: Tensor | None) -> list[Tensor]:
    h, hidden = states[0], w["weight_hr" if "weight_hr" in w else "weight_hh"].shape[1]
    u = _shown(F.linear(x, w["weight_ih"]), w.get("norm_ih"), w.get("bias_ih")).view(-1, hidden)

    def product(vector: Tensor, first: int, last: int) -> Tensor:
        """Of the blocks of W_hh from `first` to before `last` and h, or what takes its place: a row for each."""
        own = slice(first * hidden, last * hidden)
        gain, bias = (w[name][own] if name in w else None for name in ("norm_hh", "bias_hh"))
        return _shown(F.linear(vector, w["weight_hh"][own]), gain, bias).view(-1, hidden)

    out, *memory = _STEPS[cell](u, product, h if mask is None else h * mask, states, w)
    return [F.linear(out, w["weight_hr"]) if "weight_hr" in w else out, *memory]


def _shown(p: Tensor, gain: Tensor | None, bias: Tensor | None) -> Tensor:
    """With a gain: distances from the mean, measured in standard deviations."""
    if gain is not None:
        distance = p - p.sum() / len(p)
        p = gain * distance / (distance.square().sum() / len(p) + 1e-5).sqrt()
    return p if bias is None else p + bias


def _tanh(a: Tensor) -> Tensor:
    return (2 * a).expm1() / ((2 * a).expm1() + 2)


def _sigmoid(a: Tensor) -> Tensor:
    return 1 / (1 + (-a).exp())


# One step from u = W_ih x + b_ih, a row for each gate, the recurrent product, what of h enters it, and the states.


def _rnn_tanh(u: Tensor, product: Product, g: Tensor, states: list[Tensor], w: Parameters) -> list[Tensor]:
    return [_tanh(u[0] + product(g, 0, 1)[0])]


def _rnn_relu(u: Tensor, product: Product, g: Tensor, states: list[Tensor], w: Parameters) -> list[Tensor]:
    return [(u[0] + product(g, 0, 1)[0]).clamp(min=0)]


def _lstm(u: Tensor, product: Product, g: Tensor, states: list[Tensor], w: Parameters) -> list[Tensor]:
    write, keep, content, read = u + product(g, 0, 4)
    c, peep = states[1], w["peephole"].view(3, -1) if "peephole" in w else torch.zeros_like(u[:3])
    c = _sigmoid(keep + peep[1] * c) * c + _sigmoid(write + peep[0] * c) * _tanh(content) + w.get("added", 0)
    seen = _shown(c, w["norm_c"], w.get("bias_c")) if "norm_c" in w else c
    return [_sigmoid(read + peep[2] * c) * _tanh(seen), c]


def _gru(u: Tensor, product: Product, g: Tensor, states: list[Tensor], w: Parameters) -> list[Tensor]:
    v, h = product(g, 0, 3), states[0]
    reset, keep = _sigmoid(u[0] + v[0]), _sigmoid(u[1] + v[1])
    content = _tanh(u[2] + reset * v[2])
    return [content + keep * (h - content)]


def _gru_before(u: Tensor, product: Product, g: Tensor, states: list[Tensor], w: Parameters) -> list[Tensor]:
    v, h = product(g, 0, 2), states[0]
    reset, keep = _sigmoid(u[0] + v[0]), _sigmoid(u[1] + v[1])
    content = _tanh(u[2] + product(reset * g, 2, 3)[0])
    return [content + keep * (h - content)]


_STEPS = {
    **{"rnn_tanh": _rnn_tanh, "rnn_relu": _rnn_relu},
    **{"lstm": _lstm, "lstm_options": _lstm, "gru": _gru, "gru_before": _gru_before},
}


def torch_recurrence(
    cell: str, x: Tensor, h0: Tensor, rows: Rows, c0: Tensor | None = None, **weights: Tensor | None
) -> tuple[Tensor, ...]:
    """torch.nn's module on the packed sequences; lengths from 1, each row in one sequence."""
    directions, _, width = h0.shape
    given = {name: w.chunk(directions) for name, w in weights.items() if w is not None}
    kind, _, nonlinearity = cell.partition("_")
    options: dict[str, Any] = {"nonlinearity": nonlinearity} if nonlinearity else {}
    hidden = width
    if "weight_hr" in given:
        hidden, options["proj_size"] = given["weight_hr"][0].shape[1], width
    module = {"rnn": nn.RNN, "lstm": nn.LSTM, "gru": nn.GRU}[kind](
        x.shape[1], hidden, bias="bias_ih" in given, bidirectional=directions == 2, device="meta", **options
    )
    parameters = {f"{name}_l0{'_reverse' * d}": part for name, parts in given.items() for d, part in enumerate(parts)}
    time = torch.arange(int(rows.length.max()))
    index = (rows.start + time[:, None] * rows.step).clamp(max=len(x) - 1)  # (T, B)
    packed = pack_padded_sequence(x[index], rows.length, enforce_sorted=False)
    output, last = torch.func.functional_call(module, parameters, (packed, h0 if c0 is None else (h0, c0)))
    y, _ = pad_packed_sequence(output)
    live = time[:, None] < rows.length
    stacked = x.new_zeros(len(x), directions * width).index_put((index[live],), y[live])
    return stacked, *((last,) if c0 is None else last)


def torch_has(inputs: Mapping[str, Any]) -> bool:
    """Whether torch.nn has a module for this."""
    torchs = {"cell", "x", "h0", "c0", "rows", "weight_ih", "weight_hh", "bias_ih", "bias_hh"}
    torchs |= {"weight_hr"} if inputs["cell"] == "lstm" else set()
    return inputs["cell"] != "gru_before" and inputs.keys() <= torchs
