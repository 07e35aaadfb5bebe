"""The mutation run by itself: it finds a planted survivor and a planted kill, in both languages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

from mutate.core import Core
from mutate.run import BROKEN, KILLED, SAME, SURVIVED, accepted, all_mutants, complaints, put, table
from mutate.source import Mutant, cpp_regions, mutants, python_regions

PYTHON = '''
def toy_forward(x):
    return 2 * x

def toy_backward(dy, saved):
    """dy * 5 is not code."""
    unused = dy + 1  # nobody reads it
    return half(dy) * 4

def half(x):
    return -x / -2
'''

CPP = """
#include <stdint.h>
constexpr int UNROLLED_TARGET = 1;
template <class T> T* forward(T* x) { return x + 1; }
template <class T> inline T half(const T* const x) { return static_cast<T>(*x / 2); }
extern "C" double toy_backward(double dy, double saved) {
  const double unused = dy + saved;  // a - b
  const double *const p = &dy;
  return half<double>(p) * 4;
}
"""


def short(mutant: Mutant) -> str:
    return mutant.label.split(": ", 1)[1]


def test_python() -> None:
    texts = {"toy.py": PYTHON}
    module = ModuleType("toy")
    exec(PYTHON, vars(module))
    states = {}
    for mutant in mutants(python_regions(texts), texts):
        before = {name: getattr(module, name).__code__ for name in ("toy_backward", "half")}
        put(module, mutant, PYTHON)
        states[short(mutant)] = SURVIVED if module.toy_backward(3.0, 0.0) == 6 else KILLED
        for name, code in before.items():
            getattr(module, name).__code__ = code
    assert states == {
        "unused = [dy → saved] + 1": SURVIVED,
        "unused = dy [+ → -] 1": SURVIVED,
        "unused = dy + [1 → 2]": SURVIVED,
        "return half([dy → saved]) * 4": KILLED,
        "return half(dy) [* → /] 4": KILLED,
        "return half(dy) * [4 → 3]": KILLED,
        "return [- → ]x / -2": KILLED,
        "return -x [/ → *] -2": KILLED,
        "return -x / [- → ]2": KILLED,
        "return -x / -[2 → 1]": KILLED,
    }


def test_cpp(tmp_path: Path) -> None:
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "toy.cpp").write_text(CPP)
    texts = {"csrc/toy.cpp": CPP}
    found = {short(m): m for m in mutants(cpp_regions(texts), texts)}
    halved = "template <class T> inline T half(const T* const x) { return static_cast<T>(*x [/ → *] 2); }"
    assert {"const double unused = dy [+ → -] saved;", halved} < found.keys()
    assert not any("forward" in m.line or "*const p = [" in label for label, m in found.items())
    core = Core(tmp_path, tmp_path / "work")

    def state(label: str, text: str = CPP) -> str:
        module = core.changed("worker", "toy.cpp", found[label].applied(text), "toy.cpp")
        return BROKEN if module is None else SAME if core.same_code("worker", "toy.cpp") else "to be judged"

    assert state("const double unused = dy [+ → -] saved;") == SAME
    assert state("return half<double>(p) [* → /] 4;") == "to be judged"
    assert state("return half<double>(p) [* → /] 4;", CPP.replace("p = &dy", "p = &d")) == BROKEN


FORK = """
import os
import mutate.judge
from mutate.judge import Judge, Question
mutate.judge.CPU_SECONDS = 0.3
right = [2]
def spin():
    while True: pass
judge = Judge([Question("sum", lambda: right[0] + 2 != 4), Question("product", lambda: right[0] * 2 != 4)])
changes = lambda: None, lambda: right.append(0), lambda: right.insert(0, 3), os.abort, spin, lambda: right.nothing
print(*map(judge.kills, changes))
"""


def test_a_wrong_answer_an_error_a_crash_and_a_hang_kill() -> None:
    done = subprocess.run([sys.executable, "-c", FORK], cwd=Path(__file__).parent, capture_output=True, text=True)
    assert done.stdout.split() == ["False", "False", "True", "True", "True", "True"], done.stderr


def test_the_report_objects_to_a_survivor_that_is_not_listed_and_to_a_listed_one_that_is_none() -> None:
    texts = {"toy.py": PYTHON}
    first, second, *rest = mutants(python_regions(texts), texts)
    results = [(first, SURVIVED), (second, SURVIVED), (rest[0], SAME), *((m, KILLED) for m in rest[1:])]
    assert complaints(results, {}, full=False) == sorted(f"survived: {m.label}" for m in (first, second))
    assert complaints(results, {first.line: "nobody reads it"}, full=True) == []
    assert complaints(results, {first.line: "", rest[1].label: ""}, full=True) == [
        f"listed, but no survivor: {rest[1].label}"
    ]
    assert table(results, {first.label: ""}).splitlines()[-1].split() == ["all", "10", "7", "2", "1", "87.5%"]


def test_every_backward_has_mutants() -> None:
    found, texts = all_mutants()
    with_backward = {file for file, text in texts.items() if "_backward(" in text and file.endswith(".py")}
    assert with_backward <= {m.file for m in found}
    assert {"csrc/linear.cpp", "csrc/embedding.cpp", "csrc/cross_entropy.cpp", "csrc/gemm.h"} < {m.file for m in found}
    assert len({m.label for m in found}) == len(found)
    assert all(len(why) > 20 for why in accepted().values())
