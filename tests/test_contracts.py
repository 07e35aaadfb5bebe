"""The contracts that hold for every layer, each under its number in the design."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import unrolled
from tolerances import close, same_bits
from unrolled import Ragged

INPUT, HIDDEN = 3, 7
OPTIONS = [
    {"num_layers": layers, "bidirectional": both, "nonlinearity": nonlinearity}
    for layers, both, nonlinearity in product((1, 2), (False, True), ("tanh", "relu"))
]


def ids(options: dict[str, Any]) -> str:
    return "-".join(f"{k}={v}" for k, v in options.items())


def batch_of(lengths: list[int], dtype: torch.dtype = torch.float64) -> Ragged:
    return Ragged(torch.randn(sum(lengths), INPUT, dtype=dtype), torch.tensor([0, *lengths]).cumsum(0))


def states(rnn: unrolled.nn.RNN, sequences: int) -> Tensor:
    return torch.randn(rnn.num_layers * rnn.num_directions, sequences, rnn.hidden_size, dtype=torch.float64)


def take_grads(module: nn.Module) -> dict[str, Tensor]:
    """The gradient of every parameter, none missing; then set back to none."""
    found = {}
    for name, p in module.named_parameters():
        assert p.grad is not None, f"{name} received no gradient"
        found[name] = p.grad
    module.zero_grad()
    return found


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@given(data=st.data())
def test_1_a_batch_equals_its_sequences_alone_in_any_order(dropout: float, backend: str, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=7))
    order = torch.tensor(data.draw(st.permutations(range(len(lengths)))))
    options = data.draw(st.sampled_from(OPTIONS))
    options = {**options, "num_layers": 2, "dropout": dropout} if dropout else options
    rnn = unrolled.nn.RNN(INPUT, HIDDEN, dtype=torch.float64, **options)
    parts, h0 = batch_of(lengths).to_list(), states(rnn, len(lengths))
    keys = torch.randint(2**40, (len(lengths),))
    weights = [torch.randn(n, HIDDEN * rnn.num_directions, dtype=torch.float64) for n in lengths]

    def run(which: Tensor) -> tuple[Ragged, Tensor]:
        torch.manual_seed(1)  # every call draws the same dropout seed
        y, h = rnn(Ragged.from_list([parts[b] for b in which]), h0[:, which], keys=keys[which])
        ((y.values * torch.cat([weights[b] for b in which])).sum() + h.sum()).backward()
        return y, h

    length = sum(lengths) + INPUT + HIDDEN
    y, h = run(torch.arange(len(lengths)))
    together = take_grads(rnn)
    for b in range(len(lengths)):
        y_alone, h_alone = run(torch.tensor([b]))
        close(y_alone[0], y[b], length)
        close(h_alone, h[:, b : b + 1], length)
    for name, value in take_grads(rnn).items():
        close(value, together[name], length)
    y_shuffled, h_shuffled = run(order)
    for place, b in enumerate(order.tolist()):
        close(y_shuffled[place], y[b], length)
    close(h_shuffled, h[:, order], length)
    for name, value in take_grads(rnn).items():
        close(value, together[name], length)


def test_1_padding_and_neighbours_do_not_reach_a_dropout_mask(backend: str) -> None:
    rnn = unrolled.nn.RNN(INPUT, HIDDEN, 2, dropout=0.5, batch_first=True, dtype=torch.float64)
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
    rnn = unrolled.nn.RNN(INPUT, HIDDEN, dtype=torch.float64, **options)
    h0 = states(rnn, len(lengths)).requires_grad_()
    y, h = rnn(batch_of(lengths), h0)
    empty = torch.tensor(lengths, dtype=torch.int64) == 0
    dh = torch.randn_like(h)
    (grad,) = torch.autograd.grad(h, h0, dh, retain_graph=True)
    assert y.lengths.tolist() == lengths
    same_bits(h[:, empty], h0[:, empty])
    same_bits(grad[:, empty], dh[:, empty])
    (h[:, empty].sum() + y.values.sum() * 0).backward()
    for value in take_grads(rnn).values():
        same_bits(value, torch.zeros_like(value))


@pytest.mark.parametrize("batch_first", [False, True])
def test_2_no_step_at_all_in_a_padded_batch(batch_first: bool, backend: str) -> None:
    rnn = unrolled.nn.RNN(INPUT, HIDDEN, bidirectional=True, batch_first=batch_first, dtype=torch.float64)
    for sequences, steps in ((2, 0), (0, 3), (0, 0)):
        x = torch.randn(*((sequences, steps) if batch_first else (steps, sequences)), INPUT, dtype=torch.float64)
        h0 = states(rnn, sequences).requires_grad_()
        y, h = rnn(x, h0)
        assert y.shape == (*x.shape[:2], 2 * HIDDEN)
        same_bits(h, h0)
        (y.sum() + h.sum()).backward()
        same_bits(h0.grad, torch.ones_like(h0))


def test_2_padding_is_zero_and_receives_no_gradient(backend: str) -> None:
    rnn = unrolled.nn.RNN(INPUT, HIDDEN, 2, bidirectional=True, dtype=torch.float64)
    x = torch.randn(5, 3, INPUT, dtype=torch.float64)
    x[2:, 1], x[4:, 2] = float("nan"), float("inf")  # what lies beyond a length is never read
    x.requires_grad_()
    y, h = rnn(x, lengths=[5, 2, 4])
    (y.sum() + h.sum()).backward()
    assert bool(h.isfinite().all())
    for values in (y, x.grad):
        assert bool(values[:2].all(-1).all())
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
    rnn = unrolled.nn.RNN(INPUT, HIDDEN, dropout=dropout, **options)
    plain = unrolled.nn.RNN(INPUT, HIDDEN, **options)
    plain.load_state_dict(rnn.state_dict())
    batch = batch_of([4, 0, 9, 1], torch.float32)
    expected = plain(batch)
    runs = [plain.eval()(batch), rnn.eval()(batch)]
    runs[1][1].sum().backward()
    take_grads(rnn)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            runs += [plain.train()(batch), plain.eval()(batch), rnn.eval()(batch)]
    frozen = plain.requires_grad_(False)
    runs.append(frozen(batch))
    for y, h in runs:
        same_bits(y.values, expected[0].values)
        same_bits(h, expected[1])


def test_5_torchs_pair_stays(backend: str) -> None:
    y, h = unrolled.nn.RNN(INPUT, HIDDEN)(torch.randn(4, 2, INPUT))
    assert type(y) is type(h) is Tensor
    same_bits(unrolled.nn.last(h), y[-1])


@pytest.mark.parametrize("options", OPTIONS, ids=ids)
@pytest.mark.parametrize("bias", [True, False])
def test_6_every_parameter_receives_a_gradient(options: dict[str, Any], bias: bool, backend: str) -> None:
    rnn = unrolled.nn.RNN(INPUT, HIDDEN, bias=bias, learn_initial_state=True, **options)
    assert "initial_state" in dict(rnn.named_parameters())
    _, h = rnn(batch_of([4, 2, 1], torch.float32))
    (h * torch.randn_like(h)).sum().backward()
    found = take_grads(rnn)
    assert all(bool(value.any()) for value in found.values())
    assert len({value.data_ptr() for value in found.values()}) == len(found)  # clipped in place, each on its own


def test_6_a_learned_initial_state_is_every_sequences_first_state(backend: str) -> None:
    rnn = unrolled.nn.RNN(INPUT, HIDDEN, 2, bidirectional=True, learn_initial_state=True, dtype=torch.float64)
    assert not bool(rnn.initial_state.any())
    torch.nn.init.normal_(rnn.initial_state)
    batch = batch_of([4, 0, 2])
    y, h = rnn(batch)
    h.sum().backward()
    learned = take_grads(rnn)
    h0 = rnn.initial_state.detach()[:, None].expand(-1, 3, -1).clone().requires_grad_()
    y_given, h_given = rnn(batch, h0)
    h_given.sum().backward()
    same_bits(y.values, y_given.values)
    same_bits(h, h_given)
    close(learned["initial_state"], h0.grad.sum(1), 3)


@pytest.mark.parametrize("threads", [1, 2])
def test_7_the_same_batch_gives_the_same_bits(threads: int, backend: str) -> None:
    torch.set_num_threads(threads)
    rnn = unrolled.nn.RNN(33, 65, 2, bidirectional=True, dropout=0.3)
    embedding, readout, loss = unrolled.nn.Embedding(11, 33), unrolled.nn.Linear(130, 5), unrolled.nn.CrossEntropyLoss()
    model = nn.ModuleList([rnn, embedding, readout])
    tokens, target = Ragged(torch.randint(11, (90,)), [0, 30, 30, 33, 50, 57, 90]), torch.randint(5, (6,))

    def run() -> list[Tensor]:
        torch.manual_seed(3)
        y, h = rnn(embedding(tokens))
        value = loss(readout(unrolled.nn.last(h)), target)
        value.backward()
        return [y.values, h, value, *take_grads(model).values()]

    expected = run()
    for _ in range(3):
        for found, reference in zip(run(), expected, strict=True):
            same_bits(found, reference)
