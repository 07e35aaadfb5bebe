"""The sides of a race: a layer of ours and of torch with the same weights, as one training step or one inference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    """The numbers of a padded, packed or ragged batch; of (batch, state) those of the batch."""
    if isinstance(batch, PackedSequence):
        return batch.data
    if isinstance(batch, tuple):
        return rows(batch[0])
    return batch.values if isinstance(batch, unrolled.Ragged) else batch


class Step:
    """Forward and backward of `forward()`, with the gradient of each of `leaves`."""

    def __init__(self, forward: Callable[[], Any], leaves: Sequence[Tensor], dy: Tensor) -> None:
        self.forward, self.leaves, self.dy = forward, leaves, dy

    def clear(self) -> None:
        for leaf in self.leaves:
            leaf.grad = None

    def __call__(self) -> Sequence[Tensor]:
        self.clear()
        rows(self.forward()).backward(self.dy)
        return [leaf.grad for leaf in self.leaves]  # type: ignore[misc]


class Training(Step):
    """A model's: with all gradients, of x first, if it holds numbers and not tokens, then of the parameters."""

    def __init__(self, model: nn.Module, x: Any, dy: Tensor, **options: Any) -> None:
        leaf = rows(x).clone()
        leaves = [leaf.requires_grad_()] if leaf.is_floating_point() else []
        if isinstance(x, PackedSequence):
            x = x._replace(data=leaf)
        else:
            x = x.with_values(leaf) if isinstance(x, unrolled.Ragged) else leaf
        super().__init__(lambda: model(x, **options), [*leaves, *model.parameters()], dy)


def inference(model: nn.Module, x: Any) -> Call:
    def call() -> Sequence[Tensor]:
        with torch.no_grad():
            return [rows(model(x))]

    return call


def check(ours: Sequence[Tensor], theirs: Sequence[Tensor], compare: Callable[[Tensor, Tensor], None] = same) -> None:
    for a, b in zip(ours, theirs, strict=True):
        compare(a, b)


def memory(sides: dict[str, Call], wanted: bool) -> dict[str, Any]:
    """`memory_mb` of a row, if it is wanted and every side's can be had. Each has been called once before."""
    peaks: dict[str, float] = {}
    for name, side in sides.items() if wanted else ():
        if isinstance(side, Step):
            side.clear()
        peak = peak_memory(side)
        if peak is None:
            return {}
        peaks[name] = peak
    return {"memory_mb": peaks} if peaks else {}
