"""The run folder: what lies where, when it may be written to, and on what machine the run was made."""

from __future__ import annotations

import json
import logging
import os
import platform
import sys
import tempfile
import time
import zlib
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric

from unrolled import backends
from unrolled.config import Config, option_names, parse_config, read_yaml, to_yaml
from unrolled.files import read_json, to_json, write_json, write_text
from unrolled.training import checkpoint
from unrolled.training.task import Task

try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None  # type: ignore[assignment]

log = logging.getLogger("unrolled")

RESUMABLE = (  # options that may change when a run is resumed; the data must be the same wherever their files lie
    *("training.epochs", "training.max_steps", "training.patience", "training.checkpoint_every"),
    *("training.device", "training.threads", "output_dir", "data.train", "data.valid", "data.test"),
)
_FILES = ("config.yaml", "environment.json", "metrics.jsonl", "metrics.json", "train.log")


class RunFolder:
    """The files of one run. `best` and `last` are replaced whole, see `checkpoint.commit`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None
        self.config, self.environment = path / "config.yaml", path / "environment.json"
        self.metrics_lines, self.metrics, self.log = path / "metrics.jsonl", path / "metrics.json", path / "train.log"
        self.best, self.last = path / "model-best", path / "model-last"

    def check(self, config: Config, resume: bool, overwrite: bool) -> None:
        """ValueError where a run may not be written here."""
        if resume and overwrite:
            raise ValueError("--resume continues a run and --overwrite begins it again: choose one")
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"output_dir {self.path} is a file, expected a folder")
        if not self.path.exists() or not any(self.path.iterdir()):
            return
        if overwrite:
            if not self.environment.exists():
                raise ValueError(
                    f"the folder {self.path} is not empty and holds no run, it has no environment.json: "
                    "--overwrite replaces runs alone, choose another --output-dir"
                )
            return
        if not resume:
            raise ValueError(
                f"the folder {self.path} is not empty: continue its run with --resume, "
                "begin it again with --overwrite, or choose another --output-dir"
            )
        if not self.config.exists():
            raise ValueError(f"the folder {self.path} holds no run to resume: it has no config.yaml")
        self._check_same(parse_config(read_yaml(self.config), str(self.config)), config)

    def _check_same(self, before: Config, now: Config) -> None:
        for name in option_names():
            found, first = _option(now, name), _option(before, name)
            if found != first and name not in RESUMABLE:
                raise ValueError(
                    f"cannot resume {self.path} with {name} = {found!r}: it began with {first!r}. "
                    f"These may change: {', '.join(RESUMABLE)}"
                )

    def begin(self, config: Config, fabric: Fabric, resumed: bool) -> None:
        """Clear the files of an earlier run unless it is resumed, and write down configuration and machine."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.lock()
        if not resumed:
            for name in _FILES:
                (self.path / name).unlink(missing_ok=True)
            for folder in (self.best, self.last, *self.path.glob("nonfinite-*")):
                checkpoint.remove(folder)
        checkpoint.settle(self.best)
        checkpoint.settle(self.last)
        here = describe_environment(fabric)
        if resumed and self.environment.exists():
            before = read_json(self.environment)
            if not isinstance(before, dict):
                raise ValueError(f"{self.environment}: damaged, expected an object")
            here = before | {"resumed": [*before.get("resumed", []), here]}
        write_json(self.environment, here)
        write_text(self.config, to_yaml(config))

    def lock(self) -> None:
        """Keep other processes from writing here until `unlock`, or until this one ends. ValueError where one does."""
        if fcntl is None:
            return
        self._lock = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another process is training in the folder {self.path}") from None
        except OSError as error:  # a file system without locks
            log.debug("%s: not locked (%s)", self.path, error)

    def unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def check_same_data(self, task: Task) -> None:
        """ValueError where the data of today do not give the task and the examples of the checkpoint."""
        state = read_json(self.last / "trainer_state.json")
        if not isinstance(state, dict) or "data" not in state:
            raise ValueError(f"{self.last / 'trainer_state.json'}: damaged, it does not say what data it is of")
        changed = [] if state["data"] == digests(task) else ["examples"]
        with tempfile.TemporaryDirectory() as temporary:
            task.save(Path(temporary))
            for now in sorted(set(Path(temporary).iterdir()) - {Path(temporary, "config.json")}):
                before = self.last / now.name
                if not before.exists() or before.read_bytes() != now.read_bytes():
                    changed.append(now.name)
        if changed:
            raise ValueError(f"cannot resume {self.path}: the data have changed, they give other {', '.join(changed)}")

    def add_metrics(self, line: dict[str, Any]) -> None:
        with self.metrics_lines.open("a", encoding="utf-8") as file:
            file.write(to_json(line) + "\n")

    def forget_metrics_after(self, step: int) -> None:
        """Drop the evaluations made after the checkpoint of `step`, to be made again, and half written lines."""

        def keep(line: str) -> bool:
            with suppress(ValueError, KeyError, TypeError):
                return bool(json.loads(line)["step"] <= step)
            return False

        if self.metrics_lines.exists():
            lines = self.metrics_lines.read_text(encoding="utf-8", errors="replace").splitlines()
            write_text(self.metrics_lines, "".join(line + "\n" for line in lines if keep(line)))


def default_path(config: Config) -> Path:
    """runs/TASK-DATE-TIME, with a number behind it where that is taken; made at once, so that it is nobody else's."""
    name = f"{config.task}-{time.strftime('%Y%m%d-%H%M%S')}"
    for i in count():
        path = Path("runs") / (name if i == 0 else f"{name}-{i}")
        with suppress(FileExistsError):
            path.mkdir(parents=True)
            return path
    raise AssertionError


def describe_environment(fabric: Fabric) -> dict[str, Any]:
    """What the bits of a run depend on besides its configuration."""
    packages = ("unrolled", "torch", "numpy", "safetensors", "lightning-fabric", "tokenizers")
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "python": platform.python_version(),
        "system": platform.platform(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": str(fabric.device),
        "device_name": torch.cuda.get_device_name(fabric.device) if fabric.device.type == "cuda" else _cpu_name(),
        "processes": fabric.world_size,
        "backends": backends(),
        "packages": {name: _version(name) for name in packages},
    }


def digests(task: Task) -> dict[str, int]:
    """A checksum of the lengths of each split's examples, in their order."""
    return {
        name: zlib.crc32(json.dumps([task.num_tokens(example) for example in part]).encode())
        for name, part in task.splits.items()
    }


def _option(config: Config, name: str) -> Any:
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(errors="replace").splitlines() if info.exists() else []
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )
