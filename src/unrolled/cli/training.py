"""unrolled train"""

from __future__ import annotations

import logging
import os
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from unrolled.cli import tables
from unrolled.cli.options import resolve
from unrolled.tasks import task_class

if TYPE_CHECKING:
    from collections.abc import Callable

    from unrolled.training import Progress


def train(
    what: str,
    /,
    *,
    resume: bool = False,
    overwrite: bool = False,
    quiet: Annotated[bool, Parameter(name=["--quiet", "-q"])] = False,
    json: bool = False,
    **flags: Any,
) -> int:
    """Train a model and leave a run folder.

    A flag wins over the file, the file over the environment, where an option is
    named like UNROLLED_TRAINING_EPOCHS.

    Two processes: torchrun --nproc_per_node=2 -m unrolled train ...

    Parameters
    ----------
    what
        A .yaml file, else the name of a task, else of a recipe.
    resume
        Go on from the last checkpoint in the output folder.
    overwrite
        Replace the run in the output folder.
    quiet
        No progress and no log on stderr.
    json
        Print the result as JSON.
    """
    config = resolve(what, flags, os.environ)
    from unrolled.run import train as run

    with _shown(quiet) as progress:
        result = run(config, resume=resume, overwrite=overwrite, progress=progress)
    if os.environ.get("RANK", "0") == "0":
        if json:
            tables.print_json(result._asdict() | {"folder": str(result.folder)})
        else:
            print(result.folder)
            tables.scores(result.metrics)
            if not quiet:
                use = task_class(config.task).use.format(run=shlex.quote(str(result.folder)))
                _say(f"to use it: unrolled {use}")
    return 0


def interrupted(error: KeyboardInterrupt) -> int:
    """Say how to go on; 128 + the signal's number, as a shell would report it."""
    folder, signal = getattr(error, "folder", None), getattr(error, "signal", 2)
    if folder is not None and os.environ.get("RANK", "0") == "0":
        print(f"unrolled: {error}", file=sys.stderr)
        print(f"to go on: unrolled train {shlex.quote(str(folder / 'config.yaml'))} --resume", file=sys.stderr)
    return 128 + int(signal)


@contextmanager
def _shown(quiet: bool) -> Iterator[Callable[[Progress], None] | None]:
    """The log on stderr and, on a terminal, a bar with loss, speed and time left."""
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bar

    if quiet or os.environ.get("RANK", "0") != "0":
        yield None
        return
    console = Console(stderr=True)
    log = logging.getLogger("unrolled")
    handler = _Lines(
        partial(console.print, markup=False, highlight=False, soft_wrap=True) if console.is_terminal else _say
    )
    log.addHandler(handler)
    try:
        if not console.is_terminal:
            yield None
            return
        columns = (BarColumn(), TextColumn("{task.percentage:3.0f}%  {task.description}"))
        with Bar(*columns, console=console, transient=True) as bar:
            task = bar.add_task("reading", total=1.0)
            shown_at = 0.0

            def show(now: Progress) -> None:
                nonlocal shown_at
                if time.monotonic() - shown_at > 0.1 or now.done >= 1:
                    shown_at = time.monotonic()
                    bar.update(task, completed=now.done, description=describe(now))

            yield show
    finally:
        log.removeHandler(handler)


def describe(now: Progress) -> str:
    minutes, seconds = divmod(round(min(now.seconds_left, 359999)), 60)
    hours, minutes = divmod(minutes, 60)
    left = f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
    return (
        f"epoch {now.epoch}  step {now.step}  loss {now.loss:.4f}  {now.tokens_per_second:,.0f} tokens/s  {left} left"
    )


class _Lines(logging.Handler):
    """Log lines; on a terminal through the console, so that they do not run into the bar."""

    def __init__(self, show: Callable[[str], None]) -> None:
        super().__init__(logging.INFO)
        self.show = show

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.ERROR:
            return  # raised as well, and said at the end
        prefix = f"{record.levelname.lower()}: " if record.levelno > logging.INFO else ""
        self.show(prefix + record.getMessage())


def _say(line: str) -> None:
    """A training goes on when nobody reads its log any more."""
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)
