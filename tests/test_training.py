"""The loop and what it leaves behind: schedules, folders, refusals, the guard against NaN, interruption."""

from __future__ import annotations

import json
import math
import os
import signal
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

import unrolled
from toy import files, python, toy_config
from unrolled import Ragged
from unrolled.config import Config, TrainingConfig, parse_config, read_yaml
from unrolled.run import load, train
from unrolled.training import Interrupted, NonFiniteError, Progress, checkpoint, fit, loop
from unrolled.training.guard import find_nonfinite
from unrolled.training.optimizer import clip_gradient, gradient_norm, make_optimizer
from unrolled.training.schedule import Schedule
from unrolled.training.session import Signals


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two epochs."""
    return train(toy_config(tmp_path_factory.mktemp("run"))).folder


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


# Folders replaced whole


class Killed(BaseException):
    """Stands for SIGKILL: nothing but the test catches it."""


def killed_at(monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    """Die instead of making the `call`-th change to the file system."""
    made = 0

    def guarded(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            nonlocal made
            made += 1
            if made == call:
                raise Killed
            return function(*args, **kwargs)

        return wrapper

    for name in ("mkdir", "rename", "replace", "unlink", "rmdir", "fsync", "chmod", "open"):
        monkeypatch.setattr(os, name, guarded(getattr(os, name)))


def test_a_kill_at_any_moment_leaves_the_old_or_the_new_folder_whole(tmp_path: Path) -> None:
    def writer(value: int) -> Callable[[Path], None]:
        def write(draft: Path) -> None:
            for name in ("a", "b"):
                descriptor = os.open(draft / name, os.O_CREAT | os.O_WRONLY)
                os.write(descriptor, str(value).encode())
                os.close(descriptor)

        return write

    def content() -> set[bytes]:
        place = checkpoint.committed(folder)
        assert place is not None
        found = files(place)
        assert set(found) == {"a", "b"}
        return set(found.values())

    folder, calls, switched = tmp_path / "model-last", 0, []
    while True:
        calls += 1
        checkpoint.remove(folder)
        checkpoint.commit(folder, writer(1))
        with pytest.MonkeyPatch.context() as patch:
            killed_at(patch, calls)
            try:
                checkpoint.commit(folder, writer(2))
                killed = False
            except Killed:
                killed = True
        assert content() in ({b"1"}, {b"2"})
        switched.append(content() == {b"2"})
        checkpoint.commit(folder, writer(3))
        assert content() == {b"3"}
        assert [path.name for path in tmp_path.iterdir()] == ["model-last"]
        if not killed:
            break
    assert calls > 12
    assert switched == sorted(switched)
    assert 0 < sum(switched) < len(switched)


def test_checkpoints_can_be_read_by_whom_new_files_can(run: Path) -> None:
    mode = stat.S_IMODE((run / "config.yaml").stat().st_mode)
    for path in (run / "model-best").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == mode, path


# The run folder


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


# The guard against NaN and infinity


class Growth(nn.Module):
    """h_t = relu(w h_{t-1} + x_t): one unit that grows without bound."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.rnn = unrolled.nn.RNN(1, 1, nonlinearity="relu", bias=False)
        self.linear = unrolled.nn.Linear(1, 1)
        with torch.no_grad():
            self.rnn.weight_ih_l0.fill_(1.0)
            self.rnn.weight_hh_l0.fill_(weight)
            self.linear.weight.fill_(1.0)

    def forward(self, inputs: Ragged) -> Tensor:
        return self.linear(unrolled.nn.last(self.rnn(inputs)[1]))


