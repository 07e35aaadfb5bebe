"""The sides of a race: a layer of ours and of torch with the same weights, as one training step or one inference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

import unrolled
from benchmarks.harness import Call, peak_memory, same

CELLS = ("RNN", "GRU", "LSTM")
GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}


def pair(cell: str, inputs: int, hidden: int, bidirectional: bool = False) -> tuple[nn.Module, nn.Module]:
    theirs = getattr(nn, cell)(inputs, hidden, bidirectional=bidirectional)
    ours = getattr(unrolled.nn, cell)(inputs, hidden, bidirectional=bidirectional)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def rows(batch: Any) -> Tensor:
    """The numbers of a padded, packed or ragged batch."""
    if isinstance(batch, PackedSequence):
        return batch.data
    return batch.values if isinstance(batch, unrolled.Ragged) else batch


class Training:
    """Forward and backward with all gradients: of the inputs first, then of the parameters."""

    def __init__(self, model: nn.Module, x: Any, dy: Tensor) -> None:
        self.model, self.dy = model, dy
        self.leaf = rows(x).clone().requires_grad_()
        if isinstance(x, PackedSequence):
            self.x: Any = x._replace(data=self.leaf)
        else:
            self.x = x.with_values(self.leaf) if isinstance(x, unrolled.Ragged) else self.leaf

    def clear(self) -> None:
        self.model.zero_grad()
        self.leaf.grad = None

    def __call__(self) -> Sequence[Tensor]:
        self.clear()
        rows(self.model(self.x)[0]).backward(self.dy)
        return [self.leaf.grad, *(p.grad for p in self.model.parameters())]


def inference(model: nn.Module, x: Any) -> Call:
    def call() -> Sequence[Tensor]:
        with torch.no_grad():
            return [rows(model(x)[0])]

    return call


def check(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        same(a, b)


def memory(sides: dict[str, Call], wanted: bool) -> dict[str, Any]:
    """`memory_mb` of a row, if it is wanted and every side's can be had. Each has been called once before."""
    peaks: dict[str, float] = {}
    for name, side in sides.items() if wanted else ():
        if isinstance(side, Training):
            side.clear()
        peak = peak_memory(side)
        if peak is None:
            return {}
        peaks[name] = peak
    return {"memory_mb": peaks} if peaks else {}
