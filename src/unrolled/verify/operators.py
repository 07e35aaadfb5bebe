"""The operators as their judges see them: how to make inputs, and every way to compute the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.nn import functional as F

from unrolled.equations import cross_entropy, dropout, embedding, linear, mean_squared_error
from unrolled.ops.cross_entropy import cross_entropy as cross_entropy_op
from unrolled.ops.dropout import dropout as dropout_op
from unrolled.ops.embedding import embedding as embedding_op
from unrolled.ops.linear import linear as linear_op
from unrolled.ops.mean_squared_error import mean_squared_error as mean_squared_error_op
from unrolled.verify import formulations as other
from unrolled.verify import inputs as draw
from unrolled.verify.attentions import ATTENTIONS
from unrolled.verify.feed_forwards import FEED_FORWARDS
from unrolled.verify.norms import NORMS
from unrolled.verify.operator import Operator
from unrolled.verify.outputs import OUTPUTS
from unrolled.verify.recurrences import plain_recurrence, torch_has, torch_recurrence
from unrolled.verify.recurrent import (
    cancels,
    recurrent_backward,
    recurrent_equation,
    recurrent_forward,
    recurrent_operator,
    terms,
)


def _recurrent(make: Callable[..., dict[str, Any]], *more: dict[str, Any]) -> Operator:
    return Operator(
        make,
        recurrent_operator,
        recurrent_forward,
        recurrent_backward,
        plain_recurrence,
        torch_recurrence,
        terms,
        (
            {},
            {"bias": False, "lengths": (7, 7, 7, 2, 1, 1), "hidden_size": 17},
            {"lengths": (3, 11, 1, 6), "directions": 2, "layout": "time_major", "hidden_size": 33, "input_size": 8},
            {"recurrent_dropout": 0.4, "layer_norm": True, "lengths": (4, 2, 0), "hidden_size": 17},
            {"zoneout": (0.3, 0.6), "lengths": (3, 4), "directions": 2, "hidden_size": 7},
            {"zoneout": (0.3, 0.6), "training": False, "bptt": 2},
            *more,
        ),
        recurrent_equation,
        cancels,
        torch_has,
    )


OPERATORS: dict[str, Operator] = {
    "rnn": _recurrent(draw.make_rnn, {"nonlinearity": "relu"}, {"proj_size": 3, "layer_norm": True}),
    "lstm": _recurrent(
        draw.make_lstm,
        {"proj_size": 3},
        {"peephole": True, "directions": 2},
        {"peephole": True, "layer_norm": True, "proj_size": 4, "recurrent_dropout": 0.4, "zoneout": (0.2, 0.1)},
    ),
    "gru": _recurrent(
        draw.make_gru,
        {"reset": "before", "directions": 2},
        {"reset": "before", "layer_norm": True, "recurrent_dropout": 0.4, "zoneout": (0.2, 0.0)},
    ),
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
    **NORMS,
    **FEED_FORWARDS,
    **ATTENTIONS,
    **OUTPUTS,
}