class GrowthTask:
    """The mean of the final states of `sequences` is the loss."""

    notes: ClassVar[list[str]] = []

    def __init__(self, weight: float, sequences: list[list[float]]) -> None:
        self.weight, self.splits = weight, {"train": list(enumerate(sequences))}

    def build_model(self) -> nn.Module:
        return Growth(self.weight)

    def num_tokens(self, example: Any) -> int:
        return len(example[1])

    def collate(self, examples: Any) -> Any:
        from unrolled.tasks.classify import Batch

        inputs = Ragged.from_list([torch.tensor(values).reshape(-1, 1) for _, values in examples])
        return Batch(inputs, torch.zeros(len(examples), dtype=torch.int64), [row + 100 for row, _ in examples])

    def loss_sum(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        logits = model(batch.inputs)
        return logits.sum(), torch.tensor(float(len(logits)))

    def metrics(self, model: nn.Module, examples: Any, batch_size: int) -> dict[str, Any]:
        return {}

    def save(self, folder: Path) -> None:
        (folder / "config.json").write_text("{}")


@pytest.mark.parametrize(
    ("weight", "sequences", "kind", "finding"),
    [
        (1e20, [[1.0], [1.0, 1.0, 1.0, 1.0], []], "loss", ("state h_t", "rnn (layer 0, forward)", 2, 101)),
        (1e5, [[0.0, 1e-37] + [0.0] * 8, [1.0]], "gradient", ("gradient dh_t", "rnn (layer 0, forward)", 1, 100)),
        (1.0, [[1.0], [1.0, math.nan, 1.0]], "loss", ("input", None, 1, 101)),
        (math.inf, [[1.0]], "loss", ("parameter rnn.weight_hh_l0", None, None, None)),
    ],
)
def test_nonfinite_stops_before_the_weights_change_and_names_layer_and_step(
    weight: float, sequences: list[list[float]], kind: str, finding: tuple[Any, ...], tmp_path: Path
) -> None:
    task = GrowthTask(weight, sequences)
    config = toy_config(tmp_path, batch_size=8, max_grad_norm=1.0)
    with pytest.raises(NonFiniteError, match=f"step 0: the {kind} is not finite") as caught:
        fit(config, lambda _: task)
    folder = tmp_path / "run" / "nonfinite-0"
    report = json.loads((folder / "report.json").read_text())
    assert report["message"] == str(caught.value)
    quantity, layer, step, row = finding
    found = report["finding"]
    assert (found["quantity"], found["layer"], found["step"]) == (quantity, layer, step)
    assert found["sequence"] == (None if row is None else report["rows"].index(row))
    assert (f"line {row} " in report["message"]) == (row is not None)
    batch = load_file(folder / "batch.safetensors")
    expected = task.collate([task.splits["train"][row - 100] for row in report["rows"]])
    torch.testing.assert_close(batch["values"], expected.inputs.values, equal_nan=True)
    assert batch["offsets"].tolist() == expected.inputs.offsets.tolist()
    after = load_file(folder / "model.safetensors")
    before = Growth(weight).state_dict()
    assert all(torch.equal(after[name], before[name]) for name in ("rnn.weight_hh_l0", "linear.weight"))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("RNN", {}),
        ("LSTM", {}),
        ("GRU", {}),
        ("RNN", {"zoneout": 0.1, "recurrent_dropout": 0.1}),
        ("LSTM", {"peephole": True}),
        ("LSTM", {"proj_size": 1}),
        ("GRU", {"reset": "before"}),
    ],
)
@pytest.mark.parametrize("quantity", ["state h_t", "gradient dh_t"])
def test_nonfinite_is_found_in_every_cell(name: str, options: dict[str, Any], quantity: str) -> None:
    layer = getattr(unrolled.nn, name)(2, 2, num_layers=2, bidirectional=True, **options).eval()
    x, weights = torch.zeros(5, 2), torch.zeros(5, 2 * (options.get("proj_size") or 2))
    if quantity == "state h_t":
        layer.weight_ih_l0_reverse.data[:] = torch.tensor([1e30, -1e30])
        x[3] = 1e30  # infinity less infinity
    else:
        for parameter_name, parameter in layer.named_parameters():
            nn.init.constant_(parameter, "weight_hr" in parameter_name)
        layer.weight_hh_l1.data.fill_(1e4)
        weights[4] = 1e38  # reaches the step before through W_hh
    inputs = Ragged(x, [0, 2, 2, 5])
    found = find_nonfinite(layer, inputs, lambda: (layer(inputs)[0].values * weights).sum())
    direction = "layer 0, reverse" if quantity == "state h_t" else "layer 1, forward"
    assert (found.quantity, found.step, found.sequence) == (quantity, 1, 2)
    assert found.layer == f"{name} ({direction})"


def test_weights_that_are_not_finite_are_never_kept(tmp_path: Path) -> None:
    task = GrowthTask(0.5, [[1.0], [1.0]])
    config = toy_config(tmp_path, optimizer="sgd", learning_rate=1e39, batch_size=1, eval_every=1)
    with pytest.raises(NonFiniteError, match=r"after step 1 the parameter .* is not finite"):
        fit(config, lambda _: task)
    assert not (tmp_path / "run" / "model-last").exists()
    assert not (tmp_path / "run" / "model-best").exists()


def test_a_reverse_layer_above_is_named_with_the_step_of_the_sequence() -> None:
    model = unrolled.nn.RNN(1, 1, num_layers=2, nonlinearity="relu", bias=False, bidirectional=True)
    for name, parameter in model.named_parameters():
        nn.init.constant_(parameter, 1e25 if name == "weight_hh_l1_reverse" else 0.1)
    inputs = Ragged.from_list([torch.ones(2, 1), torch.ones(5, 1)])
    found = find_nonfinite(model, inputs, lambda: model(inputs)[0].values.sum())
    assert found is not None
    assert (found.quantity, found.layer, found.step) == ("state h_t", "RNN (layer 1, reverse)", 2)
    assert found.sequence == 1
    nn.init.constant_(model.weight_hh_l1_reverse, 0.1)
    assert find_nonfinite(model, inputs, lambda: model(inputs)[0].values.sum()) is None


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
