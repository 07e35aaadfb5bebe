"""The certificates: every gradient against independent judges, ours and anybody's.

`run` judges the operators of this package on this machine, `check` a layer of the caller's own. Each gives rows
`{"operator", "judge", "dtype", "max_relative_error", "bound", "passed"}`.
"""

from __future__ import annotations

import copy
import difflib
import inspect
from collections.abc import Callable, Sequence
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from unrolled.ops._backend import backends, use
from unrolled.verify import judges
from unrolled.verify.judges import FINITE_BOUND, bound, compare
from unrolled.verify.operator import Operator
from unrolled.verify.operators import OPERATORS

Row = dict[str, Any]


def run(names: Sequence[str] = ()) -> list[Row]:
    """Judge the operators named, or all, on the backend in use.

    - "finite differences": the operator's gradient against central differences, in float64.
    - "autograd": the closed form of the equation against torch's differentiation of an independent formulation.
    - "torch.nn": the operator against torch's own function, outputs and gradients.
    - "core VARIANT": the core against the equation, where the core is built.
    A float32 result is measured against the float64 reference on the same numbers.
    Errors: ValueError for a name that is not an operator.
    """
    for name in names:
        if name not in OPERATORS:
            near = difflib.get_close_matches(name, OPERATORS, 1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ValueError(f"no operator is called {name!r}{hint}; there are {', '.join(OPERATORS)}")
    return [row for name in names or OPERATORS for row in _certificate(name, OPERATORS[name])]


def _certificate(name: str, operator: Operator) -> list[Row]:
    core = backends()["core"]
    rows: list[Row] = []

    def judge(title: str, dtype: torch.dtype, verdict: Callable[[dict[str, Any]], tuple[float, float] | None]) -> None:
        found = []
        for options in operator.options:
            inputs = operator.make(torch.Generator().manual_seed(0), dtype, **options)
            found.append(verdict(inputs))
        error, limit = max((f for f in found if f is not None), key=lambda f: f[0] / f[1])
        rows.append(_row(name, title, dtype, error, limit))

    def finite_differences(inputs: dict[str, Any]) -> tuple[float, float] | None:
        if inputs.get("padding_index") is not None or inputs.get("bptt"):
            return None  # by definition the padding row is a constant and so is a cut state, though y depends on them
        _, grads = judges.autograd(operator.operator, inputs)
        return max(judges.finite_difference_errors(operator.operator, inputs, grads).values()), FINITE_BOUND

    def independent(inputs: dict[str, Any]) -> tuple[float, float] | None:
        own = operator.to_equation(inputs)
        if own is None:
            return None
        found = judges.closed_form(operator.forward, operator.backward, own)
        expected = judges.autograd(operator.plain, inputs)
        return compare(_flat(found), _flat(expected), operator.cancels(inputs)), limit_of(inputs)

    def limit_of(inputs: dict[str, Any]) -> float:
        dtype = next(iter(judges.differentiable(inputs).values())).dtype
        return bound(dtype, operator.length(inputs))

    def against(reference: judges.Function, backend: str) -> Callable[[dict[str, Any]], tuple[float, float] | None]:
        def verdict(inputs: dict[str, Any]) -> tuple[float, float] | None:
            if reference is operator.peer and not operator.peer_has(inputs):
                return None
            expected = judges.autograd(reference, double(inputs))
            with use(backend):  # type: ignore[arg-type]
                found = judges.autograd(operator.operator, inputs)
            return compare(found, expected, operator.cancels(inputs)), limit_of(inputs)

        return verdict

    def equation(**inputs: Any) -> Any:
        with use("equations"):
            return operator.operator(**inputs)

    judge("finite differences", torch.float64, finite_differences)
    judge("autograd", torch.float64, independent)
    for dtype in (torch.float64, torch.float32):
        if operator.peer is not None:
            judge("torch.nn", dtype, against(operator.peer, "auto"))
        if core is not None:
            judge(f"core {core}", dtype, against(equation, "core"))
    return rows


def double(inputs: judges.Inputs) -> dict[str, Any]:
    """The same numbers in float64."""
    return {
        name: v.detach().double().requires_grad_(v.requires_grad)
        if isinstance(v, Tensor) and v.is_floating_point()
        else v
        for name, v in inputs.items()
    }


def _flat(result: judges.Result) -> judges.Result:
    """Without leading dimensions of size 1, which an operator of one direction has and its equation has not."""
    outputs, grads = ({name: t.flatten() for name, t in part.items()} for part in result)
    return outputs, grads


@overload
def check(layer: nn.Module, inputs: Sequence[Any], /) -> list[Row]: ...
@overload
def check(forward: Callable[..., Any], backward: Callable[..., Any], inputs: Sequence[Any], /) -> list[Row]: ...
def check(*args: Any) -> list[Row]:
    """Judge the gradients of any layer, a row for each, by central differences in float64.

    `check(module, inputs)`: what autograd, and so a custom backward, gives for every input and parameter of a module;
    judged on a float64 copy of it. `check(forward, backward, inputs)`: a closed form in this package's convention,
    `forward(*inputs) -> (*outputs, saved)` and `backward(*doutputs, saved)` -> the gradients, in the order of the
    inputs or as a NamedTuple with fields `d<input>`; where torch differentiates `forward`, autograd is a second judge.
    Inputs that require grad are differentiated; if none does, all of floating point are. They may be nested, or Ragged.
    Errors: ValueError where the layer gives two results for the same input, as dropout in training does, or where the
    number of gradients does not fit.
    """
    if len(args) == 2 and isinstance(args[0], nn.Module):
        return _check_module(*args)
    if len(args) == 3:
        return _check_pair(*args)
    raise TypeError("check takes (module, inputs) or (forward, backward, inputs)")


def _check_module(module: nn.Module, inputs: Sequence[Any]) -> list[Row]:
    module = copy.deepcopy(module).double()
    leaves, structure = pytree.tree_flatten(tuple(inputs))
    named = _marked({f"input{i}": leaf for i, leaf in enumerate(leaves)})
    parameters = {name: p.detach().requires_grad_() for name, p in module.named_parameters() if p.requires_grad}

    def function(**values: Any) -> tuple[Tensor, ...]:
        own = {name: values[name] for name in parameters}
        args = pytree.tree_unflatten([values[name] for name in named], structure)
        outputs = pytree.tree_leaves(torch.func.functional_call(module, own, args))
        return tuple(y for y in outputs if isinstance(y, Tensor))

    everything = {**named, **parameters}
    _same_twice(function, everything)
    _, grads = judges.autograd(function, everything)
    errors = judges.finite_difference_errors(function, everything, grads)
    return _rows(type(module).__name__, "finite differences", errors, FINITE_BOUND)


def _check_pair(forward: Callable[..., Any], backward: Callable[..., Any], inputs: Sequence[Any]) -> list[Row]:
    parameters = list(inspect.signature(forward).parameters)
    named = _marked(dict(zip(parameters, inputs, strict=False)))
    if len(named) != len(inputs):
        raise ValueError(f"{_name(forward)} takes {len(parameters)} inputs by name, {len(inputs)} were given")

    def function(**values: Any) -> tuple[Tensor, ...]:
        *outputs, _ = forward(**values)
        return tuple(outputs)

    _same_twice(function, named)
    _, grads = judges.closed_form(forward, backward, named)
    errors = judges.finite_difference_errors(function, named, grads)
    rows = _rows(_name(forward), "finite differences", errors, FINITE_BOUND)
    if any(y.requires_grad for y in function(**named)):
        _, expected = judges.autograd(function, named)
        length = max(max(x.shape, default=1) for x in judges.differentiable(named).values())
        errors = {name: judges.relative_error(grads[name], expected[name]) for name in expected}
        rows += _rows(_name(forward), "autograd", errors, bound(torch.float64, length))
    return rows


def _marked(inputs: dict[str, Any]) -> dict[str, Any]:
    """In float64; those to be differentiated require grad."""
    marked = any(isinstance(v, Tensor) and v.requires_grad for v in inputs.values())
    inputs = double(inputs)
    if not marked:
        for value in inputs.values():
            if isinstance(value, Tensor) and value.is_floating_point():
                value.requires_grad_()
    return inputs


def _same_twice(function: judges.Function, inputs: dict[str, Any]) -> None:
    with torch.no_grad():
        first, second = function(**inputs), function(**inputs)
    if not all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(first, second, strict=True)):
        raise ValueError(
            "two calls with the same input give two results, so there is no derivative; call .eval() first?"
        )


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__).removesuffix("_forward")


def _rows(name: str, judge: str, errors: dict[str, float], limit: float) -> list[Row]:
    return [_row(f"{name}.{part}", judge, torch.float64, error, limit) for part, error in errors.items()]


def _row(operator: str, judge: str, dtype: torch.dtype, error: float, limit: float) -> Row:
    return {
        "operator": operator,
        "judge": judge,
        "dtype": str(dtype).removeprefix("torch."),
        "max_relative_error": error,
        "bound": limit,
        "passed": error <= limit,
    }
