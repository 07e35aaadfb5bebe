"""A Transformer that gives each sequence the scores of some classes."""

from __future__ import annotations

from torch import Tensor

from unrolled.models.classifier import Classifier
from unrolled.models.readings import final, maximum, mean
from unrolled.nn import (
    LayerNorm,
    LearnedPositions,
    Linear,
    RMSNorm,
    SinusoidalPositions,
    TransformerEncoder,
    TransformerEncoderLayer,
)
from unrolled.ragged import Ragged

POSITIONS = ("sinusoidal", "learned", "rotary", "alibi")
READINGS = {"last": final, "mean": mean, "max": maximum}


class TransformerClassifier(Classifier):
    """Embedding (tokens) or projection (numbers), positions, encoder layers, one reading of their states, linear layer.

    Exactly one of `vocabulary_size` and `num_channels` says what comes in. `dropout` acts on what enters the first
    layer, within the layers and before the linear layer. Each token attends to all of its sequence. `positions`:
    "sinusoidal" and "learned" are added to what enters the first layer, of the latter there are `max_positions`;
    "rotary" and "alibi" act in each layer. With `norm_first` a last normalisation follows the layers. `reading`: "last"
    is the state of the last token, "mean" and "max" go over all.
    Edges: a sequence of length 0 is read as 0.
    Errors: ValueError for sizes that are not positive, an unknown option, both or neither of the two inputs, a sequence
    longer than `max_positions`.
    """

    def __init__(
        self,
        num_classes: int,
        *,
        vocabulary_size: int | None = None,
        num_channels: int | None = None,
        hidden_size: int = 128,
        num_layers: int = 1,
        heads: int = 4,
        feed_forward_size: int = 512,
        activation: str = "relu",
        gated: bool = False,
        norm: str = "layer",
        norm_first: bool = True,
        positions: str = "sinusoidal",
        max_positions: int = 1024,
        reading: str = "mean",
        dropout: float = 0.0,
    ) -> None:
        if positions not in POSITIONS:
            raise ValueError(f"positions must be one of {', '.join(POSITIONS)}, found {positions!r}")
        super().__init__(num_classes, vocabulary_size, num_channels, hidden_size, reading, tuple(READINGS), dropout)
        layer = TransformerEncoderLayer(
            *(hidden_size, heads, feed_forward_size, dropout, activation),
            norm_first=norm_first,
            gated=gated,
            norm=norm,
            positions=positions if positions in ("rotary", "alibi") else None,
        )
        self.positions: SinusoidalPositions | LearnedPositions | None = None
        if positions == "sinusoidal":
            self.positions = SinusoidalPositions(hidden_size)
        elif positions == "learned":
            self.positions = LearnedPositions(max_positions, hidden_size)
        last = {"layer": LayerNorm, "rms": RMSNorm}[norm](hidden_size) if norm_first else None
        self.encoder = TransformerEncoder(layer, num_layers, last)
        self.linear = Linear(hidden_size, num_classes)

    def read(self, embedded: Ragged) -> Tensor:
        placed = embedded if self.positions is None else self.positions(embedded)
        states: Ragged = self.encoder(self.dropout(placed))
        return READINGS[self.reading](states)
