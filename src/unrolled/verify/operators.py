"""The operators as their judges see them: how to make inputs, and every way to compute the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from unrolled.equations import cross_entropy, dropout, embedding, linear, mean_squared_error, rnn
from unrolled.ops.cross_entropy import cross_entropy as cross_entropy_op
from unrolled.ops.dropout import dropout as dropout_op
from unrolled.ops.embedding import embedding as embedding_op
from unrolled.ops.linear import linear as linear_op
from unrolled.ops.mean_squared_error import mean_squared_error as mean_squared_error_op
from unrolled.ops.rnn import rnn as rnn_op
from unrolled.ragged import Rows, live_rows
from unrolled.verify import formulations as other
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
    cancels: Callable[[Inputs], float] = lambda _: 0.0  # the size of numbers whose difference a result may be


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


def make_mean_squared_error(generator: Generator, dtype: torch.dtype, shape: Sequence[int] = (4, 3)) -> dict[str, Any]:
    return {"y": _normal(generator, dtype, *shape), "target": _normal(generator, dtype, *shape)}


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


def _normal(generator: Generator, dtype: torch.dtype, *shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype).requires_grad_()


OPERATORS = {
    "rnn": Operator(
        make_rnn,
        rnn_op,
        rnn.rnn_forward,
        rnn.rnn_backward,
        other.plain_rnn,
        other.torch_rnn,
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
        other.plain_linear,
        F.linear,
        lambda inputs: max(*inputs["x"].shape, *inputs["weight"].shape),
        ({}, {"bias": False}, {"tokens": 67, "input_size": 33, "output_size": 19}),
        cancels=lambda inputs: 1.0,
    ),
    "embedding": Operator(
        make_embedding,
        embedding_op,
        embedding.embedding_forward,
        embedding.embedding_backward,
        other.plain_embedding,
        other.torch_embedding,
        lambda inputs: len(inputs["token"]),
        ({}, {"padding_index": 2}, {"tokens": 300, "vocabulary": 11, "embedding_size": 19}),
    ),
    "dropout": Operator(
        make_dropout,
        dropout_op,
        dropout.dropout_forward,
        dropout.dropout_backward,
        other.plain_dropout,
        None,
        lambda inputs: 1,
        ({}, {"p": 0.0}, {"p": 1.0}, {"tokens": 13, "features": 67, "p": 0.5}),
    ),
    "mean_squared_error": Operator(
        make_mean_squared_error,
        mean_squared_error_op,
        mean_squared_error.mean_squared_error_forward,
        mean_squared_error.mean_squared_error_backward,
        other.plain_mean_squared_error,
        lambda y, target: F.mse_loss(y, target),
        lambda inputs: inputs["y"].numel(),
        ({}, {"shape": (1,)}, {"shape": (7, 31)}),
    ),
    "cross_entropy": Operator(
        make_cross_entropy,
        cross_entropy_op,
        cross_entropy.cross_entropy_forward,
        cross_entropy.cross_entropy_backward,
        other.plain_cross_entropy,
        other.torch_cross_entropy,
        lambda inputs: inputs["logits"].shape[1],
        (
            {},
            {"weights": True, "label_smoothing": 0.1},
            {"classes": 37, "tokens": 11, "label_smoothing": 0.3, "ignore_index": 3},
        ),
        cancels=lambda inputs: (
            max(1.0, float(inputs["logits"].detach().abs().max())) if inputs["logits"].numel() else 1.0
        ),
    ),
}
