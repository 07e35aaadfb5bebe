"""The operators' functions in other words: plain ones that share nothing with the equation, and torch's own.

Slow on purpose: one sequence, one step, one number at a time where that makes it plainer.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from unrolled.ragged import Rows


def plain_rnn(
    x: Tensor,
    h0: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor | None,
    bias_hh: Tensor | None,
    rows: Rows,
    nonlinearity: str,
) -> tuple[Tensor, Tensor]:
    """One sequence and one step at a time."""
    directions, sequences, hidden = h0.shape
    y = [[x.new_zeros(hidden)] * directions for _ in range(len(x))]
    ends = []
    for d in range(directions):
        own = slice(d * hidden, (d + 1) * hidden)
        for b in range(sequences):
            h, start = h0[d, b], int(rows.start[b])
            times = range(int(rows.length[b]))
            for t in reversed(times) if d else times:
                row = start + t * rows.step
                a = F.linear(x[row], weight_ih[own], None if bias_ih is None else bias_ih[own])
                a = a + F.linear(h, weight_hh[own], None if bias_hh is None else bias_hh[own])
                h = (2 * a).expm1() / ((2 * a).expm1() + 2) if nonlinearity == "tanh" else a.clamp(min=0)
                y[row] = [*y[row][:d], h, *y[row][d + 1 :]]
            ends.append(h)
    stacked = torch.stack([torch.cat(parts) for parts in y]) if y else x.new_zeros(0, directions * hidden)
    return stacked, torch.stack(ends).view_as(h0) if ends else h0.clone()


def torch_rnn(x: Tensor, h0: Tensor, rows: Rows, nonlinearity: str, **weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """torch.nn.RNN on the packed sequences; lengths from 1, each row in one sequence."""
    directions, _, hidden = h0.shape
    given = {name: w.chunk(directions) for name, w in weights.items() if w is not None}
    module = nn.RNN(
        x.shape[1],
        hidden,
        nonlinearity=nonlinearity,
        bias="bias_ih" in given,
        bidirectional=directions == 2,
        device="meta",
    )
    parameters = {f"{name}_l0{'_reverse' * d}": part for name, parts in given.items() for d, part in enumerate(parts)}
    time = torch.arange(int(rows.length.max()))
    index = (rows.start + time[:, None] * rows.step).clamp(max=len(x) - 1)  # (T, B)
    packed = pack_padded_sequence(x[index], rows.length, enforce_sorted=False)
    output, h_last = torch.func.functional_call(module, parameters, (packed, h0))
    y, _ = pad_packed_sequence(output)
    live = time[:, None] < rows.length
    return x.new_zeros(len(x), directions * hidden).index_put((index[live],), y[live]), h_last


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
