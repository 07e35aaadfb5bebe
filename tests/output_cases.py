"""The cases of the operators of the output projection with its loss, and of additive attention: see cases.py."""

from __future__ import annotations

from itertools import cycle, product
from typing import Any

from hypothesis import strategies as st

from covering import covering

Options = dict[str, list[dict[str, Any]]]

_TOKENS = [
    (6, 3, 5),
    (1, 1, 1),
    (0, 3, 2),
    (7, 1, 2),
    (5, 2, 11),
    (2, 3, 3),
]  # N, D, V; of 2 tokens the second is ignored
_LOSSES: dict[str, list[dict[str, Any]]] = {
    "bias": [{}, {"bias": False}],
    "weights": [{}, {"weights": True}],
    "label_smoothing": [{}, {"label_smoothing": 0.2}, {"label_smoothing": 1.0}],
    "ignore_index": [{}, {"ignore_index": 1}, {"ignore_index": 0}],
    "reduction": [{}, {"reduction": "sum"}],
    "shape": [{"tokens": n, "width": d, "classes": v} for n, d, v in _TOKENS],
}

_STEPS = cycle(
    [((3, 4), (2, 0), (1, 2)), ((1, 1),), ((0, 3), (2, 2)), ((5, 2),), ((2, 3), (3, 3), (0, 0)), ((4, 1), (1, 4))]
)
_SIZES = cycle([(3, 2), (1, 1), (2, 5), (5, 1)])
_READS: dict[str, list[dict[str, Any]]] = {
    "mask": [
        {},
        {"mask": "boolean"},
        {"mask": "added", "repeated": (1,)},
        {"mask": "learned", "repeated": (0, 2)},
        {"mask": "boolean", "repeated": (0, 1)},
    ],
    "layout": [{}, {"layout": "time_major"}, {"layout": "batch_first"}, {"layout": "reverse"}],
    "weights": [{}, {"need_weights": True}],
}


def _sized(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "steps": next(_STEPS), **dict(zip(("size", "value_size"), next(_SIZES), strict=True))}


OPTIONS: Options = {
    "linear_cross_entropy": covering(_LOSSES),
    "additive_attention": [
        *(_sized(row) for row in covering(_READS)),
        *(
            {**more, "steps": steps}
            for more, steps in product(
                ({}, {"mask": "learned", "need_weights": True}), ((), ((0, 0), (0, 2)), ((3, 0),))
            )
        ),
    ],
}
# Several chunks of tokens and blocks of classes, more classes than logits of one chunk; one sequence for all threads.
LARGE: Options = {
    "linear_cross_entropy": [
        {"tokens": 1201, "width": 67, "classes": 301, "weights": True, "label_smoothing": 0.1},
        {"tokens": 150, "width": 5, "classes": 70001, "bias": False, "reduction": "sum"},
        {"tokens": 1601, "width": 130, "classes": 7, "ignore_index": 2},
    ],
    "additive_attention": [
        {"steps": ((90, 301),), "size": 33, "value_size": 19},
        {"steps": ((7, 300), (0, 5), (61, 3), (2, 0)) * 3, "size": 67, "value_size": 35, "layout": "time_major"},
        {"steps": ((1, 2003), (1, 17)), "size": 35, "value_size": 67, "mask": "added", "repeated": (1,)},
        {"steps": ((17, 40),) * 20, "size": 16, "value_size": 16, "mask": "boolean", "layout": "reverse"},
    ],
}
TEETH: Options = {
    "linear_cross_entropy": [
        {"tokens": 4, "width": 2, "classes": 3, "weights": True, "label_smoothing": 0.3, "scale": 1.0},
        {"tokens": 4, "width": 2, "classes": 2, "reduction": "sum", "scale": 1.0},
    ],
    "additive_attention": [
        {"steps": ((2, 3), (1, 2)), "size": 2, "value_size": 3},
        {"steps": ((2, 3), (3, 2)), "size": 2, "mask": "learned", "repeated": (1,), "need_weights": True},
        {"steps": ((2, 3),), "size": 1, "mask": "boolean", "need_weights": True},
    ],
}

_WIDTHS = st.one_of(
    st.integers(1, 70), st.sampled_from([1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 97, 130])
)
_COUNTS = st.one_of(st.integers(0, 9), st.sampled_from([0, 1, 2, 15, 16, 17, 31, 33, 64, 65]))

DRAWS: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "linear_cross_entropy": st.fixed_dictionaries(
        {
            "tokens": st.sampled_from([0, 1, 2, 3, 5, 7, 15, 16, 17, 40, 61, 127, 517]),
            "width": _WIDTHS,
            "classes": _WIDTHS,
            "bias": st.booleans(),
            "weights": st.booleans(),
            "label_smoothing": st.sampled_from([0.0, 0.1, 1.0]),
            "ignore_index": st.sampled_from([-100, 0]),
            "reduction": st.sampled_from(["mean", "sum"]),
            "scale": st.sampled_from([1.0, 3.0, 200.0]),
        }
    ),
    "additive_attention": st.fixed_dictionaries(
        {
            "steps": st.lists(st.tuples(_COUNTS, _COUNTS), max_size=4),
            "size": _WIDTHS,
            "value_size": _WIDTHS,
            "layout": st.sampled_from(["ragged", "reverse", "batch_first", "time_major"]),
            "mask": st.sampled_from([None, None, "boolean", "added", "learned"]),
            "repeated": st.lists(st.integers(0, 2), max_size=2, unique=True),
            "need_weights": st.booleans(),
        }
    ),
}
