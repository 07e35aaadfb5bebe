"""Draws the pictures of the pages, light and dark, into docs/_static: `python docs/pictures.py`.

`unrolled` and `transformer` are diagrams. The rest are measurements: `gradient_reach`, `lstm_reach`, `option_reach` and
`attention_reach` of the gradients of the states, by the closed form; `cost` of time, as `python -m benchmarks cost` has
stored it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from diagrams import draw_transformer, draw_unrolled
from drawing import COLOURS, FAINT, INK, SOFT, svg, text
from torch import Tensor

from unrolled.equations.lstm import LSTM
from unrolled.equations.recurrence import Cell, recurrence_backward, recurrence_forward
from unrolled.equations.rnn import RNN_TANH
from unrolled.nn import RNN
from unrolled.ops.additive_attention import additive_attention
from unrolled.ops.recurrence import record
from unrolled.ragged import Rows

ROOT = Path(__file__).parents[1]
T, B, H = 100, 64, 128
RADII = (0.8, 1.0, 1.2, 1.5)
FORGET_BIASES = (0, 1, 2, 4)
OPTIONS: dict[str, dict[str, Any]] = {
    "uniform": {},
    "zoneout = 0.3": {"zoneout": 0.3},
    "layer norm": {"layer_norm": True},
    "orthogonal": {"recurrent_init": "orthogonal"},
}


def norms(
    cell: Cell, x: Tensor, state: tuple[Tensor, ...], dlast: tuple[Tensor, ...], *weights: Tensor | None
) -> Tensor:
    """|d| / |d_T| of the last of the states at t = 0 ... T for inputs (T, B, I): quartiles over B, (3, T + 1)."""
    steps = [torch.arange(B)]
    trail = []
    for x_t in x:
        _, state, saved = recurrence_forward(cell, x_t, state, *weights, steps)
        trail.append(saved)
    found = [dlast]
    for saved in reversed(trail):
        found.append(recurrence_backward(torch.zeros(B, H, dtype=x.dtype), found[-1], saved).dstate0)
    if len(state) == 2:  # what reaches c_T reaches it through h_T
        o, c = trail[-1].kept.o, state[1]
        found[0] = dlast[0], dlast[0] * o * (1 - c.tanh() ** 2)
    return quartiles(torch.stack([d[-1].norm(dim=1) for d in reversed(found)]))


def quartiles(size: Tensor) -> Tensor:
    return (size / size[-1]).quantile(torch.tensor([0.25, 0.5, 0.75], dtype=size.dtype), dim=1)


def normals() -> Callable[..., Tensor]:
    draw = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(shape, generator=draw, dtype=torch.float64)


def reach(radius: float) -> Tensor:
    """dh_t of a tanh network whose recurrent matrix has this spectral radius."""
    normal = normals()
    weight_hh = normal(H, H)
    weight_hh *= radius / torch.linalg.eigvals(weight_hh).abs().max()
    weight_ih = 0.1 * normal(H, 1)
    x = normal(T * B, 1).view(T, B, 1)
    return norms(RNN_TANH, x, (0.1 * normal(B, H),), (normal(B, H),), weight_ih, weight_hh, None, None)


def lstm_reach(forget_bias: float) -> Tensor:
    """dc_t of an LSTM with torch's initial weights and this bias of the forget gates."""
    normal = normals()
    bound = H**-0.5
    weight_ih, weight_hh = (torch.special.erf(normal(4 * H, n) / 2**0.5) * bound for n in (1, H))  # uniform
    bias = torch.zeros(4 * H, dtype=torch.float64)
    bias[H : 2 * H] = forget_bias
    zero = torch.zeros(B, H, dtype=torch.float64)
    return norms(LSTM, normal(T, B, 1), (zero, zero), (normal(B, H), zero), weight_ih, weight_hh, bias, None)


def option_reach(**options: Any) -> Tensor:
    """dh_t of an untrained tanh layer with this option, for inputs of 16 features."""
    torch.manual_seed(0)
    layer = RNN(16, H, dtype=torch.float64, **options)
    h0 = torch.zeros(1, B, H, dtype=torch.float64, requires_grad=True)
    with record() as records:
        y, _ = layer(torch.randn(T, B, 16, dtype=torch.float64), h0)
    (y[-1] * torch.randn(B, H, dtype=torch.float64)).sum().backward()
    assert h0.grad is not None
    return quartiles(torch.cat([h0.grad, records[0].gradients["dh"].view(T, B, H)]).norm(dim=2))


