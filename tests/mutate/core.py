"""The core with all its mutants in it, each behind a switch: compiled once, for one target and in doubles."""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
import re
import shutil
import subprocess
import sys
import sysconfig
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from .source import OTHER, Mutant

TARGET = ["-DUNROLLED_TARGET=baseline", "-DUNROLLED_BYTES=16", "-DUNROLLED_VECTORS=2"]
FLAGS = ["-std=c++17", "-O1", "-fPIC", "-fvisibility=hidden", "-ffp-contract=fast", "-fno-math-errno", "-w"]
# What a mutant reads or writes outside an array kills the process.
SANITIZER = ["-fsanitize=address"]

# `a + b` becomes `a + Op{7} + b`: of the same precedence, and the second plus does what mutant 7 would if it is on.
_SWITCHES = """
#include <type_traits>
extern "C" int unrolled_mutant;
namespace unrolled_mutants {
struct Op { int first, second; };
inline bool on(int id) { return id && unrolled_mutant == id; }
template <class A> auto operator-(Op m, const A& a) { return on(m.first) ? a : -a; }
"""
_BINARY = """
template <class A> struct P%(i)s { A a; Op m; };
template <class A> auto operator%(op)s(const A& a, Op m) { return P%(i)s<std::decay_t<const A&>>{a, m}; }
template <class A, class B> auto operator%(op)s(const P%(i)s<A>& p, const B& b) {
  if (on(p.m.first)) return p.a %(first)s b;
  if (on(p.m.second)) return p.a %(second)s b;
  return p.a %(op)s b;
}
"""
_ASSIGNMENT = """
template <class B> struct P%(i)s { B b; Op m; };
template <class B> auto operator%(op)s(Op m, const B& b) { return P%(i)s<std::decay_t<const B&>>{b, m}; }
template <class A, class B> A& operator%(op)s(A& a, const P%(i)s<B>& p) {
  return on(p.m.first) ? a %(first)s p.b : a %(op)s p.b;
}
"""

# In the place of parallel.cpp: on one thread, the last part first, so that each must do its own work and no more; in as
# many parts as threads are allowed, however small the work.
_PARALLEL = """
#include "unrolled/parallel.h"
extern "C" __attribute__((visibility("default"))) int unrolled_mutant = 0;
namespace unrolled {
void parallel_for(int, int64_t n, Body body, void* context) {
  while (n > 0) body(context, --n);
}
int useful_threads(int threads, double) { return threads; }
}
"""


def switches() -> str:
    text = _SWITCHES
    for i, (op, others) in enumerate(OTHER.items()):
        first, second = (others.split() * 2)[:2]
        if op not in ("//", "@", "and", "or"):
            pattern = _ASSIGNMENT if op in ("+=", "-=", "*=") else _BINARY
            text += pattern % {"i": i, "op": op, "first": first, "second": second}
    return text + "}\n"


class Span(NamedTuple):
    """Where in the switched text some mutants stand."""

    row: int
    first: int
    last: int
    numbers: tuple[int, ...]


def switched(text: str, mutants: dict[int, Mutant]) -> tuple[str, list[Span]]:
    """The text of a file with these mutants in it, on the rows where they were."""
    tokens: dict[tuple[int, int], list[int]] = defaultdict(list)
    for i, m in mutants.items():
        tokens[m.start, m.end].append(i)
    found, spans, done = "", list[Span](), 0
    for (start, end), numbers, new in sorted(_edits(text, tokens, mutants)):
        found += text[done:start]
        column = len(found) - found.rfind("\n")
        spans.append(Span(found.count("\n") + 1, column, column + len(new), numbers))
        found, done = found + new, end
    return found + text[done:], spans


def _edits(
    text: str, tokens: dict[tuple[int, int], list[int]], mutants: dict[int, Mutant]
) -> Iterator[tuple[tuple[int, int], tuple[int, ...], str]]:
    for (start, end), numbers in tokens.items():
        ids = tuple(numbers)
        old, op = text[start:end], f"::unrolled_mutants::Op{{{', '.join(map(str, ids))}}}"
        if mutants[ids[0]].new == "":
            operand = re.compile(r"\w+").match(text, end)
            assert operand is not None
            yield (start, end), ids, f"({op} - "
            yield (operand.end(), operand.end()), ids, ")"
        elif old in OTHER:
            yield (start, end), ids, f"{old} {op} {old}"
        else:
            yield (start, end), ids, f"(::unrolled_mutants::on({ids[0]}) ? {mutants[ids[0]].new} : {old})"


