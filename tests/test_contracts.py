"""The contracts that hold for every layer, each under its number in the design."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import unrolled
from cases import CASES, CELL_OPTIONS, Case
from peers import ids
from tolerances import NORMS, close, same_bits
from unrolled import Ragged
from unrolled.verify.judges import differentiable

INPUT, HIDDEN = 3, 7
OPTIONS: list[dict[str, Any]] = [
    *(
        {"kind": "RNN", "num_layers": layers, "bidirectional": both, "nonlinearity": nonlinearity}
        for layers, both, nonlinearity in product((1, 2), (False, True), ("tanh", "relu"))
    ),
    *(
        {"kind": kind, "num_layers": layers, "bidirectional": both}
        for kind, layers, both in product(("LSTM", "GRU"), (1, 2), (False, True))
    ),
]
KINDS = ["RNN", "LSTM", "GRU"]
_NOISE: dict[str, Any] = {"recurrent_dropout": 0.4, "zoneout": 0.3}
MORE: list[dict[str, Any]] = [
    {"kind": "RNN", "num_layers": 2, "bidirectional": True, "layer_norm": True, "proj_size": 3, "bptt": 2, **_NOISE},
    {"kind": "RNN", "num_layers": 1, "bidirectional": False, "nonlinearity": "relu", "recurrent_dropout": 0.4},
    {
        **{"kind": "LSTM", "num_layers": 2, "bidirectional": True, "layer_norm": True, "peephole": True},
        **{"proj_size": 3, "recurrent_dropout": 0.4, "zoneout": (0.3, 0.2), "bptt": 2},
    },
    {"kind": "LSTM", "num_layers": 1, "bidirectional": False, "peephole": True, "zoneout": (0.0, 0.4)},
    {"kind": "GRU", "num_layers": 2, "bidirectional": True, "layer_norm": True, "reset": "before", "bptt": 2, **_NOISE},
    {"kind": "GRU", "num_layers": 1, "bidirectional": False, "layer_norm": True, "zoneout": 0.3},
]
OPTIONS += MORE


def make(kind: str, *sizes: int, **options: Any) -> Any:
    return getattr(unrolled.nn, kind)(*(sizes or (INPUT, HIDDEN)), **options)


def batch_of(lengths: list[int], dtype: torch.dtype = torch.float64) -> Ragged:
    return Ragged(torch.randn(sum(lengths), INPUT, dtype=dtype), torch.tensor([0, *lengths]).cumsum(0))


def states(rnn: Any, sequences: int) -> list[Tensor]:
    """Initial states that require grad: h, for the LSTM h and c."""
    widths = [rnn.proj_size or rnn.hidden_size, rnn.hidden_size][: 1 + isinstance(rnn, unrolled.nn.LSTM)]
    rows = rnn.num_layers * rnn.num_directions
    return [torch.randn(rows, sequences, width, dtype=torch.float64).requires_grad_() for width in widths]


def call(rnn: Any, x: Any, given: Sequence[Tensor] = (), **options: Any) -> tuple[Any, list[Tensor]]:
    """The outputs and the list of last states."""
    y, last = rnn(x, (given[0] if len(given) == 1 else tuple(given)) if given else None, **options)
    return y, [last] if isinstance(last, Tensor) else list(last)


def take_grads(module: nn.Module) -> dict[str, Tensor]:
    """The gradient of every parameter, none missing; then set back to none."""
    found = {}
    for name, p in module.named_parameters():
        assert p.grad is not None, f"{name} received no gradient"
        found[name] = p.grad
    module.zero_grad()
    return found


@pytest.mark.parametrize("choices", [OPTIONS, MORE], ids=["any", "more"])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
@given(data=st.data())
def test_1_a_batch_equals_its_sequences_alone_in_any_order(
    dropout: float, choices: list[dict[str, Any]], backend: str, data: st.DataObject
) -> None:
    lengths = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=7))
    order = torch.tensor(data.draw(st.permutations(range(len(lengths)))))
    options = data.draw(st.sampled_from(choices))
    options = {**options, "num_layers": 2, "dropout": dropout} if dropout else options
    rnn = make(**options, dtype=torch.float64)
    parts, initial = batch_of(lengths).to_list(), states(rnn, len(lengths))
    keys = torch.randint(2**40, (len(lengths),))
    width = (rnn.proj_size or HIDDEN) * rnn.num_directions
    weights = [torch.randn(n, width, dtype=torch.float64) for n in lengths]

    def run(which: Tensor) -> tuple[Ragged, list[Tensor]]:
        torch.manual_seed(1)  # every call draws the same dropout seed
        given = [s.detach()[:, which] for s in initial]
        y, last = call(rnn, Ragged.from_list([parts[b] for b in which]), given, keys=keys[which])
        (
            (y.values * torch.cat([weights[b] for b in which])).sum() + sum(i * s.sum() for i, s in enumerate(last, 1))
        ).backward()
        return y, last

    length = (sum(lengths) + INPUT + HIDDEN) * (NORMS if rnn.layer_norm else 1)
    y, last = run(torch.arange(len(lengths)))
    together = take_grads(rnn)
    for b in range(len(lengths)):
        y_alone, last_alone = run(torch.tensor([b]))
        close(y_alone[0], y[b], length)
        for found, reference in zip(last_alone, last, strict=True):
            close(found, reference[:, b : b + 1], length)
    for name, value in take_grads(rnn).items():
        close(value, together[name], length)
    y_shuffled, last_shuffled = run(order)
    for place, b in enumerate(order.tolist()):
        close(y_shuffled[place], y[b], length)
    for found, reference in zip(last_shuffled, last, strict=True):
        close(found, reference[:, order], length)
    for name, value in take_grads(rnn).items():
        close(value, together[name], length)


@pytest.mark.parametrize("kind", KINDS)
def test_1_padding_and_neighbours_do_not_reach_a_dropout_mask(kind: str, backend: str) -> None:
    rnn = make(kind, num_layers=2, dropout=0.5, batch_first=True, dtype=torch.float64)
    x = torch.randn(2, 4, INPUT, dtype=torch.float64)
    results = []
    for padded, lengths in ((x, [4, 3]), (torch.cat([x, x], 1), [4, 3]), (torch.cat([x, x]), [4, 3, 1, 0])):
        torch.manual_seed(2)
        y, _ = rnn(padded, lengths=lengths)
        results.append(y[:2, :4])
    torch.manual_seed(2)
    results.append(rnn(Ragged.from_padded(x, [4, 3], batch_first=True))[0].to_padded(batch_first=True))
    for other in results[1:]:
        close(other, results[0], INPUT + HIDDEN)


@pytest.mark.parametrize("options", OPTIONS, ids=ids)
@pytest.mark.parametrize("lengths", [[0], [0, 0], [3, 0, 1], []], ids=str)
def test_2_length_zero(lengths: list[int], options: dict[str, Any], backend: str) -> None:
    rnn = make(**options, dtype=torch.float64)
    initial = states(rnn, len(lengths))
    y, last = call(rnn, batch_of(lengths), initial)
    empty = torch.tensor(lengths, dtype=torch.int64) == 0
    dlast = [torch.randn_like(s) for s in last]
    grads = torch.autograd.grad(last, initial, dlast, retain_graph=True)
    assert y.lengths.tolist() == lengths
    for before, after, d, grad in zip(initial, last, dlast, grads, strict=True):
        same_bits(after[:, empty], before[:, empty])
        same_bits(grad[:, empty], d[:, empty])
    (sum(s[:, empty].sum() for s in last) + y.values.sum() * 0).backward()
    for value in take_grads(rnn).values():
        same_bits(value, torch.zeros_like(value))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch_first", [False, True])
def test_2_no_step_at_all_in_a_padded_batch(batch_first: bool, kind: str, backend: str) -> None:
    rnn = make(kind, bidirectional=True, batch_first=batch_first, dtype=torch.float64)
    for sequences, steps in ((2, 0), (0, 3), (0, 0)):
        x = torch.randn(*((sequences, steps) if batch_first else (steps, sequences)), INPUT, dtype=torch.float64)
        initial = states(rnn, sequences)
        y, last = call(rnn, x, initial)
        assert y.shape == (*x.shape[:2], 2 * HIDDEN)
        (y.sum() + sum(s.sum() for s in last)).backward()
        for before, after in zip(initial, last, strict=True):
            same_bits(after, before)
            same_bits(before.grad, torch.ones_like(before))


PADDED = [{"kind": kind, "num_layers": 2, "bidirectional": True} for kind in KINDS]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("options", PADDED + MORE, ids=ids)
def test_2_padding_is_zero_and_receives_no_gradient(options: dict[str, Any], training: bool, backend: str) -> None:
    rnn = make(**options, dtype=torch.float64).train(training)
    noise = training and options in MORE  # which may leave a state at its initial 0
    x = torch.randn(5, 3, INPUT, dtype=torch.float64)
    x[2:, 1], x[4:, 2] = float("nan"), float("inf")  # what lies beyond a length is never read
    x.requires_grad_()
    y, last = call(rnn, x, lengths=[5, 2, 4])
    (y.sum() + sum(s.sum() for s in last)).backward()
    assert all(bool(s.isfinite().all()) for s in last)
    for values in (y, x.grad):
        assert noise or options.get("nonlinearity") == "relu" or bool(values[:2].all(-1).all())
        assert not bool(values[2:, 1].any())
        assert not bool(values[4:, 2].any())
    assert all(bool(value.isfinite().all()) for value in take_grads(rnn).values())


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
def test_3_a_loss_over_no_target_is_zero(weighted: bool, reduction: str, backend: str) -> None:
    weight = torch.tensor([0.0, 1.0, 2.0]) if weighted else None
    loss = unrolled.nn.CrossEntropyLoss(weight, ignore_index=1, reduction=reduction, label_smoothing=0.1)
    for count in (0, 4):
        logits = torch.randn(count, 3, requires_grad=True)
        value = loss(logits, torch.ones(count, dtype=torch.int64))
        value.sum().backward()
        same_bits(value, torch.zeros_like(value))
        same_bits(logits.grad, torch.zeros(count, 3))
    y = torch.zeros(0, 3, requires_grad=True)
    value = unrolled.nn.MSELoss(reduction=reduction)(y, torch.zeros(0, 3))
    value.sum().backward()
    same_bits(value, torch.zeros_like(value))
    same_bits(y.grad, torch.zeros(0, 3))


def test_3_a_class_may_be_ruled_out_or_certain(backend: str) -> None:
    infinity = float("inf")
    logits = torch.tensor(
        [[-infinity, 1.0, 2.0], [0.0, 800.0, -800.0], [-infinity, 5.0, -infinity]], requires_grad=True
    )
    loss = unrolled.nn.CrossEntropyLoss(reduction="none")(logits, torch.tensor([2, 0, 1]))
    loss.sum().backward()
    expected = torch.tensor([torch.tensor([1.0, 2.0]).logsumexp(0) - 2, 800.0, 0.0])
    close(loss.detach(), expected, 3)
    e = 1 / (1 + torch.tensor(1.0).exp())
    close(logits.grad, torch.tensor([[0, e, -e], [-1, 1, 0], [0, 0, 0]]), 3)


@pytest.mark.parametrize("options", OPTIONS, ids=ids)
def test_4_train_eval_and_no_grad_agree_to_the_bit(options: dict[str, Any], backend: str) -> None:
    dropout = 0.5 if options["num_layers"] > 1 else 0.0
    options = {name: value for name, value in options.items() if name not in _NOISE}
    rnn, plain = make(**options, dropout=dropout), make(**options)
    plain.load_state_dict(rnn.state_dict())
    batch = batch_of([4, 0, 9, 1], torch.float32)
    expected, expected_last = call(plain, batch)
    runs = [call(plain.eval(), batch), call(rnn.eval(), batch)]
    sum(s.sum() for s in runs[1][1]).backward()
    take_grads(rnn)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            runs += [call(plain.train(), batch), call(plain.eval(), batch), call(rnn.eval(), batch)]
    runs.append(call(plain.requires_grad_(False), batch))
    for y, last in runs:
        same_bits(y.values, expected.values)
        for found, reference in zip(last, expected_last, strict=True):
            same_bits(found, reference)


@pytest.mark.parametrize("kind", KINDS)
def test_5_torchs_pair_stays(kind: str, backend: str) -> None:
    y, last = make(kind)(torch.randn(4, 2, INPUT))
    assert type(y) is Tensor
    assert type(last) is (tuple if kind == "LSTM" else Tensor)
    same_bits(unrolled.nn.last(last[0] if kind == "LSTM" else last), y[-1])


@pytest.mark.parametrize("options", OPTIONS, ids=ids)
@pytest.mark.parametrize("bias", [True, False])
def test_6_every_parameter_receives_a_gradient(options: dict[str, Any], bias: bool, backend: str) -> None:
    rnn = make(**options, bias=bias, learn_initial_state=True)
    own = {name for name, _ in rnn.named_parameters() if name.startswith("initial")}
    assert own == {"initial_state", *(["initial_memory"] if options["kind"] == "LSTM" else [])}
    _, (h, *_) = call(rnn, batch_of([4, 2, 1], torch.float32))
    (h * torch.randn_like(h)).sum().backward()
    found = take_grads(rnn)
    assert all(bool(value.any()) for value in found.values())
    assert len({value.data_ptr() for value in found.values()}) == len(found)  # clipped in place, each on its own


@pytest.mark.parametrize("kind", KINDS)
def test_6_a_learned_initial_state_is_every_sequences_first_state(kind: str, backend: str) -> None:
    rnn = make(kind, num_layers=2, bidirectional=True, learn_initial_state=True, dtype=torch.float64)
    names = ["initial_state", "initial_memory"][: 1 + (kind == "LSTM")]
    initial = [getattr(rnn, name) for name in names]
    for parameter in initial:
        assert not bool(parameter.any())
        torch.nn.init.normal_(parameter)
    batch = batch_of([4, 0, 2])
    y, last = call(rnn, batch)
    sum(s.sum() for s in last).backward()
    learned = take_grads(rnn)
    given = [p.detach()[:, None].expand(-1, 3, -1).clone().requires_grad_() for p in initial]
    y_given, last_given = call(rnn, batch, given)
    sum(s.sum() for s in last_given).backward()
    same_bits(y.values, y_given.values)
    for found, reference in zip(last, last_given, strict=True):
        same_bits(found, reference)
    for name, s in zip(names, given, strict=True):
        close(learned[name], s.grad.sum(1), 3)


@pytest.mark.parametrize("case", [case for case in CASES if case.name in CELL_OPTIONS], ids=str)
def test_7_outputs_never_alias_what_a_second_backward_reads(case: Case, backend: str) -> None:
    inputs = case.inputs()
    leaves = list(differentiable(inputs).values())
    outputs = case.operator.operator(**inputs)
    weights = [torch.randn_like(y) for y in outputs]
    first = torch.autograd.grad(outputs, leaves, weights, retain_graph=True)
    kept = [g.clone() for g in first]
    for tensor in (*outputs, *first):
        tensor.detach().fill_(float("nan"))
    for found, expected in zip(torch.autograd.grad(outputs, leaves, weights), kept, strict=True):
        same_bits(found, expected)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_7_the_same_batch_gives_the_same_bits(kind: str, threads: int, backend: str) -> None:
    torch.set_num_threads(threads)
    rnn = make(kind, 33, 65, num_layers=2, bidirectional=True, dropout=0.3)
    embedding, readout, loss = unrolled.nn.Embedding(11, 33), unrolled.nn.Linear(130, 5), unrolled.nn.CrossEntropyLoss()
    model = nn.ModuleList([rnn, embedding, readout])
    offsets = [0, 30, 30, 33, 50, 57, 90]  # enough for two threads of the core; the equation steps through a tenth
    offsets = [n // 10 for n in offsets] if backend == "equation" else offsets
    tokens, target = Ragged(torch.randint(11, (offsets[-1],)), offsets), torch.randint(5, (6,))

    def run() -> list[Tensor]:
        torch.manual_seed(3)
        y, last = call(rnn, embedding(tokens))
        value = loss(readout(unrolled.nn.last(last[0])), target)
        value.backward()
        return [y.values, *last, value, *take_grads(model).values()]

    expected = run()
    for _ in range(3):
        for found, reference in zip(run(), expected, strict=True):
            same_bits(found, reference)
