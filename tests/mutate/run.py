"""The run: every mutant of the equations and of the core, who lived, and whether that is accounted for."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from .core import Core, load
from .source import Mutant, cpp_regions, mutants, python_regions, read

ROOT = Path(__file__).parents[2]
EQUIVALENT = Path(__file__).parents[1] / "equivalent_mutants.toml"
KILLED, SURVIVED, SAME, BROKEN = "killed", "survived", "same code", "does not compile"
Outcome = tuple[Mutant, str]


def all_mutants(only: Iterable[str] = ()) -> tuple[list[Mutant], dict[str, str]]:
    """Of the files whose names hold one of `only`, with the texts of all."""
    python = read(ROOT, ["src/unrolled/equations/*.py"])
    # simd.h holds the elementary functions, which tests/test_core.py judges; the border has no arithmetic
    cpp = read(ROOT, ["csrc/*.h", "csrc/*.cpp"], {"simd.h", "bind.cpp", "dispatch.cpp", "parallel.cpp", "schedule.cpp"})
    found = mutants(python_regions(python), python) + mutants(cpp_regions(cpp), cpp)
    wanted = list(only)
    return [m for m in found if not wanted or any(o in m.file for o in wanted)], {**python, **cpp}


def put(module: ModuleType, mutant: Mutant, text: str) -> None:
    """The mutant's code into the function that everybody holds."""
    code = compile(mutant.applied(text), mutant.file, "exec", dont_inherit=True)
    bodies = [c for c in code.co_consts if isinstance(c, CodeType) and c.co_name == mutant.function]
    getattr(module, mutant.function).__code__ = bodies[0]


def judge_python(mutant: Mutant, text: str, kills: Callable[..., bool]) -> str:
    module = importlib.import_module(mutant.file.removeprefix("src/").removesuffix(".py").replace("/", "."))
    return KILLED if kills(partial(put, module, mutant, text)) else SURVIVED


def judge_cpp(mutant: Mutant, text: str, kills: Callable[..., bool], core: Core) -> str:
    file, worker = mutant.file.removeprefix("csrc/"), f"worker{os.getpid()}"
    seen = []
    for unit in core.including(file):
        module = core.changed(worker, file, mutant.applied(text), unit)
        if module is None:
            return BROKEN
        seen.append(SAME if core.same_code(worker, unit) else SURVIVED)
        if seen[-1] is SURVIVED and kills(partial(load, module), True):
            return KILLED
    return SURVIVED if SURVIVED in seen else SAME


def outcomes(found: list[Mutant], texts: dict[str, str], judge: Any, core: Core, jobs: int) -> Iterator[Outcome]:
    context = multiprocessing.get_context("fork")
    with context.Pool(jobs, _begin, (texts, judge, core)) as pool:
        yield from pool.imap_unordered(_one, found, chunksize=4)


_worker: list[Any] = []


def _begin(*given: Any) -> None:
    _worker[:] = given


def _one(mutant: Mutant) -> Outcome:
    texts, judge, core = _worker
    if mutant.file.endswith(".py"):
        return mutant, judge_python(mutant, texts[mutant.file], judge.kills)
    return mutant, judge_cpp(mutant, texts[mutant.file], judge.kills, core)


def accepted(path: Path = EQUIVALENT) -> dict[str, str]:
    """The committed list: mutants, or lines of which every mutant, that no test can tell from the original, and why."""
    groups = tomllib.loads(path.read_text())["equivalent"]
    return {label: group["why"] for group in groups for label in (*group.get("mutants", ()), *group.get("lines", ()))}


def equivalent(mutant: Mutant, known: dict[str, str]) -> bool:
    return mutant.label in known or mutant.line in known


def table(results: list[Outcome], known: dict[str, str]) -> str:
    """Per file: mutants that compile, killed, equivalent (listed, or compiled to the same code), survived, score."""
    rows = [("file", "mutants", "killed", "equivalent", "survived", "score")]
    for file in [*dict.fromkeys(sorted(m.file for m, _ in results)), "all"]:
        count = Counter(
            "equivalent" if state == SAME or (state == SURVIVED and equivalent(m, known)) else state
            for m, state in results
            if file in (m.file, "all") and state != BROKEN
        )
        total, real = count.total(), count.total() - count["equivalent"]
        score = f"{count[KILLED] / real:.1%}" if real else "-"
        rows.append((file, *map(str, (total, count[KILLED], count["equivalent"], count[SURVIVED])), score))
    return "\n".join(f"{r[0]:44}" + "".join(f"{cell:>12}" for cell in r[1:]) for r in rows)


def complaints(results: list[Outcome], known: dict[str, str], full: bool) -> list[str]:
    """Survivors that the list does not have and, of a full run, entries of the list that did not survive."""
    survived = [m for m, state in results if state == SURVIVED]
    stale = known.keys() - {m.label for m in survived} - {m.line for m in survived} if full else set()
    found = sorted(m.label for m in survived if not equivalent(m, known))
    return [f"survived: {label}" for label in found] + [f"listed, but no survivor: {label}" for label in sorted(stale)]
