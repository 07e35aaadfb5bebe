"""A check counts only if it can fail: every single-term change of every backward must be caught by the judges.

`pytest tests/test_teeth.py -s` prints each mutant and what caught it.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from cases import FINITE_CASES, TEETH_CASES, Case
from mutants import CHANGES, Mutant, mutants, of_results
from test_gradients import as_function, of_tensors
from tolerances import FINITE_BOUND, GRADCHECK, bound
from unrolled.verify.judges import (
    Result,
    autograd,
    closed_form,
    compare,
    finite_difference_errors,
    relative_error,
)
from unrolled.verify.operators import OPERATORS

# Changes that no judge can tell from the original, each with the reason. A stale entry fails the test.
EQUIVALENT: dict[str, dict[str, str]] = {
    "rnn": {
        "rnn_backward, shift da in dbias = da.sum(0)": "a sum does not depend on the order of its terms",
        **{
            f"rnn_backward, shift {what} in tokens = all_rows(steps, x.device)": "the same order in both factors"
            for what in ("steps", "all_rows(steps, x.device)")
        },
        "relu_grad_from_output, scale h in return (h > 0).to(h.dtype)": "a positive factor does not change the sign",
    },
    "linear": {
        "linear_backward, shift dy in return LinearGrads(dx=dy @ weight, dweight=dy.T @ x, dbias=dy.sum(0))": (
            "a sum does not depend on the order of its terms"
        ),
    },
    "dropout": {
        **{
            f"dropout_mask, only the {side} of (units + 63) // 64 in first = "
            "torch.arange((units + 63) // 64 * 16, device=key.device)": "more random numbers than are used"
            for side in ("left", "right")
        },
        "dropout_mask, scale p in return (random >= round(p * 2 ** 32)).to(torch.float64) / "
        "(1 - p if p < 1 else 1) (2)": "this p is only asked whether it is 1",
    },
    "embedding": {},
    "mean_squared_error": {},
    "cross_entropy": {},
}

# Changes that finite differences cannot see and the independent formulation does.
PADDING = "a padding row is a constant by definition only, so finite differences do not look at it"
UNSEEN: dict[str, str] = {
    "embedding_backward, leave out if padding_index is not None:": PADDING,
    **{
        f"embedding_backward, {change} in dweight[padding_index] = 0": PADDING
        for change in (
            "leave out dweight[padding_index] = 0",
            "drop dweight",
            "shift dweight",
            "scale dweight",
            "negate dweight",
        )
    },
}

JUDGES = ("independent", "gradcheck", "certificate")
# So that a generator that makes no mutants cannot pass.
FEWEST = {"rnn": 200, "linear": 30, "embedding": 20, "dropout": 60, "mean_squared_error": 30, "cross_entropy": 100}

Judge = Callable[[Any], bool]  # whether it lets a backward pass


def judges(case: Case) -> dict[str, Judge]:
    operator, inputs = case.operator, case.inputs()
    own = operator.to_equation(inputs)
    _, grads = autograd(operator.plain, inputs)
    limit, floor = bound(torch.float64, operator.length(inputs)), operator.cancels(inputs)

    def independent(backward: Any) -> bool:
        _, found = closed_form(operator.forward, backward, own)
        reference: Result = {}, {name: grads[name].view_as(found[name]) for name in grads if found[name].numel()}
        return compare(({}, found), reference, floor) <= limit

    def gradcheck(backward: Any) -> bool:
        function, values = of_tensors(as_function(operator.forward, backward), own)
        return torch.autograd.gradcheck(function, values, raise_exception=False, **GRADCHECK)

    def certificate(backward: Any) -> bool:
        function = as_function(operator.forward, backward)
        _, found = autograd(function, own)
        return max(finite_difference_errors(function, own, found).values()) <= FINITE_BOUND

    if case not in FINITE_CASES:
        return {"independent": independent}
    return {"independent": independent, "gradcheck": gradcheck, "certificate": certificate}


def objects(judge: Judge, mutant: Mutant) -> bool:
    """A judge objects to a backward that it lets not pass, or that breaks on the shapes the change made."""
    try:
        return not judge(mutant.backward)
    except (RuntimeError, IndexError, TypeError, AttributeError):
        return True


def caught(candidates: Iterable[Mutant], courts: list[dict[str, Judge]]) -> tuple[Counter[str], set[str]]:
    """How many mutants each judge has caught, and the mutants that escaped one which could have seen them."""
    kills: Counter[str] = Counter()
    escaped: set[str] = set()
    for mutant in candidates:
        verdicts = {}
        for name in JUDGES:
            verdicts[name] = any(objects(court[name], mutant) for court in courts if name in court)
            if not any(mutant.acted) and not verdicts[name]:
                break
        else:
            kills.update(name for name, verdict in verdicts.items() if verdict)
            print(f"{mutant.label}: {verdicts}")
            missed = {name for name, verdict in verdicts.items() if not verdict}
            if missed and not (missed == {"gradcheck", "certificate"} and mutant.label in UNSEEN):
                escaped.add(mutant.label)
    return kills, escaped


@pytest.mark.parametrize("name", OPERATORS)
def test_every_single_change_of_a_backward_is_caught(name: str) -> None:
    courts = [judges(case) for case in TEETH_CASES if case.name == name]
    kills, escaped = caught(mutants(OPERATORS[name].backward), courts)
    print(f"{name}: {dict(kills)}")
    assert kills["independent"] >= FEWEST[name]
    assert escaped == EQUIVALENT[name].keys()


@pytest.mark.parametrize("name", OPERATORS)
def test_every_change_of_a_returned_gradient_is_caught(name: str) -> None:
    operator, cases = OPERATORS[name], [case for case in TEETH_CASES if case.name == name]
    _, grads = closed_form(operator.forward, operator.backward, operator.to_equation(cases[0].inputs()))
    kills, escaped = caught(of_results(operator.backward, len(grads)), [judges(case) for case in cases])
    assert kills["independent"] == kills["gradcheck"] == kills["certificate"] == len(grads) * len(CHANGES)
    assert not escaped


@pytest.mark.parametrize("name", [name for name in OPERATORS if name != "dropout"])  # its backward is its forward
def test_every_wrong_gradient_of_an_operator_is_caught(
    name: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way from a kernel of a backward to autograd: each tensor that it returns, changed on its way."""
    module = sys.modules[OPERATORS[name].operator.__module__]
    case = next(case for case in TEETH_CASES if case.name == name)
    operator, inputs = case.operator, case.inputs()
    expected, limit = autograd(operator.plain, inputs), bound(torch.float64, operator.length(inputs))
    kernel, results = module._backward_once, []

    def spy(*args: Any) -> Any:
        results.append(kernel(*args))
        return results[-1]

    def error(backward: Any) -> float:
        monkeypatch.setattr(module, "_backward_once", backward)
        return compare(autograd(operator.operator, inputs), expected, operator.cancels(inputs))

    assert error(spy) <= limit
    candidates = list(of_results(kernel, 1 if isinstance(results[0], Tensor) else len(results[0])))
    assert [m.label for m in candidates if error(m.backward) <= limit or not any(m.acted)] == []


def test_the_measure_of_error_sees_everything() -> None:
    one = torch.ones(3, 2)
    assert relative_error(one, one) == 0
    assert relative_error(one * float("nan"), one) == math.inf
    assert relative_error(one, one * float("nan")) == math.inf
    assert relative_error(one[:2], one) == math.inf
    assert relative_error(one, torch.zeros(3, 2)) == math.inf
    assert relative_error(one + torch.eye(3, 2) * 1e-6, one) == pytest.approx(1e-6, rel=0.2)
    assert relative_error(one * 1e-3, one * 2e-3, floor=1.0) == pytest.approx(1e-3)
    assert compare(({}, {}), ({}, {"x": one})) == math.inf
    assert compare(({"y": one}, {"x": one}), ({"y": one}, {"x": 2 * one})) == 0.5
