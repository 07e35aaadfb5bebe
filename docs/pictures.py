"""Draws the pictures of the pages, light and dark, into docs/_static: `python docs/pictures.py`.

`unrolled` is a diagram. `gradient_reach` is a measurement: dh_t of tanh networks by the closed form, for a loss on the
last state.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor

from unrolled.equations.rnn import rnn_backward, rnn_forward

T, B, H = 100, 64, 128
RADII = (0.8, 1.0, 1.2, 1.5)

INK = {"": "#1f2328", "_dark": "#e6edf3"}
FAINT = {"": "#d8dee4", "_dark": "#343b44"}
SOFT = {"": "#656d76", "_dark": "#9198a1"}
FILL = {"": "#f3f6f8", "_dark": "#1d2229"}
COLOURS = {
    "": ("#1f6feb", "#0f8a7e", "#b26a00", "#cf222e"),
    "_dark": ("#6cb0ff", "#56c9bb", "#e3b341", "#ff7b72"),
}


def reach(radius: float) -> Tensor:
    """|dh_t| / |dh_T| for t = 0 ... T: quartiles over B sequences, (3, T + 1)."""
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    weight_hh = normal(H, H)
    weight_hh *= radius / torch.linalg.eigvals(weight_hh).abs().max()
    # H more inputs, all zero, go straight into the pre-activation: their gradient is da_t itself.
    weight_ih = torch.cat([0.1 * normal(H, 1), torch.eye(H, dtype=torch.float64)], dim=1)
    x = torch.cat([normal(T * B, 1), torch.zeros(T * B, H, dtype=torch.float64)], dim=1)
    steps = list(torch.arange(T * B).view(T, B))
    y, _, saved = rnn_forward(x, 0.1 * normal(B, H), weight_ih, weight_hh, None, None, steps)
    dh_last = normal(B, H)
    grads = rnn_backward(torch.zeros_like(y), dh_last, saved)
    da = grads.dx[:, 1:].view(T, B, H)
    dh = torch.cat([da @ weight_hh, dh_last[None]])  # dh_t = W_hh^T da_{t+1}
    norm = dh.norm(dim=2)
    return (norm / norm[-1]).quantile(torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64), dim=1)


def svg(width: int, height: int, body: list[str], label: str) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{label}"'
        """ font-family="'STIX Two Text','STIX Two Math','Times New Roman','DejaVu Serif',serif">"""
    )
    return "\n".join([head, *body, "</svg>", ""])


def text(
    x: float, y: float, markup: str, colour: str, anchor: str = "middle", size: int = 17, slant: str = "italic"
) -> str:
    """`markup` in italics; `_{...}` and `^{...}` go down and up, `~{...}` is upright."""
    shifts = {"_": (5, 'font-size="70%"'), "^": (-7, 'font-size="70%"'), "~": (0, 'font-style="normal"')}
    out = ""
    for kind, inside, plain in re.findall(r"([_^~])\{(.*?)\}|(.)", markup):
        if plain:
            out += plain
            continue
        shift, look = shifts[kind]
        out += f'<tspan dy="{shift}" {look}>{inside}</tspan>' + (
            f'<tspan dy="{-shift}">&#8203;</tspan>' if shift else ""
        )
    place = f'x="{x:g}" y="{y:g}" text-anchor="{anchor}"'
    return f'<text {place} fill="{colour}" font-size="{size}" font-style="{slant}">{out}</text>'


def draw_reach(theme: str) -> str:
    left, right, top, bottom, width, height = 70, 40, 44, 50, 820, 410
    low, high = -12, 4

    def px(t: float) -> float:
        return left + (width - left - right) * t / T

    def py(exponent: float) -> float:
        return top + (height - top - bottom) * (high - exponent) / (high - low)

    body = []
    for exponent in range(low, high + 1, 2):
        colour, weight = (SOFT[theme], 1.2) if exponent == 0 else (FAINT[theme], 1)
        body.append(f'<path d="M{px(0):g} {py(exponent):.1f}H{px(T):g}" stroke="{colour}" stroke-width="{weight}"/>')
        label = f"10^{{{str(exponent).replace('-', '−')}}}" if exponent else "1"
        body.append(text(left - 12, py(exponent) + 5, label, SOFT[theme], "end", 15, "normal"))
    for t in range(0, T + 1, 20):
        body.append(text(px(t), height - bottom + 24, f"~{{{t}}}" if t < T else "T~{ = 100}", SOFT[theme], size=15))
    body.append(text(px(T / 2), height - 8, "t", INK[theme]))
    body.append(text(left, 22, "‖~{d}h_{t}‖ / ‖~{d}h_{T}‖", INK[theme], "start", 16))
    for radius, colour in zip(RADII, COLOURS[theme], strict=True):
        lower, median, upper = reach(radius).log10().clamp(low, high).tolist()
        band = [f"{px(t):.1f},{py(v):.1f}" for t, v in enumerate(upper)]
        band += [f"{px(t):.1f},{py(v):.1f}" for t, v in reversed(list(enumerate(lower)))]
        line = " ".join(f"{px(t):.1f},{py(v):.1f}" for t, v in enumerate(median))
        body.append(f'<polygon points="{" ".join(band)}" fill="{colour}" fill-opacity="0.18"/>')
        body.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2.4"/>')
        body.append(text(px(1), py(max(median[:11])) - 12, f"ρ~{{ = {radius}}}", colour, "start", 16))
    return svg(width, height, body, "norm of dh_t over t, logarithmic, for four spectral radii")


def draw_unrolled(theme: str) -> str:
    ink, soft, fill = INK[theme], SOFT[theme], FILL[theme]
    direct, indirect = COLOURS[theme][3], COLOURS[theme][0]
    colours = {"ink": ink, "direct": direct, "indirect": indirect}
    body = [
        f'<marker id="{name}" viewBox="0 0 10 10" refX="8.5" refY="5" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 1L9 5L0 9z" fill="{colour}"/></marker>'
        for name, colour in colours.items()
    ]

    def arrow(x1: float, y1: float, x2: float, y2: float, kind: str = "ink") -> None:
        line = f'stroke="{colours[kind]}" stroke-width="1.8"' + (' stroke-dasharray="6 4"' if kind != "ink" else "")
        body.append(f'<path d="M{x1} {y1}L{x2} {y2}" {line} marker-end="url(#{kind})"/>')

    def box(x: float, y: float, markup: str) -> None:
        place = f'x="{x - 30}" y="{y - 24}" width="60" height="48" rx="10"'
        body.append(f'<rect {place} fill="{fill}" stroke="{ink}" stroke-width="1.6"/>')
        body.append(text(x, y + 6, markup, ink, size=20))

    middle, centres = 170, {"0": 60, "1": 230, "2": 400, "T": 740}
    for name, x in centres.items():
        box(x, middle, f"h_{{{name}}}")
        if name == "0":
            continue
        body.append(text(x, 318, f"x_{{{name}}}", ink, size=20))
        arrow(x, 296, x, 198)
        body.append(text(x + 10, 258, "W_{ih}", soft, "start"))
        body.append(text(x - 12, 28, f"y_{{{name}}}", ink, size=20))
        arrow(x - 12, 144, x - 12, 42)
        arrow(x + 12, 42, x + 12, 142, "direct")
        body.append(text(x + 22, 84, f"~{{d}}y_{{{name}}}", direct, "start"))
    body.append(text(570, middle + 6, "~{· · ·}", ink, size=22))
    for x1, x2, following in ((60, 230, "1"), (230, 400, "2"), (400, 550, "3"), (590, 740, "T")):
        begin = x1 + 32 if x1 != 590 else 598
        end = x2 - 32 if x2 != 550 else 542
        arrow(begin, middle - 10, end, middle - 10)
        arrow(end, middle + 12, begin + 2, middle + 12, "indirect")
        body.append(text((begin + end) / 2, middle - 20, "W_{hh}", soft))
        sent_back = f"W_{{hh}}^{{⊤}}~{{d}}a_{{{following}}}"
        body.append(text((begin + end) / 2 + 4, middle + 36, sent_back, indirect, size=16))
    return svg(820, 336, body, "the network unrolled over time, with the gradient flowing back")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name, draw in (("gradient_reach", draw_reach), ("unrolled", draw_unrolled)):
        for theme in INK:
            (Path(__file__).parent / "_static" / f"{name}{theme}.svg").write_text(draw(theme), "utf-8")
