"""The operators of the output projection with its loss, and of additive attention as their judges see them."""

from __future__ import annotations

from unrolled.verify.operator import Operator

OUTPUTS: dict[str, Operator] = {}
