"""What the loop asks of a task, and what it gives back. A task knows the data, the model, the loss and the metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from unrolled.ragged import Ragged


class Batch(Protocol):
    """What `collate` makes of examples: a NamedTuple of these and more."""

    @property
    def inputs(self) -> Ragged: ...
    @property
    def targets(self) -> Tensor: ...
    @property
    def rows(self) -> Sequence[int]: ...


class Task(Protocol):
    """`splits` holds "train" and, where there are any, "valid" and "test" examples."""

    @property
    def splits(self) -> Mapping[str, Sequence[Any]]: ...
    @property
    def notes(self) -> Sequence[str]:
        """What in the data deserves a look."""
        ...

    def num_tokens(self, example: Any) -> int: ...
    def build_model(self) -> nn.Module: ...
    def collate(self, examples: Sequence[Any]) -> Any: ...
    def loss_sum(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor | float]:
        """A sum over the batch and its divisor, both additive over the parts of a batch."""
        ...

    def metrics(self, model: nn.Module, examples: Sequence[Any], batch_size: int) -> dict[str, Any]: ...
    def save(self, folder: Path) -> None:
        """All but the weights: what it takes to predict."""
        ...


class Progress(NamedTuple):
    """What the loop tells after each step; `done` is a share, `seconds_left` an estimate."""

    step: int
    epoch: int
    done: float
    loss: float
    tokens_per_second: float
    seconds_left: float


class RunResult(NamedTuple):
    """`metrics` by split, of the best model; `stopped` says why: "epochs", "max_steps" or "patience"."""

    folder: Path
    steps: int
    best_step: int
    stopped: str
    metrics: dict[str, dict[str, Any]]


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM: the step in hand was finished and a checkpoint of it is in `folder`."""

    def __init__(self, folder: Path, step: int, signal: int) -> None:
        super().__init__(f"interrupted after step {step}; the run in {folder} can be resumed from there")
        self.folder, self.step, self.signal = folder, step, signal
