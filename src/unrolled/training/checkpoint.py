"""Folders replaced whole: a process killed at any moment leaves the old content or the new, never a mixture."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any


def commit(folder: Path, write: Callable[[Path], None]) -> None:
    """Replace `folder` by what `write(draft)` puts into an empty folder.

    The draft is written beside `folder`, flushed to the disk, and becomes `.NAME.new` by one rename: the commit. What
    follows only tidies up, and whoever opens the folder next (`committed`, `settle`) can do it as well.
    """
    settle(folder)
    draft, new = _beside(folder, "draft"), _beside(folder, "new")
    draft.mkdir(parents=True)
    write(draft)
    _open_to_readers(draft)
    _flush(draft)
    draft.rename(new)
    _flush(folder.parent, recursive=False)
    settle(folder)


def settle(folder: Path) -> None:
    """Finish or clear away what a killed process left beside `folder`. Only for the one process that writes there."""
    new, old = _beside(folder, "new"), _beside(folder, "old")
    shutil.rmtree(_beside(folder, "draft"), ignore_errors=True)
    if new.exists():
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)
            folder.rename(old)
        new.rename(folder)
        _flush(folder.parent, recursive=False)
    shutil.rmtree(old, ignore_errors=True)


def committed(folder: Path) -> Path | None:
    """Where the content last committed as `folder` lies; None if nothing ever was."""
    return next((place for place in (_beside(folder, "new"), folder) if place.is_dir()), None)


def remove(folder: Path) -> None:
    """Delete `folder` and whatever lies beside it under its name."""
    for place in (_beside(folder, "new"), folder, _beside(folder, "old"), _beside(folder, "draft")):
        shutil.rmtree(place, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Write a file beside itself, flush it, and rename it into place."""
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(text, encoding="utf-8")
    _flush(draft)
    draft.replace(path)


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(finite(value), indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: null takes their place."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(part) for key, part in value.items()}
    return [finite(part) for part in value] if isinstance(value, list | tuple) else value


def _beside(folder: Path, kind: str) -> Path:
    return folder.with_name(f".{folder.name}.{kind}")


def _open_to_readers(draft: Path) -> None:
    """Give each file the mode of any new file: safetensors makes files that only their owner can read."""
    probe = draft / ".mode"
    probe.touch()
    mode = probe.stat().st_mode
    probe.unlink()
    for file in draft.iterdir():
        file.chmod(mode)


def _flush(path: Path, recursive: bool = True) -> None:
    """fsync a file, or a folder and all in it; a system that cannot open folders flushes the files alone."""
    if path.is_dir():
        for child in path.iterdir() if recursive else ():
            _flush(child)
        if not hasattr(os, "O_DIRECTORY"):
            return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
