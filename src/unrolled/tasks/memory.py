"""Memory: problems that only a network that remembers solves, on sequences made from a seed."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from unrolled.config import Config, parse_config, read_yaml
from unrolled.data.values import DataError
from unrolled.files import write_json
from unrolled.models import SequenceClassifier
from unrolled.nn import CrossEntropyLoss, MSELoss
from unrolled.ragged import Ragged
from unrolled.sections import MOST
from unrolled.tasks.batches import batches

DIGITS = 10  # to be copied, each one of 1 ... 8
DELIMITER = 9
NEAR = 0.04  # a sum this near counts as right (Hochreiter and Schmidhuber 1997)

PARTS = ("train", "valid", "test", "fresh")

Arrays = tuple[NDArray[Any], NDArray[Any]]


class Example(NamedTuple):
    """A sequence by what it is made from: nothing else of it is kept."""

    part: int  # in PARTS
    number: int
    length: int


class Batch(NamedTuple):
    """`inputs`: (N, 2) numbers (adding) or (N,) tokens (copying); `targets`: a number for each sequence, or token."""

    inputs: Ragged
    targets: Tensor
    rows: list[int]

    def to(self, device: torch.device | str) -> Batch:
        return Batch(self.inputs.to(device), self.targets.to(device), self.rows)


def adding(length: int, random: np.random.Generator) -> Arrays:
    """The adding problem: (T, 2), a number in [0, 1) and whether it is one of the two marked ones; their sum.

    Source: Bai 2018, section 4.1, after Hochreiter and Schmidhuber 1997.
    """
    steps = np.zeros((length, 2), dtype=np.float32)
    steps[:, 0] = random.random(length, dtype=np.float32)
    marked = random.choice(length, 2, replace=False)
    steps[marked, 1] = 1
    return steps, steps[marked, 0].sum(keepdims=True)


def copying(length: int, random: np.random.Generator) -> Arrays:
    """Copying memory: ten digits 1 ... 8, T - 1 zeros, eleven 9; wanted: T + 10 zeros and the ten digits again.

    Source: Bai 2018, section 4.1, after Hochreiter and Schmidhuber 1997.
    """
    steps = np.zeros(length + 2 * DIGITS, dtype=np.int64)
    steps[:DIGITS] = random.integers(1, DELIMITER, DIGITS)
    wanted = np.zeros_like(steps)
    wanted[-DIGITS:] = steps[:DIGITS]
    steps[-DIGITS - 1 :] = DELIMITER
    return steps, wanted


PROBLEMS: dict[str, Callable[[int, np.random.Generator], Arrays]] = {"adding": adding, "copying": copying}


class MemoryTask:
    """The adding problem or copying memory. `splits` holds "train", "valid" and "test", after `load` nothing."""

    use: ClassVar[str] = "evaluate {run} LENGTH"  # what to do with a trained one
    predicts: ClassVar[bool] = False

    def __init__(self, config: Config) -> None:
        self.config = config
        self.splits: dict[str, list[Example]] = {}
        self.notes: list[str] = []

    @classmethod
    def prepare(cls, config: Config) -> MemoryTask:
        task, memory = cls(config), config.memory
        counts = (memory.train_examples, memory.valid_examples, memory.test_examples)
        task.splits = {
            name: [Example(part, i, memory.length) for i in range(count)]
            for part, (name, count) in enumerate(zip(PARTS, counts, strict=False))
        }
        return task

    def examples(self, source: str) -> list[Example]:
        """As many as in the test, of length `source`, none of which was trained on. Errors: DataError for no length."""
        shortest = self.config.memory.shortest
        if not re.fullmatch("[0-9]{1,9}", source) or not shortest <= int(source) <= MOST:
            raise DataError(
                f"a run of the task memory is scored on sequences made for it: give their length, "
                f"from {shortest} to {MOST}, found {source!r}"
            )
        return [Example(PARTS.index("fresh"), i, int(source)) for i in range(self.config.memory.test_examples)]

    def predictions(self, model: nn.Module, inputs: Sequence[Any], probabilities: bool = False) -> list[dict[str, Any]]:
        raise ValueError("a run of the task memory predicts nothing: score it with unrolled evaluate RUN LENGTH")

    def build_model(self) -> SequenceClassifier:
        """A network of the configured sizes with fresh weights: one number a sequence, or ten scores a token."""
        options = self.config.model.arguments()
        if self._adding:
            return SequenceClassifier(1, num_channels=2, **options)
        return SequenceClassifier(DELIMITER + 1, vocabulary_size=DELIMITER + 1, **options | {"reading": "each"})

    def num_tokens(self, example: Example) -> int:
        return example.length if self._adding else example.length + 2 * DIGITS

    def collate(self, examples: Sequence[Example]) -> Batch:
        """The sequences of these examples, of none at all too: each is a function of seed, part, length and number."""
        memory = self.config.memory
        make, seed = PROBLEMS[memory.problem], memory.data_seed
        made = [make(e.length, np.random.default_rng([seed, e.part, e.length, e.number])) for e in examples]
        inputs, targets = zip(*made, strict=True) if made else zip(self._nothing(), strict=True)
        offsets = np.cumsum([0, *(len(steps) for steps, _ in made)])
        values = Ragged(torch.from_numpy(np.concatenate(inputs)), torch.from_numpy(offsets))
        return Batch(values, torch.from_numpy(np.concatenate(targets)), [e.number for e in examples])

    def loss_sum(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Sum of the squared errors over the sequences (adding) or of the cross-entropies over all tokens; how many."""
        loss = self._loss(model(batch.inputs), batch.targets)
        return loss, torch.tensor(float(len(batch.targets))).to(loss)

    @torch.no_grad()
    def metrics(self, model: nn.Module, examples: Sequence[Example], batch_size: int = 256) -> dict[str, Any]:
        """Scores on examples: the mean loss, that of the best answer without memory, and the share of right answers.

        adding: the baseline says 1; right is a sum that is off by less than 0.04. copying: the baseline says 0 and at
        the end any of the eight digits, 10 ln 8 / (T + 20); right is a digit at its place among the last ten.
        """
        device, training = next(model.parameters()).device, model.training
        model.eval()
        loss, baseline, right, count, answers = 0.0, 0.0, 0, 0, 0
        for part in batches(examples, self.num_tokens, batch_size):
            batch = self.collate(part).to(device)
            output, targets = model(batch.inputs), batch.targets
            loss, count = loss + self._loss(output, targets).item(), count + len(targets)
            if self._adding:
                baseline += (targets - 1).square().sum().item()
                hits = (output.squeeze(1) - targets).abs() < NEAR
            else:
                baseline += len(batch.rows) * DIGITS * math.log(DELIMITER - 1)
                last = (batch.inputs.offsets[1:, None] - torch.arange(1, DIGITS + 1, device=device)).flatten()
                hits = output[last].argmax(1) == targets[last]
            right, answers = right + int(hits.sum()), answers + len(hits)
        model.train(training)
        return {
            "loss": loss / max(count, 1),
            "baseline": baseline / max(count, 1),
            "accuracy": right / max(answers, 1),
            "examples": len(examples),
        }

    def save(self, folder: Path) -> None:
        """config.json into an existing folder."""
        write_json(folder / "config.json", self.config.model_dump(mode="json"))

    @classmethod
    def load(cls, folder: Path) -> MemoryTask:
        path = folder / "config.json"
        return cls(parse_config(read_yaml(path), str(path)))

    def _loss(self, output: Tensor, targets: Tensor) -> Tensor:
        if self._adding:
            return MSELoss(reduction="sum")(output.squeeze(1), targets.to(output))  # type: ignore[no-any-return]
        return CrossEntropyLoss(reduction="sum")(output, targets)  # type: ignore[no-any-return]

    @property
    def _adding(self) -> bool:
        return self.config.memory.problem == "adding"

    def _nothing(self) -> Arrays:
        """Inputs and targets of no sequence."""
        if self._adding:
            return np.empty((0, 2), dtype=np.float32), np.empty(0, dtype=np.float32)
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
