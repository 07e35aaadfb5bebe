"""The loop and what it leaves behind: folders, options, refusals, interruption, loading."""

from __future__ import annotations

import json
import os
import signal
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from toy import files, python, toy_config
from unrolled.config import Config, parse_config, read_yaml
from unrolled.run import load, train
from unrolled.training import Interrupted, Progress, checkpoint, loop
from unrolled.training.session import Signals


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two epochs."""
    return train(toy_config(tmp_path_factory.mktemp("run"))).folder


# The run folder


def test_checkpoints_can_be_read_by_whom_new_files_can(run: Path) -> None:
    mode = stat.S_IMODE((run / "config.yaml").stat().st_mode)
    for path in (run / "model-best").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == mode, path


def test_run_folder_holds_what_is_promised_and_no_pickle(run: Path) -> None:
    model = {"config.json", "labels.json", "model.safetensors", "tokenizer.json"}
    assert set(os.listdir(run)) == {
        *("config.yaml", "environment.json", "metrics.json", "metrics.jsonl", "train.log", "model-best", "model-last")
    }
    assert set(os.listdir(run / "model-best")) == model
    assert set(os.listdir(run / "model-last")) == model | {"optimizer.safetensors", "trainer_state.json"}
    assert json.loads((run / "environment.json").read_text())["threads"] == 1
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [1.0, 2.0]
    summary = json.loads((run / "metrics.json").read_text())
    best = max(lines, key=lambda line: line["valid_accuracy"])
    assert summary["best_step"] == best["step"]
    assert summary["valid"]["accuracy"] == best["valid_accuracy"]
    assert summary["test"]["examples"] == 24
    assert "step 24" in (run / "train.log").read_text()


def test_config_yaml_makes_the_same_run_again(run: Path, tmp_path: Path) -> None:
    config = parse_config(read_yaml(run / "config.yaml"))
    assert config.output_dir == run
    again = train(config.model_copy(update={"output_dir": tmp_path / "again"})).folder
    assert files(again / "model-last") | {"config.json": b""} == files(run / "model-last") | {"config.json": b""}
    assert (again / "metrics.jsonl").read_bytes() == (run / "metrics.jsonl").read_bytes()


def test_a_folder_that_is_not_empty_is_refused(run: Path, tmp_path: Path) -> None:
    before = files(run / "model-last")
    config = parse_config(read_yaml(run / "config.yaml"))
    with pytest.raises(ValueError, match=r"not empty: .*--resume.*--overwrite"):
        train(config)
    assert files(run / "model-last") == before
    with pytest.raises(ValueError, match="choose one"):
        train(config, resume=True, overwrite=True)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"no run to resume: it has no config\.yaml"):
        train(config.model_copy(update={"output_dir": tmp_path}), resume=True)
    with pytest.raises(ValueError, match="is a file"):
        train(config.model_copy(update={"output_dir": tmp_path / "notes.txt"}))
    with pytest.raises(ValueError, match="say which"):
        train(config.model_copy(update={"output_dir": None}), resume=True)


def test_overwrite_replaces_the_run_and_spares_other_files(tmp_path: Path) -> None:
    train(toy_config(tmp_path, epochs=1))
    (tmp_path / "run" / "notes.txt").write_text("mine")
    train(toy_config(tmp_path, epochs=1, eval_every=100, max_steps=2), overwrite=True)
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 1


def test_overwrite_replaces_runs_alone(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("# mine")
    with pytest.raises(ValueError, match=r"holds no run, it has no environment\.json"):
        train(toy_config(tmp_path, run="."), overwrite=True)
    assert (tmp_path / "config.yaml").read_text() == "# mine"


def test_two_processes_cannot_train_in_one_folder(tmp_path: Path) -> None:
    config = toy_config(tmp_path, epochs=1)
    errors: list[str] = []

    def intrude(now: Progress) -> None:
        if now.step == 1:
            for options in ({"overwrite": True}, {"resume": True}):
                result = python("-c", INTRUDER, str(tmp_path), json.dumps(options), cwd=Path(__file__).parent)
                errors.append(result.stdout)

    train(config, progress=intrude)
    assert errors == [f"another process is training in the folder {tmp_path / 'run'}\n"] * 2
    train(config, overwrite=True)


INTRUDER = """
import json, sys
from pathlib import Path
from toy import toy_config
from unrolled.run import train

try:
    train(toy_config(Path(sys.argv[1]), epochs=1), **json.loads(sys.argv[2]))
except ValueError as error:
    print(error)
