"""The activations and the feed-forward layer: accuracy, edges, what is kept, what is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cases import Case
from conftest import VARIANTS, on
from tolerances import close, same_bits
from unrolled import use
from unrolled.equations.dropout import Dropping
from unrolled.ops._backend import core
from unrolled.ops.activation import KINDS, activation
from unrolled.ops.feed_forward import feed_forward
from unrolled.verify.judges import autograd, differentiable


def exact(kind: str, x: np.ndarray) -> np.ndarray:
    """In float64, without a difference of nearly equal numbers."""
    if kind == "relu":
        return np.maximum(x, 0)
    if kind == "gelu":
        return x * np.array([math.erfc(-v / math.sqrt(2)) / 2 for v in x])
    argument = x if kind == "silu" else math.sqrt(8 / math.pi) * (x + 0.044715 * x**3)
    return x / (1 + np.exp(-argument))


@pytest.mark.parametrize(("low", "high"), [(-12.0, -1e-3), (-1e-3, 1e-3), (1e-3, 12.0)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_float32_activations_are_as_exact_as_promised(variant: str, kind: Any, low: float, high: float) -> None:
    """In the lower tail too, where 1 + erf would have no digit left; tanh's argument, a cube, is rounded there."""
    if kind == "gelu_tanh":
        low = max(low, -3.0)
    x = np.linspace(low, high, 40_001, dtype=np.float32)
    with on(variant):
        y = activation(torch.from_numpy(x), kind).numpy()
    reference = exact(kind, x.astype(np.float64))
    unit = np.spacing(np.abs(reference).astype(np.float32)).astype(np.float64)
    assert float((np.abs(y - reference) / unit).max()) <= (16 if kind == "gelu_tanh" else 6)


@pytest.mark.parametrize("kind", KINDS)
def test_activations_at_the_ends(kind: Any, backend: str) -> None:
    for dtype in (torch.float32, torch.float64):
        x = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 50.0, -50.0, 1e4, -1e4], dtype=dtype, requires_grad=True)
        y = activation(x, kind)
        (dx,) = torch.autograd.grad(y.sum(), x)
        close(y, torch.where(x > 1, x, 0).double(), 1)
        middle = 0.0 if kind == "relu" else 0.5
        close(dx[4:], torch.tensor([1.0, 0.0, 1.0, 0.0]).double(), 1)
        close(dx[:2], torch.full((2,), middle).double(), 1)
        assert activation(torch.tensor([math.nan], dtype=dtype), kind).isnan().all()
        assert activation(torch.tensor([math.inf], dtype=dtype), kind).isinf().all()


def inputs(**options: Any) -> dict[str, Any]:
    return Case("feed_forward", {"tokens": 7, "width": 5, "units": 67, "gated": True, "p": 0.4, **options}).inputs()


def test_the_mask_is_the_equation_s_and_dropout_of_what_is_between(backend: str) -> None:
    """With all first weights 0 and biases 1 the hidden units are phi(1): the second map shows the mask."""
    tokens, units = 9, 130
    key, t, seed = torch.arange(tokens) * 3, torch.arange(tokens) + 2**33, torch.tensor(5)
    dropping = Dropping(0.4, seed, 3, key, t)
    one, zero = torch.ones(units, dtype=torch.float64), torch.zeros(units, units, dtype=torch.float64)
    x = torch.randn(tokens, units, dtype=torch.float64)
    y = feed_forward(x, zero, one, torch.eye(units, dtype=torch.float64), None, "relu", dropping=dropping)
    close(y, dropping.mask(units), 1)


def test_dropout_0_is_none_and_dropout_1_leaves_the_bias(backend: str) -> None:
    given = inputs(p=0.4)
    d = given.pop("dropping")
    y = feed_forward(**given)
    same_bits(feed_forward(**given, dropping=d._replace(p=0.0)), y)
    nothing = feed_forward(**given, dropping=d._replace(p=1.0))
    same_bits(nothing, given["bias2"].expand_as(nothing))
    assert not torch.equal(feed_forward(**given, dropping=d), y)


def test_a_row_does_not_depend_on_its_neighbours(backend: str) -> None:
    given = inputs(tokens=13)
    y = feed_forward(**given)
    order = torch.randperm(13)[:5]
    d = given["dropping"]
    given |= {"x": given["x"][order], "dropping": d._replace(key=d.key[order], t=d.t[order])}
    close(feed_forward(**given), y[order], 67)


@pytest.mark.parametrize("gated", [False, True])
def test_inference_keeps_nothing_and_computes_the_same(gated: bool, backend: str) -> None:
    given = inputs(gated=gated)
    with torch.no_grad():
        y = feed_forward(**given)
    assert not y.requires_grad
    close(feed_forward(**given), y, 67)


def test_only_what_needs_a_gradient_gets_one(backend: str) -> None:
    given = {k: v.detach() if isinstance(v, Tensor) else v for k, v in inputs().items()}
    given["weight2"].requires_grad_()
    y = feed_forward(**given)
    y.sum().backward()
    assert given["weight2"].grad is not None
    assert given["x"].grad is None
    (dx,) = torch.autograd.grad(feed_forward(**{**given, "x": given["x"].requires_grad_()}).sum(), given["x"])
    with use("equations"):
        (expected,) = torch.autograd.grad(feed_forward(**given).sum(), given["x"])
    close(dx, expected, 67)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("tokens", [9, 53])  # few rows go another way
