"""The core by itself: its elementary functions against float64, its variants, its border."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys

import numpy as np
import pytest

from unrolled.ops._backend import core

VARIANTS = core.variants() if core else []


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest):
    before = core.variant()
    core.set_variant(request.param)
    yield request.param
    core.set_variant(before)


def units_in_the_last_place(function: object, exact: object, x: np.ndarray) -> float:
    y = np.empty_like(x)
    function(x, y)
    reference = exact(x.astype(np.float64))
    return float((np.abs(y - reference) / np.spacing(np.abs(reference).astype(np.float32)).astype(np.float64)).max())


@pytest.mark.parametrize(
    ("name", "low", "high", "bound"),
    [("tanh", -12, 12, 2.5), ("tanh", -1e-3, 1e-3, 2.5), ("tanh", -3e38, 3e38, 2.5), ("exp", -87, 0, 1.5)],
)
def test_float32_functions_are_as_exact_as_promised(variant: str, name: str, low: float, high: float, bound: float):
    x = np.linspace(low, high, 400_001, dtype=np.float32)
    assert units_in_the_last_place(getattr(core, name), getattr(np, name), x) <= bound


def test_special_values(variant: str):
    x = np.array([math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-40, -1e-40, 200.0, -200.0], dtype=np.float32)
    y = np.empty_like(x)
    core.tanh(x, y)
    np.testing.assert_array_equal(y, np.tanh(x))
    assert math.copysign(1, y[4]) == -1
    core.exp(x, y)
    np.testing.assert_array_equal(y, [math.nan, math.inf, 0, 1, 1, 1, 1, math.inf, 0])


def test_float64_functions_are_the_library_s(variant: str):
    x = np.linspace(-30, 30, 1001)
    y = np.empty_like(x)
    core.tanh(x, y)
    np.testing.assert_allclose(y, np.tanh(x), rtol=4e-16)
    core.exp(x, y)
    np.testing.assert_allclose(y, np.exp(x), rtol=4e-16)


def test_another_variant_is_refused_by_name(variant: str):
    with pytest.raises(ValueError, match=r'no CPU variant "mmx" here; this machine has .*baseline'):
        core.set_variant("mmx")
    assert core.variant() == variant


@pytest.mark.parametrize("name", VARIANTS)
def test_the_environment_forces_a_variant(name: str):
    code = "from unrolled import backends; print(backends()['core'])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "UNROLLED_CPU": name},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == name


# and their gates, and the numbers kept for each unit without and with every option
CELLS = {
    "rnn_tanh": (1, 0, 3),
    "rnn_relu": (1, 0, 3),
    "lstm": (4, 4, 14),
    "lstm_options": (4, 6, 15),
    "gru": (3, 4, 11),
    "gru_before": (3, 4, 10),
}


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


def options_of(cell: str, gates: int, every: bool) -> dict[str, object]:
    """All that the cell takes, for D 1, B 1, H 2, and P 2 or, with a projection, 1; else nothing."""
    if not every:
        names = ("weight_hr", "norm_ih", "norm_hh", "peephole", "norm_c", "bias_c", "mask", "seed", "keys")
        return dict.fromkeys(names)
    own = cell == "lstm_options"
    return {
        "weight_hr": None if "gru" in cell else zeros(units(cell, every), 2),
        **{"norm_ih": zeros(gates), "norm_hh": zeros(gates), "peephole": zeros(6) if own else None},
        **{"norm_c": zeros(2) if own else None, "bias_c": zeros(2) if own else None},
        **{"mask": zeros(1, 1, units(cell, every)), "seed": np.array(3), "keys": np.array([5])},
    }


def units(cell: str, every: bool) -> int:
    return 1 if every and "gru" not in cell else 2


def last_arguments(cell: str, every: bool) -> dict[str, object]:
    rates = (0.5, 0.25 if "lstm" in cell else 0.0) if every else (0.0, 0.0)
    return {"zoneout_h": rates[0], "zoneout_c": rates[1], "layer": 0, "bptt": 0, "step": 1, "threads": 1}


def forward_arguments(cell: str, every: bool = False, **changed: object) -> list[object]:
    """Of R 4 rows, B 1 sequence, D 1, I 3, H 2; kept is what a backward needs where there are options."""
    gates, blocks, P = CELLS[cell][0] * 2, CELLS[cell][1 + every], units(cell, every)
    memory = zeros(1, 1, 2) if "lstm" in cell else None
    arguments: dict[str, object] = {
        "x": zeros(4, 3),
        **{"h0": zeros(1, 1, P), "c0": memory, "weight_ih": zeros(gates, 3), "weight_hh": zeros(gates, P)},
        **{"bias_ih": None, "bias_hh": None, **options_of(cell, gates, every)},
        **{
            "start": np.array([0]),
            "length": np.array([4]),
            "y": zeros(4, P),
            "h_last": zeros(1, 1, P),
            "c_last": memory,
        },
        **{"h_prev": zeros(4, P) if every else None, "c_prev": zeros(4, 2) if every and "lstm" in cell else None},
        **{"kept": zeros(4, 2 * blocks) if every else None, "scales": zeros(4, 4) if every else None},
        **last_arguments(cell, every),
    }
    assert changed.keys() <= arguments.keys()
    return [cell, *{**arguments, **changed}.values()]


def backward_arguments(cell: str, every: bool = False, **changed: object) -> list[object]:
    gates, blocks, P = CELLS[cell][0] * 2, CELLS[cell][1 + every], units(cell, every)
    memory = zeros(1, 1, 2) if "lstm" in cell else None
    options = options_of(cell, gates, every)
    weights = ("weight_hr", "norm_ih", "norm_hh", "peephole", "norm_c", "bias_c")
    arguments: dict[str, object] = {
        **{"dy": zeros(4, P), "dh_last": zeros(1, 1, P), "dc_last": memory, "x": zeros(4, 3)},
        **{"weight_ih": zeros(gates, 3), "weight_hh": zeros(gates, P), **options},
        **{"start": np.array([0]), "length": np.array([4]), "h_prev": zeros(4, P)},
        **{"c_prev": zeros(4, 2) if "lstm" in cell else None, "kept": zeros(4, 2 * blocks) if blocks else None},
        **{"scales": zeros(4, 4) if every else None, "h_end": zeros(1, 1, P), "c_end": memory},
        **{"dx": zeros(1, 4, 3), "dh0": zeros(1, 1, P), "dc0": memory},
        **{"dweight_ih": zeros(gates, 3), "dweight_hh": zeros(gates, P), "dbias_ih": zeros(gates)},
        **{"dbias_hh": zeros(gates), **{f"d{name}": options[name] for name in weights}},
        **{"dh": zeros(4, P) if every else None, "dc": zeros(4, 2) if every and "lstm" in cell else None},
        **last_arguments(cell, every),
    }
    assert changed.keys() <= arguments.keys()
    return [cell, *{**arguments, **changed}.values()]


CALLS = {"recurrent_forward": forward_arguments, "recurrent_backward": backward_arguments}


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("call", CALLS)
def test_the_border_refuses_rows_outside_memory(variant: str, call: str, cell: str):
    function, arguments = getattr(core, call), CALLS[call]
    function(*arguments(cell))
    for start, length in ((0, 5), (-1, 2), (2, 3), (0, -1), (4, 1), (2**62, 2)):
        with pytest.raises(ValueError, match=r"length|rows"):
            function(*arguments(cell, start=np.array([start]), length=np.array([length])))


# What may be left out by itself: the others belong to something that is there.
OPTIONAL = {"dx", "dh", "dc", "h_prev", "c_prev", "kept", "scales", "mask", "bias_c", "peephole", "seed"}


@pytest.mark.parametrize("every", [False, True], ids=["plain", "options"])
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("call", CALLS)
def test_the_border_refuses_every_array_of_another_shape_or_type(variant: str, call: str, cell: str, every: bool):
    function, arguments = getattr(core, call), CALLS[call]
    function(*arguments(cell, every))
    names = [name for name in re.findall(r"(\w+): ", function.__doc__.splitlines()[0]) if name != "cell"]
    given = dict(zip(names, arguments(cell, every)[1:], strict=True))
    arrays = {name: value for name, value in given.items() if isinstance(value, np.ndarray)}
    assert len(arrays) >= 8
    for name, value in arrays.items():
        if value.ndim:
            with pytest.raises(ValueError, match=r"must (be|have)"):
                function(*arguments(cell, every, **{name: np.zeros([n + 1 for n in value.shape], value.dtype)}))
        with pytest.raises(TypeError):  # float64 among float32 is not converted in silence
            function(*arguments(cell, every, **{name: value.astype(np.float64)}))
        if name not in OPTIONAL:
            with pytest.raises((TypeError, ValueError)):
                function(*arguments(cell, every, **{name: None}))


@pytest.mark.parametrize(
    ("cell", "changed", "message"),
    [
        ("gru", {"weight_hr": zeros(2, 2)}, "weight_hr must be None for a GRU"),
        ("lstm", {"peephole": zeros(6)}, "must be None for this cell"),
        ("rnn_tanh", {"norm_c": zeros(2)}, "must be None for this cell"),
        ("lstm_options", {"norm_c": zeros(2)}, "must be None without norm_ih"),
        ("lstm_options", {"bias_c": zeros(2)}, "must be None without norm_c"),
        ("rnn_tanh", {"zoneout_h": 1.5}, r"rates in \[0, 1\]"),
        ("rnn_tanh", {"bptt": -1}, "bptt must be at least 0"),
    ],
)
def test_the_border_refuses_options_that_do_not_belong_together(cell: str, changed: dict, message: str):
    with pytest.raises(ValueError, match=message):
        core.recurrent_forward(*forward_arguments(cell, **changed))


def test_the_border_names_an_unknown_cell(variant: str):
    with pytest.raises(ValueError, match="no cell is called elman"):
        core.recurrent_forward("elman", *forward_arguments("gru")[1:])
