"""The diagrams: the network unrolled over time, and the whole Transformer."""

from __future__ import annotations

from drawing import COLOURS, FAINT, FILL, INK, SOFT, svg, text


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


def draw_transformer(theme: str) -> str:
    ink, soft, back = INK[theme], SOFT[theme], COLOURS[theme][0]
    body = [
        f'<marker id="{name}" viewBox="0 0 10 10" refX="8.5" refY="5" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 1L9 5L0 9z" fill="{colour}"/></marker>'
        for name, colour in {"ink": ink, "back": back}.items()
    ]

    def line(path: str, backwards: bool = False) -> None:
        look = f'stroke="{back}" stroke-dasharray="6 4"' if backwards else f'stroke="{ink}"'
        end = f'marker-end="url(#{"back" if backwards else "ink"})"'
        body.append(f'<path d="{path}" fill="none" stroke-width="1.6" {look} {end}/>')

    def box(x: float, y: float, name: str, note: str = "") -> None:
        place = f'x="{x - 105}" y="{y - 19}" width="210" height="38" rx="9"'
        body.append(f'<rect {place} fill="{FILL[theme]}" stroke="{ink}" stroke-width="1.6"/>')
        look = f'fill="{ink}" font-size="15" font-family="ui-monospace,Menlo,Consolas,\'DejaVu Sans Mono\',monospace"'
        body.append(f'<text x="{x}" y="{y + 5}" text-anchor="middle" {look}>{name}</text>')
        if note:
            body.append(text(x + 113, y + 5, note, soft, "start", 15))

    def column(x: float, sublayers: list[tuple[str, str]], inward: str, outward: str, name: str) -> list[float]:
        """From the bottom up; the heights of its sub-layers."""
        top = 410 - 92 * len(sublayers)
        place = f'x="{x - 150}" y="{top - 8}" width="300" height="{416 - top}" rx="16"'
        body.append(f'<rect {place} fill="none" stroke="{FAINT[theme]}" stroke-width="2"/>')
        body.append(text(x, 502, inward, ink, size=18))
        line(f"M{x} 484V472")
        box(x, 451, "embedding", "+ p_{t}")
        heights = []
        for n, (sublayer, note) in enumerate(sublayers):
            y = 364 - 92 * n
            line(f"M{x} {431 if n == 0 else y + 35}V{y + 21}")
            box(x, y, sublayer, note)
            line(f"M{x} {y - 19}V{y - 32}")
            line(f"M{x} {y + 31}H{x - 128}V{y - 45}H{x - 13}")
            body.append(
                f'<circle cx="{x}" cy="{y - 45}" r="11" fill="{FILL[theme]}" stroke="{ink}" stroke-width="1.6"/>'
            )
            body.append(
                f'<path d="M{x - 6} {y - 45}H{x + 6}M{x} {y - 51}V{y - 39}" stroke="{ink}" stroke-width="1.6"/>'
            )
            heights.append(y)
        body.append(text(x + 128, top + 16, name, soft, "end", 15))
        body.append(text(x + 10, top - 18, outward, ink, "start", 18))
        return heights

    left, right = 190, 620
    column(left, [("attention", ""), ("feed_forward", "")], "x_{1}~{, …, }x_{T}", "", "~{×} n")
    sublayers = [("attention", "j ≤ i"), ("attention", ""), ("feed_forward", "")]
    _, cross, _ = column(right, sublayers, "y_{0}~{, }y_{1}~{, …}", "", "~{×} n")
    top = 410 - 92 * 3
    line(f"M{right} {top - 10}V{top - 46}")
    box(right, top - 67, "linear_cross_entropy")
    line(f"M{right} {top - 86}V{top - 106}")
    body.append(text(right, top - 116, "L", ink, size=19))
    low = 410 - 92 * 2
    line(f"M{left} {low - 10}V{low - 44}H444V{cross - 7}H{right - 107}")
    line(f"M{right - 107} {cross + 8}H428V{low - 28}H{left + 14}V{low - 5}", backwards=True)
    body.append(text(left - 10, low - 28, "u", ink, "end", 19))
    body.append(text(420, cross - 18, "∑_{n} ~{d}u^{(n)}", back, "end", 16))
    return svg(820, 520, body, "the encoder, read by every layer of the decoder")
