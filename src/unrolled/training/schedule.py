"""How the learning rate changes, which model is best, and when to stop."""

from __future__ import annotations

import math
from dataclasses import dataclass

from unrolled.config import TrainingConfig


@dataclass
class Schedule:
    """The learning rate of each step and what the evaluations so far say: all its state is these numbers.

    rate(step) = learning_rate * warm-up * decay, with warm-up = (step + 1) / warmup_steps until it reaches 1, and decay
    cosine: (1 + cos(pi * p)) / 2, p the share done of what was left to do when the warm-up ended;
    plateau: plateau_factor to the number of times the metric stood still for plateau_patience evaluations.
    """

    best: float | None = None
    best_step: int = 0
    evaluations_since_best: int = 0
    evaluations_since_decay: int = 0
    decays: int = 0
    done_at_warmup: float = 0.0

    def rate(self, training: TrainingConfig, step: int, done: float) -> float:
        """Of step number `step`, counted from 0, when the share `done` of all training lies behind."""
        rate = training.learning_rate
        if step < training.warmup_steps:
            return rate * (step + 1) / training.warmup_steps
        if step == training.warmup_steps:
            self.done_at_warmup = done
        if training.scheduler == "cosine":
            share = (done - self.done_at_warmup) / (1 - self.done_at_warmup)
            return rate * (1 + math.cos(math.pi * share)) / 2
        if training.scheduler == "plateau":
            return float(rate * training.plateau_factor**self.decays)
        return rate

    def observe(self, training: TrainingConfig, value: float, step: int) -> bool:
        """Take in the metric of an evaluation; True if it is the best so far. NaN never is."""
        sign = -1.0 if training.metric == "loss" else 1.0
        if math.isfinite(value) and (self.best is None or sign * value > sign * self.best):
            self.best, self.best_step = value, step
            self.evaluations_since_best = self.evaluations_since_decay = 0
            return True
        self.evaluations_since_best += 1
        self.evaluations_since_decay += 1
        if training.scheduler == "plateau" and self.evaluations_since_decay >= training.plateau_patience:
            self.decays += 1
            self.evaluations_since_decay = 0
        return False

    def exhausted(self, training: TrainingConfig) -> bool:
        return 0 < training.patience <= self.evaluations_since_best
