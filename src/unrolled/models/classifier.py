"""Networks that give each sequence, or each step, the scores of some classes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from unrolled.models.readings import maximum, mean
from unrolled.nn import GRU, LSTM, RNN, AdditiveAttention, Dropout, Embedding, Linear, last
from unrolled.ragged import Ragged

LAYERS = {"rnn": RNN, "lstm": LSTM, "gru": GRU}
READINGS = ("last", "mean", "max", "attention", "each")


class Classifier(nn.Module, ABC):
    """What they share: embedding (tokens) or projection (numbers), whatever reads it, dropout, linear layer.

    Exactly one of `vocabulary_size` and `num_channels` says what comes in. A subclass adds the layers, then `linear`.
    """

    linear: Linear

    def __init__(
        self,
        num_classes: int,
        vocabulary_size: int | None,
        num_channels: int | None,
        embedding_size: int,
        reading: str,
        readings: tuple[str, ...],
        dropout: float,
    ) -> None:
        super().__init__()
        if (vocabulary_size is None) == (num_channels is None):
            raise ValueError(f"give vocabulary_size or num_channels, found {vocabulary_size} and {num_channels}")
        if reading not in readings:
            raise ValueError(f"reading must be one of {', '.join(readings)}, found {reading!r}")
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
        self.dropout = Dropout(dropout)

    def forward(self, inputs: Ragged) -> Tensor:
        """Logits (B, C), with reading "each" (N, C), of tokens (N,) or of numbers (N, channels)."""
        if inputs.values.dtype.is_floating_point != isinstance(self.embedding, Linear):
            wanted = "numbers (N, channels)" if isinstance(self.embedding, Linear) else "token numbers (N,)"
            raise TypeError(f"this model reads {wanted}, found {inputs.values.dtype} {tuple(inputs.values.shape)}")
        if isinstance(self.embedding, Linear):
            inputs = inputs.with_values(inputs.values.to(self.embedding.weight.dtype))
        logits: Tensor = self.linear(self.dropout(self.read(self.embedding(inputs))))
        return logits

    @abstractmethod
    def read(self, embedded: Ragged) -> Tensor:
        """What the linear layer sees of a batch: (B, D), with reading "each" (N, D)."""


class SequenceClassifier(Classifier):
    """Embedding (tokens) or projection (numbers), recurrent layers, one reading of their states, linear layer.

    Exactly one of `vocabulary_size` and `num_channels` says what comes in. `dropout` acts on what enters the first
    recurrent layer, between recurrent layers and before the linear layer. `reading`: "last" is the final state of each
    direction, "mean" and "max" go over the states of a sequence's own steps, "attention" is their mean by the weights
    of additive attention, of `attention_size` numbers, whose query is the final state; "each" gives every step its own
    scores.
    `model`: "rnn", "lstm" or "gru"; what else is given goes to that layer, such as `nonlinearity` or `proj_size`.
    Edges: a sequence of length 0 is read as its initial state ("last") or as 0 ("mean", "max", "attention").
    Errors: ValueError for sizes that are not positive, an unknown model or reading, both or neither of the two inputs,
    an attention_size with another reading or none with this; TypeError for an argument that the layer does not have.
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
        attention_size: int | None = None,
        dropout: float = 0.0,
        **layer: Any,
    ) -> None:
        if model not in LAYERS:
            raise ValueError(f"model must be one of {', '.join(LAYERS)}, found {model!r}")
        super().__init__(num_classes, vocabulary_size, num_channels, embedding_size, reading, READINGS, dropout)
        if (reading == "attention") != (attention_size is not None and attention_size >= 1):
            raise ValueError(
                f'attention_size, at least 1, belongs to reading = "attention", found {attention_size} with {reading!r}'
            )
        self.rnn: RNN | LSTM | GRU = LAYERS[model](
            embedding_size,
            hidden_size,
            num_layers,
            dropout=dropout if num_layers > 1 else 0.0,
            bidirectional=bidirectional,
            **layer,
        )
        state = (layer.get("proj_size") or hidden_size) * self.rnn.num_directions
        self.attention = AdditiveAttention(state, state, attention_size) if attention_size else None
        self.linear = Linear(state, num_classes)

    def read(self, embedded: Ragged) -> Tensor:
        states, final = self.rnn(self.dropout(embedded))
        if self.reading == "each":
            every: Tensor = states.values
            return every
        if self.reading in ("mean", "max"):
            return mean(states) if self.reading == "mean" else maximum(states)
        h = last(final if isinstance(final, Tensor) else final[0], bidirectional=self.rnn.bidirectional)
        if self.attention is None:
            return h
        query = Ragged(h, torch.arange(len(h) + 1, device=h.device))  # one of each sequence
        read: Ragged = self.attention(query, states)
        return read.values
