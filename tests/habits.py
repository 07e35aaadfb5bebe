"""What the tests of PyTorch's habits share: layers by name, a small classifier, its gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unrolled

INPUT, HIDDEN, CLASSES = 3, 5, 4
KINDS = ["RNN", "LSTM", "GRU"]
every_kind = pytest.mark.parametrize("kind", KINDS)


def make(kind: str, *arguments: Any, **options: Any) -> Any:
    return getattr(unrolled.nn, kind)(*(arguments or (INPUT, HIDDEN)), **options)


def call(rnn: nn.Module, *arguments: Any, **options: Any) -> tuple[Any, list[Tensor]]:
    """The outputs and the list of last states."""
    y, last = rnn(*arguments, **options)
    return y, [last] if isinstance(last, Tensor) else list(last)


def total(y: Tensor, last: list[Tensor]) -> Tensor:
    value = y.pow(2).sum()
    for factor, state in enumerate(last, 1):
        value = value + factor * state.pow(2).sum()
    return value


class Classifier(nn.Module):
    """Everything of ours in one model, on a padded batch with lengths; a recurrent layer for each of `kinds`."""

    def __init__(self, *kinds: str, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = unrolled.nn.Embedding(11, INPUT, padding_idx=0)
        self.layers = nn.ModuleList()
        for width, kind in zip([INPUT, 2 * HIDDEN, 2 * HIDDEN], kinds or ("RNN",), strict=False):
            layers = {"num_layers": 2, "dropout": dropout} if not self.layers else {}
            self.layers.append(make(kind, width, HIDDEN, batch_first=True, bidirectional=True, **layers))
        self.readout = unrolled.nn.Linear(2 * HIDDEN, CLASSES)
        self.loss = unrolled.nn.CrossEntropyLoss(label_smoothing=0.1)

    def forward(self, tokens: Tensor, lengths: Tensor | None = None) -> Tensor:
        y = self.embedding(tokens)
        for layer in self.layers:
            y, (h, *_) = call(layer, y, lengths=lengths)
        return self.readout(unrolled.nn.last(h, bidirectional=True))

    def step(self, tokens: Tensor, lengths: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = self.loss(self(tokens, lengths), target)
        return loss


def example(sequences: int = 3, steps: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    tokens = torch.randint(1, 11, (sequences, steps))
    return tokens, torch.randint(0, steps + 1, (sequences,)), torch.randint(CLASSES, (sequences,))


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))
