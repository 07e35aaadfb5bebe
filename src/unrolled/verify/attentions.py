"""The operators of scaled dot-product attention as their judges see them."""

from __future__ import annotations

from unrolled.verify.operator import Operator

ATTENTIONS: dict[str, Operator] = {}
