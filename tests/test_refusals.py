"""What the layers refuse, and how; and what they must not get silently wrong."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.utils.prune

from unrolled import Ragged, nn, use
from unrolled.ops.recurrence import Weights, recurrence
from unrolled.ragged import Rows

X = torch.randn(6, 3, 4)
LOGITS = torch.randn(2, 3)


def rnn(*args: Any, **options: Any) -> Any:
    return nn.RNN(4, 6)(*args, **options)


def strided() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls them a prototype
        return torch.nested.nested_tensor([X[0], X[1]], layout=torch.strided)


REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: rnn(X.double()), TypeError, "one dtype and device, found torch.float64 on cpu, torch.float32 on cpu"),
    (lambda: rnn(X.to("meta")), TypeError, "found torch.float32 on meta, torch.float32 on cpu"),
    (lambda: rnn([1.0]), TypeError, "found list"),
    (lambda: rnn(strided()), TypeError, "must have layout=torch.jagged"),
    (lambda: rnn(X, [1]), TypeError, "hx must be a tensor, found list"),
    (lambda: nn.LSTM(4, 6)(X, torch.zeros(1, 3, 6)), TypeError, "pair of tensors (h, c), found Tensor"),
    (lambda: nn.LSTM(4, 6, proj_size=6), ValueError, "found 6 with hidden_size=6"),
    (lambda: nn.LSTMCell(4, 6)(X[0], (torch.zeros(3, 6), None)), ValueError, "found [(3, 6), None]"),
    (lambda: rnn(X, lengths=5), TypeError, "a list of whole numbers, found 5"),
    (lambda: rnn(X, lengths=["a", 1, 2]), TypeError, "found ['a', 1, 2]"),
    (lambda: rnn(X, lengths=[7, 1, 2]), ValueError, "lengths must lie in [0, 6], found 1 to 7"),
    (lambda: nn.RNN(4, 6, 2, dropout=0.5)(X, keys=torch.arange(2)), ValueError, "for each of 3 sequences"),
    (lambda: nn.RNN(4, 6, 2, dropout=0.5)(X, keys=torch.rand(3)), TypeError, "keys must be whole numbers"),
    (lambda: nn.Dropout(0.5)(Ragged(X[0], [0, 3]), keys=[1, 2]), ValueError, "for each of 1 sequences"),
    (lambda: nn.Linear(4, 6)(torch.ones(2, 4, dtype=torch.int64)), TypeError, "floating dtype, found torch.int64"),
    (lambda: nn.Linear(4, 6)(torch.tensor(1.0)), ValueError, "expected x (..., 4), found shape ()"),
    (lambda: nn.CrossEntropyLoss(reduction="bogus")(LOGITS, torch.tensor([0, 1])), ValueError, "found 'bogus'"),
    (lambda: nn.CrossEntropyLoss()(LOGITS, torch.tensor([True, False])), TypeError, "found torch.bool"),
]


ROWS = Rows(torch.arange(2), 2, torch.tensor([3, 2]))


@pytest.mark.parametrize(
    ("cell", "gates", "weights", "message"),
    [
        ("rnn_tanh", 1, {"norm_ih": torch.ones(6)}, "come together"),
        ("lstm_options", 4, {"norm_c": torch.ones(6), "bias_c": torch.zeros(6)}, "norm_c only with them"),
        ("gru", 3, {"weight_hr": torch.ones(6, 6)}, "a GRU has no projection"),
    ],
)
@pytest.mark.parametrize("own", ["auto", "equations"])
def test_weights_that_do_not_belong_together(cell: str, gates: int, weights: Any, message: str, own: Any) -> None:
    both = Weights(torch.ones(gates * 6, 4), torch.ones(gates * 6, 6), **weights)
    state0 = [torch.zeros(1, 2, 6)] * (2 if "lstm" in cell else 1)
    with use(own), pytest.raises(ValueError, match=message):
        recurrence(cell, torch.ones(6, 4), state0, both, ROWS)


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_a_mistake_is_named_with_what_was_found(case: int) -> None:
    call, kind, message = REFUSED[case]
    with pytest.raises(kind, match=re.escape(message)):
        call()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.func imports torch.jit
@pytest.mark.parametrize("layer", [nn.RNN(4, 6), nn.LSTM(4, 6), nn.GRU(4, 6)], ids=lambda layer: layer.mode)
def test_forward_mode_is_refused_not_lost(layer: torch.nn.Module) -> None:
    for differentiable in (True, False):
        with torch.set_grad_enabled(differentiable), pytest.raises(NotImplementedError, match=r"use\('equations'\)"):
            torch.func.jvp(lambda x: layer(x)[0], (X,), (X,))


def test_whole_numbers_of_any_size_are_targets() -> None:
    expected = nn.CrossEntropyLoss()(LOGITS, torch.tensor([2, 0]))
    for dtype in (torch.int32, torch.uint8):
        assert nn.CrossEntropyLoss()(LOGITS, torch.tensor([2, 0], dtype=dtype)) == expected


def test_sizes_of_zero() -> None:
    with pytest.warns(UserWarning, match="zero-element"):
        linear = nn.Linear(0, 6)
    torch.testing.assert_close(linear(torch.randn(2, 0)), linear.bias.expand(2, 6))
    assert nn.Dropout(0.5)(torch.ones(3, 0)).shape == (3, 0)


def test_convert_leaves_alone_what_it_does_not_know_and_keeps_hooks() -> None:
    pruned = torch.nn.RNN(4, 6)
    torch.nn.utils.prune.random_unstructured(pruned, "weight_hh_l0", 0.5)
    assert nn.convert(torch.nn.Sequential(pruned))[0] is pruned
    hooked, calls = torch.nn.GRU(4, 6), []
    hooked.register_forward_hook(lambda *_: calls.append(1))
    converted = nn.convert(hooked)
    assert type(converted) is nn.GRU
    converted(X)
    assert calls == [1]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, from torch's own compiler
def test_compiled_lengths_beyond_the_input_are_refused() -> None:
    layer = nn.RNN(4, 6, batch_first=True)
    compiled = torch.compile(lambda x, lengths: layer(x, lengths=lengths)[0], fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 5, 4)
    torch.testing.assert_close(compiled(x, torch.tensor([5, 0])), layer(x, lengths=[5, 0])[0])
    with pytest.raises(RuntimeError, match="lengths must lie between"):
        compiled(x, torch.tensor([7, 3]))
