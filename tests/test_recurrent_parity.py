"""The recurrent layers and cells of unrolled.nn against torch.nn: every argument, every form of input, both ways."""

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
from peers import DTYPES, agree, ids
from tolerances import close, same_bits
from unrolled import Ragged

KINDS: list[dict[str, Any]] = [
    {"kind": "RNN"},
    {"kind": "RNN", "nonlinearity": "relu"},
    {"kind": "LSTM"},
    {"kind": "GRU"},
]
PROJECTED = {"kind": "LSTM", "proj_size": 2}
GRID = [
    {**kind, "num_layers": layers, "bias": bias, "bidirectional": both}
    for kind, layers, bias, both in product([*KINDS, PROJECTED], (1, 3), (True, False), (False, True))
]
DEEP = [{**kind, "num_layers": 2, "bidirectional": True} for kind in [*KINDS, PROJECTED] if "nonlinearity" not in kind]
INPUT, HIDDEN, LENGTHS = 3, 5, [4, 1, 6, 2]


def twins(kind: str, dtype: torch.dtype = torch.float64, **options: Any) -> tuple[Any, Any]:
    ours = getattr(unrolled.nn, kind)(INPUT, HIDDEN, dtype=dtype, **options)
    peer = getattr(nn, kind)(INPUT, HIDDEN, dtype=dtype, **options)
    peer.load_state_dict(ours.state_dict())
    return ours, peer


def states(module: Any, *sequences: int) -> list[Tensor]:
    """Random initial states: h, for the LSTM h and c."""
    rows = module.num_layers * (1 + module.bidirectional)
    widths = [module.proj_size or HIDDEN, HIDDEN][: 1 + isinstance(module, unrolled.nn.LSTM)]
    return [torch.randn(rows, *sequences, width, dtype=module.weight_hh_l0.dtype) for width in widths]


def hx(states: tuple[Tensor, ...]) -> Any:
    return (states[0] if len(states) == 1 else states) if states else None


def flat(result: tuple[Any, Any]) -> tuple[Any, ...]:
    y, last = result
    return (y, last) if isinstance(last, Tensor) else (y, *last)


