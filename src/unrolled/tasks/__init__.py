"""What is learned: each task says which data, model, loss and metrics belong together."""

from __future__ import annotations

import importlib
from difflib import get_close_matches
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unrolled.tasks.classify import ClassifyTask
    from unrolled.tasks.memory import MemoryTask

TASKS = {"classify": "unrolled.tasks.classify:ClassifyTask", "memory": "unrolled.tasks.memory:MemoryTask"}


def task_class(name: str) -> type[ClassifyTask] | type[MemoryTask]:
    """The class of a task by its name; only now its modules, and PyTorch, are imported."""
    if name not in TASKS:
        close = get_close_matches(name, TASKS, n=1)
        hint = f"did you mean {close[0]}?" if close else "there are " + ", ".join(TASKS)
        raise ValueError(f"no task {name!r}: {hint}")
    module, _, attribute = TASKS[name].partition(":")
    found: type[ClassifyTask] | type[MemoryTask] = getattr(importlib.import_module(module), attribute)
    return found
