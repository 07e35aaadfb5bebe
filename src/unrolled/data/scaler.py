"""Numbers to numbers of one size: each channel less its mean, divided by its deviation, both of the training data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unrolled.data.values import LARGEST, DataError, Numbers


class Scaler:
    """`mean` and `deviation` of each channel over all time steps in training; only `max_length` steps of each count."""

    def __init__(self, mean: Sequence[float], deviation: Sequence[float], max_length: int = 0) -> None:
        self.mean, self.deviation = np.asarray(mean, dtype=float), np.asarray(deviation, dtype=float)
        self.max_length = max_length

    @classmethod
    def fit(cls, sequences: Sequence[Numbers], max_length: int = 0) -> Scaler:
        """A channel that never changes keeps deviation 1. At least one sequence must have a step."""
        steps = np.concatenate([np.array(s[: max_length or None], dtype=float) for s in sequences if s])
        mean, deviation = steps.mean(0), steps.std(0)
        # equal numbers have a deviation too, by rounding; and tiny ones have none
        changes = (steps.max(0) > steps.min(0)) & (deviation > 0)
        mean, deviation = np.where(changes, mean, steps[0]), np.where(changes, deviation, 1.0)
        return cls(mean.tolist(), deviation.tolist(), max_length)

    @property
    def channels(self) -> int:
        return len(self.mean)

    def encode(self, sequences: Sequence[Numbers]) -> list[NDArray[np.float32]]:
        """(T, channels) of each sequence; T = 0 for an empty one. What is beyond float32 is brought to its border."""
        kept = [s[: self.max_length or None] for s in sequences]
        arrays = [np.array(s, dtype=float).reshape(-1, self.channels) for s in kept]
        with np.errstate(over="ignore"):
            scaled = [(a - self.mean) / self.deviation for a in arrays]
        return [np.clip(a, -LARGEST, LARGEST).astype(np.float32) for a in scaled]

    def to_json(self) -> dict[str, Any]:
        return {"mean": self.mean.tolist(), "deviation": self.deviation.tolist(), "max_length": self.max_length}

    @classmethod
    def from_json(cls, saved: Any, source: str) -> Scaler:
        """DataError naming `source` where `saved` is not what `to_json` gives."""
        try:
            scaler = cls(saved["mean"], saved["deviation"], int(saved["max_length"]))
            if scaler.mean.ndim == 1 and scaler.mean.shape == scaler.deviation.shape and (scaler.deviation > 0).all():
                return scaler
        except (KeyError, TypeError, ValueError):
            pass
        raise DataError(f"{source}: damaged, expected mean and deviation of each channel, and max_length")
