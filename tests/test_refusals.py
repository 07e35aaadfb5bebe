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
from unrolled.ops.activation import activation
from unrolled.ops.additive_attention import additive_attention
from unrolled.ops.attention import attention
from unrolled.ops.dropout import dropout
from unrolled.ops.layer_norm import layer_norm
from unrolled.ops.recurrence import Weights, Zoneout, recurrence
from unrolled.ops.residual_norm import residual_norm
from unrolled.ops.rms_norm import rms_norm
from unrolled.ops.rotary import rotary
from unrolled.ragged import Rows

X = torch.randn(6, 3, 4)
LOGITS = torch.randn(2, 3)
ENCODER = nn.TransformerEncoderLayer(4, 2)


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
    (lambda: nn.SinusoidalPositions(4)(X.int()), TypeError, "floating dtype, found torch.int32"),
    (lambda: nn.LearnedPositions(9, 4)(Ragged(X[0].long(), [0, 3])), TypeError, "floating dtype, found torch.int64"),
    (lambda: nn.SinusoidalPositions(8.0), TypeError, "d_model must be a whole number, found 8.0"),  # type: ignore[arg-type]
    (lambda: nn.LearnedPositions(9.0, 4), TypeError, "max_positions must be a whole number, found 9.0"),  # type: ignore[arg-type]
    (lambda: nn.GRU(4, 6.0), TypeError, "hidden_size must be a whole number, found 6.0"),  # type: ignore[arg-type]
    (lambda: nn.LayerNorm(4, eps=-1), ValueError, "at least 0, found -1"),
    (lambda: nn.RMSNorm(4, -1e-5), ValueError, "at least 0, found -1e-05"),
    (lambda: nn.LinearCrossEntropyLoss(4, 3, label_smoothing=2.0), ValueError, "must lie in [0, 1], found 2.0"),
    (lambda: nn.LinearCrossEntropyLoss(4, 3, class_weight=torch.ones(4)), ValueError, "must be (3,), found (4,)"),
    (lambda: nn.LinearCrossEntropyLoss(4, 3, class_weight=[1.0] * 3), TypeError, "tensor or None, found list"),  # type: ignore[arg-type]
    (lambda: nn.LinearCrossEntropyLoss(4, 3, weight=torch.ones(3, 4)), TypeError, "Parameter, found Tensor"),  # type: ignore[arg-type]
    (lambda: nn.TransformerEncoderLayer("8", 2), TypeError, "embed_dim must be a whole number, found '8'"),  # type: ignore[arg-type]
    (lambda: nn.TransformerDecoderLayer(8, 2.0), TypeError, "num_heads must be a whole number, found 2.0"),  # type: ignore[arg-type]
    (lambda: nn.TransformerEncoderLayer(8, 2, activation=None), TypeError, "a name or a function, found None"),  # type: ignore[arg-type]
    (lambda: nn.Transformer(8, 2, 1, 1, 8, layer_norm_eps=-1, norm="rms"), ValueError, "at least 0, found -1"),
    (lambda: nn.TransformerEncoder(ENCODER, 1, "layer"), TypeError, "a module or None, found 'layer'"),  # type: ignore[arg-type]
    (lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(4, 2), 1, 3), TypeError, "None, found 3"),  # type: ignore[arg-type]
    (lambda: nn.TransformerEncoder(ENCODER, 1).begin(2.5), TypeError, "whole numbers, found 2.5 and 64"),  # type: ignore[arg-type]
    (lambda: nn.TransformerEncoder(ENCODER, 1).begin(capacity=2.5), TypeError, "found 1 and 2.5"),  # type: ignore[arg-type]
]


ROWS = Rows(torch.arange(2), 2, torch.tensor([3, 2]))
Q, LONG = torch.randn(4, 6), torch.int64


def rows(start: list[Any], length: list[Any], dtype: torch.dtype = LONG, step: int = 1) -> Rows:
    return Rows(torch.tensor(start, dtype=dtype), step, torch.tensor(length, dtype=dtype))


GOOD = rows([0, 2], [2, 2])


def attend(queries: Rows = GOOD, keys: Rows = GOOD, x: torch.Tensor = Q, **options: Any) -> Any:
    return attention(x, x, x, **({"heads": 2, "queries": queries, "keys": keys} | options))


def read(queries: Rows = GOOD, keys: Rows = GOOD) -> Any:
    return additive_attention(Q, Q, Q, torch.ones(6), queries=queries, keys=keys)


def recur(where: Rows = GOOD, zoneout: Zoneout | None = None) -> Any:
    weights = Weights(torch.ones(5, 6), torch.ones(5, 5))
    return recurrence("rnn_tanh", Q, [torch.zeros(1, 2, 5)], weights, where, zoneout=zoneout)


def numbers(shape: tuple[int, ...] = (4,), dtype: torch.dtype = LONG) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def drop(x: torch.Tensor = Q, p: float = 0.5, **changed: torch.Tensor) -> Any:
    given = {"seed": numbers(()), "key": numbers(), "t": numbers()} | changed
    return dropout(x, p, layer=0, **given)


