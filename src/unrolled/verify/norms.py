"""The operators of the normalisations and positions as their judges see them."""

from __future__ import annotations

from unrolled.verify.operator import Operator

NORMS: dict[str, Operator] = {}
