"""`python -m benchmarks recurrent` measures, prints tables and stores everything as JSON under benchmarks/results."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks import peers

NAMES = ("recurrent",)
KEEP_PAGES = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "4294967296"}
ALLOCATORS = {"default": {}, "keeps its pages": KEEP_PAGES}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--only", default="", metavar="TEXT", help='cases whose name holds it, as "GRU T100 "')
    parser.add_argument("--peers", default="", metavar="NAMES", help=f"of {','.join(peers.PACKAGES)}: besides torch")
    parser.add_argument("--repeats", type=int, default=15, help="timings of each side, interleaved (at least 10)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="for every side alike")
    parser.add_argument(
        "--output", type=Path, help="the JSON file (default: benchmarks/results/NAME.json; with --only: none)"
    )
    parser.add_argument("--one-process", choices=ALLOCATORS, help=argparse.SUPPRESS)  # prints its rows as JSON
    options = parser.parse_args()
    if options.repeats < 10:
        parser.error(f"--repeats must be at least 10, found {options.repeats}")
    asked = [peer for peer in options.peers.split(",") if peer]
    if trouble := peers.missing(asked):
        parser.error(trouble)
    if options.one_process:
        json.dump(measure(options, asked), sys.stdout)
        return 0
    from benchmarks.harness import MEANING, machine
    from benchmarks.recurrent import linear
    from benchmarks.table import show

    if not plan(options, asked):
        parser.error(f"no case holds {options.only!r}; they are:\n" + "\n".join(plan(options, asked, everything=True)))
    result: dict[str, Any] = {"benchmark": options.name, "machine": machine(options.threads)}
    result |= {"only": options.only, "repeats": options.repeats, "meaning": MEANING, "ceiling_gflops": {}}
    result |= {"time_10000_over_1000_over_10": {}, "rows": []}
    for allocator, environment in ALLOCATORS.items():
        command = [sys.executable, "-m", "benchmarks", *sys.argv[1:], "--one-process", allocator]
        done = subprocess.run(command, env={**os.environ, **environment}, stdout=subprocess.PIPE, check=False)
        if done.returncode:
            return done.returncode
        one = json.loads(done.stdout)
        result["ceiling_gflops"][allocator] = one["ceiling_gflops"]
        result["time_10000_over_1000_over_10"][allocator] = linear(one["rows"])
        result["rows"] += [{"allocator": allocator, **row} for row in one["rows"]]
    show(result)
    output = options.output
    if output is None and not options.only:
        output = Path(__file__).parent / "results" / f"{options.name}.json"
    if output:
        output.parent.mkdir(exist_ok=True)
        output.write_text(json.dumps(result, indent=1) + "\n")
        print(f"stored in {output}", file=sys.stderr)
    return 0


def plan(options: argparse.Namespace, asked: list[str], *, everything: bool = False) -> dict[str, Any]:
    """By case: what measures it. The peers come last: their libraries start threads."""
    from benchmarks.recurrent import Run, jobs

    run = Run(options.repeats, options.threads, memory=options.one_process == "default")
    found = dict([*jobs(run), *(peers.jobs(run, asked) if asked else [])])
    return {case: call for case, call in found.items() if everything or options.only in case}


def measure(options: argparse.Namespace, asked: list[str]) -> dict[str, Any]:
    os.environ["NPROC"] = str(options.threads)  # XLA reads it once
    import torch

    from benchmarks.recurrent import ceiling_once

    torch.set_num_threads(options.threads)
    rows = []
    for case, call in plan(options, asked).items():
        print(f"{case} (allocator: {options.one_process})", file=sys.stderr)
        torch.manual_seed(0)
        rows += call()
    return {"ceiling_gflops": ceiling_once() / 1e6, "rows": rows}


if __name__ == "__main__":
    sys.exit(main())
