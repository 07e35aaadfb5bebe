"""A run that was killed and resumed ends with the bits of one that was not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from toy import files, python, toy_config, write_words
from unrolled.config import Config
from unrolled.run import load, train

SCHEDULED: dict[str, Any] = {
    "epochs": 3,
    "warmup_steps": 5,
    "scheduler": "cosine",
    "eval_every": 4,
    "checkpoint_every": 5,
    "patience": 20,
    "learning_rate": 0.03,
}
KILLED_AT = 19  # of 36: in the second epoch, the last checkpoint is of step 15

KILLER = """
import os, signal, sys
from pathlib import Path
from test_resume import SCHEDULED, KILLED_AT
from toy import toy_config
from unrolled.run import train

def kill(now):
    if now.step == KILLED_AT:
        os.kill(os.getpid(), signal.SIGKILL)

train(toy_config(Path(sys.argv[1]), **SCHEDULED), progress=kill)
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing interrupted."""
    return train(toy_config(tmp_path_factory.mktemp("whole"), **SCHEDULED)).folder


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What SIGKILL leaves of the same run: the folder with the data and `run`."""
    folder = tmp_path_factory.mktemp("killed")
    result = python("-c", KILLER, str(folder), cwd=Path(__file__).parent)
    assert result.returncode == -9, result.stderr
    assert json.loads((folder / "run/model-last/trainer_state.json").read_text())["step"] == 15
    assert len((folder / "run/metrics.jsonl").read_text().splitlines()) == 4
    return folder


def copied(folder: Path, to: Path) -> Config:
    for path in sorted(folder.rglob("*")):
        target = to / path.relative_to(folder)
        target.mkdir() if path.is_dir() else target.write_bytes(path.read_bytes())
    return toy_config(to, **SCHEDULED)


def outcome(run: Path) -> dict[str, bytes]:
    """Everything a run decides. config.json also holds the folder's name, the rest must be equal to the bit."""
    found = {f"last/{name}": content for name, content in files(run / "model-last").items()}
    found |= {f"best/{name}": content for name, content in files(run / "model-best").items()}
    found |= {name: (run / name).read_bytes() for name in ("metrics.jsonl", "metrics.json")}
    return {name: content for name, content in found.items() if not name.endswith("config.json")}


def test_killed_and_resumed_is_the_same_to_the_bit(whole: Path, killed: Path, tmp_path: Path) -> None:
    result = train(copied(killed, tmp_path), resume=True)
    assert outcome(result.folder) == outcome(whole)
    assert len(json.loads((result.folder / "environment.json").read_text())["resumed"]) == 1
    assert "resumed after step 15" in (result.folder / "train.log").read_text()


def edit_state(**changes: Any) -> Callable[[Path], None]:
    def edit(last: Path) -> None:
        path = last / "trainer_state.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return edit


def forget_optimizer(last: Path) -> None:
    tensors = load_file(last / "optimizer.safetensors")
    save_file({name: torch.zeros_like(tensor) for name, tensor in tensors.items()}, last / "optimizer.safetensors")


def forget_best(last: Path) -> None:
    path = last / "trainer_state.json"
    state = json.loads(path.read_text())
    state["schedule"]["best"] = 2.0
    path.write_text(json.dumps(state))


def forget_warmup(last: Path) -> None:
    path = last / "trainer_state.json"
    state = json.loads(path.read_text())
    state["schedule"]["done_at_warmup"] = 0.0
    path.write_text(json.dumps(state))


@pytest.mark.parametrize(
    "forget",
    [
        edit_state(step=14),
        edit_state(sampler={"epoch": 1, "position": 0}),
        edit_state(sampler={"epoch": 0, "position": 3}),
        edit_state(loss_sum=0.0),
        forget_optimizer,
        forget_best,
        forget_warmup,
    ],
)
def test_each_part_of_a_checkpoint_is_needed_for_that(
    forget: Callable[[Path], None], whole: Path, killed: Path, tmp_path: Path
) -> None:
    config = copied(killed, tmp_path)
    forget(tmp_path / "run" / "model-last")
    assert outcome(train(config, resume=True).folder) != outcome(whole)


def test_resuming_a_finished_run_changes_nothing(whole: Path, tmp_path: Path) -> None:
    config = copied(whole.parent, tmp_path)
    result = train(config, resume=True)
    assert outcome(result.folder) == outcome(whole)
    assert result.steps == 36


def test_more_epochs_may_be_asked_for(whole: Path, tmp_path: Path) -> None:
    copied(whole.parent, tmp_path)
    result = train(toy_config(tmp_path, **SCHEDULED | {"epochs": 4}), resume=True)
    assert result.steps == 48


def test_other_options_or_data_are_refused(whole: Path, tmp_path: Path) -> None:
    copied(whole.parent, tmp_path)
    with pytest.raises(ValueError, match=r"training\.seed = 1: it began with 42"):
        train(toy_config(tmp_path, **SCHEDULED, seed=1), resume=True)
    words = (tmp_path / "words.csv").read_text().splitlines()
    (tmp_path / "words.csv").write_text("\n".join([words[0], *reversed(words[1:])]) + "\n")
    with pytest.raises(ValueError, match=r"they give other examples$"):
        train(toy_config(tmp_path, **SCHEDULED), resume=True)
    write_words(tmp_path / "words.csv", number=20, seed=1)
    with pytest.raises(ValueError, match=r"they give other examples, tokenizer\.json$"):
        train(toy_config(tmp_path, **SCHEDULED), resume=True)


def test_resume_begins_where_there_is_no_checkpoint_yet(whole: Path, tmp_path: Path) -> None:
    result = train(toy_config(tmp_path, **SCHEDULED), resume=True)
    assert outcome(result.folder) == outcome(whole)


def test_a_checkpoint_committed_but_not_yet_in_place_is_taken(whole: Path, tmp_path: Path) -> None:
    config = copied(whole.parent, tmp_path)
    for name in ("model-last", "model-best"):
        (tmp_path / "run" / name).rename(tmp_path / "run" / f".{name}.new")
    assert load(tmp_path / "run").predict(["aaaa"])[0]["label"] == "more"
    assert outcome(train(config, resume=True).folder) == outcome(whole)
