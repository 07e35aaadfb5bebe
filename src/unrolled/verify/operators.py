"""The operators as their judges see them: how to make inputs, and every way to compute the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from unrolled.equations import cross_entropy, dropout, embedding, linear, mean_squared_error, recurrence
from unrolled.ops.cross_entropy import cross_entropy as cross_entropy_op
from unrolled.ops.dropout import dropout as dropout_op
from unrolled.ops.embedding import embedding as embedding_op
from unrolled.ops.linear import linear as linear_op
from unrolled.ops.mean_squared_error import mean_squared_error as mean_squared_error_op
from unrolled.ops.recurrence import CELLS, Weights
from unrolled.ops.recurrence import recurrence as recurrence_op
from unrolled.ragged import Rows, live_rows
from unrolled.verify import formulations as other
from unrolled.verify import inputs as draw
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


# The judges know tensors by name: h0 and c0 in the place of the equation's tuple of states.


def recurrent_operator(
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
    state0 = (h0,) if c0 is None else (h0, c0)
    y, last = recurrence_op(cell, x, state0, Weights(weight_ih, weight_hh, bias_ih, bias_hh), rows)
    return y, *last


def recurrent_forward(
    cell: str,
    x: Tensor,
    h0: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor | None,
    bias_hh: Tensor | None,
    steps: Sequence[Tensor],
    c0: Tensor | None = None,
) -> tuple[Any, ...]:
    state0, weights = (h0,) if c0 is None else (h0, c0), (weight_ih, weight_hh, bias_ih, bias_hh)
    y, last, saved = recurrence.recurrence_forward(CELLS[cell].equation, x, state0, *weights, steps)
    return y, *last, saved


class RecurrentGrads(NamedTuple):
    dx: Tensor
    dh0: Tensor
    dweight_ih: Tensor
    dweight_hh: Tensor
    dbias_ih: Tensor
    dbias_hh: Tensor
    dc0: Tensor | None


def recurrent_backward(*args: Any, backward: Function = recurrence.recurrence_backward) -> RecurrentGrads:
    """`(dy, dh_last, saved)` or `(dy, dh_last, dc_last, saved)`; `backward` may be another than the equation's."""
    dy, *dlast, saved = args
    g = backward(dy, tuple(dlast), saved)
    dh0, dc0 = (*g.dstate0, None)[:2]
    return RecurrentGrads(g.dx, dh0, g.dweight_ih, g.dweight_hh, g.dbias_ih, g.dbias_hh, dc0)


def _recurrent_equation(inputs: Inputs) -> dict[str, Any] | None:
    """The equation reads one direction, the longest sequence first."""
    order, steps = live_rows(inputs["rows"])
    if len(inputs["h0"]) != 1 or not torch.equal(order, torch.arange(len(order))):
        return None
    own = {k: v.detach()[0].requires_grad_() if k in ("h0", "c0") else v for k, v in inputs.items() if k != "rows"}
    return {**own, "steps": steps}


def _recurrent(make: Callable[..., dict[str, Any]], *more: dict[str, Any]) -> Operator:
    return Operator(
        make,
        recurrent_operator,
        recurrent_forward,
        recurrent_backward,
        other.plain_recurrence,
        other.torch_recurrence,
        lambda inputs: len(inputs["x"]) + inputs["x"].shape[1] + inputs["h0"].shape[2],
        (
            {},
            *more,
            {"bias": False, "lengths": (7, 7, 7, 2, 1, 1), "hidden_size": 17},
            {"lengths": (3, 11, 1, 6), "directions": 2, "layout": "time_major", "hidden_size": 33, "input_size": 8},
        ),
        _recurrent_equation,
        lambda inputs: 1.0,
    )


OPERATORS = {
    "rnn": _recurrent(draw.make_rnn, {"nonlinearity": "relu"}),
    "lstm": _recurrent(partial(draw.make_recurrent, cell="lstm")),
    "gru": _recurrent(partial(draw.make_recurrent, cell="gru")),
    "linear": Operator(
        draw.make_linear,
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
        draw.make_embedding,
        embedding_op,
        embedding.embedding_forward,
        embedding.embedding_backward,
        other.plain_embedding,
        other.torch_embedding,
        lambda inputs: len(inputs["token"]),
        ({}, {"padding_index": 2}, {"tokens": 300, "vocabulary": 11, "embedding_size": 19}),
    ),
    "dropout": Operator(
        draw.make_dropout,
        dropout_op,
        dropout.dropout_forward,
        dropout.dropout_backward,
        other.plain_dropout,
        None,
        lambda inputs: 1,
        ({}, {"p": 0.0}, {"p": 1.0}, {"tokens": 13, "features": 67, "p": 0.5}),
    ),
    "mean_squared_error": Operator(
        draw.make_mean_squared_error,
        mean_squared_error_op,
        mean_squared_error.mean_squared_error_forward,
        mean_squared_error.mean_squared_error_backward,
        other.plain_mean_squared_error,
        lambda y, target: F.mse_loss(y, target),
        lambda inputs: inputs["y"].numel(),
        ({}, {"shape": (1,)}, {"shape": (7, 31)}),
    ),
    "cross_entropy": Operator(
        draw.make_cross_entropy,
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
