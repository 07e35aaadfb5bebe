"""The four judges of every gradient: finite differences, independent autograd, torch.nn, core against equation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, combinations, product
from typing import Any

import jaxtyping
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cases import (
    CASES,
    CELL_OPTIONS,
    EQUATION_CASES,
    FINITE_CASES,
    LARGE_CASES,
    OPTION_CASES,
    OPTION_TEETH_CASES,
    PEER_CASES,
    Case,
)
from conftest import BACKENDS, VARIANTS, on
from draws import DRAWS
from tolerances import GRADCHECK, bound
from unrolled import use
from unrolled.ops.recurrence import record
from unrolled.verify import double
from unrolled.verify.judges import autograd, by_name, closed_form, compare, differentiable
from unrolled.verify.operators import OPERATORS
from unrolled.verify.recurrences import plain_recurrence


def of_tensors(function: Callable[..., Any], inputs: dict[str, Any]) -> tuple[Callable[..., Any], Sequence[Tensor]]:
    """`function` as one of its differentiable inputs alone, and these."""
    leaves = differentiable(inputs)
    return lambda *values: function(**{**inputs, **dict(zip(leaves, values, strict=True))}), tuple(leaves.values())


def as_function(forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
    """An equation and its closed form as one differentiable function."""

    class Pair(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, inputs: dict[str, Any], *values: Tensor) -> Any:
            ctx.names = list(differentiable(inputs))
            *outputs, ctx.saved = forward(**{**inputs, **dict(zip(ctx.names, values, strict=True))})
            return tuple(outputs)

        @staticmethod
        def backward(ctx: Any, *cotangents: Tensor) -> Any:
            grads = by_name(backward(*cotangents, ctx.saved))
            if set(grads) >= {f"d{name}" for name in ctx.names}:
                return None, *(grads[f"d{name}"] for name in ctx.names)
            return None, *grads.values()

    return lambda **inputs: Pair.apply(inputs, *differentiable(inputs).values())


def plain_steps(inputs: dict[str, Any]) -> dict[str, Tensor]:
    """The total derivatives of the loss with respect to the states after each token, "dh" and "dc", by autograd."""
    states = {d: inputs[name] for d, name in (("dh", "h0"), ("dc", "c0")) if name in inputs}
    added = {d: s.new_zeros(len(inputs["x"]), len(s) * s.shape[2]).requires_grad_() for d, s in states.items()}
    return autograd(lambda **given: plain_recurrence(**inputs, added=tuple(given.values())), added)[1]


@pytest.mark.parametrize("case", [case for case in FINITE_CASES if case.name in OPERATORS], ids=str)
def test_finite_differences_of_the_operator(case: Case, backend: str) -> None:
    """Entry by entry on the core. Along random directions of all inputs on the equation, which is judged in full below,
    and with options, of which there are many."""
    function, values = of_tensors(case.operator.operator, case.inputs())
    fast = backend == "equation" or case in OPTION_CASES + OPTION_TEETH_CASES
    torch.autograd.gradcheck(function, values, fast_mode=fast, **GRADCHECK)


@pytest.mark.parametrize("case", [case for case in EQUATION_CASES if case in FINITE_CASES], ids=str)
def test_finite_differences_of_the_equation(case: Case) -> None:
    pair = as_function(case.operator.forward, case.operator.backward)
    function, values = of_tensors(pair, case.operator.to_equation(case.inputs()))
    torch.autograd.gradcheck(function, values, **GRADCHECK)


@pytest.mark.parametrize("case", EQUATION_CASES, ids=str)
def test_closed_form_against_independent_autograd(case: Case, checked: None) -> None:
    inputs = case.inputs()
    found = closed_form(case.operator.forward, case.operator.backward, case.operator.to_equation(inputs))
    expected = autograd(case.operator.plain, inputs)
    for part, reference in zip(found, expected, strict=True):
        for name, value in reference.items():
            part[name] = part[name].view_as(value)
    assert compare(found, expected, case.operator.cancels(inputs)) <= bound(torch.float64, case.operator.length(inputs))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_operator_against_independent_autograd(case: Case, checked: None) -> None:
    inputs = case.inputs()
    expected = autograd(case.operator.plain, inputs)
    limit, floor = bound(torch.float64, case.operator.length(inputs)), case.operator.cancels(inputs)
    for backend in BACKENDS:
        with on(backend):
            assert compare(autograd(case.operator.operator, inputs), expected, floor) <= limit, backend


@pytest.mark.parametrize("case", [case for case in CASES if case.name in CELL_OPTIONS], ids=str)
def test_gradients_per_step_against_independent_autograd(case: Case) -> None:
    inputs = case.inputs()
    expected = plain_steps(inputs)
    limit, floor = bound(torch.float64, case.operator.length(inputs)), case.operator.cancels(inputs)
    for backend in BACKENDS:
        with on(backend):
            unrecorded = autograd(case.operator.operator, inputs)
            with record() as records:
                recorded = autograd(case.operator.operator, inputs)
        (layer,) = records
        assert compare(recorded, unrecorded, floor) <= limit, backend
        assert compare(({}, layer.gradients), ({}, expected), floor) <= limit, backend


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("case", PEER_CASES, ids=str)
def test_operator_against_torch(case: Case, dtype: torch.dtype, backend: str) -> None:
    inputs = case.inputs(dtype)
    found, expected = autograd(case.operator.operator, inputs), autograd(case.operator.peer, double(inputs))
    assert compare(found, expected, case.operator.cancels(inputs)) <= bound(dtype, case.operator.length(inputs))


@pytest.mark.parametrize("name", DRAWS)
@given(data=st.data())
def test_operator_against_the_equation(name: str, data: st.DataObject) -> None:
    """On the core: core against equation. On the equation: the operator against autograd through the plain forward."""
    case = Case(name.removesuffix(" with options"), data.draw(DRAWS[name]))
    operator = case.operator
    dtype = data.draw(st.sampled_from([torch.float64, torch.float32]))
    inputs = case.inputs(dtype, seed=data.draw(st.integers(0, 2**16)))
    if data.draw(st.booleans(), "strided"):
        inputs = {k: strided(v) if k in differentiable(inputs) else v for k, v in inputs.items()}
    torch.set_num_threads(data.draw(st.sampled_from([1, 2]), "threads"))
    with use("equations"):
        expected = autograd(operator.operator, double(inputs))
    limit, floor = bound(dtype, operator.length(inputs)), operator.cancels(inputs)
    for backend in BACKENDS:
        with on(backend):
            found = autograd(operator.operator, inputs)
        reference = expected
        if case.options.get("nonlinearity") == "relu" and not torch.equal(found[0]["y0"] > 0, expected[0]["y0"] > 0):
            found, reference = (found[0], {}), (expected[0], {})  # rounding took a unit over the kink of relu
        assert compare(found, reference, floor) <= limit, backend


@pytest.mark.parametrize("case", LARGE_CASES, ids=str)
def test_core_against_the_equation_on_several_threads(case: Case) -> None:
    single = case.inputs(torch.float32)
    terms, floor = case.operator.length(single), case.operator.cancels(single)
    with use("equations"):
        expected = autograd(case.operator.operator, double(single))
    for inputs, variant, threads in product((single, double(single)), VARIANTS, (1, 2, 3)):
        torch.set_num_threads(threads)
        with on(variant):
            found = autograd(case.operator.operator, inputs)
        dtype = found[0]["y0"].dtype
        assert compare(found, expected, floor) <= bound(dtype, terms), f"{variant}, {dtype}, {threads} threads"


@pytest.mark.parametrize("cell", CELL_OPTIONS)
def test_every_two_options_of_a_cell_are_judged_together(cell: str) -> None:
    rows = [c.options for c in OPTION_CASES if c.name == cell and sum(c.options["lengths"]) > 3]
    smooth = [row for row in rows if not row.get("bptt")]
    options = CELL_OPTIONS[cell]
    assert len(options) >= 7
    for pair in combinations(options.values(), 2):
        for one, other in product(*pair):
            assert any(row.items() >= {**one, **other}.items() for row in smooth), (one, other)
    for one in chain(*options.values()):
        assert any(row.items() >= one.items() and row.get("bptt") for row in rows), one


def strided(value: Tensor) -> Tensor:
    """The same numbers, not contiguous."""
    if value.ndim == 0:
        return value
    wide = value.new_zeros(*value.shape[:-1], 2 * value.shape[-1])
    wide[..., ::2] = value.detach()
    return wide[..., ::2].requires_grad_()


def test_the_shapes_in_the_signatures_of_equations_are_checked_here(checked: None) -> None:
    inputs = Case("linear", {}).inputs()
    with pytest.raises(jaxtyping.TypeCheckError, match="weight"):
        OPERATORS["linear"].forward(**{**inputs, "weight": inputs["weight"][:, 1:]})
