"""unrolled.nn against torch.nn: every argument, every form of input, parameters both ways."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence

import unrolled
from tolerances import close, same_bits
from unrolled import Ragged
from unrolled.verify.judges import cotangents

GRID = [
    {"num_layers": layers, "nonlinearity": nonlinearity, "bias": bias, "bidirectional": both}
    for layers, nonlinearity, bias, both in product((1, 3), ("tanh", "relu"), (True, False), (False, True))
]
DTYPES = [torch.float64, torch.float32]
INPUT, HIDDEN, LENGTHS = 3, 5, [4, 1, 6, 2]


def twins(dtype: torch.dtype = torch.float64, **options: Any) -> tuple[unrolled.nn.RNN, nn.RNN]:
    ours = unrolled.nn.RNN(INPUT, HIDDEN, dtype=dtype, **options)
    peer = nn.RNN(INPUT, HIDDEN, dtype=dtype, **options)
    peer.load_state_dict(ours.state_dict())
    return ours, peer


def ids(options: dict[str, Any]) -> str:
    return "-".join(f"{k}={v}" for k, v in options.items())


def results(module: nn.Module, call: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> list[Tensor]:
    """Outputs and the gradients of every input and parameter, for a random derivative of every output."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    outputs = call(module, *leaves)
    weights = cotangents({str(i): y for i, y in enumerate(outputs)})
    grads = torch.autograd.grad(outputs, [*leaves, *module.parameters()], list(weights.values()))
    return [y.detach() for y in outputs] + list(grads)


def agree(ours: nn.Module, peer: nn.Module, call: Callable[..., Any], *inputs: Tensor, other: Any = None) -> None:
    """Outputs and all gradients of the two alike; torch's in float64."""
    expected = results(peer.double(), other or call, *(x.double() for x in inputs))
    length = max((x.numel() for x in inputs), default=0) + HIDDEN
    for found, reference in zip(results(ours, call, *inputs), expected, strict=True):
        close(found, reference, length)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", GRID, ids=ids)
def test_padded(options: dict[str, Any], dtype: torch.dtype, backend: str) -> None:
    layers = options["num_layers"] * (1 + options["bidirectional"])
    for batch_first in (False, True):
        ours, peer = twins(dtype, batch_first=batch_first, **options)
        x, h0 = torch.randn(4, 6, INPUT, dtype=dtype), torch.randn(layers, 4 if batch_first else 6, HIDDEN, dtype=dtype)
        agree(ours, peer, lambda m, x, h: m(x, h), x, h0)
        agree(ours, peer, lambda m, x: m(x), x)


@pytest.mark.parametrize("options", GRID, ids=ids)
def test_unbatched(options: dict[str, Any], backend: str) -> None:
    ours, peer = twins(batch_first=True, **options)
    h0 = torch.randn(options["num_layers"] * (1 + options["bidirectional"]), HIDDEN, dtype=torch.float64)
    agree(ours, peer, lambda m, x, h: m(x, h), torch.randn(5, INPUT, dtype=torch.float64), h0)
    agree(ours, peer, lambda m, x: m(x), torch.randn(1, INPUT, dtype=torch.float64))


def packed_call(module: nn.Module, x: Tensor, h0: Tensor) -> tuple[Tensor, Tensor]:
    """The truth about lengths: torch.nn on a PackedSequence."""
    y, h = module(pack_padded_sequence(x, torch.tensor(LENGTHS), batch_first=True, enforce_sorted=False), h0)
    return pad_packed_sequence(y, batch_first=True, total_length=x.shape[1])[0], h


def _padded(lengths: Any) -> Callable[..., Any]:
    return lambda m, x, h: m(x, h, lengths=lengths)


def _time_major(m: Any, x: Tensor, h: Tensor) -> Any:
    m.batch_first = False
    y, h = m(x.transpose(0, 1), h, lengths=LENGTHS)
    return y.transpose(0, 1), h


