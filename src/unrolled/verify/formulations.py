"""The operators' functions in other words: plain ones that share nothing with the equation, and torch's own.

Slow on purpose: one sequence, one step, one number at a time where that makes it plainer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from unrolled.ragged import Rows


def plain_recurrence(
    cell: str,
    x: Tensor,
    h0: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor | None,
    bias_hh: Tensor | None,
    rows: Rows,
    c0: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """One sequence and one step at a time."""
    directions, sequences, hidden = h0.shape
    y = [[x.new_zeros(hidden)] * directions for _ in range(len(x))]
    ends = []
    for d in range(directions):
        w_ih, w_hh = weight_ih.chunk(directions)[d], weight_hh.chunk(directions)[d]
        b_ih, b_hh = (None if b is None else b.chunk(directions)[d] for b in (bias_ih, bias_hh))
        for b in range(sequences):
            h, start = h0[d, b], int(rows.start[b])
            c = h.new_zeros(()) if c0 is None else c0[d, b]
            times = range(int(rows.length[b]))
            for t in reversed(times) if d else times:
                row = start + t * rows.step
                u, v = F.linear(x[row], w_ih, b_ih).view(-1, hidden), F.linear(h, w_hh, b_hh).view(-1, hidden)
                h, c = _STEPS[cell](u, v, h, c)
                y[row] = [*y[row][:d], h, *y[row][d + 1 :]]
            ends.append((h, c))
    stacked = torch.stack([torch.cat(parts) for parts in y]) if y else x.new_zeros(0, directions * hidden)
    if not ends:
        return stacked, h0.clone(), *(() if c0 is None else (c0.clone(),))
    h_last, c_last = zip(*ends, strict=True)
    return stacked, torch.stack(h_last).view_as(h0), *(() if c0 is None else (torch.stack(c_last).view_as(c0),))


def _tanh(a: Tensor) -> Tensor:
    return (2 * a).expm1() / ((2 * a).expm1() + 2)


def _sigmoid(a: Tensor) -> Tensor:
    return 1 / (1 + (-a).exp())


# One step from u = W_ih x + b_ih and v = W_hh h + b_hh, a row for each gate.


def _rnn_tanh(u: Tensor, v: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    return _tanh(u[0] + v[0]), c


def _rnn_relu(u: Tensor, v: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    return (u[0] + v[0]).clamp(min=0), c


def _lstm(u: Tensor, v: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    write, keep, content, read = u + v
    c = _sigmoid(keep) * c + _sigmoid(write) * _tanh(content)
    return _sigmoid(read) * _tanh(c), c


def _gru(u: Tensor, v: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    reset, keep = _sigmoid(u[0] + v[0]), _sigmoid(u[1] + v[1])
    content = _tanh(u[2] + reset * v[2])
    return content + keep * (h - content), c


_STEPS = {"rnn_tanh": _rnn_tanh, "rnn_relu": _rnn_relu, "lstm": _lstm, "gru": _gru}


def torch_recurrence(
    cell: str, x: Tensor, h0: Tensor, rows: Rows, c0: Tensor | None = None, **weights: Tensor | None
) -> tuple[Tensor, ...]:
    """torch.nn's module on the packed sequences; lengths from 1, each row in one sequence."""
    directions, _, hidden = h0.shape
    given = {name: w.chunk(directions) for name, w in weights.items() if w is not None}
    kind, _, nonlinearity = cell.partition("_")
    options: dict[str, Any] = {"nonlinearity": nonlinearity} if nonlinearity else {}
    module = {"rnn": nn.RNN, "lstm": nn.LSTM, "gru": nn.GRU}[kind](
        x.shape[1], hidden, bias="bias_ih" in given, bidirectional=directions == 2, device="meta", **options
    )
    parameters = {f"{name}_l0{'_reverse' * d}": part for name, parts in given.items() for d, part in enumerate(parts)}
    time = torch.arange(int(rows.length.max()))
    index = (rows.start + time[:, None] * rows.step).clamp(max=len(x) - 1)  # (T, B)
    packed = pack_padded_sequence(x[index], rows.length, enforce_sorted=False)
    output, last = torch.func.functional_call(module, parameters, (packed, h0 if c0 is None else (h0, c0)))
    y, _ = pad_packed_sequence(output)
    live = time[:, None] < rows.length
    stacked = x.new_zeros(len(x), directions * hidden).index_put((index[live],), y[live])
    return stacked, *((last,) if c0 is None else last)


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
