"""The one table of cases: every operator with its options, over shapes with 0, 1, odd and prime sizes.

What an operator is (its inputs, equation, independent formulation, torch's counterpart) stands in
`unrolled.verify.operators`; a case is its name and options. To add an operator: a row there, its cases here, its
random ones in `draws.py`.
"""

from __future__ import annotations

from itertools import cycle, product
from typing import Any, NamedTuple

import torch

import attention_cases
import feed_forward_cases
import norm_cases
import output_cases
from covering import Option, covering
from pairs import PAIRS
from unrolled.verify.operator import Operator
from unrolled.verify.operators import OPERATORS

JUDGED = {**OPERATORS, **PAIRS}
FAMILIES = (norm_cases, feed_forward_cases, attention_cases, output_cases)


class Case(NamedTuple):
    name: str
    options: dict[str, Any]

    @property
    def operator(self) -> Operator:
        return JUDGED[self.name]

    def inputs(self, dtype: torch.dtype = torch.float64, seed: int = 0) -> dict[str, Any]:
        return self.operator.make(torch.Generator().manual_seed(seed), dtype, **self.options)

    def __str__(self) -> str:
        return "-".join([self.name, *(f"{k}={v}".replace(" ", "") for k, v in self.options.items())])


LENGTHS = [(6, 3, 3, 1, 0), (1,), (2, 0, 3), (7,), (), (0,), (3, 5, 4), (0, 0), (2, 2, 2)]
SIZES = [(3, 5), (1, 1), (2, 7), (5, 3), (4, 2)]
SMALL = [(2, 3), (1, 1), (3, 2), (1, 2)]  # for cells of several gates, whose many weights are moved one by one
LAYOUTS = ["ragged", "batch_first", "time_major"]


def _recurrent(sizes: list[tuple[int, int]], **more: list[Any]) -> list[Option]:
    """Without options: bias, directions and layouts in all combinations, while lengths and sizes go round."""
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


# The options of the recurrence, each off or on; a layer norm of fewer than 3 numbers would hardly depend on its input.
_ON: dict[str, list[Option]] = {
    "layer_norm": [{"layer_norm": True}],
    "recurrent_dropout": [{"recurrent_dropout": 0.4}],
    "zoneout": [{"zoneout": (0.3, 0.6)}, {"zoneout": (0.2, 0.4), "training": False}, {"zoneout": (0.5, 0.0)}],
    "bias": [{"bias": False}],
    "directions": [{"directions": 2}],
    "layout": [{"layout": "time_major"}, {"layout": "batch_first"}],
}
_PROJ, _PEEP = {"proj_size": [{"proj_size": 2}]}, {"peephole": [{"peephole": True}]}
CELL_OPTIONS: dict[str, dict[str, list[Option]]] = {
    "rnn": {**_ON, **_PROJ, "nonlinearity": [{"nonlinearity": "relu"}]},
    "lstm": {
        **_ON,
        **_PROJ,
        **_PEEP,
        "zoneout": [*_ON["zoneout"], {"zoneout": (0.0, 0.5)}],
    },
    "gru": {**_ON, "reset": [{"reset": "before"}]},
}
_BPTT: list[Option] = [{"bptt": 1}, {"bptt": 2}, {"bptt": 3}]


def _with_options(cell: str) -> list[Option]:
    """Every two options together, so that each is judged by finite differences, and each with truncation, which is not.

    Then all at once where there is next to nothing: no sequence, no step, one unit.
    """
    choices = {name: [{}, *on] for name, on in CELL_OPTIONS[cell].items()}
    shape = cycle(
        {"lengths": lengths, "input_size": i, "hidden_size": 3}
        for lengths, i in (((3, 1, 0, 2), 2), ((2, 0, 3), 1), ((5,), 1), ((2, 2), 3), ((1, 4), 1))
    )
    rows = covering(choices) + covering({**choices, "bptt": _BPTT}, beside="bptt")
    everything = {k: v for on in CELL_OPTIONS[cell].values() for k, v in on[0].items()}
    edges = [{**everything, "hidden_size": 3, "lengths": lengths} for lengths in ((), (0, 0), (1,))]
    one = {k: 1 for k in everything if k == "proj_size"}
    edges.append({**everything, "hidden_size": 1, "input_size": 1, "lengths": (2, 1), **one})
    return [{**row, **next(shape)} for row in rows] + edges


OPTION_CASES = [Case(cell, options) for cell in CELL_OPTIONS for options in _with_options(cell)]
OPTIONS: dict[str, list[Option]] = {
    "rnn": _recurrent(SIZES, nonlinearity=["tanh", "relu"]),
    "lstm": [
        *_recurrent(SMALL),
        *({"proj_size": 1, "hidden_size": 2, "directions": d, "lengths": n} for d, n in ((1, (2, 3)), (2, (1, 4)))),
    ],
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
    "zoneout": [
        {"rows": n, "units": u, "drawn": drawn} for n, u in ((3, 5), (0, 2), (1, 1)) for drawn in (True, False)
    ],
}
for family in FAMILIES:
    OPTIONS |= family.OPTIONS

