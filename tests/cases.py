"""The one table of cases: every operator with its options, over shapes with 0, 1, odd and prime sizes.

What an operator is (its inputs, equation, independent formulation, torch's counterpart) stands in
`unrolled.verify.operators`; a case is its name and options. To add an operator: a row there, its cases and draws here.
"""

from __future__ import annotations

from itertools import cycle, product
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st

from unrolled.verify.operators import OPERATORS, Operator


class Case(NamedTuple):
    name: str
    options: dict[str, Any]

    @property
    def operator(self) -> Operator:
        return OPERATORS[self.name]

    def inputs(self, dtype: torch.dtype = torch.float64, seed: int = 0) -> dict[str, Any]:
        return self.operator.make(torch.Generator().manual_seed(seed), dtype, **self.options)

    def __str__(self) -> str:
        return "-".join([self.name, *(f"{k}={v}".replace(" ", "") for k, v in self.options.items())])


LENGTHS = [(6, 3, 3, 1, 0), (1,), (2, 0, 3), (7,), (), (0,), (3, 5, 4), (0, 0), (2, 2, 2)]
SIZES = [(3, 5), (1, 1), (2, 7), (5, 3), (4, 2)]
SMALL = [(2, 3), (1, 1), (3, 2), (1, 2)]  # for cells of several gates, whose many weights are moved one by one


LAYOUTS = ["ragged", "batch_first", "time_major"]


def _recurrent(sizes: list[tuple[int, int]], **more: list[Any]) -> list[dict[str, Any]]:
    """All options in all combinations, while lengths and sizes go round."""
    lengths, size = cycle(LENGTHS), cycle(sizes)
    choices = {**more, "bias": [True, False], "directions": [1, 2], "layout": LAYOUTS}
    return [
        {
            **dict(zip(choices, chosen, strict=True)),
            "lengths": next(lengths),
            **dict(zip(("input_size", "hidden_size"), next(size), strict=True)),
        }
        for chosen in product(*choices.values())
    ]


OPTIONS: dict[str, list[dict[str, Any]]] = {
    "rnn": _recurrent(SIZES, nonlinearity=["tanh", "relu"]),
    "lstm": _recurrent(SMALL),
    "gru": _recurrent(SMALL),
    "linear": [
        {"tokens": n, "input_size": i, "output_size": o, "bias": bias}
        for (n, i, o), bias in product([(4, 3, 5), (1, 1, 1), (0, 3, 2), (7, 2, 1), (3, 11, 2)], (True, False))
    ],
    "embedding": [
        {"tokens": n, "vocabulary": v, "embedding_size": e, "padding_index": padding}
        for (n, v, e), padding in product([(11, 5, 3), (1, 1, 1), (0, 3, 2), (7, 13, 2)], (None, 0, -1))
    ],
    "dropout": [
        {"tokens": n, "features": f, "p": p, "layer": layer}
        for (n, f, layer), p in product([(3, 19, 0), (1, 1, 1), (0, 3, 0), (3, 4, 2)], (0.0, 0.3, 1.0))
    ],
    "mean_squared_error": [{"shape": shape} for shape in ((4, 3), (1,), (), (2, 3, 5), (7,))],
    "cross_entropy": [
        {"tokens": n, "classes": c, "weights": weights, "label_smoothing": smoothing, "ignore_index": ignored}
        for (n, c), (weights, smoothing, ignored) in product(
            [(6, 5), (1, 1), (0, 3), (7, 2), (5, 11)],
            [(False, 0.0, -100), (True, 0.0, 1), (False, 0.2, 0), (True, 0.3, -100), (False, 1.0, 2)],
        )
    ],
}

CASES = [Case(name, options) for name in OPERATORS for options in OPTIONS[name]]
EQUATION_CASES = [case for case in CASES if case.operator.to_equation(case.inputs()) is not None]

# Work enough for the core to use three threads, and for more than one of its blocks.
LARGE_CASES = [
    *(
        Case(name, {"lengths": [61, 0, 17] * 5, "input_size": 19, "hidden_size": 67, "directions": 2})
        for name in ("rnn", "lstm", "gru")
    ),
    *(
        Case(name, {"lengths": [300, 3], "input_size": 5, "hidden_size": 130, "layout": "time_major"})
        for name in ("rnn", "lstm", "gru")
    ),
    Case("linear", {"tokens": 1201, "input_size": 67, "output_size": 97}),
    Case("embedding", {"tokens": 2003, "vocabulary": 301, "embedding_size": 97, "padding_index": 300}),
    Case("dropout", {"tokens": 701, "features": 97}),
    Case("mean_squared_error", {"shape": (701, 607)}),
    Case("cross_entropy", {"tokens": 701, "classes": 97, "weights": True, "label_smoothing": 0.1}),
]

