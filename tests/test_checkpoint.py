"""A folder is replaced whole: a kill at any moment leaves the old one or the new one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from toy import files
from unrolled.training import checkpoint


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