def _ragged(m: Any, x: Tensor, h: Tensor) -> Any:
    y, h = m(Ragged.from_padded(x, LENGTHS, batch_first=True), h)
    assert isinstance(y, Ragged)
    return y.to_padded(batch_first=True, total_length=x.shape[1]), h


def _packed(m: Any, x: Tensor, h: Tensor) -> Any:
    y, h = m(pack_padded_sequence(x, torch.tensor(LENGTHS), batch_first=True, enforce_sorted=False), h)
    assert isinstance(y, PackedSequence)
    return pad_packed_sequence(y, batch_first=True, total_length=x.shape[1])[0], h


def _packed_sorted(m: Any, x: Tensor, h: Tensor) -> Any:
    order = torch.tensor(LENGTHS).argsort(descending=True)
    back = order.argsort()
    y, h = m(pack_sequence([x[b, : LENGTHS[b]] for b in order]), h[:, order])
    assert y.sorted_indices is None
    return pad_packed_sequence(y, batch_first=True, total_length=x.shape[1])[0][back], h[:, back]


def _nested(m: Any, x: Tensor, h: Tensor) -> Any:
    y, h = m(torch.nested.as_nested_tensor([x[b, :n] for b, n in enumerate(LENGTHS)], layout=torch.jagged), h)
    assert y.is_nested
    return y.to_padded_tensor(0.0, output_size=(*x.shape[:2], y.shape[2])), h


def _narrowed(m: Any, x: Tensor, h: Tensor) -> Any:
    nested = torch.nested.narrow(
        x, 1, torch.zeros(len(x), dtype=torch.int64), torch.tensor(LENGTHS), layout=torch.jagged
    )
    y, h = m(nested, h)
    assert y.is_nested
    assert y.lengths().tolist() == LENGTHS
    return Ragged.from_nested(y).to_padded(batch_first=True, total_length=x.shape[1]), h


def _narrowed_inside(m: Any, x: Tensor, h: Tensor) -> Any:
    start = torch.tensor([1, 0, 2, 1])
    wide = x.new_zeros(len(x), 9, x.shape[2])
    wide[torch.arange(len(x))[:, None], start[:, None] + torch.arange(x.shape[1])] = x
    y, h = m(torch.nested.narrow(wide, 1, start, torch.tensor(LENGTHS), layout=torch.jagged), h)
    return Ragged.from_nested(y).to_padded(batch_first=True, total_length=x.shape[1]), h


