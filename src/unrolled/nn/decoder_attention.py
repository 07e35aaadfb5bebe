"""Attention for decoders that read the states of an encoder: additive and multiplicative."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from unrolled.nn._forms import Batch
from unrolled.nn._initial import check_sizes
from unrolled.nn._tokens import Tokens, enter, padded_weights
from unrolled.ops.additive_attention import additive_attention
from unrolled.ops.attention import attention
from unrolled.ops.linear import linear
from unrolled.ragged import Lengths

FORMS = ("dot", "general")


class _DecoderAttention(nn.Module, ABC):
    def __init__(self, query_size: int, memory_size: int, batch_first: bool) -> None:
        super().__init__()
        check_sizes(0, query_size=query_size, memory_size=memory_size)
        self.query_size, self.memory_size, self.batch_first = query_size, memory_size, batch_first

    def forward(
        self,
        query: Batch,
        memory: Batch,
        *,
        lengths: Lengths | None = None,
        memory_lengths: Lengths | None = None,
        return_attention: bool = False,
    ) -> Any:
        """What each query reads of the memory, in the form of `query`; with `return_attention` also the weights.

        Shapes: query (T, B, query_size), with `batch_first` (B, T, query_size); (T, query_size) for one sequence; a
        Ragged of (N, query_size); a PackedSequence; a jagged nested tensor. memory, of S steps, likewise; the two forms
        may differ. `lengths` of a padded query, `memory_lengths` of a padded memory. Weights (B, T, S), or (T, S) for
        one sequence; they sum to 1 over S.
        Edges: a query of a sequence whose memory has length 0 gets 0, and so do rows and weights beyond a length.
        Errors: ValueError for shapes that do not fit.
        """
        queries = enter(query, self.batch_first, self.query_size, lengths)
        keys = enter(memory, self.batch_first, self.memory_size, memory_lengths)
        if queries.sequences != keys.sequences:
            raise ValueError(f"query has {queries.sequences} sequences, memory {keys.sequences}")
        o, weights = self._read(queries, keys, return_attention)
        if weights is None:
            return queries.restore(o)
        return queries.restore(o), padded_weights(weights, queries, keys).squeeze(-3)

    @abstractmethod
    def _read(self, queries: Tokens, keys: Tokens, need_weights: bool) -> tuple[Tensor, Tensor | None]:
        """Of rows: o (N, memory_size) and the weights (B, 1, T, S), or None."""


class AdditiveAttention(_DecoderAttention):
    """A decoder's queries read an encoder's states by weights that a layer of tanh gives, for sequences of any lengths.

    Parameters: weight_query (hidden_size, query_size), weight_key (hidden_size, memory_size), v (hidden_size,) and with
    `bias` bias (hidden_size,): the score of a query s and a state h is v . tanh(weight_query s + weight_key h + bias).
    Initial values: uniform in +-1/sqrt of the features that each is multiplied with.
    Source: Bahdanau 2014, appendix A.1.2; `equations.additive_attention`.
    Errors: ValueError for a size below 1.
    """

    def __init__(
        self,
        query_size: int,
        memory_size: int,
        hidden_size: int,
        bias: bool = True,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(query_size, memory_size, batch_first)
        check_sizes(0, hidden_size=hidden_size)
        self.hidden_size = hidden_size
        self.weight_query = nn.Parameter(torch.empty(hidden_size, query_size, device=device, dtype=dtype))
        self.weight_key = nn.Parameter(torch.empty(hidden_size, memory_size, device=device, dtype=dtype))
        self.v = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        sizes = (self.query_size, self.memory_size, self.hidden_size, self.query_size)
        for parameter, size in zip((self.weight_query, self.weight_key, self.v, self.bias), sizes, strict=True):
            if parameter is not None:
                nn.init.uniform_(parameter, -1 / math.sqrt(size), 1 / math.sqrt(size))

    def extra_repr(self) -> str:
        return f"{self.query_size}, {self.memory_size}, {self.hidden_size}, bias={self.bias is not None}"

    def _read(self, queries: Tokens, keys: Tokens, need_weights: bool) -> tuple[Tensor, Tensor | None]:
        q, k = linear(queries.values, self.weight_query, self.bias), linear(keys.values, self.weight_key)
        read = additive_attention(
            q, k, keys.values, self.v, queries=queries.rows, keys=keys.rows, need_weights=need_weights
        )
        return (read[0], read[1].unsqueeze(1)) if need_weights else (read, None)


class MultiplicativeAttention(_DecoderAttention):
    """A decoder's queries read an encoder's states by weights that a product with each state gives.

    `form` "dot": the score of a query s and a state h is s . h, both of one size, and there are no parameters.
    "general": s . (weight h), weight (query_size, memory_size), at first uniform in +-1/sqrt(memory_size).
    Source: Luong 2015, section 3.1; `equations.multiplicative_attention`.
    Errors: ValueError for another form, a size below 1, and for "dot" with two sizes.
    """

    def __init__(
        self,
        query_size: int,
        memory_size: int,
        form: str = "general",
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(query_size, memory_size, batch_first)
        if form not in FORMS:
            raise ValueError(f"form must be one of {', '.join(FORMS)}, found {form!r}")
        if form == "dot" and query_size != memory_size:
            raise ValueError(f'"dot" wants queries and states of one size, found {query_size} and {memory_size}')
        self.form = form
        shape = (query_size, memory_size)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype)) if form == "general" else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.uniform_(self.weight, -1 / math.sqrt(self.memory_size), 1 / math.sqrt(self.memory_size))

    def extra_repr(self) -> str:
        return f"{self.query_size}, {self.memory_size}, form={self.form!r}"

    def _read(self, queries: Tokens, keys: Tokens, need_weights: bool) -> tuple[Tensor, Tensor | None]:
        k = keys.values if self.weight is None else linear(keys.values, self.weight)
        q, value = queries.values, keys.values
        read = attention(
            q, k, value, heads=1, queries=queries.rows, keys=keys.rows, scale=1.0, need_weights=need_weights
        )
        return read if need_weights else (read, None)
