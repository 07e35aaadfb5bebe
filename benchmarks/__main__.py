"""`python -m benchmarks NAME` measures, prints and stores everything as JSON under benchmarks/results."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks import peers

KEEP_PAGES = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "4294967296"}
ALLOCATORS = {"default": {}, "keeps its pages": KEEP_PAGES}
RESULTS = Path(__file__).parent / "results"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    names = parser.add_subparsers(dest="name", required=True, metavar="NAME")
    recurrent = names.add_parser("recurrent", help="the recurrent layers beside torch.nn's and others")
    recurrent.add_argument("--peers", default="", metavar="NAMES", help=f"of {','.join(peers.PACKAGES)}: besides torch")
    attention = names.add_parser("attention", help="attention and the Transformer beside torch.nn's")
    attention.add_argument("--compile", action="store_true", help="torch's side under torch.compile too")
    for name in (recurrent, attention):
        name.add_argument("--only", default="", metavar="TEXT", help='cases whose name holds it, as "GRU T100 "')
        name.add_argument("--repeats", type=int, default=15, help="timings of each side, interleaved (at least 10)")
        name.add_argument("--one-process", choices=ALLOCATORS, help=argparse.SUPPRESS)  # prints its rows as JSON
    epochs = names.add_parser("epochs", help="epochs of a classifier beside the same on torch.nn's packed layer")
    epochs.add_argument("files", type=Path, nargs="+", metavar="FILE", help="lines label<TAB>text")
    epochs.add_argument("--epochs", type=int, default=5)
    cost = names.add_parser("cost", help="a training step over T: recurrence beside self-attention")
    for name in (recurrent, attention, epochs, cost):
        name.add_argument("--threads", type=int, default=os.cpu_count(), help="for every side alike")
        name.add_argument("--output", type=Path, help="default: benchmarks/results/NAME.json; with --only: none")
    options = parser.parse_args()
    if options.name == "cost" and not KEEP_PAGES.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks", *sys.argv[1:]], {**os.environ, **KEEP_PAGES})
    if options.name in ("recurrent", "attention"):
        check(options, {"recurrent": recurrent, "attention": attention}[options.name])
        if options.one_process:
            json.dump(measure(options), sys.stdout)
            return 0
    from unrolled.files import write_json

    output = options.output
    if output is None and not getattr(options, "only", ""):
        output = RESULTS / f"{options.name}.json"
    if output:
        output.parent.mkdir(parents=True, exist_ok=True)  # now: an hour later is late for an error
    if options.name in ("epochs", "cost"):
        result = importlib.import_module(f"benchmarks.{options.name}").measure(options)
    else:
        result = both_allocators(options)
    if output:
        write_json(output, result)
        print(f"stored in {output}", file=sys.stderr)
    return 0


def check(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Ends the program, in words, where there is nothing to measure."""
    if options.repeats < 10:
        parser.error(f"--repeats must be at least 10, found {options.repeats}")
    options.peers = [peer for peer in getattr(options, "peers", "").split(",") if peer]
    if trouble := peers.missing(options.peers):
        parser.error(trouble)
    if not options.one_process and not plan(options, options.peers):
        every = "\n".join(plan(options, options.peers, everything=True))
        parser.error(f"no case holds {options.only!r}; they are:\n{every}")


def both_allocators(options: argparse.Namespace) -> dict[str, Any]:
    """The rows, each allocator in a process of its own; prints their tables."""
    from benchmarks.harness import MEANING, machine
    from benchmarks.recurrent import linear
    from benchmarks.table import show

    result: dict[str, Any] = {"benchmark": options.name, "machine": machine(options.threads)}
    result |= {"only": options.only, "repeats": options.repeats, "meaning": MEANING, "ceiling_gflops": {}}
    result |= {"time_10000_over_1000_over_10": {}} if options.name == "recurrent" else {}
    result["rows"] = []
    for allocator, environment in ALLOCATORS.items():
        command = [sys.executable, "-m", "benchmarks", *sys.argv[1:], "--one-process", allocator]
        done = subprocess.run(command, env={**os.environ, **environment}, stdout=subprocess.PIPE, check=False)
        if done.returncode:
            sys.exit(done.returncode)
        one = json.loads(done.stdout)
        result["ceiling_gflops"][allocator] = one["ceiling_gflops"]
        if options.name == "recurrent":
            result["time_10000_over_1000_over_10"][allocator] = linear(one["rows"])
        result["rows"] += [{"allocator": allocator, **row} for row in one["rows"]]
    show(result)
    return result


def plan(options: argparse.Namespace, asked: list[str], *, everything: bool = False) -> dict[str, Any]:
    """By case: what measures it. The peers come last: their libraries start threads."""
    from benchmarks.harness import Run

    own = importlib.import_module(f"benchmarks.{options.name}")
    run = Run(options.repeats, options.threads, options.one_process == "default", getattr(options, "compile", False))
    found = dict([*own.jobs(run), *(peers.jobs(run, asked) if asked else [])])
    return {case: call for case, call in found.items() if everything or options.only in case}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    os.environ["NPROC"] = str(options.threads)  # XLA reads it once
    import torch

    from benchmarks.harness import ceiling_once

    torch.set_num_threads(options.threads)
    rows = []
    for case, call in plan(options, options.peers).items():
        print(f"{case} (allocator: {options.one_process})", file=sys.stderr)
        torch.manual_seed(0)
        rows += call()
    return {"ceiling_gflops": ceiling_once() / 1e6, "rows": rows}


if __name__ == "__main__":
    sys.exit(main())