FORMS = {
    "lengths list": _padded(LENGTHS),
    **{
        f"lengths {dtype}": _padded(torch.tensor(LENGTHS, dtype=dtype))
        for dtype in (torch.int64, torch.int32, torch.uint8)
    },
    "time major": _time_major,
    "ragged": _ragged,
    "packed": _packed,
    "packed sorted": _packed_sorted,
    "nested": _nested,
    "nested with holes": _narrowed,
    "nested with holes before": _narrowed_inside,
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("options", [GRID[0], GRID[-3]], ids=ids)
def test_forms_with_lengths(form: str, options: dict[str, Any], backend: str) -> None:
    ours, peer = twins(batch_first=True, **options)
    x = torch.randn(len(LENGTHS), max(LENGTHS), INPUT, dtype=torch.float64)
    h0 = torch.randn(options["num_layers"] * (1 + options["bidirectional"]), len(LENGTHS), HIDDEN, dtype=torch.float64)
    agree(ours, peer, FORMS[form], x, h0, other=packed_call)


@pytest.mark.parametrize("options", GRID, ids=ids)
def test_same_parameters_from_the_same_seed_and_both_ways(options: dict[str, Any]) -> None:
    torch.manual_seed(5)
    ours = unrolled.nn.RNN(INPUT, HIDDEN, **options)
    torch.manual_seed(5)
    peer = nn.RNN(INPUT, HIDDEN, **options)
    assert list(ours.state_dict()) == list(peer.state_dict())
    for name, value in peer.state_dict().items():
        same_bits(ours.state_dict()[name], value)
    other = nn.RNN(INPUT, HIDDEN, **options)
    ours.load_state_dict(other.state_dict())
    peer.load_state_dict(ours.state_dict())
    for name, value in other.state_dict().items():
        same_bits(peer.state_dict()[name], value)


def test_arguments_are_torchs() -> None:
    ours, peer = (inspect.signature(m).parameters for m in (unrolled.nn.RNN, nn.RNN.__init__))
    names = ["input_size", "hidden_size", "num_layers", "nonlinearity", "bias", "batch_first", "dropout"]
    names += ["bidirectional", "device", "dtype"]
    assert list(ours)[: len(names)] == names
    assert [ours[name].default for name in names[2:]] == [1, "tanh", True, False, 0.0, False, None, None]
    assert all(p.kind == inspect.Parameter.KEYWORD_ONLY for p in list(ours.values())[len(names) :])
    assert "self" in peer
    for name in ("Linear", "Embedding", "Dropout", "CrossEntropyLoss", "MSELoss"):
        own, theirs = (inspect.signature(getattr(m, name)).parameters for m in (unrolled.nn, nn))
        assert {k: p.default for k, p in own.items()} == {k: p.default for k, p in theirs.items()}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"nonlinearity": "gelu"}, "found 'gelu'"),
        ({"hidden_size": 0}, "hidden_size must be at least 1, found 0"),
        ({"num_layers": 0}, "num_layers must be at least 1, found 0"),
        ({"input_size": -1}, "found -1"),
        ({"num_layers": 2, "dropout": 1.5}, "1.5"),
        ({"dropout": 0.5}, "between layers"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        unrolled.nn.RNN(**{"input_size": 2, "hidden_size": 3, **arguments})


def test_wrong_inputs() -> None:
    rnn = unrolled.nn.RNN(INPUT, HIDDEN)
    x = torch.randn(4, 2, INPUT)
    for args, message in [
        ((x[..., :2],), "reads 3 features, the input has 2"),
        ((x[None],), "2-D .* or 3-D tensor, found 4-D"),
        ((x, torch.zeros(2, 2, HIDDEN)), r"\(1, 2, 5\), found \(2, 2, 5\)"),
        ((x[0], torch.zeros(2, HIDDEN)), r"\(1, 5\), found \(2, 5\)"),
        ((x, None, [4]), "one number for each of 2"),
        ((x, None, [5, 1]), r"lie in \[0, 4\]"),
        ((x[0], None, [2]), "belongs to a padded batch"),
        ((pack_sequence([x[:, 0]]), None, [4]), "belongs to a padded batch"),
    ]:
        with pytest.raises(ValueError, match=message):
            rnn(*args)


def test_convert() -> None:
    shared = nn.RNN(3, 3)
    model = nn.ModuleDict(
        {
            "a": nn.RNN(INPUT, HIDDEN, 2, "relu", bias=False, batch_first=True, dropout=0.3, bidirectional=True),
            "deep": nn.Sequential(nn.Linear(3, 3), nn.ModuleList([shared])),
            "again": shared,
            "lstm": nn.LSTM(2, 2),
        }
    ).double()
    model["deep"].eval()
    before, state = dict(model.named_parameters()), {k: v.clone() for k, v in model.state_dict().items()}
    assert unrolled.nn.convert(model) is model
    assert type(model["a"]) is type(model["again"]) is unrolled.nn.RNN
    assert model["deep"][1][0] is model["again"]
    assert type(model["lstm"]) is nn.LSTM
    assert all(p is before[name] for name, p in model.named_parameters())
    assert list(state) == list(model.state_dict())
    assert [m.training for m in model.modules()].count(False) == len(list(model["deep"].modules()))
    converted = model["a"]
    assert (converted.nonlinearity, converted.bias, converted.batch_first, converted.dropout) == (
        "relu",
        False,
        True,
        0.3,
    )
    peer = nn.RNN(INPUT, HIDDEN, 2, "relu", bias=False, batch_first=True, bidirectional=True, dtype=torch.float64)
    peer.load_state_dict(converted.state_dict())
    agree(converted.eval(), peer.eval(), lambda m, x: m(x), torch.randn(2, 3, INPUT, dtype=torch.float64))


def test_convert_of_a_single_layer_and_of_subclasses() -> None:
    class Special(nn.RNN):
        pass

    assert type(unrolled.nn.convert(nn.RNN(2, 3))) is unrolled.nn.RNN
    special = nn.Sequential(Special(2, 3))
    assert type(unrolled.nn.convert(special)[0]) is Special


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(INPUT,), (4, INPUT), (2, 5, INPUT), (0, INPUT), (2, 0, INPUT)], ids=str)
def test_linear(shape: tuple[int, ...], bias: bool, dtype: torch.dtype, backend: str) -> None:
    torch.manual_seed(3)
    ours = unrolled.nn.Linear(INPUT, HIDDEN, bias, dtype=dtype)
    torch.manual_seed(3)
    peer = nn.Linear(INPUT, HIDDEN, bias, dtype=dtype)
    agree(ours, peer, lambda m, x: (m(x),), torch.randn(shape, dtype=dtype))


