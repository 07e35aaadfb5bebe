"""The command line: what it prints where, its exit codes, its messages, the order of its layers."""

from __future__ import annotations

import io
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from toy import python, toy_config, write_words
from unrolled import cli
from unrolled.cli import training
from unrolled.config import option_names, parse_config, read_yaml, to_yaml
from unrolled.run import load, train
from unrolled.training import Progress


class Result:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def unrolled(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run one command in this process."""
    monkeypatch.setenv("COLUMNS", "100")

    def call(*arguments: str | Path) -> Result:
        code = cli.run([str(argument) for argument in arguments])
        return Result(code, *capfd.readouterr())

    return call


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(toy_config(tmp_path_factory.mktemp("cli"))).folder


# Help


def test_help_does_not_import_torch() -> None:
    """What makes --help slow; its 0.3 s are measured outside the tests."""
    code = (
        "import sys\n"
        "from unrolled import cli\n"
        "assert cli.run(sys.argv[1:]) == 0\n"
        "assert not {'torch', 'lightning_fabric', 'tokenizers', 'numpy'} & set(sys.modules)"
    )
    for arguments in (["--help"], ["train", "--help"], ["--version"], ["config", "show", "names"]):
        result = python("-c", code, *arguments)
        assert result.returncode == 0, result.stderr


def test_help_lists_every_option_with_its_default(unrolled: Any) -> None:
    shown = " ".join(unrolled("train", "--help").out.replace("│", " ").split())
    for name in option_names():
        assert f"--{name.replace('_', '-')} " in shown
    assert "(default 32)" in shown
    assert "label<TAB>text" in shown


# Train


def test_train_prints_the_result_on_stdout_and_the_log_on_stderr(unrolled: Any, tmp_path: Path) -> None:
    words = write_words(tmp_path / "words.csv")
    options = ["--train", words, "--training.epochs", "1", "--batch_size=16", "--threads", "1", "-o", tmp_path / "run"]
    result = unrolled("train", "classify", *options, "--bidirectional")
    assert result.code == 0
    assert result.out.splitlines()[0] == str(tmp_path / "run")
    assert [line.split()[0] for line in result.out.splitlines()[2:]] == ["valid", "test"]
    assert "epoch 1.00  train_loss " in result.err
    config = read_yaml(tmp_path / "run" / "config.yaml")
    assert config["training"] | {"epochs": 1, "batch_size": 16} == config["training"]
    assert config["model"]["bidirectional"] is True
    again = unrolled("train", tmp_path / "run" / "config.yaml", "--resume", "--quiet", "--json")
    assert (again.code, again.err) == (0, "")
    assert json.loads(again.out)["steps"] == 12


def test_the_long_memory_recipe_shows_the_baseline_and_says_what_to_do_next(unrolled: Any, tmp_path: Path) -> None:
    sizes = ["--train-examples", "64", "--valid-examples", "8", "--test-examples", "8", "--hidden-size", "4"]
    for problem in ("adding", "copying"):
        run = tmp_path / problem
        result = unrolled(
            "train", "long_memory", "--problem", problem, "--length", "6", "--threads", "1", *sizes, "-o", run
        )
        assert result.code == 0
        assert result.out.splitlines()[1].split() == ["loss", "baseline", "accuracy", "examples"]
        assert result.err.splitlines()[-1] == f"to use it: unrolled evaluate {run} LENGTH"
    assert unrolled("evaluate", run, "9").out.splitlines()[1].split()[::2] == ["9", f"{10 * math.log(8) / 29:.4f}", "8"]
    for source in ("a.csv", "0"):
        assert f"from 1 to 1000000, found '{source}'" in unrolled("evaluate", run, source).err
    result = unrolled("predict", run)
    assert (result.code, result.out) == (2, "")
    assert "predicts nothing: score it with unrolled evaluate RUN LENGTH" in result.err
    facts = json.loads(unrolled("info", run, "--json").out)
    assert facts["sequences"] | {"problem": "copying", "length": 6} == facts["sequences"]
    assert "reset" in facts["network"]
    assert "peephole" not in facts["network"]


def test_layers_flag_over_file_over_environment_over_default(
    unrolled: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("training: {epochs: 3, seed: 3}\n")
    for name in ("EPOCHS", "SEED", "BATCH_SIZE"):
        monkeypatch.setenv(f"UNROLLED_TRAINING_{name}", "2")
    monkeypatch.setenv("UNROLLED_CPU", "scalar")
    found = yaml.safe_load(unrolled("config", "show", file, "--epochs", "4").out)
    expected = {"epochs": 4, "seed": 3, "batch_size": 2, "patience": 0}
    assert found["training"] | expected == found["training"]
    assert found == parse_config(found).model_dump(mode="json")
    monkeypatch.setenv("UNROLLED_TRAINING_EPOCH", "2")
    result = unrolled("config", "show", file)
    assert result.code == 2
    assert "UNROLLED_TRAINING_EPOCH is no option: did you mean UNROLLED_TRAINING_EPOCHS?" in result.err


def test_switches_can_be_turned_off(unrolled: Any, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("model: {bidirectional: true}\n")
    for flag, value in (("--no-bidirectional", False), ("--model.no-bidirectional", False), ("--lowercase", True)):
        shown = yaml.safe_load(unrolled("config", "show", tmp_path / "c.yaml", flag).out)
        assert shown["data"]["lowercase" if value else "encoding"] == (True if value else "utf-8")
        assert shown["model"]["bidirectional"] is value or flag == "--lowercase"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "nams"], "did you mean names? Tasks: classify, memory. Recipes: long_memory, names."),
        (["train", "nix.yaml"], "nix.yaml: No such file"),
        (["train", "classify"], "data.train"),
        (["train", "classify", "--train", "missing.csv"], "missing.csv: no such file"),
        (["train", "classify", "--epoch", "3"], "Unknown option: --epoch. Did you mean --epochs?"),
        (["train", "classify", "--training.ephochs", "3"], "Did you mean --training.epochs?"),
        (["train", "classify", "--epochs", "many"], '--epochs: unable to convert "many" into int'),
        (
            ["train", "classify", "--epochs", "0"],
            "training.epochs: input should be greater than or equal to 1, found",
        ),
        (["train", "classify", "--tokens", "word"], 'Did you mean "words"?'),
        (["train", "classify", "--epochs", "1.5"], '--epochs: unable to convert "1.5" into int'),
        (["train", "classify", "--train", ""], "data.train: expected the name of a file or folder, found ''"),
        (["train", "classify", "-o", "a\udce9"], "output_dir: expected Unicode text without NUL"),
        (["train"], "requires an argument"),
        (["trian"], 'Did you mean "train"?'),
        (["predict", "nowhere"], "nowhere: no such folder"),
        (["evaluate", "nowhere", "data.csv"], "nowhere: no such folder"),
        (["info", "nowhere"], "nowhere: no such folder"),
        (["config", "show", "classify", "--momentum", "0.5"], "momentum = 0.5 has no effect"),
        (["config", "show", "names", "--reset", "before"], "model: reset = 'before' has no effect with model = 'rnn'"),
        (["config", "show", "long_memory", "--length", "1"], "memory: length must be >= 2 with problem = 'adding'"),
        (["train", "long_memory", "--train", "a.csv"], "data.train = 'a.csv' has no effect with task = 'memory'"),
    ],
)
def test_wrong_use_is_one_message_and_exit_code_2(arguments: list[str], message: str, unrolled: Any) -> None:
    result = unrolled(*arguments)
    assert result.code == 2
    assert result.out == ""
    assert result.err.startswith("unrolled: error: ")
    assert message in result.err


def test_a_file_called_as_a_recipe_does_not_hide_it(
    unrolled: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("names").write_text("Kowalski\n")
    assert yaml.safe_load(unrolled("config", "show", "names").out)["data"]["train"] == "builder:names"
    Path("mine").write_text("training: {epochs: 7}")
    assert yaml.safe_load(unrolled("config", "show", "mine").out)["training"]["epochs"] == 7


def test_a_folder_that_is_not_empty_is_refused(unrolled: Any, run: Path) -> None:
    result = unrolled("train", run / "config.yaml")
    assert result.code == 2
    assert "--resume" in result.err
    assert "--overwrite" in result.err


def test_a_run_folder_in_place_of_its_config_is_understood(unrolled: Any, run: Path) -> None:
    assert f"did you mean {run / 'config.yaml'}?" in unrolled("train", run).err


def test_a_bug_keeps_its_traceback(unrolled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli.inform, "describe_installation", lambda: int("bug"))
    with pytest.raises(ValueError, match="invalid literal"):
        unrolled("info")


def test_ctrl_c_says_how_to_go_on(unrolled: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = toy_config(tmp_path)
    (tmp_path / "c.yaml").write_text(to_yaml(config))
    steps = []

    @contextmanager
    def shown(quiet: bool) -> Iterator[Any]:
        yield interrupt

    def interrupt(now: Progress) -> None:
        steps.append(now.step)
        if now.step == 5:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(training, "_shown", shown)
    result = unrolled("train", tmp_path / "c.yaml")
    assert result.code == 130
    assert result.err.splitlines()[-1] == f"to go on: unrolled train {tmp_path / 'run' / 'config.yaml'} --resume"
    assert json.loads((tmp_path / "run/model-last/trainer_state.json").read_text())["step"] == 6
    assert max(steps) == 6


def test_progress_shows_loss_speed_and_time_left() -> None:
    now = Progress(step=7, epoch=2, done=0.5, loss=0.25, tokens_per_second=12345.6, seconds_left=3700.4)
    assert training.describe(now) == "epoch 2  step 7  loss 0.2500  12,346 tokens/s  1:01:40 left"
    assert training.describe(now._replace(seconds_left=65.0)).endswith("1:05 left")


# Evaluate and predict


def test_evaluate(unrolled: Any, run: Path, tmp_path: Path) -> None:
    words = write_words(tmp_path / "other.csv", number=50, seed=7)
    expected = load(run).evaluate(words)
    found = unrolled("evaluate", run, words, "--json", "-o", tmp_path / "m.json")
    assert json.loads(found.out) == json.loads((tmp_path / "m.json").read_text()) == expected
    table = unrolled("evaluate", run, words).out
    assert f"{expected['accuracy']:.4f}" in table
    assert "majority baseline" in table
    assert [line.split()[0] for line in table.splitlines()[-2:]] == ["less", "more"]


def test_predict_lines_from_file_and_standard_input(
    unrolled: Any, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["aaaa", "dddd", "", "Übung 测试"]
    lines = "".join(text + "\n" for text in texts)
    (tmp_path / "in.txt").write_text(lines, encoding="utf-8")
    labels = [row["label"] for row in load(run).predict(texts)]
    assert labels[:2] == ["more", "less"]
    assert unrolled("predict", run, tmp_path / "in.txt").out.splitlines() == labels
    for arguments in ([], ["-"]):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines.encode())))
        result = unrolled("predict", run, *arguments, "--json", "--probabilities")
        rows = [json.loads(line) for line in result.out.splitlines()]
        assert [row["label"] for row in rows] == labels
        assert all(row["probabilities"][row["label"]] == row["probability"] for row in rows)
        assert result.err == ""
    text = unrolled("predict", run, tmp_path / "in.txt", "--probabilities", "--output", tmp_path / "out.txt")
    assert text.out == ""
    cells = (tmp_path / "out.txt").read_text().splitlines()[0].split("\t")
    assert cells[0] == "more"
    assert [cell.partition("=")[0] for cell in cells[1:]] == ["less", "more"]


def test_a_bad_row_is_named_and_nothing_is_predicted(unrolled: Any, run: Path, tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("text\nfine\n" + '"open\n')
    (tmp_path / "in.txt").write_bytes(b"fine\nb\xffd\n")
    (tmp_path / "data.csv").write_text("text,label\naa,more\nbb,none\n")
    for command, name, line in (("predict", "in.csv", 3), ("predict", "in.txt", 2), ("evaluate", "data.csv", 3)):
        result = unrolled(command, run, tmp_path / name)
        assert (result.code, result.out) == (2, "")
        assert f"{tmp_path / name}, line {line}: " in result.err


def test_a_reader_that_leaves_early_is_no_error(run: Path, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("ab\n" * 20000)
    arguments = [sys.executable, "-m", "unrolled", "predict", str(run), str(tmp_path / "in.txt"), "--json"]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline().startswith(b'{"label"')
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 141


def test_output_goes_through_links_and_into_devices_and_pipes(unrolled: Any, run: Path, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("aaaa\ndddd\n")
    (tmp_path / "out.txt").write_text("old")
    (tmp_path / "link").symlink_to("out.txt")
    assert unrolled("predict", run, tmp_path / "in.txt", "-o", tmp_path / "link").code == 0
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "out.txt").read_text() == "more\nless\n"
    assert unrolled("predict", run, tmp_path / "in.txt", "-o", "/dev/null").code == 0
    assert not Path("/dev/null").is_file()
    for folder in (".", tmp_path):
        result = unrolled("predict", run, tmp_path / "in.txt", "-o", folder)
        assert (result.code, result.err) == (2, f"unrolled: error: {folder}: Is a directory\n")


def test_closed_streams_and_a_log_nobody_reads_are_no_errors(run: Path, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("aaaa\n")
    write_words(tmp_path / "words.csv", number=40)
    unrolled = f"exec {sys.executable} -m unrolled"
    options = "--train words.csv --hidden-size 4 --epochs 1 --threads 1 -o run"
    for command, out in (
        (f"{unrolled} predict {run} <&- >&- 2>&-", []),
        (f"{unrolled} train classify {options} 2>/dev/full", ["run"]),
    ):
        result = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert (result.returncode, result.stderr, result.stdout.splitlines()[:1]) == (0, "", out), command


# Verify, info, config


def certificate(*passed: bool) -> list[dict[str, Any]]:
    names = {"operator": "rnn", "judge": "autograd", "dtype": "float64", "max_relative_error": 1.5e-12, "bound": 1e-9}
    return [{**names, "passed": verdict} for verdict in passed]


def test_verify_prints_the_certificate_and_its_verdict(unrolled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from unrolled import verify

    asked = []
    for rows, code in ((certificate(True, True), 0), (certificate(True, False), 1)):
        monkeypatch.setattr(verify, "run", lambda names, rows=rows: asked.append(names) or rows)
        table = unrolled("verify", "rnn", "linear")
        assert table.code == code
        assert table.out.splitlines()[1].split() == ["rnn", "autograd", "float64", "1.50e-12", "1.00e-09", "ok"]
        assert ("FAILED" in table.out) == bool(code)
        machine = unrolled("verify", "--json")
        assert machine.code == code
        assert json.loads(machine.out) == rows
    assert asked == [["rnn", "linear"], [], ["rnn", "linear"], []]


def test_info_of_the_installation_and_of_a_run(unrolled: Any, run: Path) -> None:
    facts = json.loads(unrolled("info", "--json").out)
    assert facts["backends"]["equations"] == "torch"
    assert facts["tasks"] == ["classify", "memory"]
    assert "names" in facts["recipes"]
    facts = json.loads(unrolled("info", run, "--json").out)
    assert facts["parameters"] == sum(parameter.numel() for parameter in load(run).model.parameters())
    assert facts["metrics"]["test"]["examples"] == 24
    assert "best step" in unrolled("info", run).out


def test_config_schema_and_validate(unrolled: Any, run: Path, tmp_path: Path) -> None:
    schema = json.loads(unrolled("config", "schema").out)
    assert "batch_size" in schema["$defs"]["TrainingConfig"]["properties"]
    assert unrolled("config", "validate", run / "config.yaml").code == 0
    (tmp_path / "bad.yaml").write_text("training: {epochs: 0, batch_sizes: 3}\n")
    result = unrolled("config", "validate", tmp_path / "bad.yaml")
    assert result.code == 1
    assert "did you mean batch_size?" in result.err
    recipe = Path(cli.__file__).parent.parent / "recipes" / "names.yaml"
    assert unrolled("config", "show", "names").out == to_yaml(parse_config(read_yaml(recipe)))


def test_python_m_unrolled_has_the_same_exit_codes() -> None:
    result = python("-m", "unrolled", "trian")
    assert result.returncode == 2
    assert result.stderr.startswith("unrolled: error: ")
    assert python("-m", "unrolled", "config", "schema").returncode == 0
