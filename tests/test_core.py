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


CELLS = {"rnn_tanh": 1, "rnn_relu": 1, "lstm": 4, "gru": 3}  # and their gates


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


def forward_arguments(cell: str, **changed: object) -> list[object]:
    """Of R 4 rows, B 1 sequence, D 1, I 3, H 2, nothing kept."""
    gates, memory = CELLS[cell] * 2, zeros(1, 1, 2) if cell == "lstm" else None
    arguments: dict[str, object] = {
        "x": zeros(4, 3),
        **{"h0": zeros(1, 1, 2), "c0": memory, "weight_ih": zeros(gates, 3), "weight_hh": zeros(gates, 2)},
        **{"bias_ih": None, "bias_hh": None, "start": np.array([0]), "length": np.array([4]), "y": zeros(4, 2)},
        **{"h_last": zeros(1, 1, 2), "c_last": memory, "h_prev": None, "c_prev": None, "kept": None, "step": 1},
        "threads": 1,
    }
    assert changed.keys() <= arguments.keys()
    return [cell, *{**arguments, **changed}.values()]


def backward_arguments(cell: str, **changed: object) -> list[object]:
    gates, memory = CELLS[cell] * 2, zeros(1, 1, 2) if cell == "lstm" else None
    kept = {"lstm": zeros(4, 8), "gru": zeros(4, 8)}.get(cell)
    arguments: dict[str, object] = {
        **{"dy": zeros(4, 2), "dh_last": zeros(1, 1, 2), "dc_last": memory, "x": zeros(4, 3)},
        **{"weight_ih": zeros(gates, 3), "weight_hh": zeros(gates, 2), "h_prev": zeros(4, 2), "h_end": zeros(1, 1, 2)},
        **{"c_prev": zeros(4, 2) if cell == "lstm" else None, "c_end": memory, "kept": kept},
        **{"start": np.array([0]), "length": np.array([4]), "dx": zeros(1, 4, 3), "dh0": zeros(1, 1, 2), "dc0": memory},
        **{"dweight_ih": zeros(gates, 3), "dweight_hh": zeros(gates, 2), "dbias_ih": zeros(gates)},
        **{"dbias_hh": zeros(gates), "step": 1, "threads": 1},
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


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("call", CALLS)
def test_the_border_refuses_every_array_of_another_shape_or_type(variant: str, call: str, cell: str):
    function, arguments = getattr(core, call), CALLS[call]
    names = [name for name in re.findall(r"(\w+): ", function.__doc__.splitlines()[0]) if name != "cell"]
    given = dict(zip(names, arguments(cell)[1:], strict=True))
    arrays = {name: value for name, value in given.items() if isinstance(value, np.ndarray)}
    assert len(arrays) >= 8
    for name, value in arrays.items():
        with pytest.raises(ValueError, match=r"must (be|have)"):
            function(*arguments(cell, **{name: np.zeros([n + 1 for n in value.shape], value.dtype)}))
        with pytest.raises(TypeError):  # float64 among float32 is not converted in silence
            function(*arguments(cell, **{name: value.astype(np.float64)}))
        if name != "dx":
            with pytest.raises((TypeError, ValueError)):
                function(*arguments(cell, **{name: None}))


def test_the_border_names_an_unknown_cell(variant: str):
    with pytest.raises(ValueError, match="no cell is called elman"):
        core.recurrent_forward("elman", *forward_arguments("gru")[1:])
