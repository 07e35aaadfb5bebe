"""Random cases of every operator, for hypothesis; the recurrent ones without options, fused in the core, and with."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from cases import FAMILIES, LAYOUTS

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
_OPTIONAL: dict[str, st.SearchStrategy[Any]] = {
    "layer_norm": st.booleans(),
    "recurrent_dropout": st.sampled_from([0.0, 0.4]),
    "zoneout": st.tuples(*[st.sampled_from([0.0, 0.0, 0.3, 1.0])] * 2),
    "training": st.booleans(),
    "bptt": st.sampled_from([0, 0, 1, 2, 5]),
}
_PROJECTION = {"proj_size": st.sampled_from([0, 0, 1, 3, 8, 17, 33])}
_NONLINEARITY = {"nonlinearity": st.sampled_from(["tanh", "relu"])}

DRAWS: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "rnn": st.fixed_dictionaries({**_RECURRENT, **_NONLINEARITY}),
    "lstm": st.fixed_dictionaries(_RECURRENT),
    "gru": st.fixed_dictionaries(_RECURRENT),
    "rnn with options": st.fixed_dictionaries({**_RECURRENT, **_NONLINEARITY, **_OPTIONAL, **_PROJECTION}),
    "lstm with options": st.fixed_dictionaries({**_RECURRENT, **_OPTIONAL, **_PROJECTION, "peephole": st.booleans()}),
    "gru with options": st.fixed_dictionaries(
        {**_RECURRENT, **_OPTIONAL, "reset": st.sampled_from(["after", "before"])}
    ),
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
for family in FAMILIES:
    DRAWS |= family.DRAWS
