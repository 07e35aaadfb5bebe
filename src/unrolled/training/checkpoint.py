"""Folders replaced whole: a process killed at any moment leaves the old content or the new, never a mixture."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

from unrolled.files import flush, named


def commit(folder: Path, write: Callable[[Path], None]) -> None:
    """Replace `folder` by what `write(draft)` puts into an empty folder.

    The draft is written beside `folder`, flushed to the disk, and becomes `.NAME.new` by one rename: the commit. What
    follows only tidies up, and whoever opens the folder next (`committed`, `settle`) can do it as well.
    """
    settle(folder)
    draft, new = _beside(folder, "draft"), _beside(folder, "new")
    try:
        with named(draft):
            draft.mkdir(parents=True)
            write(draft)
            _open_to_readers(draft)
            flush(draft)
    except SafetensorError as error:
        raise OSError(f"{draft}: {error}") from None
    draft.rename(new)
    flush(folder.parent, recursive=False)
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
        flush(folder.parent, recursive=False)
    shutil.rmtree(old, ignore_errors=True)


def committed(folder: Path) -> Path | None:
    """Where the content last committed as `folder` lies; None if nothing ever was."""
    return next((place for place in (_beside(folder, "new"), folder) if place.is_dir()), None)


def remove(folder: Path) -> None:
    """Delete `folder` and whatever lies beside it under its name."""
    for place in (_beside(folder, "new"), folder, _beside(folder, "old"), _beside(folder, "draft")):
        shutil.rmtree(place, ignore_errors=True)


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
