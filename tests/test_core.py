"""The core by itself: its elementary functions against float64, its variants, its border."""

from __future__ import annotations

import math
import os
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


def test_the_border_refuses_rows_outside_memory(variant: str):
    x, h = np.zeros((4, 3), np.float32), np.zeros((1, 1, 2), np.float32)
    weights = np.zeros((2, 3), np.float32), np.zeros((2, 2), np.float32), None, None
    y = np.zeros((4, 2), np.float32)
    for start, length in ((0, 5), (-1, 2), (2, 3), (0, -1), (4, 1), (2**62, 2)):
        rows = np.array([start]), np.array([length])
        with pytest.raises(ValueError, match=r"length|rows"):
            core.rnn_forward(x, h, *weights, *rows, y, h.copy(), y[:0], 1, False, 1)
    with pytest.raises(TypeError):  # float64 among float32 is not converted in silence
        core.rnn_forward(
            x.astype(np.float64), h, *weights, np.array([0]), np.array([4]), y, h.copy(), y[:0], 1, False, 1
        )
