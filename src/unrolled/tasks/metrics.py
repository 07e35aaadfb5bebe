"""Scores of a classifier, all from its confusion matrix: `confusion[true, predicted]` counts examples.

A score whose definition would divide by 0 is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray


def confusion_matrix(true: Sequence[int], predicted: Sequence[int], num_classes: int) -> NDArray[np.int64]:
    """(C, C) counts, a row for each true class."""
    counts = np.zeros((num_classes, num_classes), dtype=np.int64)
    np.add.at(counts, (np.asarray(true, dtype=np.int64), np.asarray(predicted, dtype=np.int64)), 1)
    return counts


def accuracy(confusion: NDArray[np.int64]) -> float:
    """Share of examples on the diagonal."""
    return _ratio(np.trace(confusion), confusion.sum())


def majority_baseline(confusion: NDArray[np.int64]) -> float:
    """Accuracy of always giving the most frequent true class of these examples."""
    return _ratio(confusion.sum(1).max(initial=0), confusion.sum())


def per_class(confusion: NDArray[np.int64], labels: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Precision, recall, F1 (their harmonic mean) and the number of true examples of each class."""
    table = {}
    sums = np.diag(confusion), confusion.sum(1), confusion.sum(0)
    for label, hits, true, predicted in zip(labels, *sums, strict=True):
        table[label] = {
            "precision": _ratio(hits, predicted),
            "recall": _ratio(hits, true),
            "f1": _ratio(2 * hits, true + predicted),
            "count": int(true),
        }
    return table


def counts(confusion: NDArray[np.int64], labels: Sequence[str]) -> dict[str, dict[str, int]]:
    """{true label: {predicted label: count}} without the zeros, of which many classes have very many."""
    table: dict[str, dict[str, int]] = {}
    for true, predicted in np.argwhere(confusion).tolist():
        table.setdefault(labels[true], {})[labels[predicted]] = int(confusion[true, predicted])
    return table


def macro_f1(confusion: NDArray[np.int64]) -> float:
    """Mean F1 over the classes that occur, as a true or as a predicted label."""
    size = confusion.sum(0) + confusion.sum(1)
    occurs = size > 0
    return float(np.mean(2 * np.diag(confusion)[occurs] / size[occurs])) if occurs.any() else 0.0


def mcc(confusion: NDArray[np.int64]) -> float:
    """Matthews correlation coefficient for any number of classes (Gorodkin 2004, R_K): 1 perfect, 0 chance."""
    true, predicted = confusion.sum(1).astype(float), confusion.sum(0).astype(float)
    total = float(confusion.sum())
    covariance = float(np.trace(confusion)) * total - float(true @ predicted)
    return _ratio(covariance, sqrt((total**2 - predicted @ predicted) * (total**2 - true @ true)))


def _ratio(above: Any, below: Any) -> float:
    return float(above / below) if below else 0.0
