"""Whether a mutant is found out: the change and then all questions in a fork, until one is answered wrong."""

from __future__ import annotations

import os
import signal
import struct
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

CPU_SECONDS = 4.0  # of one question, which needs 0.3 at most: a mutant that takes longer hangs


class Question(NamedTuple):
    name: str
    wrong: Callable[[], bool]
    of_equation: bool = True
    of_core: bool = True


Asked = Callable[[Question], bool]


def always(_: Question) -> bool:
    return True


class Judge:
    """`kills(change)`: whether any question is answered wrong after `change()`, which takes place in a fork."""

    def __init__(self, questions: list[Question]) -> None:
        self.questions = list(questions)

    def kills(self, change: Callable[[], object], asked: Asked = always) -> bool:
        """True too for an error, a crash and a hang. The case that kills is asked first the next time."""
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                found = self._first_wrong(change, asked)
                os.write(write, struct.pack("i", found))
            finally:
                os._exit(0)
        os.close(write)
        with open(read, "rb") as pipe:
            said = pipe.read()
        os.waitpid(child, 0)
        if len(said) < 4:
            return True
        (place,) = struct.unpack("i", said)
        if place > 0:
            self.questions.insert(0, self.questions.pop(place))
        return bool(place >= 0)

    def _first_wrong(self, change: Callable[[], object], asked: Asked) -> int:
        """The place of a question answered wrong, or -1. Dies of its timer where one never ends."""
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        os.dup2(sys.stderr.fileno(), 2)
        place = 0
        try:
            signal.setitimer(signal.ITIMER_VIRTUAL, CPU_SECONDS)
            change()
            for place, question in enumerate(self.questions):
                signal.setitimer(signal.ITIMER_VIRTUAL, CPU_SECONDS)
                if asked(question) and question.wrong():
                    return place
        except Exception:  # noqa: BLE001  # whatever it is, it is found out
            return place
        return -1


def seconds(judge: Judge, change: Callable[[], object], asked: Asked) -> float:
    """What code that is right takes; it must pass."""
    start = time.perf_counter()
    if judge.kills(change, asked):
        raise RuntimeError(f"without a mutant it fails: {judge.questions[0].name}")
    return time.perf_counter() - start
