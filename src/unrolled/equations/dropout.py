"""Dropout whose mask is a function of (seed, position): recomputed in the backward, never stored."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

_LOW = 0xFFFFFFFF
_MULTIPLIER = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 7  # the fewest that pass the authors' tests of randomness


class DropoutSaved(NamedTuple):
    seed: Int[Tensor, ""]
    layer: int
    key: Int[Tensor, "N"]
    t: Int[Tensor, "N"]
    p: float


class Dropping(NamedTuple):
    """Which numbers an operator that drops inside itself drops: the mask of line (1), of the rows it acts on.

    An operator that drops in several places, or in several heads, uses `layer`, `layer + 1` and on.
    """

    p: float
    seed: Int[Tensor, ""]
    layer: int
    key: Int[Tensor, "N"]  # the sequence of each row
    t: Int[Tensor, "N"]  # and its step

    def mask(self, units: int, layer: int = 0) -> Float[Tensor, "N F"]:
        """0 or 1 / (1 - p) in float64, for `units` numbers of each row, at `self.layer + layer`."""
        return dropout_mask(self.seed, self.layer + layer, self.key, self.t, units, self.p)


def dropout_forward(
    x: Float[Tensor, "N F"], seed: Int[Tensor, ""], layer: int, key: Int[Tensor, "N"], t: Int[Tensor, "N"], p: float
) -> tuple[Float[Tensor, "N F"], DropoutSaved]:
    """Each unit of each token is kept with probability 1 - p and then divided by it, else set to 0.

    Definition, with `random` the 32-bit number that Philox gives for a seed and a position::

        m = [random(seed; layer, key, t, unit) >= p * 2^32] / (1 - p)     (1)
        y = x * m                                                           (2)

    Gradient::

        dx = dy * m

    Shapes: x (N, F); seed an int64 scalar; `key` (N,) the sequence and `t` (N,) the step of each token.
    Edges: p = 0 changes nothing, p = 1 gives 0 throughout.
    Source: Srivastava 2014, section 4 (scaled in training); the numbers: Philox4x32-7 of Salmon 2011, key = seed.
    The counters (16 * (unit // 64) + unit % 16, t, key, layer) give four words each, (unit // 16) % 4 the unit's.
    Derivation: docs/en/notation.md.
    """
    return x * dropout_mask(seed, layer, key, t, x.shape[1], p).to(x.dtype), DropoutSaved(seed, layer, key, t, p)  # (2)


def dropout_backward(dy: Float[Tensor, "N F"], saved: DropoutSaved) -> Float[Tensor, "N F"]:
    seed, layer, key, t, p = saved
    return dy * dropout_mask(seed, layer, key, t, dy.shape[1], p).to(dy.dtype)  # (2)


def dropout_mask(
    seed: Int[Tensor, ""], layer: int, key: Int[Tensor, "N"], t: Int[Tensor, "N"], units: int, p: float
) -> Float[Tensor, "N F"]:
    """0 or 1 / (1 - p) in float64."""
    first = torch.arange((units + 63) // 64 * 16, device=key.device)
    shape = (len(key), len(first))
    counter = tuple(c.expand(shape) for c in (first, t[:, None], key[:, None], torch.full_like(first, layer)))
    words = (word.reshape(len(key), len(first) // 16, 16) for word in _philox(counter, seed))
    random = torch.stack(tuple(words), dim=2).flatten(1)[:, :units]  # (N, F): sixteen units of each word in turn
    return (random >= round(p * 2**32)).to(torch.float64) / (1 - p if p < 1 else 1)  # (1)


def _philox(counter: tuple[Tensor, ...], seed: Tensor) -> tuple[Tensor, ...]:
    """Four 32-bit words from four; int64 products wrap, so their upper half is exact after the mask."""
    c0, c1, c2, c3 = (c & _LOW for c in counter)
    k0, k1 = seed & _LOW, (seed >> 32) & _LOW
    for _ in range(_ROUNDS):
        p0, p1 = c0 * _MULTIPLIER[0], c2 * _MULTIPLIER[1]
        c0, c1, c2, c3 = ((p1 >> 32) & _LOW) ^ c1 ^ k0, p1 & _LOW, ((p0 >> 32) & _LOW) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3
