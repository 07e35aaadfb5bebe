"""`python -m benchmarks NAME` measures, prints one table and stores it as JSON under benchmarks/results."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

NAMES = ("rnn", "recurrent")
KEEP_PAGES = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "4294967296"}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--repeats", type=int, default=15, help="timings of each side, interleaved (at least 10)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="for every side alike")
    parser.add_argument("--output", type=Path, help="the JSON file (default: benchmarks/results/NAME.json)")
    parser.add_argument("--one-process", action="store_true", help="only with the allocator as it is; print JSON")
    options = parser.parse_args()
    if options.repeats < 10:
        parser.error(f"--repeats must be at least 10, found {options.repeats}")
    if options.one_process:
        rows = import_module(f"benchmarks.{options.name}").measure(options.repeats, options.threads)
        json.dump(rows, sys.stdout)
        return 0
    from benchmarks.harness import machine

    runs = {"default": {}, "keeps its pages": KEEP_PAGES}
    result: dict[str, Any] = {"benchmark": options.name, "machine": machine(options.threads), "rows": []}
    for allocator, environment in runs.items():
        command = [sys.executable, "-m", "benchmarks", options.name, "--one-process", "--repeats", str(options.repeats)]
        command += ["--threads", str(options.threads)]
        done = subprocess.run(command, env={**os.environ, **environment}, stdout=subprocess.PIPE, check=True)
        result["rows"] += [{"allocator": allocator, **row} for row in json.loads(done.stdout)]
    show(result)
    output = options.output or Path(__file__).parent / "results" / f"{options.name}.json"
    output.parent.mkdir(exist_ok=True)
    output.write_text(json.dumps(result, indent=1) + "\n")
    print(f"stored in {output}", file=sys.stderr)
    return 0


def show(result: dict[str, Any]) -> None:
    console = Console(width=170)
    console.print(" ".join(f"{k}={v}" for k, v in result["machine"].items()), highlight=False)
    for allocator in dict.fromkeys(row["allocator"] for row in result["rows"]):
        table = Table(title=f"milliseconds, minimum / median; allocator: {allocator}")
        for column in ("case", "what", "ours", "peer", "peer's", "ratio", "goal", "over floor", "goal", "reached"):
            table.add_column(column, justify="left" if column in ("case", "what", "peer") else "right")
        for row in result["rows"]:
            if row["allocator"] == allocator:
                table.add_row(*_cells(row))
        console.print(table)


def _cells(row: dict[str, Any]) -> list[str]:
    def pair(times: dict[str, float]) -> str:
        return f"{times['min_ms']:.2f} / {times['median_ms']:.2f}"

    def number(key: str, form: str = "{:.2f}") -> str:
        return form.format(row[key]) if row.get(key) is not None else ""

    ratio = f"{row['ratio_min']:.2f} / {row['ratio_median']:.2f}"
    goal = ("<= " if row.get("smaller_is_better") else ">= ") + f"{row['goal']:g}" if row.get("goal") else ""
    floor_goal = f"<= {row['floor_goal']:g}" if row.get("floor_goal") else ""
    reached = "" if row.get("reached") is None else ("yes" if row["reached"] else "no")
    cells = [row["case"], row["what"], pair(row["ours"]), row["peer"], pair(row["theirs"]), ratio, goal]
    return [*cells, number("over_floor"), floor_goal, reached]


if __name__ == "__main__":
    sys.exit(main())