def zone(h: float = 0.5, seed: torch.Tensor | None = None, keys: torch.Tensor | None = None) -> Any:
    return recur(zoneout=Zoneout(h, 0.0, seed, numbers((2,)) if keys is None else keys, 0))


OUTSIDE = "leaves the 4 rows of memory"
OPERATORS: list[tuple[Callable[[], Any], type[Exception], str]] = [
    *(
        (lambda call=call, wrong=wrong: call(wrong), ValueError, message)  # type: ignore[misc]
        for call in (attend, read, recur, lambda wrong: attend(keys=wrong), lambda wrong: read(keys=wrong))
        for wrong, message in (
            (rows([0, 2], [2, 3]), f"sequence 1 (row 2, step 1, length 3) {OUTSIDE}"),
            (rows([-1, 2], [2, 2]), f"sequence 0 (row -1, step 1, length 2) {OUTSIDE}"),
            (rows([1, 0], [1, -1]), f"sequence 1 (row 0, step 1, length -1) {OUTSIDE}"),
            (rows([4, 0], [1, 1]), f"sequence 0 (row 4, step 1, length 1) {OUTSIDE}"),
            (rows([1, 3], [1, 3], step=-2), f"sequence 1 (row 3, step -2, length 3) {OUTSIDE}"),
            (rows([0, 1, 2], [2, 2]), "must be (2,), one for each sequence, found (3,) and (2,)"),
        )
    ),
    *(
        (lambda call=call: call(rows([0, 2], [2, 2], torch.int32)), TypeError, "found torch.int32 and torch.int32")  # type: ignore[misc]
        for call in (attend, read, recur, lambda wrong: attend(keys=wrong), lambda wrong: read(keys=wrong))
    ),
    (lambda: recur(rows([0], [2])), ValueError, "must be (2,), one for each sequence, found (1,) and (1,)"),
    (lambda: drop(p=2.0), ValueError, "must lie in [0, 1], found 2.0"),
    (lambda: drop(seed=torch.tensor(1.0)), TypeError, "seed must be torch.int64, found torch.float32"),
    (lambda: drop(seed=numbers((1,))), ValueError, "seed must be (), found (1,)"),
    (lambda: drop(key=numbers(dtype=torch.int32)), TypeError, "key must be torch.int64, found torch.int32"),
    (lambda: drop(t=numbers((3,))), ValueError, "t must be (4,), found (3,)"),
    (lambda: zone(1.5), ValueError, "must lie in [0, 1], found 1.5 and 0.0"),
    (lambda: zone(seed=torch.tensor(1.0)), TypeError, "seed must be torch.int64, found torch.float32"),
    (lambda: zone(keys=numbers((3,))), ValueError, "keys must be (2,), found (3,)"),
    (lambda: attention(*[Q[:, :0]] * 3, heads=1, queries=GOOD, keys=GOOD), ValueError, "F at least 1; found (4, 0)"),
    (lambda: attend(slopes=torch.ones(3)), ValueError, "slopes must be (2,), one for each head, found (3,)"),
    (
        lambda: attend(rows([0], [4]), rows([0], [4]), mask=torch.ones(1, 1, 2, 4)),
        ValueError,
        "found shape (1, 1, 2, 4)",
    ),
    (lambda: attend(x=Q.int()), TypeError, "attention: expected a floating dtype, found torch.int32"),
    (lambda: activation(Q.int(), "relu"), TypeError, "activation: expected a floating dtype, found torch.int32"),
    (lambda: rotary(Q.int(), torch.arange(4), heads=1), TypeError, "rotary: expected a floating dtype"),
    (lambda: drop(Q.int()), TypeError, "dropout: expected a floating dtype, found torch.int32"),
    (lambda: nn.MSELoss()(Q.int(), Q.int()), TypeError, "expected a floating dtype, found torch.int32"),
    (lambda: nn.CrossEntropyLoss()(Q.int(), numbers()), TypeError, "expected a floating dtype, found torch.int32"),
    (lambda: nn.CrossEntropyLoss(torch.ones(5))(Q, numbers()), ValueError, "class_weight (6,), found (5,)"),
    (lambda: nn.CrossEntropyLoss(torch.ones(6).double())(Q, numbers()), TypeError, "torch.float64 on cpu"),
    (lambda: layer_norm(Q, epsilon=-1.0), ValueError, "epsilon of a norm must be at least 0, found -1.0"),
    (lambda: rms_norm(Q, epsilon=float("nan")), ValueError, "epsilon of a norm must be at least 0, found nan"),
    (lambda: residual_norm(Q, Q, kind="layer", epsilon=-1.0), ValueError, "must be at least 0, found -1.0"),
]


@pytest.mark.parametrize("case", range(len(OPERATORS)))
@pytest.mark.parametrize("own", ["auto", "equations"])
def test_an_operator_names_a_mistake_in_our_words(own: Any, case: int) -> None:
    call, kind, message = OPERATORS[case]
    with use(own), pytest.raises(kind, match=re.escape(message)):
        call()


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
