"""What a mutant is asked: the cases of tests/cases.py, against what the unchanged equations give, and some tests."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .judge import Question

torch.set_num_threads(1)  # and so no pool of threads is there yet when a fork starts its own
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.modules.setdefault("unrolled._core", None)  # type: ignore[arg-type]  # the right results are the equations'
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import test_survivors
    from cases import CASES, LARGE_CASES, TEETH_CASES, Case
    from test_survivors import THREADED, WIDTHS
    from unrolled.ops.recurrence import record
    from unrolled.verify.judges import autograd, bound, closed_form, compare

# Those of the large cases that stay quick in code that is sanitized and full of switches.
CORE_CASES = [*THREADED, *WIDTHS, *(case for case in LARGE_CASES if "lengths" not in case.options)]
Result = tuple[dict[str, Tensor], dict[str, Tensor]]


def by_operator(case: Case, inputs: dict[str, Any]) -> Result:
    """Outputs, and gradients with those of the states after each step."""
    with record() as records:
        outputs, grads = autograd(case.operator.operator, inputs)
    named = ((f"{i} {name}", value) for i, r in enumerate(records) for name, value in r.gradients.items())
    return outputs, {**grads, **dict(named)}


def by_equation(case: Case, inputs: dict[str, Any]) -> Result:
    """The pair of equations called by itself; nothing where no single call of it does the operator's work."""
    own = case.operator.to_equation(inputs)
    return ({}, {}) if own is None else closed_form(case.operator.forward, case.operator.backward, own)


def of_case(case: Case, answer: Callable[[Case, dict[str, Any]], Result]) -> Question:
    """As in the tests, the equations are also called by themselves."""
    inputs, of_core = case.inputs(), answer is by_operator
    expected, floor = answer(case, inputs), case.operator.cancels(inputs)
    limit = 2 * bound(torch.float64, case.operator.length(inputs))  # the tests allow half of it

    def wrong() -> bool:
        torch.set_num_threads(3 if case in THREADED else 2 if of_core else 1)  # the core's: torch's work is too small
        return compare(answer(case, inputs), expected, floor) > limit

    return Question(str(case), wrong, of_equation=case not in CORE_CASES, of_core=of_core)


def of_tests() -> list[Question]:
    """The tests that a survivor of an earlier run called for; they raise where something is wrong."""
    tests = [test for name, test in vars(test_survivors).items() if name.startswith("test_")]
    alone = [test for test in tests if list(inspect.signature(test).parameters) == ["backend"]]
    return [Question(test.__name__, lambda test=test: bool(test("as loaded"))) for test in alone]


def questions() -> list[Question]:
    both = [of_case(case, answer) for case in (*TEETH_CASES, *CASES) for answer in (by_operator, by_equation)]
    return [*both, *(of_case(case, by_operator) for case in CORE_CASES), *of_tests()]