# Small, for the many mutants of test_teeth.py; between them they reach every line of every backward.
_TEETH: dict[str, list[dict[str, Any]]] = {
    "rnn": [
        {"lengths": (3, 2, 0), "input_size": 2, "hidden_size": 2, "nonlinearity": nonlinearity}
        for nonlinearity in ("tanh", "relu")
    ],
    "lstm": [{"lengths": (2, 1), "input_size": 1, "hidden_size": 2}],
    "gru": [{"lengths": (2, 1), "input_size": 1, "hidden_size": 2}],
    "linear": [{"tokens": 3, "input_size": 2, "output_size": 2}],
    "embedding": [{"tokens": 5, "vocabulary": 3, "embedding_size": 2, "padding_index": i} for i in (None, 1)],
    "dropout": [
        {"tokens": 3, "features": 5, "p": 0.62},
        {"tokens": 1, "features": 17},
        {"tokens": 1, "features": 67},
        {"tokens": 2, "features": 1, "p": 1.0},
    ],
    "mean_squared_error": [{"shape": (3, 2)}],
    "cross_entropy": [
        {"tokens": 4, "classes": 3, "weights": True, "label_smoothing": 0.3, "scale": 1.0},
        {"tokens": 4, "classes": 2, "ignore_index": 1, "scale": 1.0},
    ],
}
TEETH_CASES = [Case(name, options) for name in OPERATORS for options in _TEETH[name]]

# Finite differences see through a padding row, which is a constant by definition only.
FINITE_CASES = [case for case in CASES + TEETH_CASES if case.options.get("padding_index") is None]

# torch.nn knows no length 0, and no function for dropout by position; its mean over no element is NaN.
PEER_CASES = [
    case for case in CASES if case.operator.peer is not None and min(case.options.get("lengths", (1,)), default=0) > 0
]

# Sizes around the vector lengths of every CPU variant (4, 8, 16 numbers), so that each tail is hit.
_WIDTHS = st.one_of(
    st.integers(1, 70), st.sampled_from([1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 97, 130])
)
_COUNTS = st.one_of(st.integers(0, 40), st.sampled_from([0, 1, 2, 3, 5, 7, 11, 13, 61, 127]))

_RECURRENT: dict[str, st.SearchStrategy[Any]] = {
    "lengths": st.lists(st.integers(0, 12), max_size=19),
    "input_size": _WIDTHS,
    "hidden_size": _WIDTHS,
    "directions": st.sampled_from([1, 2]),
    "bias": st.booleans(),
    "layout": st.sampled_from(LAYOUTS),
}

DRAWS: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "rnn": st.fixed_dictionaries({**_RECURRENT, "nonlinearity": st.sampled_from(["tanh", "relu"])}),
    "lstm": st.fixed_dictionaries(_RECURRENT),
    "gru": st.fixed_dictionaries(_RECURRENT),
    "linear": st.fixed_dictionaries(
        {"tokens": _COUNTS, "input_size": _WIDTHS, "output_size": _WIDTHS, "bias": st.booleans()}
    ),
    "embedding": st.fixed_dictionaries(
        {
            "tokens": _COUNTS,
            "vocabulary": st.integers(5, 40),
            "embedding_size": _WIDTHS,
            "padding_index": st.sampled_from([None, 0, 4, -1]),
        }
    ),
    "dropout": st.fixed_dictionaries(
        {
            "tokens": _COUNTS,
            "features": _WIDTHS,
            "p": st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]),
            "layer": st.integers(0, 5),
        }
    ),
    "mean_squared_error": st.fixed_dictionaries({"shape": st.lists(_COUNTS, max_size=2)}),
    "cross_entropy": st.fixed_dictionaries(
        {
            "tokens": _COUNTS,
            "classes": _WIDTHS,
            "weights": st.booleans(),
            "label_smoothing": st.sampled_from([0.0, 0.1, 1.0]),
            "ignore_index": st.sampled_from([-100, 0]),
            "scale": st.sampled_from([1.0, 3.0, 200.0]),
        }
    ),
}
