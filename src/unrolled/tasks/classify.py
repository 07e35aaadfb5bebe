"""Classify: one label for each sequence, of text or of numbers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor, nn

from unrolled.config import Config, parse_config
from unrolled.data.load import load, load_splits, source_of
from unrolled.data.scaler import Scaler
from unrolled.data.tokenizer import encode, load_tokenizer, train_tokenizer
from unrolled.data.values import DataError, Row, check_channels, check_input
from unrolled.models import Classifier, classifier
from unrolled.nn import CrossEntropyLoss
from unrolled.ragged import Ragged
from unrolled.tasks import metrics
from unrolled.tasks.batches import batches


class Example(NamedTuple):
    """One encoded example: token numbers (T,) or scaled numbers (T, channels), the number of its label, its line."""

    input: NDArray[Any]
    target: int
    row: int


class Batch(NamedTuple):
    """Examples end to end: `inputs`, targets (B,), and the line each came from."""

    inputs: Ragged
    targets: Tensor
    rows: list[int]

    def to(self, device: torch.device | str) -> Batch:
        return Batch(self.inputs.to(device), self.targets.to(device), self.rows)


class ClassifyTask:
    """Everything about a classifier that is not its weights: encoder of inputs, labels, loss, metrics.

    `prepare` makes it from data, `load` from a saved run. `splits` holds "train" and, where there are any examples,
    "valid" and "test"; after `load` it is empty. `notes` says what in the data deserves a look.
    """

    use: ClassVar[str] = "predict {run} FILE"  # what to do with a trained one
    predicts: ClassVar[bool] = True

    def __init__(self, config: Config, encoder: Tokenizer | Scaler, labels: Sequence[str]) -> None:
        self.config, self.encoder, self.labels = config, encoder, list(labels)
        self.splits: dict[str, list[Example]] = {}
        self.notes: list[str] = []
        self.class_weights: Tensor | None = None
        self._number = {label: i for i, label in enumerate(self.labels)}

    @classmethod
    def prepare(cls, config: Config) -> ClassifyTask:
        """Read and split the data, learn tokenizer or scaling and labels from "train", encode everything.

        Errors: DataError (a ValueError) naming file and line.
        """
        data = config.data
        rows, notes = load_splits(data)
        inputs: list[Any] = [row.input for row in rows["train"]]
        counts = Counter(row.label for row in rows["train"])
        if len(counts) < 2:
            raise DataError(f"{data.train}: only one label, {next(iter(counts))!r}: there is nothing to learn")
        if not any(inputs):
            raise DataError(f"{data.train}: every input is empty: there is nothing to learn from")
        numbers = data.values_column is not None
        encoder = Scaler.fit(inputs, data.max_length) if numbers else train_tokenizer(inputs, data)
        task = cls(config, encoder, sorted(counts))
        task.notes = notes
        task.splits = {name: task._encode_rows(part, source_of(data, name)) for name, part in rows.items()}
        if config.training.class_weights == "balanced":
            weights = [len(inputs) / (len(counts) * counts[label]) for label in task.labels]
            task.class_weights = torch.tensor(weights)
        return task

    def examples(self, source: str) -> list[Example]:
        """Labelled examples of another file, encoded: DataError for a label that training did not know."""
        return self._encode_rows(load(source, self.config.data), source)

    def build_model(self) -> Classifier:
        """A network of the configured sizes with fresh weights, drawn from torch's generator."""
        options = self.config.model.arguments()
        if isinstance(self.encoder, Scaler):
            return classifier(len(self.labels), num_channels=self.encoder.channels, **options)
        return classifier(len(self.labels), vocabulary_size=self.encoder.get_vocab_size(), **options)

    def num_tokens(self, example: Example) -> int:
        return len(example.input)

    def collate(self, examples: Sequence[Example]) -> Batch:
        """A batch of these examples; of none at all too, which a process may get of a small global batch."""
        if isinstance(self.encoder, Scaler):
            nothing: NDArray[Any] = np.empty((0, self.encoder.channels), dtype=np.float32)
        else:
            nothing = np.empty(0, dtype=np.int64)
        values = torch.from_numpy(np.concatenate([nothing, *(e.input for e in examples)]))
        offsets = np.cumsum([0, *(len(e.input) for e in examples)])
        targets = torch.tensor([e.target for e in examples], dtype=torch.int64)
        return Batch(Ragged(values, torch.from_numpy(offsets)), targets, [e.row for e in examples])

    def loss_sum(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Sum of the weighted losses of a batch, and the sum of the weights that divides it."""
        logits = model(batch.inputs)
        weights = None if self.class_weights is None else self.class_weights.to(logits)
        smoothing = self.config.training.label_smoothing
        loss: Tensor = CrossEntropyLoss(weights, label_smoothing=smoothing, reduction="sum")(logits, batch.targets)
        count = torch.tensor(float(len(batch.rows))) if weights is None else weights[batch.targets].sum()
        return loss, count.to(loss)

    def metrics(self, model: nn.Module, examples: Sequence[Example], batch_size: int = 256) -> dict[str, Any]:
        """Scores on examples: loss (mean cross-entropy without weights or smoothing) and those of `tasks.metrics`.

        "confusion" counts, for each true label, the labels it was given; what never occurs is left out.
        """
        logits = self._logits(model, examples, batch_size)
        targets = torch.tensor([e.target for e in examples], dtype=torch.int64)
        loss = CrossEntropyLoss(reduction="sum")(logits, targets).item() / max(len(examples), 1)
        confusion = metrics.confusion_matrix(targets.tolist(), logits.argmax(1).tolist(), len(self.labels))
        return {
            "loss": loss,
            "accuracy": metrics.accuracy(confusion),
            "macro_f1": metrics.macro_f1(confusion),
            "mcc": metrics.mcc(confusion),
            "majority_baseline": metrics.majority_baseline(confusion),
            "examples": len(examples),
            "per_class": metrics.per_class(confusion, self.labels),
            "labels": self.labels,
            "confusion": metrics.counts(confusion, self.labels),
        }

    def predictions(
        self, model: nn.Module, inputs: Sequence[Any], probabilities: bool = False, batch_size: int = 256
    ) -> list[dict[str, Any]]:
        """For each input its most probable label and that probability; with `probabilities` those of all labels.

        Inputs are texts, or lists or arrays (T, channels) of numbers. Errors: DataError naming the input.
        """
        if isinstance(inputs, str):
            raise DataError(f"give a list of texts, found one text {inputs[:40]!r}")
        where = [f"input {i}" for i in range(len(inputs))]
        inputs = [value.tolist() if isinstance(value, np.ndarray | Tensor) else value for value in inputs]
        checked = [check_input(value, self.config.data, place) for value, place in zip(inputs, where, strict=True)]
        encoded = [Example(array, 0, i) for i, array in enumerate(self._encode(checked, where))]
        logits = self._logits(model, encoded, batch_size)
        for i in (~logits.isfinite()).any(1).nonzero().flatten().tolist():
            raise DataError(f"input {i}: the model's scores are not finite; is it of the size of the training data?")
        shares = logits.softmax(1)
        results: list[dict[str, Any]] = []
        for row in shares.tolist():
            best = max(range(len(row)), key=row.__getitem__)
            results.append({"label": self.labels[best], "probability": row[best]})
            if probabilities:
                results[-1]["probabilities"] = dict(zip(self.labels, row, strict=True))
        return results

    def save(self, folder: Path) -> None:
        """config.json, labels.json and tokenizer.json or scaler.json into an existing folder."""
        _write_json(folder / "config.json", self.config.model_dump(mode="json"))
        _write_json(folder / "labels.json", self.labels)
        if isinstance(self.encoder, Scaler):
            _write_json(folder / "scaler.json", self.encoder.to_json())
        else:
            self.encoder.save(str(folder / "tokenizer.json"))

    @classmethod
    def load(cls, folder: Path) -> ClassifyTask:
        """The task that `save` wrote, without its data. Errors: DataError where a file is missing or damaged."""
        config = parse_config(_read_json(folder / "config.json"), str(folder / "config.json"))
        encoder: Tokenizer | Scaler
        if config.data.values_column is not None:
            encoder = Scaler.from_json(_read_json(folder / "scaler.json"), str(folder / "scaler.json"))
        else:
            encoder = load_tokenizer(folder / "tokenizer.json")
        labels = _read_json(folder / "labels.json")
        if not isinstance(labels, list) or not labels or not all(isinstance(label, str) for label in labels):
            raise DataError(f"{folder / 'labels.json'}: damaged, expected a list of texts")
        return cls(config, encoder, labels)

    def _encode(self, inputs: Sequence[Any], where: Sequence[str]) -> list[NDArray[Any]]:
        if isinstance(self.encoder, Scaler):
            check_channels(inputs, where, self.encoder.channels)
            encoded: list[NDArray[Any]] = [*self.encoder.encode(inputs)]
        else:
            encoded = [*encode(self.encoder, inputs)]
        longest = self.config.model.longest
        for array, place in zip(encoded, where, strict=True):
            if longest is not None and len(array) > longest:
                raise DataError(
                    f"{place}: {len(array)} steps, and model.max_positions = {longest}: give more of these, or "
                    f"cut what is longer with data.max_length = {longest}"
                )
        return encoded

    def _encode_rows(self, rows: Sequence[Row], source: str) -> list[Example]:
        for row in rows:
            if row.label not in self._number:
                known = ", ".join(self.labels[:20]) + (", ..." if len(self.labels) > 20 else "")
                raise DataError(f"{source}, line {row.line}: label {row.label!r} is not one of training: {known}")
        arrays = self._encode([row.input for row in rows], [f"{source}, line {row.line}" for row in rows])
        return [Example(a, self._number[row.label], row.line) for a, row in zip(arrays, rows, strict=True)]

    @torch.no_grad()
    def _logits(self, model: nn.Module, examples: Sequence[Example], batch_size: int) -> Tensor:
        """(B, C) in float32 on the CPU; the model is in evaluation mode meanwhile."""
        device, training = next(model.parameters()).device, model.training
        model.eval()
        parts = [torch.empty(0, len(self.labels))]
        for part in batches(examples, self.num_tokens, batch_size):
            batch = self.collate(part).to(device)
            parts.append(model(batch.inputs).float().cpu())
        model.train(training)
        return torch.cat(parts)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{path}: {(error.strerror or str(error)).lower()}") from None
    except ValueError as error:
        raise DataError(f"{path}: damaged, {error}") from None
