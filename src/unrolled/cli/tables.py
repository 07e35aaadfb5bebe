"""What the commands print on the standard output: tables for people, JSON for machines."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from unrolled.files import to_json


def print_json(value: Any) -> None:
    utf8(to_json(value, indent=2) + "\n")


def utf8(text: str) -> None:
    """The standard output in UTF-8 whatever the terminal's language, so that a pipe always gets the same bytes."""
    sys.stdout.flush()
    buffer = getattr(sys.stdout, "buffer", None)
    if buffer is None:
        sys.stdout.write(text)
    else:
        left = memoryview(text.encode("utf-8", errors="replace"))
        while left:  # an unbuffered output may take a part only
            left = left[buffer.write(left) :]
        buffer.flush()


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns as wide as their widest cell; those that hold numbers to the right."""
    from rich.cells import cell_len

    columns = [
        _column([head[i], *cells], [cell_len(cell) for cell in (head[i], *cells)])
        for i, cells in enumerate(zip(*rows, strict=True))
    ]
    utf8("".join("  ".join(cells).rstrip() + "\n" for cells in zip(*columns, strict=True)))


def _column(cells: Sequence[str], lengths: Sequence[int]) -> list[str]:
    gaps = [" " * (max(lengths) - length) for length in lengths]
    numeric = all(re.fullmatch(r"-?[\d.]+(e[-+]\d+)?|None", cell) for cell in cells[1:])
    return [gap + cell if numeric else cell + gap for cell, gap in zip(cells, gaps, strict=True)]


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
    if isinstance(value, float) and value:
        return f"{value:.4f}" if 1e-3 <= abs(value) < 1e5 else f"{value:.2e}"
    return str(value or 0) if isinstance(value, int | float) else str(value)


def _number(value: Any) -> bool:
    return isinstance(value, int | float)
