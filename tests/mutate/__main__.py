"""`python -m tests.mutate [FILE ...]`: exit status 1 if a mutant survives that the committed list does not have."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from .core import Core, environment
from .judge import Judge, seconds
from .questions import questions
from .run import ROOT, accepted, all_mutants, complaints, outcomes, table


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutate", description=__doc__)
    parser.add_argument("files", nargs="*", help="parts of file names; without any, all files")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--count", action="store_true", help="only say how many mutants there are")
    given = parser.parse_args()
    start = time.perf_counter()
    found, texts = all_mutants(given.files)
    print(f"{len(found)} mutants", flush=True)
    if given.count:
        return 0
    judge = Judge(questions())
    print(f"{len(judge.questions)} questions, {seconds(judge):.1f} s when all are asked", flush=True)
    with tempfile.TemporaryDirectory() as work:
        core = Core(ROOT, Path(work))
        if any(m.file.startswith("csrc/") for m in found):
            core.build(given.jobs)
        print(f"begun after {time.perf_counter() - start:.0f} s", flush=True)
        results = []
        for result in outcomes(found, texts, judge, core, given.jobs):
            results.append(result)
            if len(results) % 100 == 0:
                print(f"{len(results)} after {time.perf_counter() - start:.0f} s", flush=True)
    known = accepted()
    print(table(results, known))
    wrong = complaints(results, known, full=not given.files)
    print("\n".join(wrong))
    print(f"{time.perf_counter() - start:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    if "LD_PRELOAD" not in os.environ:
        os.execve(sys.executable, [sys.executable, "-m", "tests.mutate", *sys.argv[1:]], os.environ | environment())
    sys.exit(main())
