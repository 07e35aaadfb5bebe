"""Linear, Embedding and Dropout: torch.nn's modules, computed by our operators; each maps a Ragged to a Ragged too."""

from __future__ import annotations

import math
from typing import TypeVar

import torch
from torch import Tensor, nn

from unrolled.ops.dropout import dropout
from unrolled.ops.embedding import embedding
from unrolled.ops.linear import linear
from unrolled.ragged import Ragged, check_keys

Values = TypeVar("Values", Tensor, Ragged)


class Linear(nn.Linear):
    """torch.nn.Linear; a Ragged of (N, I) gives a Ragged of (N, O)."""

    def forward(self, input: Values) -> Values:
        if isinstance(input, Ragged):
            return input.with_values(linear(input.values, self.weight, self.bias))
        return linear(input, self.weight, self.bias)


class Embedding(nn.Embedding):
    """torch.nn.Embedding; a Ragged of tokens (N,) gives a Ragged of (N, E).

    Padding, repeated tokens: `equations.embedding`. `max_norm`, `scale_grad_by_freq` and `sparse` are torch's own code.
    """

    def forward(self, input: Values) -> Values:
        if isinstance(input, Ragged):
            return input.with_values(self.forward(input.values))
        if self.max_norm is not None or self.scale_grad_by_freq or self.sparse:
            return super().forward(input)
        return embedding(input, self.weight, self.padding_idx)


class Dropout(nn.Dropout):
    """torch.nn.Dropout, with a mask that is a function of one seed per call, drawn from torch's generator.

    In a Ragged the mask of a token depends on its sequence (the index, or `keys[b]`) and its step, not on neighbours.
    """

    def forward(self, input: Values, *, keys: Tensor | None = None) -> Values:
        if self.p == 0 or not self.training:
            return input
        seed = torch.randint(2**63 - 1, (), device=(input.values if isinstance(input, Ragged) else input).device)
        if isinstance(input, Ragged):
            flat = input.values.flatten(1)
            index = torch.repeat_interleave(input.lengths, output_size=flat.shape[0])
            t = torch.arange(flat.shape[0], device=flat.device) - input.offsets[index]
            key = index if keys is None else check_keys(keys, len(input)).to(index)[index]
            return input.with_values(dropout(flat, self.p, seed, 0, key, t).reshape(input.values.shape))
        if keys is not None:
            raise ValueError("keys= belongs to a Ragged: a plain tensor has no sequences")
        width = input.shape[-1] if input.ndim else 1
        flat = input.reshape(math.prod(input.shape[:-1]), width)
        t = torch.arange(flat.shape[0], device=flat.device)
        y = dropout(flat, self.p, seed, 0, torch.zeros_like(t), t).reshape(input.shape)
        return input.copy_(y) if self.inplace else y
