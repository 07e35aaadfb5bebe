"""The mutation run by itself: it finds a planted survivor and a planted kill, in both languages."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path
from types import ModuleType

from mutate.core import switched, switches
from mutate.judge import Question
from mutate.run import KILLED, ROOT, SURVIVED, accepted, all_mutants, asked, complaints, put, stale, table
from mutate.source import Mutant, arithmetic, cpp_regions, mutants, python_regions

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
typedef double V __attribute__((vector_size(16)));
template <class T> T* forward(T* x) { return x + 1; }
template <class T> T half(const T* const x) { return static_cast<T>(-*x / 2); }
extern "C" double toy_backward(double dy, double saved) {
  const double unused = dy + saved;  // a - b
  const V lanes = V{-1, 3} / 1;
  double sum = half<double>(&dy) * lanes[0];
  for (int64_t i = 0; i < 2; ++i) sum += saved;
  return sum;
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
    texts = {"toy.cpp": CPP}
    numbered = dict(enumerate(mutants(cpp_regions(texts), texts), 1))
    assert not any("forward" in m.line for m in numbered.values())
    (tmp_path / "switches.h").write_text(switches() + "int unrolled_mutant = 0;")
    (tmp_path / "toy.cpp").write_text(switched(CPP, numbered)[0])
    command = ["c++", "-std=c++17", "-w", "-fPIC", "-shared", "-include", "switches.h", "-o", "toy.so", "toy.cpp"]
    subprocess.run(command, cwd=tmp_path, check=True)
    toy = ctypes.CDLL(str(tmp_path / "toy.so"))
    toy.toy_backward.restype, toy.toy_backward.argtypes = ctypes.c_double, [ctypes.c_double] * 2
    switch, states = ctypes.c_int.in_dll(toy, "unrolled_mutant"), {}
    for number, mutant in ({0: None} | numbered).items():
        switch.value = number
        states["" if mutant is None else short(mutant)] = toy.toy_backward(8.0, 5.0)
    assert states == {
        "": 14.0,
        "const double unused = [dy → saved] + saved;": 14.0,
        "const double unused = dy [+ → -] saved;": 14.0,
        "const double unused = dy + [saved → dy];": 14.0,
        "const V lanes = V{[- → ]1, 3} / 1;": 6.0,
        "const V lanes = V{-[1 → 2], 3} / 1;": 18.0,
        "const V lanes = V{-1, [3 → 2]} / 1;": 14.0,
        "const V lanes = V{-1, 3} [/ → *] 1;": 14.0,
        "const V lanes = V{-1, 3} / [1 → 2];": 12.0,
        "double sum = half<double>(&[dy → saved]) * lanes[0];": 12.5,
        "double sum = half<double>(&dy) [* → /] lanes[0];": 14.0,
        "double sum = half<double>(&dy) * lanes[[0 → 1]];": -2.0,
        "template <class T> T half(const T* const x) { return static_cast<T>(-*x [/ → *] 2); }": 26.0,
        "template <class T> T half(const T* const x) { return static_cast<T>(-*x / [2 → 1]); }": 18.0,
        "for (int64_t i = [0 → 1]; i < 2; ++i) sum += saved;": 9.0,
        "for (int64_t i = 0; i [< → <=] 2; ++i) sum += saved;": 19.0,
        "for (int64_t i = 0; i [< → >] 2; ++i) sum += saved;": 4.0,
        "for (int64_t i = 0; i < [2 → 1]; ++i) sum += saved;": 9.0,
        "for (int64_t i = 0; i < 2; ++i) sum [+= → -=] saved;": -6.0,
        "for (int64_t i = 0; i < 2; ++i) sum += [saved → dy];": 20.0,
    }


def test_of_a_loop_on_one_line_the_body_is_arithmetic() -> None:
    line = "  for (int64_t j = 0; j < n; j += 2) store(s + j, 2 * load(s + j));"
    assert arithmetic(line, line.index("2 * load"))
    assert not arithmetic(line, line.index("0"))
    assert not arithmetic("  for (int64_t i = 0; i < n; ++i) row[i] = w + i * ld;", 45)
    assert not arithmetic("  const int64_t n = larger(0, a - b);  // (2)", 30)


def test_a_file_asks_the_operators_that_it_serves() -> None:
    names = ["linear-tokens=4", "feed_forward-tokens=3", "activation-kind=relu", "test_x", "lstm-lengths=()"]
    for file, count in (("csrc/products.h", 3), ("csrc/linear.cpp", 2), ("csrc/activations.h", 3), ("csrc/gemm.h", 5)):
        of_file = asked(file, questions := [Question(name, bool) for name in names])
        assert sum(of_file(q) for q in questions) == count, file


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


def test_the_report_objects_to_a_survivor_that_is_not_listed_and_to_entries_without_one() -> None:
    texts = {"toy.py": PYTHON}
    first, second, *rest = mutants(python_regions(texts), texts)
    results = [(first, SURVIVED), (second, SURVIVED), *((m, KILLED) for m in rest)]
    assert complaints(results, {}) == sorted(f"survived: {m.label}" for m in (first, second))
    assert complaints(results, {first.line: "nobody reads it"}) == []
    assert complaints(results, {first.line: "", rest[1].label: ""}) == [f"listed, but killed: {rest[1].label}"]
    assert stale({"toy.py: gone": ""}) == ["listed, but there is no such line: toy.py: gone"]
    assert table(results, {first.label: ""}).splitlines()[-1].split() == ["all", "10", "8", "1", "1", "88.9%"]


def test_every_backward_has_mutants() -> None:
    found, texts = all_mutants()
    with_backward = {file for file, text in texts.items() if "_backward(" in text and file.endswith(".py")}
    assert with_backward <= {m.file for m in found}
    kernels = {path.name for path in (ROOT / "csrc").glob("*.cpp") if "UNROLLED_TARGET" in path.read_text()}
    headers = {"gemm.h", "products.h", "scores.h", "few_queries.h", "activations.h", "philox.h", "transpose.h"}
    assert {f"csrc/{name}" for name in kernels | headers} - {m.file for m in found} == {"csrc/target.cpp"}
    assert len({m.label for m in found}) == len(found)
    assert all(len(why) > 20 for why in accepted().values())
