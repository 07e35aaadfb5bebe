"""torch.library, torch.compile and torch.export: checked, without a break, with free sizes."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import unrolled
from cases import TEETH_CASES
from habits import HIDDEN, INPUT, KINDS, Classifier, example, gradients
from tolerances import close, same_bits
from unrolled import Ragged
from unrolled.verify.judges import autograd


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


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, from torch's own compiler
def test_a_ragged_batch_through_compile_in_eager_parts() -> None:
    rnn = unrolled.nn.GRU(INPUT, HIDDEN)
    batch = Ragged(torch.randn(5, INPUT), [0, 2, 5])
    y, h = torch.compile(rnn, backend="eager")(batch)
    expected = rnn(batch)
    same_bits(y.values, expected[0].values)
    same_bits(h, expected[1])
