"""The cases of the operators of the activations and the feed-forward layer: see cases.py."""

from __future__ import annotations

from itertools import product
from typing import Any

from hypothesis import strategies as st

from unrolled.ops.activation import KINDS

Options = dict[str, list[dict[str, Any]]]

_SIZES = [(4, 3, 5), (1, 1, 1), (0, 3, 2), (3, 2, 7), (2, 5, 1)]

OPTIONS: Options = {
    "activation": [{"kind": kind, "shape": shape} for kind, shape in product(KINDS, [(4, 3), (1,), (), (0, 2), (17,)])],
    "feed_forward": [
        {"tokens": n, "width": d, "units": f, "activation": kind, "gated": gated, "bias": bias, "p": p}
        for i, (kind, gated, bias) in enumerate(product(KINDS, (False, True), (True, False)))
        for (n, d, f), p in ((_SIZES[i % 5], 0.0), (_SIZES[(i + 3) % 5], 0.4), (_SIZES[(i + 1) % 5], 1.0))
    ],
}
LARGE: Options = {
    "activation": [{"kind": "gelu", "shape": (701, 607)}],
    "feed_forward": [
        {"tokens": 1201, "width": 67, "units": 97, "activation": "relu"},
        {"tokens": 701, "width": 97, "units": 67, "activation": "gelu", "gated": True, "p": 0.3},
        {"tokens": 67, "width": 130, "units": 517, "activation": "silu", "gated": True, "bias": False},
        {"tokens": 403, "width": 131, "units": 293, "activation": "gelu_tanh", "p": 0.1},
        # more units than a block: of some rows, and of so few that no weight is packed
        {"tokens": 61, "width": 5, "units": 523, "activation": "silu", "gated": True},
        {"tokens": 7, "width": 5, "units": 523, "activation": "silu", "gated": True, "p": 0.3},
    ],
}
TEETH: Options = {
    "activation": [{"kind": kind, "shape": (5, 3)} for kind in KINDS],
    "feed_forward": [
        {"tokens": 3, "width": 2, "units": 3, "p": 0.4},
        {"tokens": 3, "width": 2, "units": 3, "activation": "silu", "gated": True, "p": 0.3},
        {"tokens": 2, "width": 2, "units": 2, "activation": "gelu_tanh", "gated": True},
        {"tokens": 2, "width": 2, "units": 2, "activation": "relu"},
    ],
}

_WIDTHS = st.one_of(
    st.integers(1, 70), st.sampled_from([1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 97, 130])
)

DRAWS: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "activation": st.fixed_dictionaries(
        {
            "kind": st.sampled_from(KINDS),
            "shape": st.lists(st.integers(0, 40), max_size=3).map(tuple),
            "scale": st.sampled_from([0.01, 2.0, 10.0]),
        }
    ),
    "feed_forward": st.fixed_dictionaries(
        {
            "tokens": st.sampled_from([0, 1, 2, 3, 5, 7, 11, 13, 40, 61, 127]),
            "width": _WIDTHS,
            "units": _WIDTHS,
            "activation": st.sampled_from(KINDS),
            "gated": st.booleans(),
            "bias": st.booleans(),
            "p": st.sampled_from([0.0, 0.1, 0.5, 1.0]),
        }
    ),
}
