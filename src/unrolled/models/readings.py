"""What a classifier sees of the states of a sequence: their mean, their maximum, the last."""

from __future__ import annotations

import torch
from torch import Tensor

from unrolled.ragged import Ragged


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


def _sequence_of_token(states: Ragged) -> Tensor:
    return torch.repeat_interleave(states.lengths, output_size=states.values.shape[0])
