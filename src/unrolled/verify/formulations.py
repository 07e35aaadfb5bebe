"""The operators' functions in other words: plain ones that share nothing with the equation, and torch's own.

Slow on purpose: one sequence, one step, one number at a time where that makes it plainer.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def plain_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = (x[:, None, :] * weight).sum(2)
    return y if bias is None else y + bias.expand_as(y)


def plain_embedding(token: Tensor, weight: Tensor, padding_index: int | None) -> Tensor:
    """Each token as a vector with a single 1; the padding row is a constant."""
    vectors = F.one_hot(token, len(weight)).to(weight.dtype)
    if padding_index is None:
        return vectors @ weight
    trained = torch.arange(len(weight)) != padding_index % len(weight)
    return vectors @ torch.where(trained[:, None], weight, weight.detach())


def torch_embedding(token: Tensor, weight: Tensor, padding_index: int | None) -> Tensor:
    return F.embedding(token, weight, padding_index)


def plain_dropout(x: Tensor, p: float, seed: Tensor, layer: int, key: Tensor, t: Tensor) -> Tensor:
    keep = [
        [
            philox((16 * (f // 64) + f % 16, int(step), int(k), layer), int(seed))[f // 16 % 4] >= p * 2**32
            for f in range(x.shape[1])
        ]
        for step, k in zip(t, key, strict=True)
    ]
    kept = x / (1 - p) if p < 1 else x
    return kept.masked_fill(~torch.tensor(keep, dtype=torch.bool).view(x.shape), 0)


def philox(counter: tuple[int, int, int, int], seed: int, rounds: int = 7) -> tuple[int, int, int, int]:
    """Philox4x32 of Salmon 2011 in Python's own integers."""
    word = 2**32
    c0, c1, c2, c3 = (c % word for c in counter)
    k0, k1 = seed % word, seed // word % word
    for _ in range(rounds):
        high0, low0 = divmod(c0 * 0xD2511F53, word)
        high1, low1 = divmod(c2 * 0xCD9E8D57, word)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % word, (k1 + 0xBB67AE85) % word
    return c0, c1, c2, c3


def plain_mean_squared_error(y: Tensor, target: Tensor) -> Tensor:
    return torch.stack([(a - b) ** 2 for a, b in zip(y.reshape(-1), target.reshape(-1), strict=True)]).mean()


def plain_cross_entropy(
    logits: Tensor, target: Tensor, class_weight: Tensor | None, ignore_index: int, label_smoothing: float
) -> Tensor:
    losses = []
    for z, k in zip(logits, target.tolist(), strict=True):
        if k == ignore_index:
            losses.append(z.new_zeros(()))
            continue
        minus_log_p = (z - z[:, None]).exp().sum(1).log()  # -log p_c = log sum_j exp(z_j - z_c)
        if class_weight is not None:
            minus_log_p = minus_log_p * class_weight
        losses.append((1 - label_smoothing) * minus_log_p[k] + label_smoothing * minus_log_p.mean())
    return torch.stack(losses) if losses else logits.sum(1)


def torch_cross_entropy(
    logits: Tensor, target: Tensor, class_weight: Tensor | None, ignore_index: int, label_smoothing: float
) -> Tensor:
    return F.cross_entropy(logits, target, class_weight, None, ignore_index, None, "none", label_smoothing)
