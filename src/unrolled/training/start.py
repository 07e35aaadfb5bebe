"""From a configuration to a finished run folder."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from unrolled.config import Config
from unrolled.training.folder import RunFolder, default_path
from unrolled.training.loop import Trainer, log
from unrolled.training.session import Signals, on_first, session
from unrolled.training.task import Progress, RunResult, Task


def fit(
    config: Config,
    prepare: Callable[[Config], Task],
    *,
    resume: bool = False,
    overwrite: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> RunResult:
    """Train the task that `prepare` makes of `config` and leave a run folder; under torchrun, each process calls this.

    Errors: ValueError for a folder that may not be written, or data that cannot be used; NonFiniteError; Interrupted.
    """
    if config.output_dir is None and resume:
        raise ValueError("to resume a run, say which: its folder is output_dir")
    with session(config.training) as fabric, Signals() as signals:
        chosen = config.output_dir is None
        path = config.output_dir or on_first(fabric, lambda: default_path(config))
        config, folder = config.model_copy(update={"output_dir": path}), RunFolder(path)
        try:
            on_first(fabric, lambda: folder.check(config, resume, overwrite))
            trainer = Trainer(prepare(config), config, folder, fabric, signals, progress)
            last = on_first(fabric, lambda: trainer.begin(resume))
            with _logged_to(folder.log, fabric.is_global_zero):
                trainer.describe()
                if last:
                    trainer.restore(last)
                elif resume and fabric.is_global_zero:
                    log.info("no checkpoint in %s: the run begins", path)
                return trainer.run()
        finally:
            folder.unlock()
            if chosen and fabric.is_global_zero:
                with suppress(OSError):  # a folder that stayed empty goes again
                    path.rmdir()


@contextmanager
def _logged_to(path: Path, here: bool) -> Iterator[None]:
    if not here:
        yield
        return
    level = log.level
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        handler.close()
