"""Where a run executes: devices, processes, threads, random numbers, signals; put back as they were afterwards."""

from __future__ import annotations

import atexit
import hashlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

import torch
from lightning_fabric import Fabric
from lightning_fabric.plugins.environments.lightning import LightningEnvironment

from unrolled.config import TrainingConfig

T = TypeVar("T")
_PRECISION = {"float32": "32-true", "float64": "64-true"}


@contextmanager
def session(training: TrainingConfig) -> Iterator[Fabric]:
    """A launched Fabric for `training.device` and the processes that torchrun started, with the wanted threads."""
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    fabric = _fabric(training)
    with torch.random.fork_rng():
        try:
            if training.threads:
                torch.set_num_threads(training.threads)
            if training.precision == "float64":
                torch.set_default_dtype(torch.float64)
            yield fabric
        finally:
            torch.set_num_threads(threads)
            torch.set_default_dtype(dtype)


def _leave() -> None:
    """Ends the threads of the group while Python still runs: what outlives it may abort the process at its end."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _fabric(training: TrainingConfig) -> Fabric:
    processes = int(os.environ.get("WORLD_SIZE", 1))
    here = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    kind, _, index = training.device.partition(":")
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind not in ("cpu", "cuda") or (index and not (index.isdigit() and kind == "cuda")):
        raise ValueError(f"training.device must be auto, cpu, cuda or cuda:NUMBER, found {training.device!r}")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"training.device = {training.device!r}, but there are {torch.cuda.device_count()} CUDA devices"
        )
    if index and processes > 1:
        raise ValueError(
            f"training.device = {training.device!r} names one device for {processes} processes: use 'cuda'"
        )
    fabric = Fabric(
        accelerator=kind,
        devices=[int(index)] if index else here,
        num_nodes=processes // here,
        strategy="ddp" if processes > 1 else "auto",
        precision=_PRECISION[training.precision],  # type: ignore[arg-type]
        plugins=LightningEnvironment() if processes == 1 else None,  # else a batch system's variables are obeyed
    )
    fabric.launch()
    if processes > 1:
        atexit.register(_leave)
    return fabric


def on_first(fabric: Fabric, call: Callable[[], T]) -> T:
    """`call` on the first process; its result, or its ValueError or OSError, on every process."""
    outcome: tuple[Any, Exception | None] = None, None
    if fabric.is_global_zero:
        try:
            outcome = call(), None
        except (ValueError, OSError) as error:
            outcome = None, error
    result, failure = fabric.broadcast(outcome)
    if failure is not None:
        raise failure
    return result  # type: ignore[no-any-return]


def seed_step(seed: int, step: int, fabric: Fabric) -> None:
    """The random numbers of a step are a function of seed, step and process: nothing else is saved to have them again.

    Not torch.manual_seed, which takes a millisecond to note the stack for a CUDA that is not there.
    """
    digest = hashlib.blake2b(f"{seed} {step} {fabric.global_rank}".encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "big") >> 1
    torch.default_generator.manual_seed(number)
    if fabric.device.type == "cuda":
        torch.cuda.manual_seed(number)


class Signals:
    """SIGINT and SIGTERM are noted in `received` and acted on after the step; a second SIGINT stops at once."""

    def __init__(self) -> None:
        self.received = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = number