def reading_reach(attended: bool) -> Tensor:
    """|dh_t| / |do| of an untrained tanh layer, o being its last state or what additive attention reads of all."""
    torch.manual_seed(0)
    layer = RNN(16, H, dtype=torch.float64)
    h0 = torch.zeros(1, B, H, dtype=torch.float64, requires_grad=True)
    with record() as records:
        y, _ = layer(torch.randn(T, B, 16, dtype=torch.float64), h0)
    q, weight_k, v = (torch.randn(shape, dtype=torch.float64) / H**0.5 for shape in ((B, H), (H, H), (H,)))
    o = y[-1]
    if attended:
        queries, keys = (Rows(torch.arange(B), B, torch.full((B,), n)) for n in (1, T))
        h = y.flatten(0, 1)
        o = additive_attention(q, h @ weight_k.T, h, v, queries=queries, keys=keys)
    do = torch.randn(B, H, dtype=torch.float64)
    (o * do).sum().backward()
    assert h0.grad is not None
    dh = torch.cat([h0.grad, records[0].gradients["dh"].view(T, B, H)]).norm(dim=2) / do.norm(dim=1)
    return dh.quantile(torch.tensor([0.25, 0.5, 0.75], dtype=dh.dtype), dim=1)


class Curves(NamedTuple):
    """A picture of `norms`, with the line dashed that each is compared with, if any."""

    state: str
    label: str
    names: list[str]
    measured: list[Tensor]
    expected: list[Tensor]
    unit: str = ""  # what the norm is relative to, if not that of the last state


def radii() -> Curves:
    names = [f"ρ~{{ = {radius}}}" for radius in RADII]
    return Curves("h", "for four spectral radii", names, [reach(radius) for radius in RADII], [])


def forget_biases() -> Curves:
    names = [f"b_{{f}}~{{ = {bias}}}" for bias in FORGET_BIASES]
    gates = torch.tensor(FORGET_BIASES, dtype=torch.float64).sigmoid()
    alone = [gate ** torch.arange(T, -1, -1) for gate in gates]
    return Curves("c", "for four biases of the forget gate", names, [lstm_reach(b) for b in FORGET_BIASES], alone)


def options() -> Curves:
    measured = [option_reach(**options) for options in OPTIONS.values()]
    return Curves("h", "with four options", [f"~{{{name}}}" for name in OPTIONS], measured, [])


def readings() -> Curves:
    measured = [reading_reach(attended) for attended in (False, True)]
    names = ["o~{ = }h_{T}", "o~{ = }∑_{t} p_{t} h_{t}"]
    return Curves("h", "read from the last state and by attention", names, measured, [], "~{d}o")