TOKENS = [torch.tensor([[3, 0, 5, 3], [6, 5, 5, 0]]), torch.tensor([1, 5, 1], dtype=torch.int32), torch.tensor(3)]


@pytest.mark.parametrize("token", [*TOKENS, torch.zeros(2, 0, dtype=torch.int64)], ids=lambda t: str(t.shape))
@pytest.mark.parametrize("options", [{}, {"padding_idx": 0}, {"padding_idx": -2}, {"max_norm": 1.0}], ids=ids)
def test_embedding(options: dict[str, Any], token: Tensor, backend: str) -> None:
    for dtype in DTYPES:
        torch.manual_seed(3)
        ours = unrolled.nn.Embedding(7, 3, dtype=dtype, **options)
        torch.manual_seed(3)
        peer = nn.Embedding(7, 3, dtype=dtype, **options)
        agree(ours, peer, lambda m: (m(token),))


def test_embedding_options_that_are_torchs_own() -> None:
    ours, peer = (m.Embedding(7, 3, scale_grad_by_freq=True, dtype=torch.float64) for m in (unrolled.nn, nn))
    peer.load_state_dict(ours.state_dict())
    agree(ours, peer, lambda m: (m(TOKENS[0]),))
    unrolled.nn.Embedding(7, 3, sparse=True)(TOKENS[0]).sum().backward()


@pytest.mark.parametrize("wrong", [-1, 7])
def test_embedding_outside_the_table(wrong: int, backend: str) -> None:
    with pytest.raises(IndexError):
        unrolled.nn.Embedding(7, 3)(torch.tensor([0, wrong]))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", [(4, 3), (7,), (), (2, 3, 5)], ids=str)
def test_mean_squared_error(shape: tuple[int, ...], reduction: str, backend: str) -> None:
    for dtype in DTYPES:
        y, target = torch.randn(2, *shape, dtype=dtype).unbind()
        agree(
            unrolled.nn.MSELoss(reduction=reduction),
            nn.MSELoss(reduction=reduction),
            lambda m, y, target: (m(y, target),),
            y,
            target,
        )


def test_mean_squared_error_refuses_to_broadcast(backend: str) -> None:
    with pytest.raises(ValueError, match=r"\(3, 1\) and \(3,\)"):
        unrolled.nn.MSELoss()(torch.zeros(3, 1), torch.zeros(3))


CLASSES = 5
CROSS_ENTROPY = [
    {"reduction": reduction, "label_smoothing": smoothing, "ignore_index": ignored, "weighted": weighted}
    for (reduction, smoothing), (ignored, weighted) in product(
        product(("mean", "sum", "none"), (0.0, 0.2)), ((-100, False), (-100, True), (1, True))
    )
]


