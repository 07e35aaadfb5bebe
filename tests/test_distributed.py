"""Several processes share each batch and train the weights that one process trains, within rounding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from toy import files, python, toy_config
from unrolled.config import Config, to_yaml
from unrolled.run import train


def without_dropout(folder: Path, run: str, **training: Any) -> Config:
    """Class weights make the counts of two shares differ, and the last batch of 192 by 19 has two sequences."""
    options = {"batch_size": 19, "class_weights": "balanced", "epochs": 1, "checkpoint_every": 4, **training}
    config = toy_config(folder, run, **options)
    return config.model_copy(update={"model": config.model.model_copy(update={"dropout": 0.0})})


def torchrun(config: Config, folder: Path, *options: str, processes: int = 2) -> Any:
    (folder / "config.yaml").write_text(to_yaml(config))
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}", "-m", "unrolled"]
    return python(*launcher, "train", str(folder / "config.yaml"), "--json", *options)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A run by two processes, and what they printed."""
    folder = tmp_path_factory.mktemp("two")
    result = torchrun(without_dropout(folder, "run"), folder)
    assert result.returncode == 0, result.stderr
    return folder / "run", result


def assert_same_weights(found: Path, expected: Path) -> None:
    left, right = (load_file(run / "model-last" / "model.safetensors") for run in (found, expected))
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=1e-4, atol=1e-5)


def test_two_processes_train_the_weights_of_one(two: tuple[Path, Any], tmp_path: Path) -> None:
    one = train(without_dropout(tmp_path, "run"))
    assert_same_weights(two[0], one.folder)
    lines = [json.loads((run / "metrics.jsonl").read_text()) for run in (two[0], one.folder)]
    assert lines[0]["train_loss"] == pytest.approx(lines[1]["train_loss"], rel=1e-5)
    assert lines[0]["valid_accuracy"] == lines[1]["valid_accuracy"]
    assert json.loads((two[0] / "environment.json").read_text())["processes"] == 2


def test_other_weights_are_told_apart(two: tuple[Path, Any], tmp_path: Path) -> None:
    """The comparison above can fail."""
    other = train(without_dropout(tmp_path, "run", class_weights="none"))
    with pytest.raises(AssertionError, match="not close"):
        assert_same_weights(other.folder, two[0])


def test_only_the_first_process_prints_and_writes(two: tuple[Path, Any]) -> None:
    run, result = two
    printed = json.loads(result.stdout)
    assert printed["folder"] == str(run)
    assert printed["steps"] == 11
    assert result.stderr.count("epoch 1.00") == 1
    assert (run / "train.log").read_text().count("epoch 1.00") == 1
    assert "Traceback" not in result.stderr


def test_a_run_of_two_processes_is_resumed_by_one(two: tuple[Path, Any], tmp_path: Path) -> None:
    for path in sorted(two[0].parent.rglob("*")):
        target = tmp_path / path.relative_to(two[0].parent)
        target.mkdir() if path.is_dir() else target.write_bytes(path.read_bytes())
    resumed = train(without_dropout(tmp_path, "run", epochs=2), resume=True)
    whole = train(without_dropout(tmp_path, "whole", epochs=2))
    assert_same_weights(resumed.folder, whole.folder)


def test_nonfinite_stops_every_process(tmp_path: Path) -> None:
    rows = [{"values": [[float(i % 7)]] * (i % 5 + 1), "label": "ab"[i % 2]} for i in range(40)]
    (tmp_path / "numbers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = toy_config(tmp_path, epochs=50, eval_every=1000, learning_rate=1e30, max_grad_norm=0.0, optimizer="sgd")
    data = {"train": str(tmp_path / "numbers.jsonl"), "values_column": "values"}
    config = Config.model_validate(config.model_dump() | {"data": data})
    result = torchrun(config, tmp_path)
    assert result.returncode == 1, result.stderr
    assert result.stdout == ""
    assert result.stderr.count("unrolled: error: step") == 1
    assert "unrolled/training" not in result.stderr, "a traceback of ours"
    (folder,) = (tmp_path / "run").glob("nonfinite-*")
    report = json.loads((folder / "report.json").read_text())
    assert f"step {report['step']}: the loss is not finite; by the equations the first is the" in result.stderr
    assert len(report["rows"]) == len(load_file(folder / "batch.safetensors")["targets"]) == 16
    assert "model.safetensors" in files(folder)
