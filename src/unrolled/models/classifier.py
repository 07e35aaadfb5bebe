"""A recurrent network that gives each sequence, or each step, the scores of some classes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from unrolled.nn import GRU, LSTM, RNN, Dropout, Embedding, Linear, last
from unrolled.ragged import Ragged

LAYERS = {"rnn": RNN, "lstm": LSTM, "gru": GRU}
READINGS = ("last", "mean", "max", "each")


class SequenceClassifier(nn.Module):
    """Embedding (tokens) or projection (numbers), recurrent layers, one reading of their states, linear layer.

    Exactly one of `vocabulary_size` and `num_channels` says what comes in. `dropout` acts on what enters the first
    recurrent layer, between recurrent layers and before the linear layer. `reading`: "last" is the final state of each
    direction, "mean" and "max" go over the states of a sequence's own steps, "each" gives every step its own scores.
    `model`: "rnn", "lstm" or "gru"; what else is given goes to that layer, such as `nonlinearity` or `proj_size`.
    Edges: a sequence of length 0 is read as its initial state ("last") or as 0 ("mean", "max").
    Errors: ValueError for sizes that are not positive, an unknown model or reading, both or neither of the two inputs;
    TypeError for an argument that the layer does not have.
    """

    def __init__(
        self,
        num_classes: int,
        *,
        model: str = "rnn",
        vocabulary_size: int | None = None,
        num_channels: int | None = None,
        embedding_size: int = 64,
        hidden_size: int = 128,
        num_layers: int = 1,
        bidirectional: bool = False,
        reading: str = "last",
        dropout: float = 0.0,
        **layer: Any,
    ) -> None:
        super().__init__()
        if (vocabulary_size is None) == (num_channels is None):
            raise ValueError(f"give vocabulary_size or num_channels, found {vocabulary_size} and {num_channels}")
        if model not in LAYERS:
            raise ValueError(f"model must be one of {', '.join(LAYERS)}, found {model!r}")
        if reading not in READINGS:
            raise ValueError(f"reading must be one of {', '.join(READINGS)}, found {reading!r}")
        width = vocabulary_size if num_channels is None else num_channels
        for name, size in (("num_classes", num_classes), ("input size", width), ("embedding_size", embedding_size)):
            if size is None or size < 1:
                raise ValueError(f"{name} must be at least 1, found {size}")
        self.reading = reading
        self.embedding: Embedding | Linear
        if num_channels is None:
            assert vocabulary_size is not None
            self.embedding = Embedding(vocabulary_size, embedding_size)
        else:
            self.embedding = Linear(num_channels, embedding_size)
        self.rnn: RNN | LSTM | GRU = LAYERS[model](
            embedding_size,
            hidden_size,
            num_layers,
            dropout=dropout if num_layers > 1 else 0.0,
            bidirectional=bidirectional,
            **layer,
        )
        self.dropout = Dropout(dropout)
        state = layer.get("proj_size") or hidden_size
        self.linear = Linear(state * self.rnn.num_directions, num_classes)

    def forward(self, inputs: Ragged) -> Tensor:
        """Logits (B, C), with reading "each" (N, C), of tokens (N,) or of numbers (N, channels)."""
        if inputs.values.dtype.is_floating_point != isinstance(self.embedding, Linear):
            wanted = "numbers (N, channels)" if isinstance(self.embedding, Linear) else "token numbers (N,)"
            raise TypeError(f"this model reads {wanted}, found {inputs.values.dtype} {tuple(inputs.values.shape)}")
        if isinstance(self.embedding, Linear):
            inputs = inputs.with_values(inputs.values.to(self.embedding.weight.dtype))
        states, final = self.rnn(self.dropout(self.embedding(inputs)))
        logits: Tensor = self.linear(self.dropout(self._read(states, final)))
        return logits

    def _read(self, states: Ragged, final: Tensor | tuple[Tensor, Tensor]) -> Tensor:
        if self.reading == "last":
            h = final if isinstance(final, Tensor) else final[0]
            return last(h, bidirectional=self.rnn.bidirectional)
        if self.reading == "each":
            return states.values
        return mean(states) if self.reading == "mean" else maximum(states)


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


def _sequence_of_token(states: Ragged) -> Tensor:
    return torch.repeat_interleave(states.lengths, output_size=states.values.shape[0])