@pytest.mark.parametrize("options", CROSS_ENTROPY, ids=ids)
@pytest.mark.parametrize("shape", [(6, CLASSES), (CLASSES,), (2, CLASSES, 3), (2, CLASSES, 2, 2)], ids=str)
def test_cross_entropy(shape: tuple[int, ...], options: dict[str, Any], backend: str) -> None:
    options = dict(options)
    weighted = options.pop("weighted")
    for dtype in DTYPES:
        weight = torch.rand(CLASSES, dtype=dtype) if weighted else None
        target = torch.randint(CLASSES, [n for i, n in enumerate(shape) if i != (len(shape) > 1)])
        target.view(-1)[1::3] = options["ignore_index"]
        target.view(-1)[0] = 2  # torch's mean over nothing is NaN, ours 0
        losses = [m.CrossEntropyLoss(weight, **options) for m in (unrolled.nn, nn)]
        agree(*losses, lambda m, z, k=target: (m(z, k),), torch.randn(shape, dtype=dtype))


def test_cross_entropy_against_probabilities_is_torchs() -> None:
    losses = [m.CrossEntropyLoss(label_smoothing=0.1) for m in (unrolled.nn, nn)]
    target = torch.rand(6, CLASSES, dtype=torch.float64)
    agree(*losses, lambda m, z: (m(z, target),), torch.randn(6, CLASSES, dtype=torch.float64))


@pytest.mark.parametrize("wrong", [-1, 5, 2**40])
def test_cross_entropy_of_a_class_that_is_none(wrong: int, backend: str) -> None:
    with pytest.raises(IndexError):
        unrolled.nn.CrossEntropyLoss()(torch.zeros(2, CLASSES), torch.tensor([0, wrong]))


def test_cross_entropy_wrong_use() -> None:
    with pytest.raises(ValueError, match=r"\(2, 5\) and target \(3,\)"):
        unrolled.nn.CrossEntropyLoss()(torch.zeros(2, 5), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"\[0, 1\], found 1.5"):
        unrolled.nn.CrossEntropyLoss(label_smoothing=1.5)(torch.zeros(2, 5), torch.zeros(2, dtype=torch.int64))


def test_ragged_through_the_plain_layers(backend: str) -> None:
    batch = Ragged(torch.randn(5, INPUT), [0, 2, 2, 5])
    linear, embedding, dropout = unrolled.nn.Linear(INPUT, 4), unrolled.nn.Embedding(7, 4), unrolled.nn.Dropout(0.5)
    tokens = Ragged(torch.tensor([1, 4, 0, 6, 6]), batch.offsets)
    for module, given in ((linear, batch), (embedding, tokens), (dropout.eval(), batch)):
        found = module(given)
        same_bits(found.values, module(given.values))
        same_bits(found.offsets, batch.offsets)


def test_last_joins_the_directions(backend: str) -> None:
    for both, layers in product((False, True), (1, 2)):
        rnn = unrolled.nn.RNN(INPUT, HIDDEN, layers, bidirectional=both)
        y, h = rnn(batch := Ragged(torch.randn(6, INPUT), [0, 4, 6]))
        found = unrolled.nn.last(h)
        same_bits(found, unrolled.nn.last(h.clone(), bidirectional=both))
        for b, own in enumerate(y):
            same_bits(found[b, :HIDDEN], own[-1, :HIDDEN])
            if both:
                same_bits(found[b, HIDDEN:], own[0, HIDDEN:])
        _, alone = rnn(batch[0])
        assert unrolled.nn.last(alone).shape == (HIDDEN * (1 + both),)
    with pytest.raises(ValueError, match="how many directions"):
        unrolled.nn.last(h.clone())
    with pytest.raises(ValueError, match="3 states cannot be layers of 2"):
        unrolled.nn.last(h[:3], bidirectional=True)
