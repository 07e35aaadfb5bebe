"""What PyTorch's users do to a module must work on ours: vmap, autocast, copies, second derivatives, checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import unrolled
from habits import HIDDEN, INPUT, KINDS, Classifier, call, every_kind, example, gradients, make, total
from tolerances import close, same_bits
from unrolled.ops.dropout import dropout
from unrolled.ops.embedding import embedding
from unrolled.ops.linear import linear


@every_kind
@pytest.mark.parametrize("names", [("tokens", "target"), ("tokens", "lengths", "target")], ids=str)
def test_gradients_per_example_by_vmap(names: tuple[str, ...], kind: str, backend: str) -> None:
    model = Classifier(kind)
    batch = dict(zip(("tokens", "lengths", "target"), example(), strict=True))
    batch = {name: batch[name] for name in names}
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters: dict[str, Tensor], one: dict[str, Tensor]) -> Tensor:
        inputs = {name: value[None] for name, value in one.items()}
        target = inputs.pop("target")
        value: Tensor = model.loss(torch.func.functional_call(model, parameters, (), inputs), target)
        return value

    found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, batch)
    for b in range(3):
        value = loss(dict(model.named_parameters()), {name: value[b] for name, value in batch.items()})
        for name, reference in zip(parameters, gradients(model, value), strict=True):
            close(found[name][b], reference.double(), 12)


@every_kind
def test_ensemble_by_vmap_over_parameters(kind: str, backend: str) -> None:
    models = [make(kind, bidirectional=True) for _ in range(3)]
    stacked, _ = torch.func.stack_module_state(models)
    x = torch.randn(4, 2, INPUT)
    y, last = torch.func.vmap(lambda p: call_functional(models[0], p, x))(stacked)
    for i, model in enumerate(models):
        y_alone, last_alone = call(model, x)
        close(y[i], y_alone.double(), INPUT + HIDDEN)
        for found, reference in zip(last, last_alone, strict=True):
            close(found[i], reference.double(), INPUT + HIDDEN)


def call_functional(model: nn.Module, parameters: dict[str, Tensor], *args: Any) -> tuple[Tensor, list[Tensor]]:
    y, last = torch.func.functional_call(model, parameters, args)
    return y, [last] if isinstance(last, Tensor) else list(last)


@every_kind
def test_jacobian(kind: str, backend: str) -> None:
    rnn = make(kind, dtype=torch.float64)

    def final(x: Tensor) -> Tensor:
        y, last = call(rnn, x)
        return torch.cat([y[-1, 0], *(s[0, 0] for s in last)])

    x = torch.randn(4, 1, INPUT, dtype=torch.float64)
    found = torch.func.jacrev(final)(x)
    with unrolled.use("equations"):
        expected = torch.autograd.functional.jacobian(final, x)
    close(found, expected, INPUT + HIDDEN)


@every_kind
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_computes_in_float32(dtype: torch.dtype, kind: str, backend: str) -> None:
    model = Classifier(kind)
    batch = example()
    expected = model.step(*batch)
    with torch.autocast("cpu", dtype):
        found = model.step(*batch)
        initial = [torch.randn(4, 2, HIDDEN, dtype=dtype)] * (1 + (kind == "LSTM"))
        hx = tuple(initial) if kind == "LSTM" else initial[0]
        y, last = call(model.layers[0], torch.randn(2, 3, INPUT, dtype=dtype), hx)
    assert {t.dtype for t in (found, y, *last)} == {torch.float32}
    same_bits(found, expected)
    for own, reference in zip(gradients(model, found), gradients(model, expected), strict=True):
        same_bits(own, reference)


@every_kind
def test_copies_and_functional_call(kind: str, backend: str) -> None:
    model = Classifier(kind)
    batch = example()
    expected = model.step(*batch)
    model(*batch[:2])
    twin = copy.deepcopy(model)
    same_bits(twin.step(*batch), expected)
    other = Classifier(kind)
    other.load_state_dict(model.state_dict())
    same_bits(other.step(*batch), expected)
    logits = torch.func.functional_call(Classifier(kind), dict(model.named_parameters()), batch[:2])
    same_bits(model.loss(logits, batch[2]), expected)
    for p in twin.parameters():
        p.data.zero_()
    same_bits(model.step(*batch), expected)


def with_initial_states(kind: str) -> tuple[Callable[..., tuple[Tensor, ...]], list[Tensor]]:
    """A small layer as a function of its input and initial states, and these."""
    rnn = make(kind, 2, 2, bidirectional=True, dtype=torch.float64)

    def function(x: Tensor, *initial: Tensor) -> tuple[Tensor, ...]:
        y, last = call(rnn, x, initial if kind == "LSTM" else initial[0], lengths=[3, 1])
        return y, *last

    shapes = (3, 2, 2), *[(2, 2, 2)] * (1 + (kind == "LSTM"))
    return function, [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


@every_kind
def test_second_derivatives_of_a_recurrent_layer_under_equations(kind: str) -> None:
    function, leaves = with_initial_states(kind)
    with unrolled.use("equations"):
        torch.autograd.gradgradcheck(function, leaves)


@every_kind
def test_second_derivatives_of_a_recurrent_layer_are_refused_elsewhere(kind: str, backend: str) -> None:
    function, leaves = with_initial_states(kind)
    for leaf in leaves:
        (grad,) = torch.autograd.grad(sum(y.pow(2).sum() for y in function(*leaves)), leaf, create_graph=True)
        with pytest.raises(RuntimeError, match=r"recurrence: .*closed form.*unrolled.use"):
            grad.sum().backward()


def test_double_backward_under_equations_and_a_clear_error_elsewhere(backend: str) -> None:
    loss = unrolled.nn.CrossEntropyLoss()
    x = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(7, INPUT, dtype=torch.float64, requires_grad=True)
    token, target = torch.tensor([1, 4, 1]), torch.tensor([0, 2])
    functions: dict[str, tuple[Callable[..., Tensor], Tensor]] = {
        "linear": (lambda w: linear(torch.ones(6, INPUT, dtype=torch.float64), w) ** 2, weight),
        "embedding": (lambda w: embedding(token, w) ** 2, weight),
        "cross_entropy": (lambda z: loss(z, target), x),
        "mean_squared_error": (lambda y: unrolled.nn.MSELoss()(y, torch.zeros_like(y)), x),
    }
    for name, (function, leaf) in functions.items():
        with unrolled.use("equations"):
            torch.autograd.gradgradcheck(function, (leaf,))
        value = function(leaf).pow(2).sum()
        (grad,) = torch.autograd.grad(value, leaf, create_graph=True)
        with pytest.raises(RuntimeError, match=f"{name}: .*closed form.*unrolled.use"):
            grad.sum().backward()


def test_dropout_is_linear_so_its_second_derivative_is_exact(backend: str) -> None:
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    seed, key = torch.tensor(5), torch.arange(4)
    torch.autograd.gradgradcheck(lambda x: dropout(x, 0.4, seed, 0, key, key) ** 3, (x,))


@every_kind
def test_outputs_may_be_changed_in_place_before_the_backward(kind: str, backend: str) -> None:
    rnn = make(kind, INPUT, HIDDEN, 2, bidirectional=True)
    x = torch.randn(4, 3, INPUT)

    def run(change: Callable[[Tensor, float], Tensor]) -> list[Tensor]:
        y, last = call(rnn, x)
        return gradients(rnn, total(change(y, 2.0), [change(s, 3.0) for s in last]))

    for found, reference in zip(run(Tensor.mul_), run(Tensor.mul), strict=True):
        same_bits(found, reference)


@every_kind
def test_inputs_changed_in_place_before_the_backward_are_noticed(kind: str, backend: str) -> None:
    for number in range(2):
        x, rnn = torch.randn(4, 3, INPUT), make(kind)
        y, _ = rnn(x)
        with torch.no_grad():
            (x, rnn.weight_hh_l0)[number].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


@every_kind
def test_two_backwards_of_one_graph_are_the_same(kind: str, backend: str) -> None:
    model = Classifier(kind, dropout=0.5)
    loss = model.step(*example())
    expected = [g.clone() for g in torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)]
    for found, reference in zip(gradients(model, loss), expected, strict=True):
        same_bits(found, reference)


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        *((kind, name) for kind in KINDS for name in ("x", "h0", "weight_hh_l0", "bias_ih_l0")),
        ("LSTM", "c0"),
    ],
)
def test_any_subset_of_gradients(kind: str, wanted: str, backend: str) -> None:
    rnn = make(kind, bidirectional=True)
    tensors = {"x": torch.randn(4, 3, INPUT), "h0": torch.randn(2, 3, HIDDEN), **dict(rnn.named_parameters())}
    if kind == "LSTM":
        tensors["c0"] = torch.randn(2, 3, HIDDEN)

    def grad() -> Tensor:
        hx = (tensors["h0"], tensors["c0"]) if kind == "LSTM" else tensors["h0"]
        (found,) = torch.autograd.grad(total(*call(rnn, tensors["x"], hx)), tensors[wanted])
        return found

    for tensor in tensors.values():
        tensor.requires_grad_()
    expected = grad()
    for name, tensor in tensors.items():
        tensor.requires_grad_(name == wanted)
    same_bits(grad(), expected)


@every_kind
def test_only_one_of_the_outputs_used(kind: str, backend: str) -> None:
    rnn = make(kind, bidirectional=True, dtype=torch.float64)
    x = torch.randn(4, 3, INPUT, dtype=torch.float64)
    y, _ = rnn(x)
    from_states = gradients(rnn, torch.cat([y[-1, :, :HIDDEN], y[0, :, HIDDEN:]]).sum())
    _, last = call(rnn, x)
    for found, reference in zip(gradients(rnn, last[0].sum()), from_states, strict=True):
        close(found, reference, 12)
    if kind == "LSTM":
        _, (_, c) = call(rnn, x)
        found = gradients(rnn, c.sum())
        with unrolled.use("equations"):
            expected = gradients(rnn, call(rnn, x)[1][1].sum())
        for own, reference in zip(found, expected, strict=True):
            close(own, reference, 12)


@every_kind
def test_activation_checkpointing_draws_the_same_mask_again(kind: str, backend: str) -> None:
    rnn = make(kind, INPUT, HIDDEN, 2, dropout=0.5)
    x = torch.randn(6, 3, INPUT, requires_grad=True)

    def run(call: Callable[..., Any]) -> list[Tensor]:
        torch.manual_seed(4)
        return gradients(rnn, call(x)[0].pow(2).sum())

    for found, reference in zip(run(lambda x: checkpoint(rnn, x, use_reentrant=False)), run(rnn), strict=True):
        same_bits(found, reference)


@every_kind
def test_the_meta_device_has_shapes(kind: str) -> None:
    rnn = make(kind, INPUT, HIDDEN, 2, bidirectional=True, device="meta")
    y, last = call(rnn, torch.empty(4, 3, INPUT, device="meta"))
    assert y.shape == (4, 3, 2 * HIDDEN)
    assert [s.shape for s in last] == [(4, 3, HIDDEN)] * (1 + (kind == "LSTM"))
