"""The embedding operator."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from unrolled.equations.embedding import EmbeddingSaved, embedding_backward, embedding_forward
from unrolled.ops._backend import arrays, core, equations_only, full_precision, on_core
from unrolled.ops._register import apply, backward_op, register, with_signature


def embedding(token: Tensor, weight: Tensor, padding_index: int | None = None) -> Tensor:
    """The rows of `weight` (V, E) that `token` (...) names, as (..., E); the equation is in `equations.embedding`.

    Errors: IndexError for a token outside [0, V).
    """
    flat, (weight,) = token.reshape(-1), full_precision(weight)
    if equations_only():
        y, _ = embedding_forward(flat, weight, padding_index)
    else:
        y = apply(_Embedding, flat, weight, padding_index)
    return y.reshape(*token.shape, weight.shape[1])


@with_signature
class _Embedding(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(token: Tensor, weight: Tensor, padding_index: int | None) -> Tensor:
        y: Tensor = _forward(token, weight)
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        token, weight, ctx.padding_index = inputs
        ctx.vocabulary = weight.shape[0]
        ctx.save_for_backward(token)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return None, _backward_once(dy, *ctx.saved_tensors, ctx.vocabulary, ctx.padding_index), None


def _forward_kernel(token: Tensor, weight: Tensor) -> Tensor:
    if not on_core(weight) or token.dtype != torch.int64:
        return embedding_forward(token, weight)[0]
    y = weight.new_empty(len(token), weight.shape[1])
    core.embedding_forward(*arrays(token, weight, y), torch.get_num_threads())
    return y


def _backward_kernel(dy: Tensor, token: Tensor, vocabulary: int, padding_index: int | None) -> Tensor:
    if not on_core(dy) or token.dtype != torch.int64:
        return embedding_backward(dy, EmbeddingSaved(token, vocabulary, padding_index))
    dweight = dy.new_empty(vocabulary, dy.shape[1])
    padding = -1 if padding_index is None else padding_index % vocabulary
    core.embedding_backward(*arrays(dy, token, dweight), padding, torch.get_num_threads())
    return dweight


_forward = register(
    "embedding_forward(Tensor token, Tensor weight) -> Tensor",
    _forward_kernel,
    lambda token, weight: weight.new_empty(token.shape[0], weight.shape[1]),
)
_backward = register(
    "embedding_backward(Tensor dy, Tensor token, SymInt vocabulary, SymInt? padding_index) -> Tensor",
    _backward_kernel,
    lambda dy, token, vocabulary, padding_index: dy.new_empty(vocabulary, dy.shape[1]),
)
_backward_once = backward_op(_backward, "embedding")