def test_more_units_than_are_computed_at_a_time(variant: str, tokens: int, gated: bool) -> None:
    case = Case("feed_forward", {"tokens": tokens, "width": 11, "units": 1100, "gated": gated, "p": 0.3})
    with use("equations"):
        expected = autograd(case.operator.operator, case.inputs())
    with on(variant):
        found = autograd(case.operator.operator, case.inputs())
    for part, reference in zip(found, expected, strict=True):
        for name, value in reference.items():
            close(part[name], value, 1100)


def test_bits_do_not_depend_on_the_number_of_threads() -> None:
    for name, options in (
        ("linear", {"tokens": 1201, "input_size": 67, "output_size": 131}),
        ("feed_forward", {"tokens": 701, "width": 67, "units": 131, "gated": True, "p": 0.3}),
    ):
        case = Case(name, options)
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(autograd(case.operator.operator, case.inputs(torch.float32)))
        for other in results[1:]:
            for part, first in zip(other, results[0], strict=True):
                for key in first:
                    same_bits(part[key], first[key])


def test_the_feed_forward_layer_takes_what_lies_apart(backend: str) -> None:
    given = inputs()
    apart = {k: torch.stack([v, v], -1)[..., 0] for k, v in differentiable(given).items()}
    close(feed_forward(**{**given, **apart}), feed_forward(**given), 67)


def test_second_derivatives_are_refused(backend: str) -> None:
    given = inputs()
    (dx,) = torch.autograd.grad(feed_forward(**given).sum(), given["x"], create_graph=True)
    with pytest.raises(RuntimeError, match=r"feed_forward: .*use\(.equations"):
        dx.sum().backward()


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"activation": "tanh"}, ValueError, "one of 'relu', 'gelu', 'gelu_tanh', 'silu', found 'tanh'"),
    ({"x": torch.zeros(7, 6, dtype=torch.float64)}, ValueError, r"expected x \(N, D\) and weight1 \(F, D\)"),
    ({"weight2": torch.zeros(5, 66, dtype=torch.float64)}, ValueError, r"expected weight2 \(5, 67\), found \(5, 66\)"),
    ({"bias1": torch.zeros(5, dtype=torch.float64)}, ValueError, r"expected bias1 \(67,\), found \(5,\)"),
    ({"weight_gate": None}, ValueError, "bias_gate belongs to weight_gate"),
    ({"bias2": torch.zeros(5)}, TypeError, "one dtype and device"),
    ({"dropping": Dropping(1.5, torch.tensor(1), 0, torch.arange(7), torch.arange(7))}, ValueError, "found 1.5"),
    ({"dropping": Dropping(0.5, torch.tensor(1), 0, torch.arange(7), torch.arange(6))}, ValueError, r"must be \(7,\)"),
]


@pytest.mark.parametrize(("changed", "error", "message"), WRONG, ids=[message for *_, message in WRONG])
def test_wrong_use(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        feed_forward(**{**inputs(), **changed})


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(ValueError, match=r"activation: the activation must be one of 'relu', .* found 'swish'"):
        activation(torch.zeros(3), "swish")  # type: ignore[arg-type]


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


def border(name: str, gated: bool) -> dict[str, Any]:
    """Of N 4, D 3, F 2, with dropout."""
    where = {"seed": np.array(3), "key": np.arange(4), "t": np.arange(4)}
    gate, numbers = (lambda *shape: zeros(*shape) if gated else None), {"p": 0.5, "layer": 0, "threads": 1}
    if name == "feed_forward_forward":
        return {
            **{
                "activation": "gelu",
                "x": zeros(4, 3),
                "weight1": zeros(2, 3),
                "bias1": zeros(2),
                "weight2": zeros(3, 2),
            },
            **{"bias2": zeros(3), "weight_gate": gate(2, 3), "bias_gate": gate(2), **where},
            **{"y": zeros(4, 3), "a": zeros(4, 2), "gate": gate(4, 2), **numbers},
        }
    return {
        **{"activation": "gelu", "dy": zeros(4, 3), "x": zeros(4, 3), "a": zeros(4, 2), "gate": gate(4, 2)},
        **{"weight1": zeros(2, 3), "weight2": zeros(3, 2), "weight_gate": gate(2, 3), **where, "dx": zeros(4, 3)},
        **{"dweight1": zeros(2, 3), "dbias1": zeros(2), "dweight2": zeros(3, 2), "dbias2": zeros(3)},
        **{"dweight_gate": gate(2, 3), "dbias_gate": gate(2), **numbers},
    }


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("name", ["feed_forward_forward", "feed_forward_backward"])
def test_the_border_refuses_every_array_of_another_shape_or_type(name: str, gated: bool) -> None:
    function, arguments = getattr(core, name), border(name, gated)
    function(*arguments.values())
    for key, value in arguments.items():
        if not isinstance(value, np.ndarray):
            continue
        if value.ndim:
            with pytest.raises(ValueError, match=r"must (be|have)"):
                function(*{**arguments, key: np.zeros([n + 1 for n in value.shape], value.dtype)}.values())
        with pytest.raises(TypeError):
            function(*{**arguments, key: value.astype(np.float64)}.values())
        if key not in ("bias1", "bias2", "bias_gate", "dx", *(() if gated else ("a",))):
            with pytest.raises((TypeError, ValueError)):
                function(*{**arguments, key: None}.values())
    for key, wrong in (("p", 1.5), ("activation", "swish")):
        with pytest.raises(ValueError, match=r"must be in|no activation is called"):
            function(*{**arguments, key: wrong}.values())


def test_the_border_of_the_activations() -> None:
    for name, count in (("activation_forward", 2), ("activation_backward", 3)):
        function = getattr(core, name)
        for place in range(count):
            with pytest.raises(ValueError, match="must be as large"):
                function("gelu", *(zeros(3 + (i == place)) for i in range(count)), 1)
