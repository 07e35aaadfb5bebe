"""PyTorch's habits with every option of the recurrent layers at once; the plain ones are in test_pytorch_habits.py."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import unrolled
from every_option import (
    EVERY,
    INPUT,
    KINDS,
    every_kind,
    every_option,
    gradients,
    listed,
    packed_up,
    seeded,
    states,
    total,
)
from tolerances import GRADIENTS, HALF_GRADIENTS, HALF_REFUSED, HALF_STATES, NORMS, STATES, close, same_bits

LENGTHS = [6, 1, 4]
from_torchs_compiler = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class Everything(nn.Module):
    """A layer of each kind with every option, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        layers = [every_option(kind, num_layers=1, dropout=0.0) for kind in KINDS]
        self.layers = nn.ModuleList(layers)
        widths = [layer.num_directions * layer._widths[0] for layer in layers]
        self.between = nn.ModuleList(nn.Linear(width, INPUT, dtype=torch.float64) for width in widths)

    def forward(self, x: Tensor, lengths: Tensor | None = None, keys: Tensor | None = None) -> Tensor:
        for layer, linear in zip(self.layers, self.between, strict=True):
            y, _ = layer(x, lengths=lengths, keys=keys)
            x = linear(y)
        return x


def example(sequences: int = 3, steps: int = 6) -> tuple[Tensor, Tensor]:
    return torch.randn(steps, sequences, INPUT, dtype=torch.float64), torch.randint(0, steps + 1, (sequences,))


def own_gradients(model: nn.Module, y: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(y.pow(2).sum(), list(model.parameters())))


@from_torchs_compiler
@pytest.mark.parametrize("training", [False, True])
def test_compile_without_a_break(training: bool) -> None:
    torch._dynamo.reset()
    model = Everything().train(training)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    for sequences, steps in ((3, 6), (5, 4)):
        x, lengths = example(sequences, steps)
        y = compiled(x, lengths)
        grads = own_gradients(model, y)
        if training:
            assert not torch.equal(compiled(x, lengths.fill_(steps)), compiled(x, lengths))
            continue
        expected = model(x, lengths)
        close(y, expected, STATES * NORMS)
        for found, reference in zip(grads, own_gradients(model, expected), strict=True):
            close(found, reference, GRADIENTS * NORMS)


def test_export_with_free_batch_and_time() -> None:
    model = Everything().eval()
    batch, time = torch.export.Dim("batch"), torch.export.Dim("time")
    program = torch.export.export(model, example(), dynamic_shapes=({0: time, 1: batch}, {0: batch}))
    for sequences, steps in ((3, 6), (1, 1), (5, 9)):
        x, lengths = example(sequences, steps)
        close(program.module()(x, lengths), model(x, lengths), STATES * NORMS)


@every_kind
@pytest.mark.parametrize("training", [False, True])
def test_gradients_per_example_by_vmap(training: bool, kind: str, backend: str) -> None:
    layer = every_option(kind).train(training)
    x, keys = torch.randn(3, 4, INPUT, dtype=torch.float64), torch.arange(3)
    parameters = {name: p.detach() for name, p in layer.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor, key: Tensor) -> Tensor:
        y, last = torch.func.functional_call(layer, parameters, (x[:, None],), {"keys": key[None]})
        return total((y, *listed(last)))

    torch.manual_seed(3)
    found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0), randomness="same")(parameters, x, keys)
    for b in range(3):
        expected = gradients(layer, seeded(layer, x[b][:, None], keys=keys[b : b + 1]))
        for name, reference in zip(parameters, expected, strict=True):
            close(found[name][b], reference, GRADIENTS * NORMS)


