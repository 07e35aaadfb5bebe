"""The core with one translation unit changed: compiled for one target, in doubles, and linked with the others."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

TARGET = ["-DUNROLLED_TARGET=baseline", "-DUNROLLED_BYTES=16", "-DUNROLLED_VECTORS=2"]
FLAGS = ["-std=c++17", "-O1", "-fPIC", "-fvisibility=hidden", "-ffp-contract=fast", "-fno-math-errno", "-w"]

ASAN = ["-fsanitize=address"]  # only the changed unit: what it reads or writes outside an array kills the process


class Core:
    """Objects of the unchanged core in `work`; every worker gets a copy of the sources and changes one file in it."""

    def __init__(self, root: Path, work: Path, compiler: str = "c++") -> None:
        self.source, self.work, self.compiler = root / "csrc", work, compiler
        self.units = sorted(f.name for f in self.source.glob("*.cpp") if "UNROLLED_TARGET" in f.read_text())
        work.mkdir(parents=True, exist_ok=True)

    def build(self, jobs: int) -> None:
        """The unchanged objects, and of each unit what it compiles to without float."""
        import nanobind

        base = Path(nanobind.include_dir()).parent
        python = [f"-I{sysconfig.get_path('include')}", f"-I{base / 'include'}", f"-I{base / 'ext/robin_map/include'}"]
        python += ["-DNDEBUG", "-DNB_COMPACT_ASSERTIONS"]
        shared = [f.name for f in self.source.glob("*.cpp") if f.name not in self.units]
        commands = [self._command(self.source / name, self._object(name), python) for name in shared]
        commands += [
            self._command(base / "src/nb_combined.cpp", self._object("nanobind"), [*python, "-fno-strict-aliasing"])
        ]
        commands += [self._command(self.source / name, self._object(name)) for name in self.units]
        running: list[subprocess.Popen[bytes]] = []
        for command in commands:
            if len(running) == jobs:
                _checked(running.pop(0))
            running.append(subprocess.Popen(command))
        for process in running:
            _checked(process)

    def including(self, file: str) -> list[str]:
        """The units that a change of `file` changes."""
        if file.endswith(".cpp"):
            return [file]
        return [unit for unit in self.units if file in self._included(unit)]

    def changed(self, worker: str, file: str, text: str, unit: str) -> Path | None:
        """A module with `unit` compiled from the changed `file`; None where that does not compile."""
        own = self._copy(worker)
        before = (own / file).read_text()
        (own / file).write_text(_doubles(text))
        found, module = own / "changed.o", own / "changed.so"
        compiled = subprocess.run(self._command(own / unit, found, ASAN), capture_output=True, check=False)
        (own / file).write_text(before)
        if compiled.returncode:
            return None
        objects = [str(o) for o in self.work.glob("*.o")]
        link = [self.compiler, "-shared", "-o", str(module), str(found), *objects, "-ldl", "-lpthread"]
        subprocess.run(link, check=True, capture_output=True)
        return module

    def same_code(self, worker: str, unit: str) -> bool:
        """Whether the unit last changed compiled to what the unchanged one compiles to."""
        own = self._copy(worker)
        unchanged = own / f"{unit}.o"
        if not unchanged.exists():
            subprocess.run(self._command(own / unit, unchanged, ASAN), check=True)
        return unchanged.read_bytes() == (own / "changed.o").read_bytes()

    def _copy(self, worker: str) -> Path:
        own = self.work / worker
        if not own.exists():
            shutil.copytree(self.source, own)
            for f in (*own.glob("*.cpp"), *own.glob("*.h")):
                f.write_text(_doubles(f.read_text()))
        return own

    def _object(self, name: str) -> Path:
        return self.work / f"{name}.o"

    def _command(self, source: Path, target: Path, more: list[str] | None = None) -> list[str]:
        flags = [*FLAGS, *TARGET, f"-I{self.source / 'include'}", *(more or [])]
        return [self.compiler, *flags, "-c", str(source), "-o", str(target)]

    def _included(self, file: str) -> set[str]:
        found = set(re.findall(r'#include "([\w.]+)"', (self.source / file).read_text()))
        return found.union(*(self._included(f) for f in found if (self.source / f).exists()))


def _doubles(text: str) -> str:
    """Without the instantiations for float, which the unchanged objects have: half the time to compile."""
    return re.sub(r"\btemplate (?!<)[^;{}]*\bfloat\b[^;{}]*;", "", text)


def _checked(process: subprocess.Popen[bytes]) -> None:
    if process.wait():
        raise RuntimeError(f"does not compile: {process.args!r}")


def environment(compiler: str = "c++") -> dict[str, str]:
    """What a Python needs to load a unit with the address sanitizer."""
    say = [compiler, "-print-file-name=libasan.so"], [compiler, "-print-file-name=libstdc++.so"]
    found = [subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() for command in say]
    if not all(Path(f).is_absolute() for f in found):
        raise RuntimeError(f"{compiler} has no address sanitizer: {' '.join(found)}")
    options = "detect_leaks=0:symbolize=0:max_allocation_size_mb=2000"
    return {"LD_PRELOAD": " ".join(found), "ASAN_OPTIONS": options}


def load(module: Path) -> None:
    """In a fork: the operators run on this core."""
    spec = importlib.util.spec_from_file_location("unrolled._core", module)
    assert spec is not None
    core: Any = importlib.util.module_from_spec(spec)
    assert isinstance(spec.loader, importlib.machinery.ExtensionFileLoader)
    spec.loader.exec_module(core)
    for name, other in list(sys.modules.items()):
        if name.startswith("unrolled.ops") and hasattr(other, "core"):
            other.core = core  # type: ignore[attr-defined]
