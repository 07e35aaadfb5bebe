"""The result of a benchmark as tables 170 columns wide."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.harness import Row

WIDTH = 170
TITLES = {
    "padded": "padded",
    "ragged": "lengths uniform in [1, T], both directions; torch padded computes the padding too and is not correct",
    "growth": "growing in T; training",
    "options": "what an option costs: ours with it against ours without; training",
    "peers": "other peers",
}


def show(result: dict[str, Any], console: Console | None = None) -> None:
    """Each group of rows once for each allocator. The times are the fastest / the median, in milliseconds."""
    console = console or Console(width=WIDTH)
    console.print(" ".join(f"{k}={v}" for k, v in result["machine"].items()), highlight=False)
    for allocator in dict.fromkeys(row["allocator"] for row in result["rows"]):
        for group, title in TITLES.items():
            rows = [row for row in result["rows"] if (row["allocator"], row["group"]) == (allocator, group)]
            if rows:
                console.print(_table(f"{title}; ms, fastest / median; allocator: {allocator}", rows))
        for cell, sides in result.get("time_10000_over_1000_over_10", {}).get(allocator, {}).items():
            each = ", ".join(f"{side} {value:.2f}" for side, value in sides.items())
            console.print(
                f"{cell}: time(T=10000) / time(T=1000) / 10 (allocator: {allocator}): {each}", highlight=False
            )
    asked = [row["reached"] for row in result["rows"] if row["reached"] is not None]
    console.print(f"{sum(asked)} of {len(asked)} rows with goals reach all of theirs", highlight=False)


def _table(title: str, rows: Sequence[Row]) -> Table:
    sides = list(dict.fromkeys(side for row in rows for side in row["times"]))
    steps = any("us_per_step" in row for row in rows)
    memory = [side for side in sides if any(side in row.get("memory_mb", {}) for row in rows)]
    goals = list(dict.fromkeys(goal["name"] for row in rows for goal in row["goals"]))
    table = Table(title=title, padding=(0, 0), collapse_padding=True)
    table.title_justify = "left"
    for heading in ("case", "what"):
        table.add_column(heading, no_wrap=True)
    for heading in (*sides, *(["us a step, " + " / ".join(sides)] if steps else [])):
        table.add_column(heading, justify="right")
    if memory:
        table.add_column("MB, " + " / ".join(memory), justify="right")
    for heading in (*goals, "all"):
        table.add_column(heading, justify="right")
    for row in rows:
        cells: list[str | Text] = [row["case"].removesuffix(f" {row['group']}"), row["what"]]
        cells += [_times(row["times"].get(side)) for side in sides]
        if steps:
            cells.append(" / ".join(f"{row['us_per_step'][side]:.1f}" for side in sides))
        if memory:
            peaks = row.get("memory_mb", {})
            cells.append(" / ".join(f"{peaks[side]:.1f}" if side in peaks else "-" for side in memory))
        by_name = {goal["name"]: goal for goal in row["goals"]}
        cells += [_goal(by_name.get(name)) for name in goals]
        table.add_row(*cells, {None: "", True: "yes", False: Text("no", "red")}[row["reached"]])
    return table


def _times(times: dict[str, float] | None) -> str:
    return "" if times is None else f"{_short(times['min_ms'])} / {_short(times['median_ms'])}"


def _short(milliseconds: float) -> str:
    return f"{milliseconds:.2f}" if milliseconds < 100 else f"{milliseconds:.0f}"


def _goal(goal: Row | None) -> str | Text:
    """The number and, where something is asked of it, the relation that holds: 3.28 ≥ 3, or 2.81 < 3."""
    if goal is None:
        return ""
    if goal["reached"] is None:
        return f"{goal['value']:.2f}"
    least = "at_least" in goal
    relation = {(True, True): "≥", (True, False): "<", (False, True): "≤", (False, False): ">"}[least, goal["reached"]]
    number = f"{goal['value']:.2f} {relation} {goal['at_least' if least else 'at_most']:g}"
    return number if goal["reached"] else Text(number, "red")