@every_kind
def test_copies_state_dicts_and_functional_call(kind: str, backend: str) -> None:
    layer, other = every_option(kind), every_option(kind)
    x = torch.randn(4, 3, INPUT, dtype=torch.float64)
    expected = seeded(layer, x)
    other.load_state_dict(layer.state_dict())
    twin = copy.deepcopy(layer)
    for module in (other, twin):
        assert repr(module) == repr(layer)
        for found, reference in zip(seeded(module, x), expected, strict=True):
            same_bits(found, reference)
    stranger = every_option(kind)
    torch.manual_seed(3)
    y, _ = torch.func.functional_call(stranger, dict(layer.named_parameters()), (x,))
    same_bits(y, expected[0])
    for p in twin.parameters():
        p.data.zero_()
    same_bits(seeded(layer, x)[0], expected[0])


@every_kind
def test_the_repr_says_every_option(kind: str) -> None:
    text = repr(every_option(kind))
    for name, value in EVERY[kind].items():
        assert (f"{name}={value!r}" in text) == (name != "nonlinearity"), "tanh goes without saying"
    assert repr(eval(f"unrolled.nn.{text}")) == text


@every_kind
def test_hooks(kind: str, backend: str) -> None:
    layer, calls = every_option(kind), []
    layer.register_forward_pre_hook(lambda module, args: calls.append("before"))
    layer.register_forward_hook(lambda module, args, result: calls.append("after"))
    layer.register_full_backward_hook(lambda module, given, grads: calls.append("backward"))
    layer.weight_hh_l0.register_hook(lambda grad: calls.append(tuple(grad.shape)))
    y, _ = layer(torch.randn(4, 3, INPUT, dtype=torch.float64, requires_grad=True))
    y.sum().backward()
    assert calls[:2] == ["before", "after"]
    assert set(calls[2:]) == {"backward", tuple(layer.weight_hh_l0.shape)}


@every_kind
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_computed_as_such_by_the_equations(dtype: torch.dtype, kind: str) -> None:
    layer = every_option(kind, layer_norm=False).to(dtype)
    precise = copy.deepcopy(layer).double()
    x = torch.randn(4, 3, INPUT, dtype=dtype)
    outputs, expected = (seeded(m, v, lengths=[4, 1, 3]) for m, v in ((layer, x), (precise, x.double())))
    grads, precise_grads = gradients(layer, outputs), gradients(precise, expected)
    for own, precise_ones, terms in ((outputs, expected, HALF_STATES), (grads, precise_grads, HALF_GRADIENTS)):
        for found, reference in zip(own, precise_ones, strict=True):
            assert found.dtype == dtype
            close(found, reference, terms)
            with pytest.raises(AssertionError, match="relative error"):
                close(found * HALF_REFUSED, reference, terms)
    with pytest.raises(TypeError, match=f"one dtype and device, found torch.float32 on cpu, {dtype} on cpu"):
        layer(x.float())


@every_kind
def test_half_precision_is_refused_by_the_core_in_words(kind: str, backend: str) -> None:
    layer = every_option(kind, torch.bfloat16)
    if backend == "equation":
        layer(torch.randn(4, 3, INPUT, dtype=torch.bfloat16))
        return
    with pytest.raises(TypeError, match=r"takes float32 or float64 on the CPU, all alike; found torch\.bfloat16"):
        layer(torch.randn(4, 3, INPUT, dtype=torch.bfloat16))


@every_kind
def test_autocast_computes_in_float32(kind: str, backend: str) -> None:
    layer = every_option(kind, torch.float32)
    x = torch.randn(4, 3, INPUT)
    expected = seeded(layer, x)
    with torch.autocast("cpu", torch.bfloat16):
        found = seeded(layer, x)
    for own, reference in zip(found, expected, strict=True):
        same_bits(own, reference)


def as_a_function(kind: str, **changed: Any) -> tuple[Any, list[Tensor]]:
    """A layer as a function of its input and initial states, and these."""
    layer = every_option(kind, **changed)
    x, hx = torch.randn(3, 2, INPUT, dtype=torch.float64), listed(states(layer, 2))

    def function(x: Tensor, *hx: Tensor) -> tuple[Tensor, ...]:
        return seeded(layer, x, hx if kind == "LSTM" else hx[0], lengths=[3, 1])

    return function, [leaf.requires_grad_() for leaf in (x, *hx)]


