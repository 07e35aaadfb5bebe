"""The cases of the operators of the normalisations and positions: see cases.py."""

from __future__ import annotations

from itertools import cycle, product
from typing import Any

from hypothesis import strategies as st

Options = dict[str, list[dict[str, Any]]]

_SHAPES = [(3, 5), (1, 1), (0, 3), (2, 7), (5, 2)]
_LAYER = [(True, True), (True, False), (False, True), (False, False)]
_KINDS = [("layer", 0.0), ("layer", 0.4), ("rms", 0.4), ("rms", 0.0), ("layer", 1.0)]

OPTIONS: Options = {
    "layer_norm": [
        *(
            {"rows": n, "features": f, "gain": gain, "bias": bias}
            for (n, f), (gain, bias) in product(_SHAPES, _LAYER[:2])
        ),
        *({"gain": gain, "bias": bias, "epsilon": 0.3, "mean": 5.0} for gain, bias in _LAYER),
    ],
    "rms_norm": [
        *({"rows": n, "features": f, "gain": gain} for (n, f), gain in product(_SHAPES, (True, False))),
        {"epsilon": 0.3, "mean": 5.0},
    ],
    "residual_norm": [
        {"rows": n, "features": f, "kind": kind, "p": p, "gain": gain, "bias": kind == "layer" and bias}
        for ((n, f), (kind, p)), (gain, bias) in zip(product(_SHAPES, _KINDS), cycle(_LAYER), strict=False)
    ],
    "rotary": [
        {"rows": n, "heads": a, "head": f, "more": more, "base": base}
        for (n, a, f), (more, base) in product(
            [(3, 2, 4), (1, 1, 2), (0, 2, 2), (5, 3, 6), (2, 1, 0)], [(0, 10000.0), (3, 100.0)]
        )
    ],
}
LARGE: Options = {
    "layer_norm": [{"rows": 1201, "features": 97}],
    "rms_norm": [{"rows": 1201, "features": 97}],
    "residual_norm": [
        {"rows": 701, "features": 131, "p": 0.3},
        {"rows": 1201, "features": 97, "kind": "rms"},
    ],
    "rotary": [
        {"rows": 701, "heads": 5, "head": 34, "more": 67},
        {"rows": 701, "heads": 5, "head": 34, "far": 2**40},
    ],
}
TEETH: Options = {
    "layer_norm": [{"rows": 2, "features": 3}],
    "rms_norm": [{"rows": 2, "features": 3}],
    "residual_norm": [
        {"rows": 2, "features": 3, "p": 0.4},
        {"rows": 2, "features": 3},
        {"rows": 2, "features": 3, "kind": "rms", "p": 0.4},
    ],
    "rotary": [{"rows": 3, "heads": 2, "head": 6, "more": 1, "base": 10.0}],
}

# Sizes around the vector lengths of every CPU variant.
_FEATURES = st.one_of(st.integers(1, 70), st.sampled_from([1, 2, 3, 16, 17, 63, 64, 65, 127, 128, 129, 130, 200]))
_ROWS = st.one_of(st.integers(0, 40), st.sampled_from([0, 1, 2, 15, 16, 17, 33, 127]))
_NORM: dict[str, st.SearchStrategy[Any]] = {
    "rows": _ROWS,
    "features": _FEATURES,
    "gain": st.booleans(),
    "epsilon": st.sampled_from([1e-5, 0.1]),
    "mean": st.sampled_from([0.0, 3.0]),
}
_BIAS = {"bias": st.booleans()}
_P = {"p": st.sampled_from([0.0, 0.1, 0.5, 1.0]), "layer": st.integers(0, 9)}
DRAWS: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "layer_norm": st.fixed_dictionaries({**_NORM, **_BIAS}),
    "rms_norm": st.fixed_dictionaries(_NORM),
    "residual_norm": st.one_of(
        st.fixed_dictionaries({**_NORM, **_BIAS, **_P, "kind": st.just("layer")}),
        st.fixed_dictionaries({**_NORM, **_P, "kind": st.just("rms")}),
    ),
    "rotary": st.fixed_dictionaries(
        {
            "rows": _ROWS,
            "heads": st.integers(1, 5),
            "head": st.one_of(st.integers(0, 35), st.sampled_from([0, 1, 8, 16, 32])).map(lambda half: 2 * half),
            "more": st.sampled_from([0, 1, 17]),
            "base": st.sampled_from([10000.0, 10.0]),
            "far": st.sampled_from([1, 30, 1000]),
        }
    ),
}
