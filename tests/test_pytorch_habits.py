"""What PyTorch's users do to a module must work on ours: compile, export, vmap, autocast, copies, forks, threads."""

from __future__ import annotations

import copy
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

import unrolled
from cases import TEETH_CASES
from tolerances import close, same_bits
from unrolled import Ragged
from unrolled.ops.dropout import dropout
from unrolled.ops.embedding import embedding
from unrolled.ops.linear import linear
from unrolled.verify.judges import autograd

INPUT, HIDDEN, CLASSES = 3, 5, 4
KINDS = ["RNN", "LSTM", "GRU"]
every_kind = pytest.mark.parametrize("kind", KINDS)


def make(kind: str, *arguments: Any, **options: Any) -> Any:
    return getattr(unrolled.nn, kind)(*(arguments or (INPUT, HIDDEN)), **options)


def call(rnn: nn.Module, *arguments: Any, **options: Any) -> tuple[Any, list[Tensor]]:
    """The outputs and the list of last states."""
    y, last = rnn(*arguments, **options)
    return y, [last] if isinstance(last, Tensor) else list(last)


def total(y: Tensor, last: list[Tensor]) -> Tensor:
    value = y.pow(2).sum()
    for factor, state in enumerate(last, 1):
        value = value + factor * state.pow(2).sum()
    return value


