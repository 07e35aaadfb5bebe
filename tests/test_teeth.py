"""A check counts only if it can fail: every single-term change of every backward must be caught by the judges.

`pytest tests/test_teeth.py -s` prints each mutant and what caught it.
"""

from __future__ import annotations

import importlib
import math
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from cases import FINITE_CASES, OPTION_TEETH_CASES, TEETH_CASES, Case
from equivalent import EQUIVALENT, unseen
from mutants import CHANGES, Backward, Mutant, mutants, of_results
from pairs import zoneout_pair_backward
from test_gradients import as_function, of_tensors, plain_steps
from tolerances import FINITE_BOUND, GRADCHECK, bound
from unrolled.equations.additive_attention import additive_attention_backward
from unrolled.equations.attention import attention_backward
from unrolled.equations.gru import gru_backward
from unrolled.equations.gru_before import gru_before_backward, reset_backward
from unrolled.equations.layer_norm import layer_norm_backward
from unrolled.equations.lstm import lstm_backward
from unrolled.equations.lstm_options import lstm_options_backward
from unrolled.equations.multiplicative_attention import multiplicative_attention_backward
from unrolled.equations.recurrence import recurrence_backward
from unrolled.equations.recurrent_options import options_backward
from unrolled.equations.rms_norm import rms_norm_backward
from unrolled.equations.rnn import rnn_relu_backward, rnn_tanh_backward
from unrolled.equations.zoneout import zoneout_backward
from unrolled.verify.attentions import attention_pair_backward
from unrolled.verify.judges import (
    Result,
    autograd,
    closed_form,
    compare,
    errors_against,
    finite_differences,
    relative_error,
)
from unrolled.verify.norms import layer_norm_pair_backward, rms_norm_pair_backward
from unrolled.verify.operators import OPERATORS, recurrent_backward
from unrolled.verify.outputs import additive_attention_pair_backward


class Teeth(NamedTuple):
    """A backward in the equations, the cases that judge it, and how a version of it becomes an operator's backward."""

    backward: Backward
    cases: list[Case]
    put: Callable[[Backward], Backward] = lambda version: version


def of(*names: str, **options: Any) -> list[Case]:
    return [case for case in TEETH_CASES if case.name in names and case.options.items() >= options.items()]


def with_options(*names: str, **options: Any) -> list[Case]:
    return [c for c in OPTION_TEETH_CASES if c.name in names and c.options.items() >= options.items()]


def within(pair_backward: Backward) -> Callable[[Backward], Backward]:
    return lambda version: partial(pair_backward, backward=version)


def as_cell(version: Backward) -> Backward:
    def backward(*args: Any) -> Any:
        *cotangents, saved = args
        return recurrent_backward(*cotangents, saved._replace(cell=saved.cell._replace(backward=version)))

    return backward


def as_reset(version: Backward) -> Backward:
    def backward(*args: Any) -> Any:
        *cotangents, saved = args
        cell = saved.cell._replace(reset=saved.cell.reset._replace(backward=version))
        return recurrent_backward(*cotangents, saved._replace(cell=cell))

    return backward


RECURRENT = ("rnn", "lstm", "gru")
TEETH = {
    "recurrence": Teeth(recurrence_backward, of(*RECURRENT), within(recurrent_backward)),
    "rnn_tanh": Teeth(rnn_tanh_backward, of("rnn", nonlinearity="tanh"), as_cell),
    "rnn_relu": Teeth(rnn_relu_backward, of("rnn", nonlinearity="relu"), as_cell),
    "lstm": Teeth(lstm_backward, of("lstm"), as_cell),
    "gru": Teeth(gru_backward, of("gru"), as_cell),
    "options": Teeth(options_backward, OPTION_TEETH_CASES, within(recurrent_backward)),
    "lstm_options": Teeth(lstm_options_backward, with_options("lstm"), as_cell),
    "gru_before": Teeth(gru_before_backward, with_options("gru"), as_cell),
    "reset": Teeth(reset_backward, with_options("gru"), as_reset),
    "zoneout": Teeth(zoneout_backward, of("zoneout"), within(zoneout_pair_backward)),
    "multiplicative_attention": Teeth(multiplicative_attention_backward, of("multiplicative_attention")),
    **{name: Teeth(o.backward, of(name)) for name, o in OPERATORS.items() if name not in RECURRENT},
    "additive_attention": Teeth(
        additive_attention_backward, of("additive_attention"), within(additive_attention_pair_backward)
    ),
    "layer_norm": Teeth(layer_norm_backward, of("layer_norm"), within(layer_norm_pair_backward)),
    "rms_norm": Teeth(rms_norm_backward, of("rms_norm"), within(rms_norm_pair_backward)),
    "attention": Teeth(attention_backward, of("attention"), within(attention_pair_backward)),
}

JUDGES = ("independent", "gradcheck", "certificate")
# So that a generator that makes no mutants cannot pass.
FEWEST = {
    **{"recurrence": 250, "rnn_tanh": 40, "rnn_relu": 25, "lstm": 250, "gru": 200},
    **{"options": 700, "lstm_options": 500, "gru_before": 120, "reset": 30, "layer_norm": 100, "zoneout": 25},
    **{"rms_norm": 80, "residual_norm": 75, "rotary": 180},
    **{"linear": 30, "embedding": 20, "dropout": 60, "mean_squared_error": 30, "cross_entropy": 100},
    **{"attention": 500, "multiplicative_attention": 5},
    **{"activation": 100, "feed_forward": 100},
    **{"linear_cross_entropy": 10, "additive_attention": 100},
}

Judge = Callable[[Any], bool]  # whether it lets a backward pass


