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
    "encoder layer": "encoder layers; ragged: lengths uniform in [1, T], torch padded with its padding mask; training",
    "attention": "attention alone, one sequence, against scaled_dot_product_attention; training",
    "projection": "projection to classes and their cross-entropy; training",
    "decoding": "decoding token by token: ours with the cache, torch on the growing prefix",
    "model": "a whole decoder-only model; training",
}
EACH = {  # what a row holds for each side beside the times: its heading, and how a number is written
    "us_per_step": ("us a step", "{:.1f}"),
    "memory_mb": ("MB", "{:.1f}"),
    "ceiling_share": ("of the ceiling", "{:.2f}"),
    "tokens_per_second": ("tokens/s", "{:.0f}"),
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
    each = {key: [side for side in sides if any(side in row.get(key, {}) for row in rows)] for key in EACH}
    each = {key: found for key, found in each.items() if found}
    goals = list(dict.fromkeys(goal["name"] for row in rows for goal in row["goals"]))
    table = Table(title=title, padding=(0, 0), collapse_padding=True)
    table.title_justify = "left"
    for heading in ("case", "what"):
        table.add_column(heading, no_wrap=True)
    headings = [f"{EACH[key][0]}, {' / '.join(found)}" for key, found in each.items()]
    for heading in (*sides, *headings, *goals, "all"):
        table.add_column(heading, justify="right")
    for row in rows:
        cells: list[str | Text] = [row["case"].removesuffix(f" {row['group']}"), row["what"]]
        cells += [_times(row["times"].get(side)) for side in sides]
        for key, found in each.items():
            numbers = row.get(key, {})
            cells.append(" / ".join(EACH[key][1].format(numbers[side]) if side in numbers else "-" for side in found))
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
