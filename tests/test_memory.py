"""The memory task: its sequences by hand, scores by hand, learning, and the same bits again after a restart."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from unrolled.config import parse_config
from unrolled.data.values import DataError
from unrolled.ragged import Ragged
from unrolled.run import load, train
from unrolled.tasks import task_class
from unrolled.tasks.batches import TOKENS
from unrolled.tasks.memory import MemoryTask, adding, copying


def values(problem: str = "adding", **memory: Any) -> dict[str, Any]:
    sizes = {"train_examples": 64, "valid_examples": 20, "test_examples": 30}
    return {
        "task": "memory",
        "memory": {"problem": problem, "length": 8, **sizes, **memory},
        "model": {"model": "gru", "embedding_size": 4, "hidden_size": 16, "dropout": 0},
        "training": {"threads": 1, "metric": "loss", "epochs": 1, "eval_every": 1},
    }


def prepare(problem: str = "adding", **memory: Any) -> MemoryTask:
    return MemoryTask.prepare(parse_config(values(problem, **memory)))


class Says(nn.Module):
    """A model whose answer is a function of its inputs."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer, self.weight = answer, nn.Parameter(torch.zeros(1))

    def forward(self, inputs: Ragged) -> Tensor:
        assert not self.training
        return self.answer(inputs)


# Sequences


@pytest.mark.parametrize("length", [2, 3, 50])
def test_adding_marks_two_numbers_and_wants_their_sum(length: int) -> None:
    for seed in range(5):
        steps, wanted = adding(length, np.random.default_rng(seed))
        assert steps.shape == (length, 2)
        numbers, marked = steps.T
        assert sorted(marked.tolist()) == [0] * (length - 2) + [1, 1]
        assert numbers.min() >= 0
        assert numbers.max() < 1
        assert wanted.tolist() == pytest.approx([float(numbers @ marked)])


@pytest.mark.parametrize("length", [1, 2, 30])
def test_copying_wants_ten_digits_again_after_the_delimiter(length: int) -> None:
    steps, wanted = (part.tolist() for part in copying(length, np.random.default_rng(0)))
    digits = steps[:10]
    assert set(digits) <= set(range(1, 9))
    assert steps == [*digits, *[0] * (length - 1), *[9] * 11]
    assert wanted == [*[0] * (length + 10), *digits]
    assert len(steps) == len(wanted) == length + 20


@pytest.mark.parametrize("problem", ["adding", "copying"])
def test_a_sequence_depends_on_seed_part_and_number_alone(problem: str) -> None:
    task, other = prepare(problem), prepare(problem, data_seed=1, train_examples=5)
    train = task.splits["train"]
    batch = task.collate([train[3], train[0]])
    assert batch.rows == [3, 0]
    assert torch.equal(batch.inputs[0], task.collate(train).inputs[3])
    assert [len(part) for part in task.splits.values()] == [64, 20, 30]
    firsts = [task.collate(part[:1]) for part in (*task.splits.values(), task.examples("8"))]
    firsts.append(other.collate(other.splits["train"][:1]))
    assert len({tuple(first.inputs.values.flatten().tolist()) for first in firsts}) == 5
    longer = prepare(problem, train_examples=1000)
    assert torch.equal(
        longer.collate(longer.splits["test"]).inputs.values, task.collate(task.splits["test"]).inputs.values
    )
    moved = batch.to("meta")
    assert moved.inputs.values.device.type == moved.targets.device.type == "meta"


# Scores


def test_scores_of_adding_by_hand() -> None:
    task = prepare()
    examples = task.splits["test"]
    targets = task.collate(examples).targets

    def sums(inputs: Ragged) -> Tensor:
        return torch.stack([(steps[:, 0] * steps[:, 1]).sum(0, keepdim=True) for steps in inputs])

    model = Says(sums).train()
    exact = task.metrics(model, examples, batch_size=7)
    assert model.training
    assert exact["loss"] == pytest.approx(0, abs=1e-12)
    assert exact["accuracy"] == 1
    assert exact["baseline"] == pytest.approx(float((targets - 1).square().mean()))
    assert exact["examples"] == 30
    for off, accuracy in ((0.03, 1), (-0.05, 0)):
        scores = task.metrics(Says(lambda inputs, off=off: sums(inputs) + off), examples)
        assert scores["loss"] == pytest.approx(off**2, rel=1e-4)
        assert scores["accuracy"] == accuracy
    assert task.metrics(model, [])["loss"] == 0


def test_the_baseline_of_adding_is_the_variance_of_the_sum() -> None:
    task = prepare(test_examples=4000)
    ones = Says(lambda inputs: torch.ones(len(inputs), 1))
    scores = task.metrics(ones, task.splits["test"])
    assert scores["loss"] == pytest.approx(scores["baseline"])
    assert scores["baseline"] == pytest.approx(1 / 6, rel=0.05)