def draw_norms(curves: Curves, theme: str) -> str:
    """Median and middle half of each curve over t."""
    state, label, names, measured, expected, unit = curves
    left, right, top, bottom, width, height = 70, 40, 44, 50, 820, 410
    low, high = -12, 4

    def px(t: float) -> float:
        return left + (width - left - right) * t / T

    def py(exponent: float) -> float:
        return top + (height - top - bottom) * (high - exponent) / (high - low)

    def points(exponents: list[float]) -> list[str]:
        """From where the curve has risen above the lower edge."""
        return [f"{px(t):.1f},{py(v):.1f}" for t, v in enumerate(exponents) if max(exponents[: t + 1]) > low]

    body = []
    for exponent in range(low, high + 1, 2):
        colour, weight = (SOFT[theme], 1.2) if exponent == 0 else (FAINT[theme], 1)
        body.append(f'<path d="M{px(0):g} {py(exponent):.1f}H{px(T):g}" stroke="{colour}" stroke-width="{weight}"/>')
        power = f"10^{{{str(exponent).replace('-', '−')}}}" if exponent else "1"
        body.append(text(left - 12, py(exponent) + 5, power, SOFT[theme], "end", 15, "normal"))
    for t in range(0, T + 1, 20):
        body.append(text(px(t), height - bottom + 24, f"~{{{t}}}" if t < T else "T~{ = 100}", SOFT[theme], size=15))
    body.append(text(px(T / 2), height - 8, "t", INK[theme]))
    unit = unit or f"~{{d}}{state}_{{T}}"
    body.append(text(left, 22, f"‖~{{d}}{state}_{{t}}‖ / ‖{unit}‖", INK[theme], "start", 16))
    for name, curve, colour in zip(names, measured, COLOURS[theme], strict=False):
        lower, median, upper = curve.log10().clamp(low, high).tolist()
        band = points(upper) + points(lower)[::-1]
        body.append(f'<polygon points="{" ".join(band)}" fill="{colour}" fill-opacity="0.18"/>')
        line = " ".join(points(median))
        body.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2.4"/>')
        start = next(t for t, v in enumerate(median) if v > low)
        place = py(max(median[start + 1 : start + 11])) - 12
        if any(abs(py(other.log10()[start + 3].item()) - place + 5) < 12 for other in expected):
            place = py(min(median[start : start + 11])) + 20
        body.append(text(px(start + 1), place, name, colour, "start", 16))
    for curve, colour in zip(expected, COLOURS[theme], strict=False):
        line = " ".join(points(curve.log10().clamp(min=low).tolist()))
        look = f'stroke="{colour}" stroke-width="1.4" stroke-dasharray="5 4"'
        body.append(f'<polyline points="{line}" fill="none" {look}/>')
    return svg(width, height, body, f"norm of d{state}_t over t, logarithmic, {label}")


def draw_cost(theme: str) -> str:
    """The fastest training step over T, both logarithmic."""
    stored = json.loads((ROOT / "benchmarks/results/cost.json").read_text("utf-8"))
    names = {"rnn": "RNN", "lstm": "LSTM", "attention": "attention", "causal attention": "causal"}
    ticks = [row["T"] for row in stored["rows"]]
    times = {name: [row["times"][name]["min_ms"] for row in stored["rows"]] for name in names}
    left, right, top, bottom, width, height = 70, 110, 44, 50, 820, 410
    every = [v for curve in times.values() for v in curve]
    low, high = math.floor(math.log2(min(every))), math.ceil(math.log2(max(every)))

    def px(t: float) -> float:
        return left + (width - left - right) * math.log(t / ticks[0]) / math.log(ticks[-1] / ticks[0])

    def py(milliseconds: float) -> float:
        return top + (height - top - bottom) * (high - math.log2(milliseconds)) / (high - low)

    body = []
    for power in range(low, high + 1):
        body.append(f'<path d="M{px(ticks[0]):g} {py(2**power):.1f}H{px(ticks[-1]):g}" stroke="{FAINT[theme]}"/>')
        body.append(text(left - 12, py(2**power) + 5, f"~{{{2**power}}}", SOFT[theme], "end", 15))
    for t in ticks:
        body.append(text(px(t), height - bottom + 24, f"~{{{t:,}}}", SOFT[theme], size=15))
    body.append(text((px(ticks[0]) + px(ticks[-1])) / 2, height - 8, "T", INK[theme]))
    body.append(text(left, 22, "~{ms}", INK[theme], "start", 16))
    ends: list[float] = []
    for (name, curve), colour in sorted(zip(times.items(), COLOURS[theme], strict=True), key=lambda c: c[0][1][-1]):
        points = " ".join(f"{px(t):.1f},{py(v):.1f}" for t, v in zip(ticks, curve, strict=True))
        body.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2.4"/>')
        ends.append(min([py(curve[-1]) + 5, *(end - 18 for end in ends)]))
        body.append(text(px(ticks[-1]) + 8, ends[-1], f"~{{{names[name]}}}", colour, "start", 16))
    return svg(width, height, body, "time of a training step over T, at equal parameters")


if __name__ == "__main__":
    torch.set_num_threads(1)
    reaches = {"gradient_reach": radii(), "lstm_reach": forget_biases(), "option_reach": options()}
    reaches["attention_reach"] = readings()
    draws = {name: partial(draw_norms, curves) for name, curves in reaches.items()}
    for name, draw in {**draws, "unrolled": draw_unrolled, "transformer": draw_transformer, "cost": draw_cost}.items():
        for theme in INK:
            (ROOT / "docs/_static" / f"{name}{theme}.svg").write_text(draw(theme), "utf-8")
