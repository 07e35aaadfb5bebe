"""`python -m tests.mutate [FILE ...]`: exit status 1 if a mutant survives that the committed list does not have."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from .core import Core, environment
from .judge import Judge, seconds
from .questions import questions
from .run import ROOT, accepted, all_mutants, asked, changes, complaints, outcomes, stale, switch, table


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutate", description=__doc__)
    parser.add_argument("files", nargs="*", help="parts of file names; without any, all files")
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    start = time.perf_counter()
    found, texts = all_mutants(given.files)
    known = accepted()
    judge = Judge(questions())
    took = seconds(judge, lambda: None, asked("equations", judge.questions))
    print(f"{len(found)} mutants, {len(judge.questions)} questions, answered in {took:.1f} s", flush=True)
    results = []
    with tempfile.TemporaryDirectory() as work:
        core = Core(ROOT, Path(work))
        changed = changes(found, texts, core, given.jobs)
        print(f"{len(changed)} of them are valid programs", flush=True)
        if core.module.exists():
            took = seconds(judge, partial(switch, core.module, 0), asked("csrc/", judge.questions))
            print(f"by the core in {took:.1f} s", flush=True)
        for result in outcomes(changed, judge, given.jobs):
            results.append(result)
            if len(results) % 200 == 0:
                print(f"{len(results)} after {time.perf_counter() - start:.0f} s", flush=True)
    print(table(results, known))
    wrong = complaints(results, known) + ([] if given.files else stale(known))
    print(*wrong, f"{time.perf_counter() - start:.0f} s", sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    if "LD_PRELOAD" not in os.environ:
        os.execve(sys.executable, [sys.executable, "-m", "tests.mutate", *sys.argv[1:]], os.environ | environment())
    sys.exit(main())
