"""The operators of the activations and the feed-forward layer as their judges see them."""

from __future__ import annotations

from unrolled.verify.operator import Operator

FEED_FORWARDS: dict[str, Operator] = {}
