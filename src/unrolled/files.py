"""Files that are never half written, and JSON that every reader takes."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def write_text(path: Path, text: str) -> None:
    """Write a file beside itself, flush it to the disk, and rename it into place; a pipe or a device is written to.

    Errors: OSError that names the path.
    """
    with named(path):
        if path.is_dir() or (path.exists() and not path.is_file()):
            path.write_text(text, encoding="utf-8")
            return
        path = path.resolve()  # what a link points to is replaced, not the link
        draft = path.with_name(f".{path.name}.draft")
        draft.write_text(text, encoding="utf-8")
        flush(draft)
        draft.replace(path)


@contextmanager
def named(path: Path) -> Iterator[None]:
    """An OSError from within names this path, unless it names one already: a full disk does not."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def write_json(path: Path, value: Any) -> None:
    write_text(path, to_json(value, indent=2) + "\n")


def to_json(value: Any, indent: int | None = None) -> str:
    """JSON has no NaN and no infinity: null takes their place."""
    return json.dumps(_finite(value), indent=indent, ensure_ascii=False, allow_nan=False)


def read_json(path: Path) -> Any:
    """Errors: ValueError that names the file where it is damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: damaged, {error}") from None


def flush(path: Path, recursive: bool = True) -> None:
    """fsync a file, or a folder and all in it; a system that cannot open folders flushes the files alone."""
    if path.is_dir():
        for child in path.iterdir() if recursive else ():
            flush(child)
        if not hasattr(os, "O_DIRECTORY"):
            return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    return [_finite(part) for part in value] if isinstance(value, list | tuple) else value