class Classifier(nn.Module):
    """Everything of ours in one model, on a padded batch with lengths; a recurrent layer for each of `kinds`."""

    def __init__(self, *kinds: str, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = unrolled.nn.Embedding(11, INPUT, padding_idx=0)
        self.layers = nn.ModuleList()
        for width, kind in zip([INPUT, 2 * HIDDEN, 2 * HIDDEN], kinds or ("RNN",), strict=False):
            layers = {"num_layers": 2, "dropout": dropout} if not self.layers else {}
            self.layers.append(make(kind, width, HIDDEN, batch_first=True, bidirectional=True, **layers))
        self.readout = unrolled.nn.Linear(2 * HIDDEN, CLASSES)
        self.loss = unrolled.nn.CrossEntropyLoss(label_smoothing=0.1)

    def forward(self, tokens: Tensor, lengths: Tensor | None = None) -> Tensor:
        y = self.embedding(tokens)
        for layer in self.layers:
            y, (h, *_) = call(layer, y, lengths=lengths)
        return self.readout(unrolled.nn.last(h, bidirectional=True))

    def step(self, tokens: Tensor, lengths: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = self.loss(self(tokens, lengths), target)
        return loss


def example(sequences: int = 3, steps: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    tokens = torch.randint(1, 11, (sequences, steps))
    return tokens, torch.randint(0, steps + 1, (sequences,)), torch.randint(CLASSES, (sequences,))


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


class Recorder(TorchDispatchMode):
    """The calls of our operators, as they reach the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, tuple[Any, tuple[Any, ...]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "unrolled":
            self.calls[func.name()] = func, args
        return func(*args, **(kwargs or {}))


def recorded(name: str) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    with Recorder() as recorder:
        for case in TEETH_CASES:
            if case.name == name:
                autograd(case.operator.operator, case.inputs())
    return recorder.calls


NAMES = list(dict.fromkeys(case.name for case in TEETH_CASES))


def test_every_registered_operator_is_checked() -> None:
    registered = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("unrolled::")}
    assert registered == {call for name in NAMES for call in recorded(name)}


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name: str, backend: str) -> None:
    for func, args in recorded(name).values():
        plain = tuple(a.detach() if isinstance(a, Tensor) else a for a in args)
        torch.library.opcheck(func, plain)
        floats = tuple(a.requires_grad_() if isinstance(a, Tensor) and a.is_floating_point() else a for a in plain)
        torch.library.opcheck(func, floats, test_utils=("test_schema", "test_faketensor"))


# Inductor writes C++, so it needs what the core needs.
COMPILERS = ["aot_eager", *(["inductor"] if shutil.which("g++") else [])]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, from torch's own compiler
@pytest.mark.parametrize("compiler", COMPILERS)
def test_compile_without_a_break(compiler: str) -> None:
    torch._dynamo.reset()
    model = Classifier(*KINDS)
    compiled = torch.compile(model.step, fullgraph=True, backend=compiler, dynamic=True)
    for sequences, steps in ((3, 6), (5, 4), (2, 9)):
        batch = example(sequences, steps)
        loss, expected = compiled(*batch), model.step(*batch)
        close(loss, expected.double(), 3 * HIDDEN)
        for found, reference in zip(gradients(model, loss), gradients(model, expected), strict=True):
            close(found, reference.double(), 2 * sequences * steps)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, from torch's own compiler
def test_compile_with_dropout_draws_new_masks_at_each_call() -> None:
    torch._dynamo.reset()
    model = Classifier("LSTM", dropout=0.5)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    tokens, lengths, _ = example()
    lengths.fill_(6)
    assert not torch.equal(compiled(tokens, lengths), compiled(tokens, lengths))
    same_bits(torch.compile(model.eval(), backend="aot_eager")(tokens, lengths), model(tokens, lengths))


def test_export_with_free_batch_and_time() -> None:
    model = Classifier(*KINDS).eval()
    tokens, lengths, _ = example()
    batch, time = torch.export.Dim("batch"), torch.export.Dim("time")
    program = torch.export.export(model, (tokens, lengths), dynamic_shapes=({0: batch, 1: time}, {0: batch}))
    for sequences, steps in ((3, 6), (1, 1), (7, 13)):
        tokens, lengths, _ = example(sequences, steps)
        close(program.module()(tokens, lengths), model(tokens, lengths).double(), 3 * HIDDEN)


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


class InAWorker(Dataset[list[Tensor]]):
    """Items that are losses and gradients, computed where the item is fetched."""

    def __init__(self, model: Classifier) -> None:
        self.model, self.batch = model, example()

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> list[Tensor]:
        loss = self.model.step(*self.batch)
        return [loss.detach(), *gradients(self.model, loss)]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_in_a_forked_worker(backend: str) -> None:
    torch.set_num_threads(2)
    data = InAWorker(Classifier(*KINDS))
    expected = data[0]
    workers = DataLoader(data, batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=60)
    for item in workers:
        for found, reference in zip(item, expected, strict=True):
            close(found, reference.double(), 36)


def test_several_python_threads_at_once(backend: str) -> None:
    torch.set_num_threads(2)
    data = InAWorker(Classifier(*KINDS))
    expected = data[0]
    with ThreadPoolExecutor(4) as pool:
        for item in pool.map(data.__getitem__, range(40)):
            for found, reference in zip(item, expected, strict=True):
                close(found, reference.double(), 36)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, from torch's own compiler
def test_a_ragged_batch_through_compile_in_eager_parts() -> None:
    rnn = unrolled.nn.GRU(INPUT, HIDDEN)
    batch = Ragged(torch.randn(5, INPUT), [0, 2, 5])
    y, h = torch.compile(rnn, backend="eager")(batch)
    expected = rnn(batch)
    same_bits(y.values, expected[0].values)
    same_bits(h, expected[1])


FORK = """
import os, signal, sys, time, torch, unrolled
torch.set_num_threads(2)
rnn, x = unrolled.nn.RNN(64, 128), torch.randn(20, 8, 64)
torch.randn(600, 600) @ torch.randn(600, 600)  # starts the threads that do not live on in a child
if sys.argv[1] == "used before":
    rnn(x)
child = os.fork()
if child == 0:
    rnn(x)[1].sum().backward()
    os._exit(7)
deadline = time.monotonic() + 30
while time.monotonic() < deadline:
    done, status = os.waitpid(child, os.WNOHANG)
    if done:
        sys.exit(os.waitstatus_to_exitcode(status))
    time.sleep(0.05)
os.kill(child, signal.SIGKILL)
"""


@pytest.mark.parametrize("when", ["used before", "not used before"])
def test_after_a_fork_the_core_does_not_wait_for_threads_that_are_gone(when: str) -> None:
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", FORK, when], timeout=60).returncode == 7
