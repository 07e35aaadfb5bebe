"""Random inputs for every operator: what is to be differentiated requires grad."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Generator, Tensor

from unrolled.ops.recurrence import CELLS, Zoneout
from unrolled.ragged import Rows


def normal(generator: Generator, dtype: torch.dtype, *shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype).requires_grad_()


def rows_of(lengths: Sequence[int], layout: str) -> tuple[Rows, int]:
    """Where sequences of these lengths lie, and among how many rows.

    `layout`: "ragged", "reverse", or padded "batch_first" or "time_major" with a step more than any sequence needs.
    """
    length, B, steps = torch.tensor(lengths, dtype=torch.int64), len(lengths), max(lengths, default=0) + 1
    if layout in ("ragged", "reverse"):
        rows = Rows(length.cumsum(0) - length, 1, length)
        return rows.reverse() if layout == "reverse" else rows, int(length.sum())
    index = torch.arange(B)
    return Rows(index * steps, 1, length) if layout == "batch_first" else Rows(index, B, length), B * steps


def mask_of(generator: Generator, dtype: torch.dtype, kind: str, shape: list[int]) -> Tensor:
    """`kind`: "boolean", "added" with some -inf, or "learned"."""
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
    if kind == "boolean":
        return drawn > -0.5
    if kind == "added":
        return torch.where(drawn < -1, -torch.inf, drawn).to(dtype)
    return drawn.to(dtype).requires_grad_()


def longest(rows: Rows) -> int:
    return max(rows.length.tolist(), default=0)


def make_recurrent(
    generator: Generator,
    dtype: torch.dtype,
    cell: str,
    lengths: Sequence[int] = (5, 3, 1),
    input_size: int = 3,
    hidden_size: int = 5,
    directions: int = 1,
    bias: bool = True,
    layout: str = "ragged",
    proj_size: int = 0,
    layer_norm: bool = False,
    peephole: bool = False,
    recurrent_dropout: float = 0.0,
    zoneout: tuple[float, float] = (0.0, 0.0),
    training: bool = True,
    bptt: int = 0,
) -> dict[str, Any]:
    """`layout` as in `rows_of`.

    `training`: zoneout draws; else it takes its expectation. An option that is off is not among the inputs.
    """
    sequences, (rows, count) = len(lengths), rows_of(lengths, layout)
    uniform = 1.5 / hidden_size**0.5
    units, width = directions * hidden_size, proj_size or hidden_size
    gates = CELLS[cell].gates * units

    def draw(*shape: int, scale: float = uniform) -> Tensor:
        return normal(generator, dtype, *shape, scale=scale)

    def gain(mean: float, *shape: int) -> Tensor:
        return (mean + draw(*shape, scale=0.3 * mean).detach()).requires_grad_()

    inputs: dict[str, Any] = {
        "cell": cell,
        "x": draw(count, input_size, scale=1.0),
        "h0": draw(directions, sequences, width, scale=0.5),
        "weight_ih": draw(gates, input_size),
        "weight_hh": draw(gates, width, scale=uniform / 2),
        "bias_ih": draw(gates) if bias else None,
        "bias_hh": draw(gates) if bias else None,
        "rows": rows,
    }
    memory = CELLS[cell].states == 2
    if memory:
        inputs["c0"] = draw(directions, sequences, hidden_size, scale=1.0)
    if proj_size:
        inputs["weight_hr"] = draw(directions * proj_size, hidden_size)
    if layer_norm:
        inputs |= {"norm_ih": gain(1.0, gates), "norm_hh": gain(0.3, gates)}  # more would be chaos: errors grow
    if layer_norm and memory:
        inputs |= {"norm_c": gain(1.0, units), "bias_c": draw(units) if bias else None}
    if peephole:
        inputs["peephole"] = draw(3 * units)
    if recurrent_dropout:
        kept = torch.rand(directions, sequences, width, generator=generator, dtype=torch.float64) >= recurrent_dropout
        inputs["mask"] = kept.to(dtype) / (1 - recurrent_dropout)
    if any(zoneout):
        keys = torch.randint(2**40, (sequences,), generator=generator)
        seed = torch.randint(2**63 - 1, (), generator=generator) if training else None
        inputs["zoneout"] = Zoneout(*zoneout, seed, keys, 1)
    return inputs | ({"bptt": bptt} if bptt else {})


def make_rnn(generator: Generator, dtype: torch.dtype, nonlinearity: str = "tanh", **options: Any) -> dict[str, Any]:
    return make_recurrent(generator, dtype, f"rnn_{nonlinearity}", **options)


def make_lstm(generator: Generator, dtype: torch.dtype, **options: Any) -> dict[str, Any]:
    more = options.get("peephole") or options.get("layer_norm")
    return make_recurrent(generator, dtype, "lstm_options" if more else "lstm", **options)


def make_gru(generator: Generator, dtype: torch.dtype, reset: str = "after", **options: Any) -> dict[str, Any]:
    return make_recurrent(generator, dtype, "gru_before" if reset == "before" else "gru", **options)


def make_linear(
    generator: Generator,
    dtype: torch.dtype,
    tokens: int = 4,
    input_size: int = 3,
    output_size: int = 5,
    bias: bool = True,
) -> dict[str, Any]:
    return {
        "x": normal(generator, dtype, tokens, input_size),
        "weight": normal(generator, dtype, output_size, input_size),
        "bias": normal(generator, dtype, output_size) if bias else None,
    }


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
        "weight": normal(generator, dtype, vocabulary, embedding_size),
        "padding_index": padding_index,
    }


def make_dropout(
    generator: Generator, dtype: torch.dtype, tokens: int = 5, features: int = 7, p: float = 0.4, layer: int = 1
) -> dict[str, Any]:
    return {
        "x": normal(generator, dtype, tokens, features),
        "p": p,
        "seed": torch.randint(2**63 - 1, (), generator=generator),
        "layer": layer,
        "key": torch.randint(2**40, (tokens,), generator=generator),
        "t": torch.randint(1000, (tokens,), generator=generator),
    }


def make_mean_squared_error(generator: Generator, dtype: torch.dtype, shape: Sequence[int] = (4, 3)) -> dict[str, Any]:
    return {"y": normal(generator, dtype, *shape), "target": normal(generator, dtype, *shape)}


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
        "logits": normal(generator, dtype, tokens, classes, scale=scale),
        "target": target,
        "class_weight": torch.rand(classes, generator=generator, dtype=torch.float64).to(dtype) if weights else None,
        "ignore_index": ignore_index,
        "label_smoothing": label_smoothing,
    }
