"""Positions, of which attention knows nothing by itself: sinusoidal, linear biases (ALiBi), rotary."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

BASE = 10000.0


def sinusoidal(t: Int[Tensor, "N"], width: int) -> Float[Tensor, "N D"]:
    """A vector for each position, to be added to what stands there: waves from short to long, a pair for each length.

    Definition, for the position t, D the width, i = 0 ... (D - 1) // 2::

        p_{2i} = sin(t 10000^(-2i / D))             (1)
        p_{2i+1} = cos(t 10000^(-2i / D))           (2)

    Shapes: t (N,) whole numbers of any size, p (N, D) in float64.
    Edges: an odd D ends with a sine that has no cosine; D = 0 gives nothing.
    Source: Vaswani 2017, section 3.5.
    Derivation: docs/en/positions.md.
    """
    angle = t[:, None] * frequencies(width, t.device)
    return torch.stack((angle.sin(), angle.cos()), 2).flatten(1)[:, :width]  # (1), (2)


def frequencies(width: int, device: torch.device, base: float = BASE) -> Float[Tensor, "half"]:
    """base^(-2i / width) in float64: radians a position, of each pair of numbers."""
    i = torch.arange(0, width, 2, dtype=torch.float64, device=device)
    exponent = i / -max(width, 1)
    return base**exponent


def alibi_slopes(heads: int) -> Float[Tensor, "A"]:
    """How much each head's score falls with each position of distance: attention with linear biases.

    Definition, for the heads a = 1 ... A of a power of 2; the score of query i and key j gets -m_a |i - j|::

        m_a = 2^(-8a / A)                           (3)

    Shapes: (A,) in float64.
    Edges: for another number of heads those of the largest power of 2 below it, A', then the first, third, fifth ...
    of 2 A'.
    Errors: ValueError for fewer than one head.
    Source: Press 2021, section 3; other numbers of heads: its authors' code.
    Derivation: docs/en/positions.md.
    """
    if heads < 1:
        raise ValueError(f"heads must be at least 1, found {heads}")
    below = 1 << (heads.bit_length() - 1)
    slopes = 2.0 ** (-8 / below * torch.arange(1, below + 1, dtype=torch.float64))  # (3)
    between = 2.0 ** (-4 / below * torch.arange(1, 2 * below, 2, dtype=torch.float64))  # (3) of 2 A'
    return torch.cat([slopes, between])[:heads]


class RotarySaved(NamedTuple):
    t: Int[Tensor, "N"]
    heads: int
    columns: int
    base: float


def rotary_forward(
    x: Float[Tensor, "N W"], t: Int[Tensor, "N"], heads: int, columns: int, base: float = BASE
) -> tuple[Float[Tensor, "N W"], RotarySaved]:
    """Turns each pair of numbers of each head by an angle that grows with the position.

    So the product of a turned query and a turned key depends on the distance of their positions, not on the positions.

    Definition, for the position t, i = 0 ... F / 2 - 1 with F the numbers of a head::

        a_i = t base^(-2i / F)                      (4)
        y_{2i} = x_{2i} cos a_i - x_{2i+1} sin a_i  (5)
        y_{2i+1} = x_{2i} sin a_i + x_{2i+1} cos a_i    (6)

    Gradient, the turn back, by -a_i::

        dx_{2i} = dy_{2i} cos a_i + dy_{2i+1} sin a_i
        dx_{2i+1} = dy_{2i+1} cos a_i - dy_{2i} sin a_i

    Shapes: x (N, D), t (N,) whole numbers of any size. The first `columns` columns hold `heads` heads of
    F = columns / heads numbers each; the others are copied. For q|k|v of A heads in one row of 3 A F numbers, 2 A heads
    in 2 A F columns. Angles, sines and cosines are computed in float64 and rounded once.
    Edges: position 0 turns nothing; there is no largest position.
    Source: Su 2021, equation 34, with its pairs of neighbours.
    Derivation: docs/en/positions.md.
    """
    return rotate(x, t, heads, columns, base), RotarySaved(t, heads, columns, base)


def rotary_backward(dy: Float[Tensor, "N W"], saved: RotarySaved) -> Float[Tensor, "N W"]:
    t, heads, columns, base = saved
    return rotate(dy, -t, heads, columns, base)  # (6), (5)


def rotate(x: Float[Tensor, "N W"], t: Int[Tensor, "N"], heads: int, columns: int, base: float) -> Float[Tensor, "N W"]:
    a = t[:, None, None] * frequencies(columns // heads, t.device, base)  # (4)
    cos, sin = a.cos().to(x.dtype), a.sin().to(x.dtype)
    even, odd = x[:, :columns].reshape(len(x), heads, columns // heads // 2, 2).unbind(3)
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), 3)  # (5), (6)
    return torch.cat((turned.reshape(len(x), columns), x[:, columns:]), 1)