def plainly(m: Any, x: Tensor, *s: Tensor) -> Any:
    return flat(m(x, hx(s)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", GRID, ids=ids)
def test_padded(options: dict[str, Any], dtype: torch.dtype, backend: str) -> None:
    for batch_first in (False, True):
        ours, peer = twins(dtype=dtype, batch_first=batch_first, **options)
        x = torch.randn(4, 6, INPUT, dtype=dtype)
        agree(ours, peer, plainly, x, *states(ours, 4 if batch_first else 6), terms=HIDDEN)
        agree(ours, peer, plainly, x, terms=HIDDEN)


@pytest.mark.parametrize("options", GRID, ids=ids)
def test_unbatched(options: dict[str, Any], backend: str) -> None:
    ours, peer = twins(batch_first=True, **options)
    terms = 4 * HIDDEN * ours.num_layers
    agree(ours, peer, plainly, torch.randn(5, INPUT, dtype=torch.float64), *states(ours), terms=terms)
    agree(ours, peer, plainly, torch.randn(1, INPUT, dtype=torch.float64), terms=terms)


def packed_call(module: nn.Module, x: Tensor, *s: Tensor) -> tuple[Tensor, ...]:
    """The truth about lengths: torch.nn on a PackedSequence."""
    packed = pack_padded_sequence(x, torch.tensor(LENGTHS), batch_first=True, enforce_sorted=False)
    y, *last = flat(module(packed, hx(s)))
    return pad_packed_sequence(y, batch_first=True, total_length=x.shape[1])[0], *last


def _padded(lengths: Any) -> Callable[..., Any]:
    return lambda m, x, *s: flat(m(x, hx(s), lengths=lengths))


def _time_major(m: Any, x: Tensor, *s: Tensor) -> Any:
    m.batch_first = False
    y, *last = flat(m(x.transpose(0, 1), hx(s), lengths=LENGTHS))
    return y.transpose(0, 1), *last


def _ragged(m: Any, x: Tensor, *s: Tensor) -> Any:
    y, *last = flat(m(Ragged.from_padded(x, LENGTHS, batch_first=True), hx(s)))
    assert isinstance(y, Ragged)
    return y.to_padded(batch_first=True, total_length=x.shape[1]), *last


def _packed(m: Any, x: Tensor, *s: Tensor) -> Any:
    packed = pack_padded_sequence(x, torch.tensor(LENGTHS), batch_first=True, enforce_sorted=False)
    y, *last = flat(m(packed, hx(s)))
    assert isinstance(y, PackedSequence)
    return pad_packed_sequence(y, batch_first=True, total_length=x.shape[1])[0], *last


def _packed_sorted(m: Any, x: Tensor, *s: Tensor) -> Any:
    order = torch.tensor(LENGTHS).argsort(descending=True)
    back = order.argsort()
    packed = pack_sequence([x[b, : LENGTHS[b]] for b in order])
    y, *last = flat(m(packed, hx(tuple(own[:, order] for own in s))))
    assert y.sorted_indices is None
    padded, _ = pad_packed_sequence(y, batch_first=True, total_length=x.shape[1])
    return padded[back], *(own[:, back] for own in last)


def _nested(m: Any, x: Tensor, *s: Tensor) -> Any:
    nested = torch.nested.as_nested_tensor([x[b, :n] for b, n in enumerate(LENGTHS)], layout=torch.jagged)
    y, *last = flat(m(nested, hx(s)))
    assert y.is_nested
    return y.to_padded_tensor(0.0, output_size=(*x.shape[:2], y.shape[2])), *last


def _narrowed(m: Any, x: Tensor, *s: Tensor) -> Any:
    start = torch.zeros(len(x), dtype=torch.int64)
    y, *last = flat(m(torch.nested.narrow(x, 1, start, torch.tensor(LENGTHS), layout=torch.jagged), hx(s)))
    assert y.is_nested
    assert y.lengths().tolist() == LENGTHS
    return Ragged.from_nested(y).to_padded(batch_first=True, total_length=x.shape[1]), *last


def _narrowed_inside(m: Any, x: Tensor, *s: Tensor) -> Any:
    start = torch.tensor([1, 0, 2, 1])
    wide = x.new_zeros(len(x), 9, x.shape[2])
    wide[torch.arange(len(x))[:, None], start[:, None] + torch.arange(x.shape[1])] = x
    y, *last = flat(m(torch.nested.narrow(wide, 1, start, torch.tensor(LENGTHS), layout=torch.jagged), hx(s)))
    return Ragged.from_nested(y).to_padded(batch_first=True, total_length=x.shape[1]), *last


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
@pytest.mark.parametrize("options", [{"kind": "RNN"}, *DEEP], ids=ids)
def test_forms_with_lengths(form: str, options: dict[str, Any], backend: str) -> None:
    ours, peer = twins(batch_first=True, **options)
    x = torch.randn(len(LENGTHS), max(LENGTHS), INPUT, dtype=torch.float64)
    agree(ours, peer, FORMS[form], x, *states(ours, len(LENGTHS)), other=packed_call, terms=HIDDEN)
    agree(ours, peer, FORMS[form], x, other=packed_call, terms=HIDDEN)


@pytest.mark.parametrize("options", GRID, ids=ids)
def test_same_parameters_from_the_same_seed_and_both_ways(options: dict[str, Any]) -> None:
    kind, options = options["kind"], {k: v for k, v in options.items() if k != "kind"}
    torch.manual_seed(5)
    ours = getattr(unrolled.nn, kind)(INPUT, HIDDEN, **options)
    torch.manual_seed(5)
    peer = getattr(nn, kind)(INPUT, HIDDEN, **options)
    same_state(ours, peer)
    other = getattr(nn, kind)(INPUT, HIDDEN, **options)
    ours.load_state_dict(other.state_dict())
    peer.load_state_dict(ours.state_dict())
    same_state(peer, other)
    assert ours.mode == peer.mode


def same_state(one: nn.Module, other: nn.Module) -> None:
    assert list(one.state_dict()) == list(other.state_dict())
    for name, value in other.state_dict().items():
        same_bits(one.state_dict()[name], value)


# torch's layers hide their arguments behind *args; these are the documented ones.
ARGUMENTS = {
    "RNN": {"num_layers": 1, "nonlinearity": "tanh"},
    "LSTM": {"num_layers": 1},
    "GRU": {"num_layers": 1},
}
REST = {"bias": True, "batch_first": False, "dropout": 0.0, "bidirectional": False}


@pytest.mark.parametrize("kind", ARGUMENTS)
def test_arguments_of_a_layer_are_torchs(kind: str) -> None:
    expected = {**ARGUMENTS[kind], **REST, **({"proj_size": 0} if kind == "LSTM" else {})}
    own = list(inspect.signature(getattr(unrolled.nn, kind)).parameters.values())
    positional = [p for p in own if p.kind != inspect.Parameter.KEYWORD_ONLY]
    assert [p.name for p in positional] == ["input_size", "hidden_size", *expected, "device", "dtype"]
    assert {p.name: p.default for p in positional[2:]} == {**expected, "device": None, "dtype": None}
    theirs = getattr(nn, kind)(2, 3, *(2 if name == "num_layers" else value for name, value in expected.items()))
    for name, value in expected.items():
        assert getattr(theirs, name) == (2 if name == "num_layers" else value)
    ours = getattr(unrolled.nn, kind)(2, 3, *(2 if name == "num_layers" else value for name, value in expected.items()))
    assert repr(ours) == repr(theirs)


CELLS = [
    {"kind": f"{own['kind']}Cell", "bias": bias, **{k: v for k, v in own.items() if k != "kind"}}
    for own, bias in product(KINDS, (True, False))
]


@pytest.mark.parametrize("options", CELLS, ids=ids)
def test_cells(options: dict[str, Any], backend: str) -> None:
    for dtype in DTYPES:
        torch.manual_seed(5)
        ours = getattr(unrolled.nn, options["kind"])(INPUT, HIDDEN, dtype=dtype, **without_kind(options))
        torch.manual_seed(5)
        peer = getattr(nn, options["kind"])(INPUT, HIDDEN, dtype=dtype, **without_kind(options))
        same_state(ours, peer)
        assert repr(ours) == repr(peer)
        count = 1 + ("LSTM" in options["kind"])

        def step(m: Any, x: Tensor, *s: Tensor) -> tuple[Tensor, ...]:
            after = m(x, hx(s))
            return (after,) if isinstance(after, Tensor) else after

        for batch in ((4,), (1,), ()):
            x = torch.randn(*batch, INPUT, dtype=dtype)
            before = [torch.randn(*batch, HIDDEN, dtype=dtype) for _ in range(count)]
            peer.to(dtype)
            agree(ours, peer, step, x, *before, terms=HIDDEN)
            agree(ours, peer, step, x, terms=HIDDEN)
        empty = step(ours, torch.randn(0, INPUT, dtype=dtype))
        assert [s.shape for s in empty] == [(0, HIDDEN)] * count


def without_kind(options: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in options.items() if k != "kind"}


@pytest.mark.parametrize("kind", ["RNNCell", "LSTMCell", "GRUCell"])
def test_a_cell_step_by_step_is_the_layer(kind: str, backend: str) -> None:
    cell = getattr(unrolled.nn, kind)(INPUT, HIDDEN, dtype=torch.float64)
    layer = getattr(unrolled.nn, kind.removesuffix("Cell"))(INPUT, HIDDEN, dtype=torch.float64)
    layer.load_state_dict({f"{name}_l0": value for name, value in cell.state_dict().items()})
    x, state, ys = torch.randn(5, 2, INPUT, dtype=torch.float64), None, []
    for x_t in x:
        state = cell(x_t, state)
        ys.append(state if isinstance(state, Tensor) else state[0])
    y, *last = flat(layer(x))
    close(torch.stack(ys), y, INPUT + HIDDEN)
    for found, reference in zip((state,) if isinstance(state, Tensor) else state, last, strict=True):
        close(found, reference[0], INPUT + HIDDEN)


@pytest.mark.parametrize("kind", ["RNNCell", "LSTMCell", "GRUCell"])
def test_arguments_of_a_cell_are_torchs(kind: str) -> None:
    own, theirs = (inspect.signature(getattr(m, kind)).parameters.values() for m in (unrolled.nn, nn))
    positional = [p for p in own if p.kind != inspect.Parameter.KEYWORD_ONLY]
    assert [(p.name, p.default) for p in positional] == [(p.name, p.default) for p in theirs]
    cell = getattr(unrolled.nn, kind)(INPUT, HIDDEN)
    for args, message in [
        ((torch.zeros(2, 4),), r"expected input \(B, 3\) or \(3,\), found \(2, 4\)"),
        ((torch.zeros(2, 2, INPUT),), "found \\(2, 2, 3\\)"),
        ((torch.zeros(2, INPUT), (torch.zeros(3, HIDDEN),) * (1 + (kind == "LSTMCell"))), r"\(2, 5\), found"),
        ((torch.zeros(INPUT), (torch.zeros(1, HIDDEN),) * (1 + (kind == "LSTMCell"))), r"\(5,\), found"),
        ((torch.zeros(INPUT), (torch.zeros(HIDDEN),) * 3), "must hold"),
    ]:
        with pytest.raises(ValueError, match=message):
            cell(*args)


@pytest.mark.parametrize("kind", ["RNN", "LSTM", "GRU"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hidden_size": 0}, "hidden_size must be at least 1, found 0"),
        ({"num_layers": 0}, "num_layers must be at least 1, found 0"),
        ({"input_size": -1}, "found -1"),
        ({"num_layers": 2, "dropout": 1.5}, "1.5"),
        ({"dropout": 0.5}, "between layers"),
    ],
)
def test_wrong_arguments(kind: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        getattr(unrolled.nn, kind)(**{"input_size": 2, "hidden_size": 3, **arguments})


def test_wrong_arguments_of_one_kind() -> None:
    for kind in (unrolled.nn.RNN, unrolled.nn.RNNCell):
        with pytest.raises(ValueError, match="found 'gelu'"):
            kind(2, 3, nonlinearity="gelu")
    for wrong in (-1, 3, 4):
        with pytest.raises(ValueError, match=f"found {wrong} with hidden_size=3"):
            unrolled.nn.LSTM(2, 3, proj_size=wrong)
        with pytest.raises(ValueError, match="proj_size"):
            nn.LSTM(2, 3, proj_size=wrong)


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
    lstm, h = unrolled.nn.LSTM(INPUT, HIDDEN), torch.zeros(1, 2, HIDDEN)
    with pytest.raises(ValueError, match=r"\(1, 2, 5\), found \(1, 2, 4\)"):
        lstm(x, (h, h[..., :4]))
    for wrong in (h, (h,), (h, h, h)):
        with pytest.raises(TypeError, match=r"hx must be a pair of tensors \(h, c\)"):
            lstm(x, wrong)


def test_convert() -> None:
    shared = nn.GRU(3, 3)
    model = nn.ModuleDict(
        {
            "a": nn.RNN(INPUT, HIDDEN, 2, "relu", bias=False, batch_first=True, dropout=0.3, bidirectional=True),
            "b": nn.LSTM(INPUT, HIDDEN, 2, bias=False, batch_first=True, dropout=0.3, bidirectional=True),
            "c": nn.GRU(INPUT, HIDDEN, 2, bias=False, batch_first=True, dropout=0.3, bidirectional=True),
            "deep": nn.Sequential(nn.Linear(3, 3), nn.ModuleList([shared])),
            "again": shared,
            "p": nn.LSTM(INPUT, HIDDEN, 2, bias=False, batch_first=True, dropout=0.3, bidirectional=True, proj_size=2),
        }
    ).double()
    model["deep"].eval()
    before, state = dict(model.named_parameters()), {k: v.clone() for k, v in model.state_dict().items()}
    assert unrolled.nn.convert(model) is model
    assert [type(model[name]) for name in "abc"] == [unrolled.nn.RNN, unrolled.nn.LSTM, unrolled.nn.GRU]
    assert type(model["again"]) is unrolled.nn.GRU
    assert model["deep"][1][0] is model["again"]
    assert type(model["p"]) is unrolled.nn.LSTM
    assert all(p is before[name] for name, p in model.named_parameters())
    assert list(state) == list(model.state_dict())
    assert [m.training for m in model.modules()].count(False) == len(list(model["deep"].modules()))
    assert model["a"].nonlinearity == "relu"
    for name in "abcp":
        converted = model[name]
        assert (converted.bias, converted.batch_first, converted.dropout) == (False, True, 0.3)
        options = {"a": {"nonlinearity": "relu"}, "p": {"proj_size": 2}}.get(name, {})
        kind = getattr(nn, type(converted).__name__)
        peer = kind(INPUT, HIDDEN, 2, bias=False, batch_first=True, bidirectional=True, dtype=torch.float64, **options)
        peer.load_state_dict(converted.state_dict())
        x = torch.randn(2, 3, INPUT, dtype=torch.float64)
        agree(converted.eval(), peer.eval(), plainly, x, terms=HIDDEN)


@pytest.mark.parametrize("options", CELLS, ids=ids)
def test_convert_of_cells(options: dict[str, Any]) -> None:
    cell = getattr(nn, options["kind"])(INPUT, HIDDEN, **without_kind(options))
    parameters, repr_before = dict(cell.named_parameters()), repr(cell)
    converted = unrolled.nn.convert(nn.Sequential(cell).eval())[0]
    assert type(converted) is getattr(unrolled.nn, options["kind"])
    assert repr(converted) == repr_before
    assert not converted.training
    assert all(p is parameters[name] for name, p in converted.named_parameters())
    assert list(converted.state_dict()) == list(cell.state_dict())


@pytest.mark.parametrize("kind", ["RNN", "LSTM", "GRU"])
def test_convert_of_a_single_layer_and_of_subclasses(kind: str) -> None:
    special = type("Special", (getattr(nn, kind),), {})
    assert type(unrolled.nn.convert(getattr(nn, kind)(2, 3))) is getattr(unrolled.nn, kind)
    model = nn.Sequential(special(2, 3))
    assert type(unrolled.nn.convert(model)[0]) is special


@pytest.mark.parametrize("kind", ["RNN", "LSTM", "GRU"])
def test_last_joins_the_directions(kind: str, backend: str) -> None:
    for both, layers in product((False, True), (1, 2)):
        rnn = getattr(unrolled.nn, kind)(INPUT, HIDDEN, layers, bidirectional=both)
        y, h, *_ = flat(rnn(batch := Ragged(torch.randn(6, INPUT), [0, 4, 6])))
        found = unrolled.nn.last(h)
        same_bits(found, unrolled.nn.last(h.clone(), bidirectional=both))
        for b, own in enumerate(y):
            same_bits(found[b, :HIDDEN], own[-1, :HIDDEN])
            if both:
                same_bits(found[b, HIDDEN:], own[0, HIDDEN:])
        _, *alone = flat(rnn(batch[0]))
        assert all(unrolled.nn.last(s).shape == (HIDDEN * (1 + both),) for s in alone)
    with pytest.raises(ValueError, match="how many directions"):
        unrolled.nn.last(h.clone())
    with pytest.raises(ValueError, match="3 states cannot be layers of 2"):
        unrolled.nn.last(h[:3], bidirectional=True)