@every_kind
def test_second_derivatives_under_equations(kind: str) -> None:
    # bptt: finite differences do see through a detached state
    function, leaves = as_a_function(kind, num_layers=1, dropout=0.0, bidirectional=False, bptt=0)
    with unrolled.use("equations"):
        torch.autograd.gradgradcheck(function, leaves)


@every_kind
def test_second_derivatives_are_refused_elsewhere(kind: str, backend: str) -> None:
    function, leaves = as_a_function(kind)
    for leaf in leaves:
        (grad,) = torch.autograd.grad(total(function(*leaves)), leaf, create_graph=True)
        with pytest.raises(RuntimeError, match=r"recurrence: .*closed form.*unrolled.use"):
            grad.sum().backward()


class InAWorker(Dataset[list[Tensor]]):
    """Items that are outputs and gradients, computed where the item is fetched."""

    def __init__(self) -> None:
        self.layers = [every_option(kind).eval() for kind in KINDS]  # seeds come from one generator for all threads
        self.x = torch.randn(6, 3, INPUT, dtype=torch.float64)

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> list[Tensor]:
        found = []
        for layer in self.layers:
            y, last = layer(self.x, lengths=LENGTHS)
            outputs = (y, *listed(last))
            found += [*(s.detach() for s in outputs), *torch.autograd.grad(total(outputs), list(layer.parameters()))]
        return found


def alike(found: list[Tensor], expected: list[Tensor]) -> None:
    for own, reference in zip(found, expected, strict=True):
        close(own, reference, GRADIENTS * NORMS)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_in_a_forked_worker(backend: str) -> None:
    data = InAWorker()
    expected = data[0]
    workers = DataLoader(data, batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=60)
    for item in workers:
        alike(item, expected)


def test_several_python_threads_at_once(backend: str) -> None:
    torch.set_num_threads(2)
    data = InAWorker()
    expected = data[0]
    with ThreadPoolExecutor(4) as pool:
        for item in pool.map(data.__getitem__, range(8)):
            alike(item, expected)


@every_kind
def test_thread_counts(kind: str, backend: str) -> None:
    layer = every_option(kind)
    x = torch.randn(6, 3, INPUT, dtype=torch.float64)
    found = []
    for threads in (1, 2, 3, 2):
        torch.set_num_threads(threads)
        outputs = seeded(layer, x, lengths=LENGTHS)
        found.append([*outputs, *gradients(layer, outputs)])
    for one, other in pairwise(found):
        alike(one, other)
    for one, other in zip(found[1], found[3], strict=True):
        same_bits(one, other)


@every_kind
def test_inference_mode(kind: str, backend: str) -> None:
    layer = every_option(kind)
    x = torch.randn(4, 3, INPUT, dtype=torch.float64)
    expected = seeded(layer, x)
    with torch.inference_mode():
        found = seeded(layer, x)
    for own, reference in zip(found, expected, strict=True):
        assert own.is_inference()
        same_bits(own, reference)


@every_kind
def test_the_meta_device_has_shapes(kind: str) -> None:
    layer = every_option(kind).to("meta").eval()
    y, *last = packed_up(layer, torch.empty(4, 3, INPUT, device="meta", dtype=torch.float64), *_meta(layer))
    assert y.shape == (4, 3, 2 * last[0].shape[2])
    assert [s.shape for s in last] == [s.shape for s in _meta(layer)]


def _meta(layer: Any) -> list[Tensor]:
    return [s.to("meta") for s in listed(states(layer, 3))]


def test_a_parametrized_weight(backend: str) -> None:
    layer = every_option("GRU").eval()
    x = torch.randn(4, 3, INPUT, dtype=torch.float64)
    expected = layer(x)[0]
    nn.utils.parametrizations.weight_norm(layer, "weight_hh_l0")
    close(layer(x)[0], expected, STATES * NORMS)