def test_scores_of_copying_by_hand() -> None:
    task = prepare("copying")
    examples = task.splits["test"]
    wanted = task.collate(examples).targets

    def guess(inputs: Ragged) -> Tensor:
        """0, and at the end each of the eight digits alike, 1 by a hair."""
        logits = torch.full((len(inputs.values), 10), -100.0)
        last = (inputs.offsets[1:, None] - torch.arange(1, 11)).flatten()
        logits[:, 0] = 0
        logits[last, 0] = -100.0
        logits[last, 1:9] = 0
        logits[last, 1] = 1e-4
        return logits

    scores = task.metrics(Says(guess), examples, batch_size=7)
    assert scores["baseline"] == pytest.approx(10 * math.log(8) / 28)
    assert scores["loss"] == pytest.approx(scores["baseline"], rel=1e-3)
    assert scores["accuracy"] == pytest.approx(float((wanted == 1).sum()) / 300)
    answers = iter(torch.split(wanted, 7 * 28))
    right = task.metrics(Says(lambda _: 100.0 * nn.functional.one_hot(next(answers), 10)), examples, batch_size=7)
    assert right["accuracy"] == 1
    assert right["loss"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("problem", ["adding", "copying"])
def test_long_sequences_are_scored_few_at_a_time(problem: str) -> None:
    task, tokens = prepare(problem), []

    def answer(inputs: Ragged) -> Tensor:
        tokens.append(inputs.lengths.tolist())
        return torch.zeros(len(inputs), 1) if problem == "adding" else torch.zeros(len(inputs.values), 10)

    extra = 0 if problem == "adding" else 20
    fits, beyond = TOKENS // 3 - extra, TOKENS + 1
    examples = [e for length in (fits, fits, fits, fits, beyond, 8) for e in task.examples(str(length))[:1]]
    assert task.metrics(Says(answer), examples)["examples"] == 6
    long, longest = fits + extra, beyond + extra
    assert tokens == [[long] * 3, [long], [longest], [8 + extra]]


@pytest.mark.parametrize("problem", ["adding", "copying"])
def test_the_loss_adds_up_over_parts(problem: str) -> None:
    task = prepare(problem)
    model, examples = task.build_model(), task.splits["train"][:9]
    output = model(task.collate(examples).inputs)
    targets = task.collate(examples).targets
    if problem == "adding":
        expected = nn.functional.mse_loss(output[:, 0], targets)
    else:
        expected = nn.functional.cross_entropy(output, targets)
    loss, count = task.loss_sum(model, task.collate(examples))
    assert_close(loss / count, expected)
    parts = [task.loss_sum(model, task.collate(part)) for part in (examples[:4], [], examples[4:])]
    assert_close(sum(part for part, _ in parts), loss)
    assert_close(sum(part for _, part in parts), count)
    nothing, zero = parts[1]
    model.zero_grad()
    nothing.backward()
    assert float(zero) == 0
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


# Runs


def test_a_run_learns_is_scored_at_another_length_and_predicts_nothing(tmp_path: Path) -> None:
    config = values(length=5, train_examples=2400)
    config["training"] |= {"learning_rate": 0.02, "eval_every": 25}
    result = train({**config, "output_dir": tmp_path / "run"})
    assert result.metrics["test"]["loss"] < result.metrics["test"]["baseline"] / 4
    trained = load(tmp_path / "run")
    assert trained.task.config.memory.length == 5
    assert trained.task.splits == {}
    assert trained.evaluate("5")["loss"] < 0.06
    assert trained.evaluate("40")["examples"] == 30
    assert {path.name for path in trained.folder.iterdir()} == {"config.json", "model.safetensors"}
    for source in ("more.csv", "1", "1000001", "-3", "²"):
        with pytest.raises(DataError, match=f"give their length, from 2 to 1000000, found '{source}'"):
            trained.evaluate(source)
    with pytest.raises(ValueError, match="predicts nothing: score it with unrolled evaluate RUN LENGTH"):
        trained.predict([[[0.5, 1.0]]])


@pytest.mark.parametrize("problem", ["adding", "copying"])
def test_stopped_and_resumed_is_the_same_to_the_bit(problem: str, tmp_path: Path) -> None:
    def outcome(run: Path) -> list[bytes]:
        return [(run / name).read_bytes() for name in ("model-last/model.safetensors", "metrics.jsonl", "metrics.json")]

    config = values(problem)
    config["training"] |= {"batch_size": 20, "eval_every": 2}
    whole = train({**config, "output_dir": tmp_path / "whole"})
    assert whole.steps == 4
    first = {**config, "training": config["training"] | {"max_steps": 3}}
    train({**first, "output_dir": tmp_path / "parts"})
    parts = train({**config, "output_dir": tmp_path / "parts"}, resume=True)
    # the run that was stopped was scored once more where it ended
    lines = [json.loads(line) for line in (parts.folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 3, 4]
    assert outcome(parts.folder)[0] == outcome(whole.folder)[0]
    assert outcome(parts.folder)[2] == outcome(whole.folder)[2]
    with pytest.raises(ValueError, match=r"cannot resume .* with memory\.length = 9: it began with 8"):
        train({**values(problem, length=9), "output_dir": tmp_path / "parts"}, resume=True)


def test_the_sizes_of_the_network_follow_the_problem() -> None:
    assert task_class("memory") is MemoryTask
    task = prepare("copying")
    assert task.build_model()(task.collate(task.splits["train"][:3]).inputs).shape == (3 * 28, 10)
    task = prepare()
    assert task.build_model()(task.collate(task.splits["train"][:3]).inputs).shape == (3, 1)
    assert [prepare(problem).num_tokens(prepare(problem).splits["train"][0]) for problem in ("adding", "copying")] == [
        8,
        28,
    ]
