"""The run: every mutant of the equations and of the core, who lived, and whether that is accounted for."""

from __future__ import annotations

import importlib
import multiprocessing
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from .core import Core, load
from .judge import Asked, Judge, Question
from .source import Mutant, arithmetic, cpp_regions, mutants, python_regions, read

ROOT = Path(__file__).parents[2]
EQUIVALENT = Path(__file__).parents[1] / "equivalent_mutants.toml"
KILLED, SURVIVED = "killed", "survived"
Outcome = tuple[Mutant, str]
Change = Callable[[], object]


def all_mutants(only: Iterable[str] = ()) -> tuple[list[Mutant], dict[str, str]]:
    """Of the files whose names hold one of `only`, with the texts of all."""
    python = read(ROOT, ["src/unrolled/equations/*.py"])
    # simd.h holds the elementary functions, which tests/test_core.py judges; the border has no arithmetic
    without = {"simd.h", "dispatch.cpp", "parallel.cpp", "schedule.cpp", *(f.name for f in ROOT.glob("csrc/bind*"))}
    cpp = read(ROOT, ["csrc/*.h", "csrc/*.cpp"], without)
    found = mutants(python_regions(python), python)
    found += [m for m in mutants(cpp_regions(cpp), cpp) if arithmetic(*_line(m, cpp[m.file]))]
    wanted = list(only)
    return [m for m in found if not wanted or any(o in m.file for o in wanted)], {**python, **cpp}


def _line(mutant: Mutant, text: str) -> tuple[str, int]:
    first = text.rfind("\n", 0, mutant.start) + 1
    return text[first : text.index("\n", mutant.end)], mutant.start - first


def put(module: ModuleType, mutant: Mutant, text: str) -> None:
    """The mutant's code into the function that everybody holds."""
    code = compile(mutant.applied(text), mutant.file, "exec", dont_inherit=True)
    bodies = [c for c in code.co_consts if isinstance(c, CodeType) and c.co_name == mutant.function]
    getattr(module, mutant.function).__code__ = bodies[0]


def changes(mutants: list[Mutant], texts: dict[str, str], core: Core, jobs: int) -> list[tuple[Mutant, Change]]:
    """What brings each mutant about; not those that make no valid program."""
    python = [m for m in mutants if m.file.endswith(".py")]
    found = [(m, partial(put, _module(m), m, texts[m.file])) for m in python]
    numbered = (
        core.build([m for m in mutants if not m.file.endswith(".py")], jobs) if len(python) < len(mutants) else {}
    )
    return found + [(m, partial(switch, core.module, i)) for i, m in numbered.items()]


def _module(mutant: Mutant) -> ModuleType:
    return importlib.import_module(mutant.file.removeprefix("src/").removesuffix(".py").replace("/", "."))


def switch(module: Path, number: int) -> None:
    """On to the core, with this mutant, or with 0 none."""
    load(module).value = number


def outcomes(changes: list[tuple[Mutant, Change]], judge: Judge, jobs: int) -> Iterator[Outcome]:
    _given[:] = changes, judge
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        yield from pool.imap_unordered(_one, range(len(changes)), chunksize=8)


_given: list[Any] = []  # the forked workers see it


def _one(index: int) -> Outcome:
    (mutant, change), judge = _given[0][index], _given[1]
    return mutant, KILLED if judge.kills(change, asked(mutant.file, judge.questions)) else SURVIVED


# The operators that a file serves, where they are not the one that it is named after, or more.
_SERVED = {
    "activations": ("activation", "feed_forward"),
    "few_queries": ("attention",),
    "feed_forward": ("activation", "feed_forward"),
    "attention": ("attention", "multiplicative_attention"),
    "layer_norm": ("layer_norm", "residual_norm"),
    "norm": ("layer_norm", "rms_norm", "residual_norm"),
    "positions": ("rotary",),
    "products": ("linear", "feed_forward"),
    "rms_norm": ("rms_norm", "residual_norm"),
    "scores": ("attention",),
}


def asked(file: str, questions: list[Question]) -> Asked:
    """Which questions concern a file: those of the operators that it serves, and all where none is known."""
    core, stem = file.startswith("csrc/"), Path(file).stem
    names = tuple(f"{name}-" for name in _SERVED.get(stem, (stem,)))
    about = (*names, "test_") if any(q.name.startswith(names) for q in questions) else ("",)
    return lambda q: (q.of_core if core else q.of_equation) and q.name.startswith(about)


def accepted(path: Path = EQUIVALENT) -> dict[str, str]:
    """The committed list: mutants, or lines of which every mutant, that no test can tell from the original, and why."""
    groups = tomllib.loads(path.read_text())["equivalent"]
    return {label: group["why"] for group in groups for label in (*group.get("mutants", ()), *group.get("lines", ()))}


def equivalent(mutant: Mutant, known: dict[str, str]) -> bool:
    return mutant.label in known or mutant.line in known


def table(results: list[Outcome], known: dict[str, str]) -> str:
    """Per file: mutants, killed, equivalent by the list, survived; and of those not equivalent, the share killed."""
    rows = [("file", "mutants", "killed", "equivalent", "survived", "score")]
    for file in [*sorted({m.file for m, _ in results}), "all"]:
        own = Counter(
            "equivalent" if state == SURVIVED and equivalent(m, known) else state
            for m, state in results
            if file in (m.file, "all")
        )
        total, real = own.total(), own.total() - own["equivalent"]
        score = f"{own[KILLED] / real:.1%}" if real else "-"
        rows.append((file, *map(str, (total, own[KILLED], own["equivalent"], own[SURVIVED])), score))
    return "\n".join(f"{r[0]:44}" + "".join(f"{cell:>12}" for cell in r[1:]) for r in rows)


def complaints(results: list[Outcome], known: dict[str, str]) -> list[str]:
    """Survivors that the list does not have, and mutants listed by themselves that a question kills."""
    return sorted(
        [f"survived: {m.label}" for m, state in results if state == SURVIVED and not equivalent(m, known)]
        + [f"listed, but killed: {m.label}" for m, state in results if state == KILLED and m.label in known]
    )


def stale(known: dict[str, str]) -> list[str]:
    """Entries of the list that no mutant has, as the lines have changed."""
    there = {name for m in all_mutants()[0] for name in (m.label, m.line)}
    return [f"listed, but there is no such line: {name}" for name in sorted(known.keys() - there)]
