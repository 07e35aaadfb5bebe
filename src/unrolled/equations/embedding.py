"""The embedding table."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor


class EmbeddingSaved(NamedTuple):
    token: Int[Tensor, "N"]
    vocabulary: int
    padding_index: int | None


def embedding_forward(
    token: Int[Tensor, "N"], weight: Float[Tensor, "V E"], padding_index: int | None = None
) -> tuple[Float[Tensor, "N E"], EmbeddingSaved]:
    """The row of the table that each token names.

    Definition::

        y_n = W[token_n]    (1)

    Gradient::

        dW[v] = sum over the n with token_n = v of dy_n     repeated tokens add up; 0 at the padding index

    Shapes: token (N,) whole numbers in [0, V), weight (V, E); y (N, E).
    Edges: N = 0 gives an empty y and a zero gradient; the row at `padding_index` is a constant.
    Errors: IndexError for a token outside the table.
    Derivation: docs/en/rnn.md.
    """
    y = weight.index_select(0, token)  # (1)
    if padding_index is not None:  # a constant row
        y = torch.where((token == padding_index % len(weight))[:, None], y.detach(), y)
    return y, EmbeddingSaved(token, len(weight), padding_index)


def embedding_backward(dy: Float[Tensor, "N E"], saved: EmbeddingSaved) -> Float[Tensor, "V E"]:
    token, vocabulary, padding_index = saved
    dweight = dy.new_zeros(vocabulary, dy.shape[1]).index_add(0, token, dy)  # (1)
    if padding_index is not None:
        dweight[padding_index] = 0
    return dweight
