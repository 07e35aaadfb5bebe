"""Pairwise covering: few rows in which every two values of different options meet."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

Option = dict[str, Any]  # what one choice adds to a case; {} for off


def covering(choices: dict[str, list[Option]], beside: str | None = None) -> list[Option]:
    """Rows that hold each pair at least once; with `beside` only the pairs with a choice of that name.

    Greedy: each row begins with a pair still missing and takes, choice by choice, what covers most.
    """
    names = list(choices)
    missing = {
        frozenset({(a, i), (b, j)})
        for a, b in combinations(names, 2)
        if beside in (None, a, b)
        for i, j in product(range(len(choices[a])), range(len(choices[b])))
    }
    rows = []
    while missing:
        row = dict(min(missing, key=sorted))
        for name in names:
            if name not in row:
                row[name] = max(
                    range(len(choices[name])),
                    key=lambda i: sum(frozenset({(name, i), other}) in missing for other in row.items()),
                )
        missing -= {frozenset(pair) for pair in combinations(row.items(), 2)}
        rows.append({k: v for name in names for k, v in choices[name][row[name]].items()})
    return rows
