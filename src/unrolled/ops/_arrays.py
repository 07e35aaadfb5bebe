"""Forwards on the core, of numpy arrays: no checks, no dispatcher, no gradient, for who has seen to all of that."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from unrolled.equations.activations import Kind
from unrolled.ops._backend import core

Array = Any  # numpy's


def linear(x: Array, weight: Array, bias: Array | None) -> Array:
    """`ops.linear`."""
    y = np.empty((len(x), len(weight)), x.dtype)
    core.linear_forward(x, weight, bias, y, torch.get_num_threads())
    return y


def rotary(x: Array, t: Array, frequency: Array, heads: int, columns: int) -> Array:
    """`ops.rotary`, with the frequencies of a head's pairs."""
    y = np.empty_like(x)
    core.rotary(x, t, frequency, y, heads, columns, torch.get_num_threads())
    return y


def attention(
    q: Array,
    key_value: Array,
    queries: tuple[Array, Array, int],
    keys: tuple[Array, Array, int],
    *,
    heads: int,
    causal: bool,
    seen: Array | None,
    added: Array | None,
    slopes: Array | None,
) -> Array:
    """`ops.attention` of keys and values side by side; the rows as start, length, step, the mask of either kind."""
    (start, length, step), (key_start, key_length, key_step) = queries, keys
    o, log_sum = np.empty_like(q), np.empty((len(q), heads), q.dtype)
    core.attention_forward(
        *(q, key_value, None, seen, added, slopes, start, length, key_start, key_length, None, None, None),
        *(o, log_sum, None, heads, step, key_step, causal, (q.shape[1] // heads) ** -0.5, 0.0, 0),
        torch.get_num_threads(),
    )
    return o


def norm(
    x: Array, s: Array | None, gain: Array | None, bias: Array | None, centred: bool, epsilon: float
) -> tuple[Array, Array]:
    """`ops.residual_norm`; without `s` y is the norm of x itself."""
    r, y = (None if s is None else np.empty_like(x)), np.empty_like(x)
    mean, scale = (np.empty(len(x), x.dtype) for _ in range(2))
    core.norm_forward(
        *(x, s, gain, bias, None, None, None, r, y, mean if centred else None, scale, epsilon, 0, 0.0),
        torch.get_num_threads(),
    )
    return x if r is None else r, y


def feed_forward(x: Array, kind: Kind, weights: tuple[Array | None, ...]) -> Array:
    """`ops.feed_forward` of weight1, bias1, weight2, bias2, weight_gate, bias_gate."""
    y = np.empty_like(x)
    core.feed_forward_forward(kind, x, *weights, None, None, None, y, None, None, 0.0, 0, torch.get_num_threads())
    return y