CASES = [Case(name, options) for name in OPERATORS for options in OPTIONS[name]] + OPTION_CASES
PAIR_CASES = [Case(name, options) for name in PAIRS for options in OPTIONS[name]]
EQUATION_CASES = [case for case in CASES if case.operator.to_equation(case.inputs()) is not None] + PAIR_CASES

# Work enough for the core to use three threads, and for more than one of its blocks.
LARGE = {"lengths": [61, 0, 17] * 5, "input_size": 19, "hidden_size": 67, "directions": 2}
LARGE_CASES = [
    *(Case(name, LARGE) for name in ("rnn", "lstm", "gru")),
    *(
        Case(name, {"lengths": [300, 3], "input_size": 5, "hidden_size": 130, "layout": "time_major"})
        for name in ("rnn", "lstm", "gru")
    ),
    # recurrent weights so large that threads share each step
    *(
        Case(name, {"lengths": [4, 0, 1, 3, 3, 2, 4], "input_size": 131, "hidden_size": hidden_size})
        for name, hidden_size in (("rnn", 391), ("lstm", 205), ("gru", 230))
    ),
    *(
        Case(name, {**LARGE, "recurrent_dropout": 0.3, "zoneout": (0.2, 0.1), "layer_norm": True, **more})
        for name, more in (
            ("rnn", {"proj_size": 19}),
            ("lstm", {"proj_size": 35, "peephole": True}),
            ("gru", {}),
            ("gru", {"reset": "before"}),
        )
    ),
    *(
        Case(name, {"lengths": [150, 0, 5], "input_size": 5, "hidden_size": 130, "bptt": 7, **more})
        for name, more in (
            ("rnn", {"zoneout": (0.3, 0.0), "training": False, "nonlinearity": "relu"}),
            ("lstm", {"proj_size": 67, "layout": "batch_first"}),
            ("lstm", {"peephole": True, "zoneout": (0.0, 0.2), "directions": 2}),
            ("lstm", {"layer_norm": True, "bias": False}),
            ("gru", {"recurrent_dropout": 0.3}),
            ("gru", {"reset": "before", "bias": False}),
        )
    ),
    Case("linear", {"tokens": 1201, "input_size": 67, "output_size": 97}),
    Case("embedding", {"tokens": 2003, "vocabulary": 301, "embedding_size": 97, "padding_index": 300}),
    Case("dropout", {"tokens": 701, "features": 97}),
    Case("mean_squared_error", {"shape": (701, 607)}),
    Case("cross_entropy", {"tokens": 701, "classes": 97, "weights": True, "label_smoothing": 0.1}),
    *(Case(name, options) for family in FAMILIES for name, rows in family.LARGE.items() for options in rows),
]

# Small, for the many mutants of test_teeth.py; between them they reach every line of every backward.
_TEETH: dict[str, list[Option]] = {
    "rnn": [
        *(
            {"lengths": (3, 2, 0), "input_size": 2, "hidden_size": 2, "nonlinearity": nonlinearity}
            for nonlinearity in ("tanh", "relu")
        ),
        {"lengths": (3, 1), "input_size": 1, "hidden_size": 2, "bptt": 2},
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
    "zoneout": [{"rows": 2, "units": 3, "drawn": False}],
}
for family in FAMILIES:
    _TEETH |= family.TEETH
TEETH_CASES = [Case(name, options) for name in JUDGED for options in _TEETH[name]]

# The same for the recurrence with options; the first meets most of the lines.
_SMALL: Option = {"lengths": (3, 2), "input_size": 1, "hidden_size": 3}
OPTION_TEETH_CASES = [
    Case(
        "lstm",
        {
            **{"lengths": (3, 2), "input_size": 1, "hidden_size": 3, "layer_norm": True, "peephole": True},
            **{"proj_size": 2, "recurrent_dropout": 0.4, "zoneout": (0.2, 0.4), "training": False},
        },
    ),
    Case("gru", {**_SMALL, "reset": "before", "layer_norm": True, "recurrent_dropout": 0.4}),
    Case("gru", {**_SMALL, "reset": "before", "bias": False, "zoneout": (0.5, 0.0)}),
    Case("lstm", {**_SMALL, "peephole": True}),
    Case("lstm", {**_SMALL, "layer_norm": True, "bias": False}),
    Case("rnn", {**_SMALL, "lengths": (5, 1), "recurrent_dropout": 0.4, "bptt": 2}),
]


def _smooth(case: Case) -> bool:
    """Finite differences see through what is a constant by definition only: a padding row, the state at a cut."""
    return case.options.get("padding_index") is None and not case.options.get("bptt")


FINITE_CASES = [case for case in CASES + PAIR_CASES + TEETH_CASES + OPTION_TEETH_CASES if _smooth(case)]

# torch.nn knows no length 0, no options but its own; its mean over no element is NaN.
PEER_CASES = [
    case
    for case in CASES
    if case.operator.peer is not None
    and min(case.options.get("lengths", (1,)), default=0) > 0
    and case.operator.peer_has(case.inputs())
]
