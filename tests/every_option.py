"""Recurrent layers with every option at once, and such a layer in plain torch, one step after the other."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import unrolled

INPUT, HIDDEN = 3, 5

_COMMON: dict[str, Any] = {
    **{"num_layers": 2, "bidirectional": True, "dropout": 0.3, "learn_initial_state": True, "layer_norm": True},
    **{"recurrent_dropout": 0.4, "zoneout": 0.2, "recurrent_init": "orthogonal", "bptt": 3},
}
EVERY: dict[str, dict[str, Any]] = {
    "RNN": {**_COMMON, "proj_size": 2, "nonlinearity": "tanh"},
    "LSTM": {**_COMMON, "proj_size": 2, "zoneout": (0.2, 0.1), "peephole": True, "forget_bias": 1.0},
    "GRU": {**_COMMON, "reset": "before"},
}
KINDS = list(EVERY)
every_kind = pytest.mark.parametrize("kind", KINDS)
LENGTHS = [4, 0, 6, 1]


def make(kind: str, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    return getattr(unrolled.nn, kind)(INPUT, HIDDEN, dtype=dtype, **options)


def every_option(kind: str, dtype: torch.dtype = torch.float64, **changed: Any) -> Any:
    """With parameters none of which is 0 or 1."""
    return stirred(make(kind, dtype, **{**EVERY[kind], **changed}))


def stirred(layer: Any) -> Any:
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return layer


def states(layer: Any, *sequences: int) -> Any:
    """Random `hx`."""
    rows = layer.num_layers * layer.num_directions
    widths = [getattr(layer, "proj_size", 0) or HIDDEN, HIDDEN][: 1 + (layer.mode == "LSTM")]
    made = tuple(torch.randn(rows, *sequences, width, dtype=layer.weight_hh_l0.dtype) for width in widths)
    return made if len(made) == 2 else made[0]


def listed(last: Any) -> list[Tensor]:
    return [last] if isinstance(last, Tensor) else list(last)


def seeded(layer: Any, *args: Any, seed: int = 3, **options: Any) -> tuple[Any, ...]:
    torch.manual_seed(seed)
    y, last = layer(*args, **options)
    return y, *listed(last)


def gradients(layer: Any, outputs: tuple[Tensor, ...], *more: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(total(outputs), [*layer.parameters(), *more]))


def total(outputs: tuple[Tensor, ...]) -> Tensor:
    return torch.stack([factor * y.pow(2).sum() for factor, y in enumerate(outputs, 1)]).sum()


def packed_up(layer: Any, x: Tensor, *hx: Tensor) -> tuple[Tensor, ...]:
    y, last = layer(x, hx if len(hx) == 2 else hx[0])
    return y, *listed(last)


class Steps(NamedTuple):
    h: list[Tensor]  # the state after each step, each (B, P)
    c: list[Tensor]
    cell: list[Tensor]  # c as the cell gave it, before zoneout
    gates: list[dict[str, Tensor]]


def step_by_step(layer: Any, x: Tensor, hx: Any, suffix: str = "_l0") -> Steps:
    """The first layer of ours in one direction, in evaluation."""
    w = {n.removesuffix(suffix): p for n, p in layer.named_parameters() if n.endswith(suffix)}
    rates = layer.zoneout if isinstance(layer.zoneout, tuple) else (layer.zoneout, layer.zoneout)
    state, steps = listed(hx), Steps([], [], [], [])
    for x_t in x:
        out, gates = _STEP[layer.mode](layer, w, _product(w, x_t, "ih"), *state)
        if "weight_hr" in w:
            out = [out[0] @ w["weight_hr"].T, *out[1:]]
        state = [z * old + (1 - z) * new for z, old, new in zip(rates, state, out, strict=False)]
        for kept, s in zip((steps.h, steps.c), state, strict=False):
            kept.append(s)
        steps.cell.extend(out[1:])
        steps.gates.append(gates)
    return steps


def _product(w: dict[str, Tensor], a: Tensor, which: str, rows: slice = slice(None)) -> Tensor:
    p = a @ w[f"weight_{which}"][rows].T
    if f"norm_{which}" in w:
        p = F.layer_norm(p, p.shape[-1:], w[f"norm_{which}"][rows])
    return p + w[f"bias_{which}"][rows] if f"bias_{which}" in w else p


def _rnn(layer: Any, w: dict[str, Tensor], u: Tensor, h: Tensor) -> Any:
    return [getattr(torch, layer.nonlinearity)(u + _product(w, h, "hh"))], {}


def _lstm(layer: Any, w: dict[str, Tensor], u: Tensor, h: Tensor, c: Tensor) -> Any:
    i, f, g, o = (u + _product(w, h, "hh")).chunk(4, -1)
    p_i, p_f, p_o = w["peephole"].chunk(3) if layer.peephole else (0, 0, 0)
    i, f, g = (i + p_i * c).sigmoid(), (f + p_f * c).sigmoid(), g.tanh()
    c = f * c + i * g
    o = (o + p_o * c).sigmoid()
    s = F.layer_norm(c, c.shape[-1:], w["norm_c"], w.get("bias_c")) if layer.layer_norm else c
    return [o * s.tanh(), c], {"i": i, "f": f, "g": g, "o": o}


def _gru(layer: Any, w: dict[str, Tensor], u: Tensor, h: Tensor) -> Any:
    first = slice(0, 2 * HIDDEN) if layer.reset == "before" else slice(None)
    u_r, u_z, u_n = u.chunk(3, -1)
    v_r, v_z, *v_n = _product(w, h, "hh", first).split(HIDDEN, -1)
    r, z = (u_r + v_r).sigmoid(), (u_z + v_z).sigmoid()
    n = (u_n + (_product(w, r * h, "hh", slice(2 * HIDDEN, None)) if layer.reset == "before" else r * v_n[0])).tanh()
    return [(1 - z) * n + z * h], {"r": r, "z": z, "n": n}


_STEP: dict[str, Any] = {"RNN_TANH": _rnn, "RNN_RELU": _rnn, "LSTM": _lstm, "GRU": _gru}
