"""What the commands print on the standard output: tables for people, JSON for machines."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any


def print_json(value: Any) -> None:
    utf8(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def utf8(text: str) -> None:
    """The standard output in UTF-8 whatever the terminal's language, so that a pipe always gets the same bytes."""
    sys.stdout.flush()
    buffer = getattr(sys.stdout, "buffer", None)
    if buffer is None:
        sys.stdout.write(text)
    else:
        buffer.write(text.encode("utf-8", errors="replace"))
        buffer.flush()


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns as wide as their widest cell; the first to the left, numbers to the right."""
    from rich.cells import cell_len

    widths = [max(cell_len(row[i]) for row in [head, *rows]) for i in range(len(head))]

    def line(row: Sequence[str]) -> str:
        gaps = [" " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=True)]

        return "  ".join([row[0] + gaps[0], *(gap + cell for gap, cell in zip(gaps[1:], row[1:], strict=True))])

    utf8("".join(line(row).rstrip() + "\n" for row in [head, *rows]))


def scores(metrics: Mapping[str, Mapping[str, Any]]) -> None:
    """One row for each split, one column for each number."""
    names = list(dict.fromkeys(name for part in metrics.values() for name, value in part.items() if _number(value)))
    if names:
        rows = [[split, *(number(part.get(name)) for name in names)] for split, part in metrics.items()]
        table(["", *(name.replace("_", " ") for name in names)], rows)


def classes(metrics: Mapping[str, Any]) -> None:
    """One row for each class."""
    per_class = metrics.get("per_class")
    if per_class:
        names = list(next(iter(per_class.values())))
        rows = [[label, *(number(part[name]) for name in names)] for label, part in per_class.items()]
        utf8("\n")
        table(["class", *names], rows)


def number(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e5 else f"{value:.2e}"
    return str(value)


def _number(value: Any) -> bool:
    return isinstance(value, int | float)
