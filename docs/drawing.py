"""What the pictures are drawn with: colours for light and dark pages, an SVG, a line of text with indices."""

from __future__ import annotations

import re

INK = {"": "#1f2328", "_dark": "#e6edf3"}
FAINT = {"": "#d8dee4", "_dark": "#343b44"}
SOFT = {"": "#656d76", "_dark": "#9198a1"}
FILL = {"": "#f3f6f8", "_dark": "#1d2229"}
COLOURS = {
    "": ("#1f6feb", "#0f8a7e", "#b26a00", "#cf222e"),
    "_dark": ("#6cb0ff", "#56c9bb", "#e3b341", "#ff7b72"),
}


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