"""


def test_a_full_disk_is_named_and_the_last_checkpoint_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = toy_config(tmp_path, epochs=2)
    train(config.model_copy(update={"training": config.training.model_copy(update={"epochs": 1})}))
    before = files(tmp_path / "run" / "model-last")

    def full(*_: Any) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(loop, "save_model", full)
    with pytest.raises(OSError, match=r"\.draft: I/O error: No space left"):
        train(config, resume=True)
    assert files(tmp_path / "run" / "model-last") == before


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    config = toy_config(tmp_path, epochs=1)
    run = train(config).folder
    for name in (
        *("model-last/trainer_state.json", "model-last/optimizer.safetensors", "model-last/model.safetensors"),
        *("model-best/model.safetensors", "environment.json"),
    ):
        whole = (run / name).read_bytes()
        (run / name).write_bytes(b"[]")
        with pytest.raises(ValueError, match=rf"{name.partition('/')[0]}.*damaged"):
            train(config, resume=True)
        (run / name).write_bytes(whole)
    lines = (run / "metrics.jsonl").read_bytes()
    (run / "metrics.jsonl").write_bytes(lines + b'\xff\n{}\n[]\n{"step": 1')
    train(config, resume=True)
    assert (run / "metrics.jsonl").read_bytes() == lines


def test_data_that_cannot_be_used_leaves_the_old_run_alone(tmp_path: Path) -> None:
    config = toy_config(tmp_path, epochs=1)
    before = files(train(config).folder / "model-last")
    (tmp_path / "words.csv").write_text("text,label\nab,\n")
    with pytest.raises(ValueError, match=r"words\.csv, line 2"):
        train(config, overwrite=True)
    assert files(tmp_path / "run" / "model-last") == before


def test_without_output_dir_the_folder_is_named_after_task_and_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = toy_config(tmp_path, max_steps=1).model_copy(update={"output_dir": None})
    folders = [train(config).folder for _ in range(2)]
    assert folders[0] != folders[1]
    assert all(folder.parent == Path("runs") and folder.name.startswith("classify-") for folder in folders)


# Options: each changes the run


OPTIONS: list[dict[str, Any]] = [
    {},
    {"optimizer": "sgd"},
    {"optimizer": "sgd", "momentum": 0.0},
    {"learning_rate": 0.02},
    {"weight_decay": 0.0},
    {"max_grad_norm": 0.0},
    {"scheduler": "cosine"},
    {"scheduler": "plateau", "eval_every": 2, "plateau_patience": 1},
    {"scheduler": "plateau", "eval_every": 2, "plateau_patience": 1, "plateau_factor": 0.1},
    {"warmup_steps": 5},
    {"label_smoothing": 0.1},
    {"class_weights": "balanced"},
    {"seed": 1},
    {"batch_size": 8},
    {"batch_tokens": 100, "batch_size": 32},
    {"precision": "float64"},
    {"epochs": 2},
    {"max_steps": 3},
]


def test_each_option_changes_the_weights(tmp_path: Path) -> None:
    found: dict[bytes, dict[str, Any]] = {}
    for options in OPTIONS:
        folder = train(toy_config(tmp_path, **{"epochs": 1, **options}), overwrite=True).folder
        weights = load_file(folder / "model-last" / "model.safetensors")
        key = b"".join(tensor.float().numpy().tobytes() for tensor in weights.values())
        assert key not in found, f"{options} trains the same weights as {found[key]}"
        found[key] = options


def test_evaluations_and_checkpoints_come_when_asked(tmp_path: Path) -> None:
    saved: list[int] = []
    state = tmp_path / "run" / "model-last" / "trainer_state.json"

    def look(now: Progress) -> None:
        if state.exists():
            saved.append(json.loads(state.read_text())["step"])

    train(toy_config(tmp_path, epochs=1, eval_every=5, checkpoint_every=3), progress=look)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [5, 10, 12]
    assert sorted(set(saved)) == [3, 6, 9]


@pytest.mark.parametrize("metric", ["accuracy", "loss", "macro_f1", "mcc"])
def test_best_is_by_the_named_metric(metric: str, tmp_path: Path) -> None:
    config = toy_config(tmp_path, epochs=1, eval_every=2, metric=metric, scheduler="plateau", plateau_patience=1)
    result = train(config)
    lines = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    sign = 1 if metric == "loss" else -1
    expected = min(lines, key=lambda line: (sign * line[f"valid_{metric}"], line["step"]))
    assert result.best_step == expected["step"] == max(line["step"] for line in lines if line["best"])
    assert result.metrics["valid"][metric] == pytest.approx(expected[f"valid_{metric}"])


def test_patience_ends_a_run_that_gets_no_better(tmp_path: Path) -> None:
    result = train(toy_config(tmp_path, epochs=50, learning_rate=1e-12, patience=3))
    assert (result.stopped, result.steps, result.best_step) == ("patience", 48, 12)
    with pytest.raises(ValueError, match="need validation examples"):
        train(without_validation(toy_config(tmp_path, patience=1)), overwrite=True)


def without_validation(config: Config) -> Config:
    return config.model_copy(update={"data": config.data.model_copy(update={"valid_fraction": 0.0})})


def test_without_validation_examples_the_last_model_is_the_best(tmp_path: Path) -> None:
    result = train(without_validation(toy_config(tmp_path, epochs=1)))
    assert result.best_step == result.steps == 14
    assert set(result.metrics) == {"test"}
    best, last = (files(result.folder / name)["model.safetensors"] for name in ("model-best", "model-last"))
    assert best == last


def test_training_tells_its_progress_and_leaves_the_process_as_it_was(tmp_path: Path) -> None:
    seen: list[Progress] = []
    handlers, random = signal.getsignal(signal.SIGINT), torch.get_rng_state()
    train(toy_config(tmp_path, epochs=1, precision="float64", threads=2), progress=seen.append)
    assert [now.step for now in seen] == list(range(1, 13))
    assert [now.done for now in seen] == pytest.approx([step / 12 for step in range(1, 13)])
    assert all(now.tokens_per_second > 0 and now.seconds_left >= 0 for now in seen)
    assert seen[-1].seconds_left == 0
    assert signal.getsignal(signal.SIGINT) is handlers
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.get_num_threads() == 1
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("device", ["tpu", "cuda:x", "cpu:1", "cuda:999"])
def test_a_device_that_is_not_there_is_a_clear_error(device: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"training.device .*{device}"):
        train(toy_config(tmp_path, device=device))


# Interruption


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_keeps_its_last_step_and_goes_on_to_the_same_bits(
    number: signal.Signals, run: Path, tmp_path: Path
) -> None:
    def interrupt(now: Progress) -> None:
        if now.step == 17:
            os.kill(os.getpid(), number)

    config = parse_config(read_yaml(run / "config.yaml")).model_copy(update={"output_dir": tmp_path / "run"})
    with pytest.raises(Interrupted, match="after step 18") as caught:
        train(config, progress=interrupt)
    assert (caught.value.folder, caught.value.step, caught.value.signal) == (tmp_path / "run", 18, number)
    train(config, resume=True)
    for name in ("model.safetensors", "optimizer.safetensors", "trainer_state.json"):
        assert (tmp_path / "run" / "model-last" / name).read_bytes() == (run / "model-last" / name).read_bytes()


def test_a_second_ctrl_c_stops_at_once() -> None:
    with Signals() as signals:
        signal.raise_signal(signal.SIGINT)
        assert signals.received == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


# Loading


def test_load_gives_the_best_model_as_a_module_that_predicts(run: Path) -> None:
    trained = load(run)
    assert trained.folder == run / "model-best"
    assert isinstance(trained.model, nn.Module)
    assert not trained.model.training
    stored = load_file(run / "model-best" / "model.safetensors")
    assert all(torch.equal(stored[name], tensor) for name, tensor in trained.model.state_dict().items())
    rows = trained.predict(["aaaa", "dddd", ""], probabilities=True)
    assert [row["label"] for row in rows[:2]] == ["more", "less"]
    assert all(sum(row["probabilities"].values()) == pytest.approx(1, abs=1e-6) for row in rows)
    summary = json.loads((run / "metrics.json").read_text())
    metrics = trained.evaluate(trained.config.data.train)
    assert metrics["examples"] == 240
    assert metrics["accuracy"] > summary["test"]["majority_baseline"] + 0.2
    assert load(run / "model-last").folder == run / "model-last"


def test_load_of_what_is_no_model_is_a_clear_error(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such folder"):
        load(tmp_path / "nothing")
    with pytest.raises(ValueError, match="no model in this folder"):
        load(tmp_path)
    broken = tmp_path / "broken"
    checkpoint.commit(broken, lambda draft: [(draft / n).write_bytes(b) for n, b in files(run / "model-best").items()])
    (broken / "model.safetensors").write_bytes(b"{}")
    with pytest.raises(ValueError, match="not the weights of this model"):
        load(broken)


def test_float64_runs_predict_in_float64(tmp_path: Path) -> None:
    trained = load(train(toy_config(tmp_path, epochs=1, precision="float64")).folder)
    assert {parameter.dtype for parameter in trained.model.parameters()} == {torch.float64}
    assert trained.predict(["aaaa"])[0]["label"] in ("more", "less")
