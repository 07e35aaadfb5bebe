"""The operators as their judges see them: inputs, and a formulation that shares nothing with the equation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from unrolled.equations import cross_entropy, dropout, embedding, linear, mean_squared_error, rnn
from unrolled.ops.cross_entropy import cross_entropy as cross_entropy_op
from unrolled.ops.dropout import dropout as dropout_op
from unrolled.ops.embedding import embedding as embedding_op
from unrolled.ops.linear import linear as linear_op
from unrolled.ops.mean_squared_error import mean_squared_error as mean_squared_error_op
from unrolled.ops.rnn import rnn as rnn_op
from unrolled.ragged import Rows, live_rows
from unrolled.verify.judges import Function, Inputs


class Operator(NamedTuple):
    """All functions take the operator's arguments by name; `forward` and `backward` those of `to_equation`."""

    make: Callable[..., dict[str, Any]]  # (generator, dtype, **options): what is to be differentiated requires grad
    operator: Function
    forward: Function
    backward: Function
    plain: Function
    peer: Function | None  # torch.nn's
    length: Callable[[Inputs], int]  # terms in the longest sum
    options: Sequence[dict[str, Any]]  # what a certificate covers
    to_equation: Callable[[Inputs], dict[str, Any] | None] = dict  # None: no single call of the equation
    floor: Callable[[Inputs], float] = lambda inputs: (
        0.0
    )  # size of the numbers whose difference an output or gradient is


def make_rnn(
    generator: Generator,
    dtype: torch.dtype,
    lengths: Sequence[int] = (5, 3, 1),
    input_size: int = 3,
    hidden_size: int = 5,
    directions: int = 1,
    nonlinearity: str = "tanh",
    bias: bool = True,
    layout: str = "ragged",
) -> dict[str, Any]:
    """`layout`: "ragged", or padded "batch_first" or "time_major" with a step more than any sequence needs."""
    length, sequences = torch.tensor(lengths, dtype=torch.int64), len(lengths)
    steps = max(lengths, default=0) + 1
    if layout == "ragged":
        rows, count = Rows(length.cumsum(0) - length, 1, length), int(length.sum())
    else:
        index = torch.arange(sequences)
        rows = Rows(index * steps, 1, length) if layout == "batch_first" else Rows(index, sequences, length)
        count = sequences * steps
    uniform = 1.5 / hidden_size**0.5
    gates = directions * hidden_size
    return {
        "x": _normal(generator, dtype, count, input_size),
        "h0": _normal(generator, dtype, directions, sequences, hidden_size, scale=0.5),
        "weight_ih": _normal(generator, dtype, gates, input_size, scale=uniform),
        "weight_hh": _normal(generator, dtype, gates, hidden_size, scale=uniform / 2),
        "bias_ih": _normal(generator, dtype, gates, scale=uniform) if bias else None,
        "bias_hh": _normal(generator, dtype, gates, scale=uniform) if bias else None,
        "rows": rows,
        "nonlinearity": nonlinearity,
    }


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


def _rnn_equation(inputs: Inputs) -> dict[str, Any] | None:
    """The equation reads one direction, the longest sequence first."""
    order, steps = live_rows(inputs["rows"])
    if len(inputs["h0"]) != 1 or not torch.equal(order, torch.arange(len(order))):
        return None
    h0 = inputs["h0"].detach()[0].requires_grad_()
    return {**{k: v for k, v in inputs.items() if k != "rows"}, "h0": h0, "steps": steps}


def make_linear(
    generator: Generator,
    dtype: torch.dtype,
    tokens: int = 4,
    input_size: int = 3,
    output_size: int = 5,
    bias: bool = True,
) -> dict[str, Any]:
    return {
        "x": _normal(generator, dtype, tokens, input_size),
        "weight": _normal(generator, dtype, output_size, input_size),
        "bias": _normal(generator, dtype, output_size) if bias else None,
    }


def plain_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = (x[:, None, :] * weight).sum(2)
    return y if bias is None else y + bias.expand_as(y)


def make_embedding(
    generator: Generator,
    dtype: torch.dtype,
    tokens: int = 9,
    vocabulary: int = 5,
    embedding_size: int = 3,
    padding_index: int | None = None,
) -> dict[str, Any]:
    return {
        "token": torch.randint(vocabulary, (tokens,), generator=generator),
        "weight": _normal(generator, dtype, vocabulary, embedding_size),
        "padding_index": padding_index,
    }


def plain_embedding(token: Tensor, weight: Tensor, padding_index: int | None) -> Tensor:
    """Each token as a vector with a single 1; the padding row is a constant."""
    vectors = F.one_hot(token, len(weight)).to(weight.dtype)
    if padding_index is None:
        return vectors @ weight
    trained = torch.arange(len(weight)) != padding_index % len(weight)
    return vectors @ torch.where(trained[:, None], weight, weight.detach())


