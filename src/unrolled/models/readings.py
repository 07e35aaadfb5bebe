"""What a classifier sees of the states of a sequence: their mean, their maximum, or what additive attention reads."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from unrolled.nn import Linear
from unrolled.ops.additive_attention import additive_attention
from unrolled.ragged import Ragged, Rows


def mean(states: Ragged) -> Tensor:
    """(B, D) mean over the steps of each sequence; 0 for a sequence of length 0. Gradient: 1/T to each step."""
    total = states.values.new_zeros(len(states), states.values.shape[1])
    total = total.index_add(0, _sequence_of_token(states), states.values)
    return total / states.lengths.clamp(min=1).unsqueeze(1)


def maximum(states: Ragged) -> Tensor:
    """(B, D) maximum over the steps of each sequence; 0 for a sequence of length 0.

    Gradient: all of it to the step that holds the maximum, in equal parts where several do.
    """
    highest = states.values.new_zeros(len(states), states.values.shape[1])
    index = _sequence_of_token(states).unsqueeze(1).expand_as(states.values)
    return highest.scatter_reduce(0, index, states.values, "amax", include_self=False)


def final(states: Ragged) -> Tensor:
    """(B, D) the last step of each sequence; 0 for a sequence of length 0."""
    live = (states.lengths > 0).unsqueeze(1)
    if not len(states.values):
        return states.values.new_zeros(len(states), states.values.shape[1]) + states.values.sum()
    return torch.where(live, states.values[(states.offsets[1:] - 1).clamp(min=0)], 0)


class AdditiveReading(nn.Module):
    """(B, D) the mean of a sequence's states by the weights of additive attention; 0 for a sequence of length 0.

    The query is one vector (B, D) for each sequence. Query and states are mapped to `size` numbers each, of whose
    tanh of the sum `score` makes one weight.
    """

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.query, self.key = Linear(width, size), Linear(width, size, bias=False)
        self.score = nn.Parameter(torch.empty(size).uniform_(-(size**-0.5), size**-0.5))

    def forward(self, states: Ragged, query: Tensor) -> Tensor:
        one = Rows(torch.arange(len(query), device=query.device), 1, torch.ones_like(states.lengths))
        keys = Rows(states.offsets[:-1], 1, states.lengths)
        read: Tensor = additive_attention(
            self.query(query), self.key(states.values), states.values, self.score, queries=one, keys=keys
        )
        return read


def _sequence_of_token(states: Ragged) -> Tensor:
    return torch.repeat_interleave(states.lengths, output_size=states.values.shape[0])