def remembered(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, computed once for the same numbers: all versions of a backward share their forward."""
    known: dict[tuple[bytes, ...], Any] = {}

    def call(**inputs: Any) -> Any:
        numbers = {k: v.detach() for k, v in inputs.items() if isinstance(v, Tensor) and v.is_floating_point()}
        key = tuple(v.numpy().tobytes() for v in numbers.values())
        if key not in known:
            known[key] = forward(**{**inputs, **{k: v.clone() for k, v in numbers.items()}})
        *outputs, saved = known[key]
        return *(y.clone() for y in outputs), saved

    return call


def judges(case: Case) -> dict[str, Judge]:
    operator, inputs = case.operator, case.inputs()
    own, forward = operator.to_equation(inputs), remembered(operator.forward)
    _, grads = autograd(operator.plain, inputs)
    limit, floor = bound(torch.float64, operator.length(inputs)), operator.cancels(inputs)

    steps = plain_steps(inputs) if case.name in RECURRENT else {}

    def independent(backward: Any) -> bool:
        found: dict[str, Tensor] = {}

        def spy(*args: Any) -> Any:
            result = backward(*args)
            found.update({name: getattr(result, name) for name in steps})
            return result

        _, by_input = closed_form(forward, spy, own)
        found |= by_input
        expected = {**steps, **grads}
        reference: Result = {}, {name: expected[name].view_as(g) for name, g in found.items() if g.numel()}
        return compare(({}, found), reference, floor) <= limit

    def gradcheck(backward: Any) -> bool:
        function, values = of_tensors(as_function(forward, backward), own)
        return torch.autograd.gradcheck(function, values, raise_exception=False, **GRADCHECK)

    def certificate(backward: Any) -> bool:
        _, found = autograd(as_function(forward, backward), own)
        return max(errors_against(differences, found).values()) <= FINITE_BOUND

    if case not in FINITE_CASES:
        return {"independent": independent}
    differences = finite_differences(lambda **given: forward(**given)[:-1], own)  # of no backward, so of all alike
    if case in OPTION_TEETH_CASES or case.name == "attention":  # gradcheck would take minutes: a thousand mutants
        return {"independent": independent, "certificate": certificate}
    return {"independent": independent, "gradcheck": gradcheck, "certificate": certificate}


def objects(judge: Judge, mutant: Mutant) -> bool:
    """A judge objects to a backward that it lets not pass, or that breaks on the shapes the change made."""
    try:
        return not judge(mutant.backward)
    except (RuntimeError, IndexError, TypeError, AttributeError, ValueError, ArithmeticError):
        return True


def caught(candidates: Iterable[Mutant], courts: list[dict[str, Judge]]) -> tuple[Counter[str], set[str]]:
    """How many mutants each judge has caught, and the mutants that escaped one which could have seen them."""
    kills: Counter[str] = Counter()
    escaped: set[str] = set()
    names = [name for name in JUDGES if any(name in court for court in courts)]
    for mutant in candidates:
        verdicts = {}
        for name in names:
            verdicts[name] = any(objects(court[name], mutant) for court in courts if name in court)
            if not any(mutant.acted) and not verdicts[name]:
                break
        else:
            kills.update(name for name, verdict in verdicts.items() if verdict)
            print(f"{mutant.label}: {verdicts}")
            missed = {name for name, verdict in verdicts.items() if not verdict}
            if missed and not ("independent" not in missed and unseen(mutant.label)):
                escaped.add(mutant.label)
    return kills, escaped


@pytest.mark.parametrize("name", TEETH)
def test_every_single_change_of_a_backward_is_caught(name: str) -> None:
    teeth = TEETH[name]
    candidates = (mutant._replace(backward=teeth.put(mutant.backward)) for mutant in mutants(teeth.backward))
    kills, escaped = caught(candidates, [judges(case) for case in teeth.cases])
    print(f"{name}: {dict(kills)}")
    assert escaped == EQUIVALENT[name].keys()
    assert kills["independent"] >= FEWEST[name]


@pytest.mark.parametrize("case", [of(name)[0] for name in OPERATORS] + OPTION_TEETH_CASES[:2], ids=str)
def test_every_change_of_a_returned_gradient_is_caught(case: Case) -> None:
    operator, inputs = case.operator, case.operator.to_equation(case.inputs())
    found: list[Any] = []
    closed_form(operator.forward, lambda *args: found.append(operator.backward(*args)) or found[0], inputs)
    grads = [found[0]] if isinstance(found[0], Tensor) else found[0]
    steps = {"dh", "dc"} if case.name in RECURRENT else set()  # seen by one judge alone
    names = getattr(grads, "_fields", range(len(grads)))
    places = [i for i, name in enumerate(names) if isinstance(grads[i], Tensor) and name not in steps]
    cases = [case] if case in OPTION_TEETH_CASES else of(case.name)
    kills, escaped = caught(of_results(operator.backward, places), [judges(each) for each in cases])
    assert set(kills.values()) == {len(places) * len(CHANGES)}
    assert not escaped


@pytest.mark.parametrize(
    "case", [of(name)[0] for name in OPERATORS if name not in ("dropout", "rotary")] + OPTION_TEETH_CASES[:2], ids=str
)  # the backward of these two is their forward
def test_every_wrong_gradient_of_an_operator_is_caught(
    case: Case, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way from a kernel of a backward to autograd: each tensor that it returns, changed on its way."""
    module = importlib.import_module(f"unrolled.ops.{'recurrence' if case.name in RECURRENT else case.name}")
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
    grads = [results[0]] if isinstance(results[0], Tensor) else results[0]
    places = [i for i, grad in enumerate(grads) if grad.numel()]
    assert len(places) >= len({"target", *expected[1]}) - 1  # of y - target both gradients are one
    candidates = of_results(kernel, places)
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