def torch_embedding(token: Tensor, weight: Tensor, padding_index: int | None) -> Tensor:
    return F.embedding(token, weight, padding_index)


def make_dropout(
    generator: Generator, dtype: torch.dtype, tokens: int = 5, features: int = 7, p: float = 0.4, layer: int = 1
) -> dict[str, Any]:
    return {
        "x": _normal(generator, dtype, tokens, features),
        "p": p,
        "seed": torch.randint(2**63 - 1, (), generator=generator),
        "layer": layer,
        "key": torch.randint(2**40, (tokens,), generator=generator),
        "t": torch.randint(1000, (tokens,), generator=generator),
    }


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


def make_mean_squared_error(generator: Generator, dtype: torch.dtype, shape: Sequence[int] = (4, 3)) -> dict[str, Any]:
    return {"y": _normal(generator, dtype, *shape), "target": _normal(generator, dtype, *shape)}


def plain_mean_squared_error(y: Tensor, target: Tensor) -> Tensor:
    return torch.stack([(a - b) ** 2 for a, b in zip(y.reshape(-1), target.reshape(-1), strict=True)]).mean()


def make_cross_entropy(
    generator: Generator,
    dtype: torch.dtype,
    tokens: int = 6,
    classes: int = 5,
    weights: bool = False,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    scale: float = 3.0,
) -> dict[str, Any]:
    target = torch.randint(classes, (tokens,), generator=generator)
    target[1::3] = ignore_index
    return {
        "logits": _normal(generator, dtype, tokens, classes, scale=scale),
        "target": target,
        "class_weight": torch.rand(classes, generator=generator, dtype=torch.float64).to(dtype) if weights else None,
        "ignore_index": ignore_index,
        "label_smoothing": label_smoothing,
    }


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


def _normal(generator: Generator, dtype: torch.dtype, *shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype).requires_grad_()


OPERATORS = {
    "rnn": Operator(
        make_rnn,
        rnn_op,
        rnn.rnn_forward,
        rnn.rnn_backward,
        plain_rnn,
        torch_rnn,
        lambda inputs: len(inputs["x"]) + inputs["x"].shape[1] + inputs["h0"].shape[2],
        (
            {},
            {"nonlinearity": "relu"},
            {"bias": False, "lengths": (7, 7, 7, 2, 1, 1), "hidden_size": 17},
            {"lengths": (3, 11, 1, 6), "directions": 2, "layout": "time_major", "hidden_size": 33, "input_size": 8},
        ),
        _rnn_equation,
        lambda inputs: 1.0,
    ),
    "linear": Operator(
        make_linear,
        linear_op,
        linear.linear_forward,
        linear.linear_backward,
        plain_linear,
        F.linear,
        lambda inputs: max(*inputs["x"].shape, *inputs["weight"].shape),
        ({}, {"bias": False}, {"tokens": 67, "input_size": 33, "output_size": 19}),
        floor=lambda inputs: 1.0,
    ),
    "embedding": Operator(
        make_embedding,
        embedding_op,
        embedding.embedding_forward,
        embedding.embedding_backward,
        plain_embedding,
        torch_embedding,
        lambda inputs: len(inputs["token"]),
        ({}, {"padding_index": 2}, {"tokens": 300, "vocabulary": 11, "embedding_size": 19}),
    ),
    "dropout": Operator(
        make_dropout,
        dropout_op,
        dropout.dropout_forward,
        dropout.dropout_backward,
        plain_dropout,
        None,
        lambda inputs: 1,
        ({}, {"p": 0.0}, {"p": 1.0}, {"tokens": 13, "features": 67, "p": 0.5}),
    ),
    "mean_squared_error": Operator(
        make_mean_squared_error,
        mean_squared_error_op,
        mean_squared_error.mean_squared_error_forward,
        mean_squared_error.mean_squared_error_backward,
        plain_mean_squared_error,
        lambda y, target: F.mse_loss(y, target),
        lambda inputs: inputs["y"].numel(),
        ({}, {"shape": (1,)}, {"shape": (7, 31)}),
    ),
    "cross_entropy": Operator(
        make_cross_entropy,
        cross_entropy_op,
        cross_entropy.cross_entropy_forward,
        cross_entropy.cross_entropy_backward,
        plain_cross_entropy,
        torch_cross_entropy,
        lambda inputs: inputs["logits"].shape[1],
        (
            {},
            {"weights": True, "label_smoothing": 0.1},
            {"classes": 37, "tokens": 11, "label_smoothing": 0.3, "ignore_index": 3},
        ),
        floor=lambda inputs: (
            max(1.0, float(inputs["logits"].detach().abs().max())) if inputs["logits"].numel() else 1.0
        ),
    ),
}