class Core:
    """Built in `work` from the sources in `root`."""

    def __init__(self, root: Path, work: Path, compiler: str = "c++") -> None:
        self.source, self.work, self.compiler = work / "unchanged", work, compiler
        shutil.copytree(root / "csrc", self.source)  # what is edited meanwhile does not matter
        self.kernels = [f.name for f in sorted(self.source.glob("*.cpp")) if "UNROLLED_TARGET" in f.read_text()]
        self.module = work / "core.so"

    def build(self, mutants: list[Mutant], jobs: int) -> dict[int, Mutant]:
        """The module; of the mutants those that compile, by the number that switches them on."""
        import nanobind

        shutil.copytree(self.source, self.work / "csrc")
        (self.work / "switches.h").write_text(switches())
        (self.work / "parallel.cpp").write_text(_PARALLEL)
        base = Path(nanobind.include_dir()).parent
        python = [f"-I{sysconfig.get_path('include')}", f"-I{base / 'include'}", f"-I{base / 'ext/robin_map/include'}"]
        python += ["-DNDEBUG", "-DNB_COMPACT_ASSERTIONS", "-fno-strict-aliasing"]
        unchanged = {f.name: f for f in self.source.glob("*.cpp")} | {"parallel.cpp": self.work / "parallel.cpp"}
        others = [base / "src/nb_combined.cpp", *unchanged.values()]
        if errors := self._compile([(f, f"unchanged_{f.stem}.o", python) for f in others], jobs):
            raise RuntimeError(f"the core does not compile:\n{errors}")
        numbered = dict(enumerate(mutants, 1))
        while bad := self._try(numbered, jobs):
            numbered = {i: m for i, m in numbered.items() if i not in bad}
        objects = [str(o) for kind in ("changed", "unchanged") for o in sorted(self.work.glob(f"{kind}_*.o"))]
        flags = [
            "-shared",
            *SANITIZER,
            "-Wl,-z,muldefs",
            "-o",
            str(self.module),
        ]  # of two definitions the first is taken
        subprocess.run([self.compiler, *flags, *objects, "-ldl", "-lpthread"], check=True)
        return numbered

    def _try(self, numbered: dict[int, Mutant], jobs: int) -> set[int]:
        """Compiles the changed kernels; which mutants make no valid program."""
        own, spans = self.work / "csrc", dict[str, list[Span]]()
        for source in (*own.glob("*.h"), *own.glob("*.cpp")):
            mine = {i: m for i, m in numbered.items() if m.file == f"csrc/{source.name}"}
            text, spans[source.name] = switched(_doubles((self.source / source.name).read_text()), mine)
            source.write_text(text)
        more = ["-include", str(self.work / "switches.h"), "-fmax-errors=0", *SANITIZER]
        files = {m.file.removeprefix("csrc/") for m in numbered.values()}
        changed = [
            name for name in self.kernels if self._read_by(name) & files
        ]  # of the others there is the unchanged one
        errors = self._compile([(own / name, f"changed_{name}.o", more) for name in changed], jobs)
        found = set[int]()
        for name, *place in re.findall(r"/csrc/(\w+\.\w+):(\d+):(\d+):(?: error|   required)", errors):
            row, column = map(int, place)
            there = [s for s in spans[name] if s.row == row]
            exact = [s for s in there if s.first <= column <= s.last]
            found.update(number for span in exact or there for number in span.numbers)
        if errors and not found:
            raise RuntimeError(f"the mutants do not compile:\n{errors}")
        return found

    def _read_by(self, name: str) -> set[str]:
        """A file and what it includes of ours."""
        included = re.findall(r'#include "(\w+\.h)"', (self.source / name).read_text())
        return {name}.union(*(self._read_by(header) for header in included))

    def _compile(self, sources: list[tuple[Path, str, list[str]]], jobs: int) -> str:
        """What the compiler says of those that do not compile."""

        def one(given: tuple[Path, str, list[str]]) -> str:
            source, target, more = given
            command = [self.compiler, *FLAGS, *TARGET, f"-I{self.source / 'include'}", *more]
            command += ["-c", str(source), "-o", str(self.work / target)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            return done.stderr if done.returncode else ""

        with ThreadPoolExecutor(jobs) as pool:
            return "".join(pool.map(one, sources))


def _doubles(text: str) -> str:
    """Without the instantiations for float, which the unchanged objects have."""
    return re.sub(r"\btemplate (?!<)[^;{}]*\bfloat\b[^;{}]*;", lambda m: " " * len(m[0]), text)


def environment(compiler: str = "c++") -> dict[str, str]:
    """What a Python needs to load code with the address sanitizer."""
    say = [compiler, "-print-file-name=libasan.so"], [compiler, "-print-file-name=libstdc++.so"]
    found = [subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() for command in say]
    if not all(Path(f).is_absolute() for f in found):
        raise RuntimeError(f"{compiler} has no address sanitizer: {' '.join(found)}")
    options = ["detect_leaks=0", "symbolize=0", "max_allocation_size_mb=2000"]
    options += ["max_malloc_fill_size=1000000000", "malloc_fill_byte=255"]  # NaN, so that what nobody wrote is seen
    return {"LD_PRELOAD": " ".join(found), "ASAN_OPTIONS": ":".join(options)}


def load(module: Path) -> ctypes.c_int:
    """The operators run on this core from now on; the switch of its mutants."""
    spec = importlib.util.spec_from_file_location("unrolled._core", module)
    assert spec is not None
    core: Any = importlib.util.module_from_spec(spec)
    assert isinstance(spec.loader, importlib.machinery.ExtensionFileLoader)
    spec.loader.exec_module(core)
    for name, other in list(sys.modules.items()):
        if name.startswith("unrolled.ops") and hasattr(other, "core"):
            other.core = core  # type: ignore[attr-defined]
    return ctypes.c_int.in_dll(ctypes.CDLL(str(module)), "unrolled_mutant")
