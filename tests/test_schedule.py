"""The learning rate, which model is the best, and the optimizer."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unrolled
from toy import toy_config
from unrolled.config import TrainingConfig
from unrolled.run import train
from unrolled.training.optimizer import clip_gradient, gradient_norm, make_optimizer
from unrolled.training.schedule import Schedule

# The learning rate


def rates(steps: int, **options: Any) -> list[float]:
    training, schedule = TrainingConfig(learning_rate=1.0, **options), Schedule()
    return [schedule.rate(training, step, step / steps) for step in range(steps)]


def test_warmup_rises_in_equal_steps_to_the_learning_rate() -> None:
    assert rates(6, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_cosine_falls_from_the_end_of_the_warmup_to_zero() -> None:
    found = rates(12, warmup_steps=2, scheduler="cosine")
    expected = [0.5, 1.0, *((1 + math.cos(math.pi * k / 10)) / 2 for k in range(10))]
    assert found == pytest.approx(expected, abs=1e-15)


def test_the_last_step_of_a_run_by_epochs_is_one_and_the_run_by_steps_is_the_same(tmp_path: Path) -> None:
    """The first step takes the whole rate, the last not 0: 192 training words are 12 batches of 16."""
    options: dict[str, Any] = {"scheduler": "cosine", "eval_every": 1, "learning_rate": 1e-3}
    found = []
    for run, own in (("epochs", {"epochs": 1}), ("steps", {"epochs": 9, "max_steps": 12})):
        folder = train(toy_config(tmp_path, run, **options, **own)).folder
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]
        found.append([line["learning_rate"] for line in lines])
    expected = [1e-3 * (1 + math.cos(math.pi * k / 12)) / 2 for k in range(12)]
    assert found[0] == pytest.approx(expected)
    assert found[1] == pytest.approx(expected)
    train(toy_config(tmp_path, "warm", scheduler="cosine", epochs=1, warmup_steps=11))  # one step left to fall in


def test_plateau_decays_each_time_the_metric_stands_still() -> None:
    training = TrainingConfig(learning_rate=1.0, scheduler="plateau", plateau_factor=0.1, plateau_patience=2)
    schedule, found = Schedule(), []
    for step, value in enumerate([0.5, 0.5, 0.4, 0.6, 0.6, 0.6, 0.6, 0.6]):
        schedule.observe(training, value, step)
        found.append(schedule.rate(training, step, 0.0))
    assert found == pytest.approx([1, 1, 0.1, 0.1, 0.1, 0.01, 0.01, 0.001])


def test_best_is_highest_and_for_the_loss_lowest_and_never_nan() -> None:
    values = [math.nan, 0.5, 0.7, 0.7, 0.6, math.inf]
    for metric, better in (("accuracy", [0, 1, 1, 0, 0, 0]), ("loss", [0, 1, 0, 0, 0, 0])):
        schedule, training = Schedule(), TrainingConfig(metric=metric, patience=3)
        assert [schedule.observe(training, value, i) for i, value in enumerate(values)] == [bool(b) for b in better]
        assert schedule.exhausted(training)


# The optimizer


def test_norm_is_global_and_survives_the_range_of_float32() -> None:
    model = nn.Linear(2, 1)
    model.weight.grad, model.bias.grad = torch.tensor([[3e30, 0.0]]), torch.tensor([4e30])
    norm = gradient_norm(model)
    assert norm == pytest.approx(5e30)
    clip_gradient(model, norm, 1.0)
    torch.testing.assert_close(model.weight.grad, torch.tensor([[0.6, 0.0]]))
    torch.testing.assert_close(model.bias.grad, torch.tensor([0.8]))


def test_only_weight_matrices_decay() -> None:
    model = unrolled.nn.RNN(2, 3, learn_initial_state=True)
    decay = {
        id(parameter): group["weight_decay"]
        for group in make_optimizer(model, TrainingConfig(weight_decay=0.5)).param_groups
        for parameter in group["params"]
    }
    found = {name: decay[id(parameter)] for name, parameter in model.named_parameters()}
    weights = {"weight_ih_l0": 0.5, "weight_hh_l0": 0.5}
    assert found == dict.fromkeys(found, 0.0) | weights
