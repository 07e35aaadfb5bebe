"""SequenceClassifier against the same network made of torch.nn, one sequence at a time."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from unrolled.models import SequenceClassifier
from unrolled.models.classifier import maximum, mean
from unrolled.ragged import Ragged

LENGTHS = [3, 0, 1, 5]
NUMBERS = [0, 3, 3, 4, 9]


def batch(channels: int | None = None) -> Ragged:
    torch.manual_seed(1)
    tokens = torch.randint(7, (9,)) if channels is None else torch.randn(9, channels)
    return Ragged(tokens, torch.tensor(NUMBERS))


def model(channels: int | None = None, **options) -> SequenceClassifier:
    torch.manual_seed(0)
    source = {"vocabulary_size": 7} if channels is None else {"num_channels": channels}
    built = SequenceClassifier(3, **source, embedding_size=4, hidden_size=5, **options)
    for name, parameter in built.rnn.named_parameters():
        if name.startswith("initial"):
            torch.nn.init.normal_(parameter)
    return built.double().eval()


def twin(ours: SequenceClassifier, inputs: Ragged) -> torch.Tensor:
    """The same logits from torch.nn's own modules, sequence by sequence."""
    rnn = ours.rnn
    directions = 2 if rnn.bidirectional else 1
    kind = type(rnn).__name__
    options = {"nonlinearity": rnn.nonlinearity} if kind == "RNN" else {}
    theirs = getattr(torch.nn, kind)(4, 5, rnn.num_layers, bidirectional=rnn.bidirectional, **options).double()
    weights = dict(rnn.state_dict())
    zero = torch.zeros(rnn.num_layers * directions, 5, dtype=torch.float64)
    start = weights.pop("initial_state", zero)
    before = (start, weights.pop("initial_memory", zero)) if kind == "LSTM" else start
    theirs.load_state_dict(weights)
    rows = []
    for sequence in inputs:
        if sequence.dtype == torch.int64:
            embedded = torch.nn.functional.embedding(sequence, ours.embedding.weight)
        else:
            embedded = torch.nn.functional.linear(sequence.double(), ours.embedding.weight, ours.embedding.bias)
        if len(sequence):
            states, final = theirs(embedded, before)
            final = final[0] if kind == "LSTM" else final
            readings = {"mean": states.mean(0), "max": states.amax(0), "last": final[-directions:].flatten()}
        else:
            nothing = torch.zeros(5 * directions, dtype=torch.float64)
            readings = {"mean": nothing, "max": nothing, "last": start[-directions:].flatten()}
        rows.append(torch.nn.functional.linear(readings[ours.reading], ours.linear.weight, ours.linear.bias))
    return torch.stack(rows)


@pytest.mark.parametrize("channels", [None, 2])
@pytest.mark.parametrize("reading", ["last", "mean", "max"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bidirectional": True, "num_layers": 2},
        {"nonlinearity": "relu"},
        {"learn_initial_state": True, "bidirectional": True},
        {"model": "lstm", "learn_initial_state": True, "num_layers": 2},
        {"model": "gru", "bidirectional": True, "learn_initial_state": True},
    ],
)
def test_equals_torch_modules_on_each_sequence_alone(channels, reading, options):
    ours, inputs = model(channels, reading=reading, **options), batch(channels)
    logits = ours(inputs)
    assert logits.shape == (4, 3)
    assert_close(logits, twin(ours, inputs), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("reading", ["last", "mean", "max"])
def test_gradients_of_every_parameter_are_those_of_the_twin(reading):
    ours, inputs = model(reading=reading, bidirectional=True), batch()
    names, parameters = zip(*ours.named_parameters(), strict=True)
    weight = torch.randn(4, 3, dtype=torch.float64)
    found = torch.autograd.grad((ours(inputs) * weight).sum(), parameters)
    theirs = model(reading=reading, bidirectional=True)

    def logits(*values):
        return torch.func.functional_call(theirs, dict(zip(names, values, strict=True)), (inputs,))

    step = 1e-6
    for name, parameter, gradient in zip(names, parameters, found, strict=True):
        direction = torch.randn_like(parameter)
        ends = []
        for sign in (1, -1):
            moved = [p.detach() + sign * step * direction if p is parameter else p.detach() for p in parameters]
            ends.append((logits(*moved) * weight).sum())
        slope = (ends[0] - ends[1]) / (2 * step)
        assert gradient.abs().max() > 0, name
        assert_close((gradient * direction).sum(), slope.detach(), rtol=1e-6, atol=1e-8, msg=name)


@pytest.mark.parametrize("options", [{}, {"model": "gru", "bidirectional": True, "num_layers": 2}])
def test_scores_for_each_step(options):
    ours, inputs = model(reading="each", **options), batch()
    scores = ours(inputs)
    assert scores.shape == (9, 3)
    states, _ = ours.rnn(ours.embedding(inputs))
    assert_close(scores, torch.nn.functional.linear(states.values, ours.linear.weight, ours.linear.bias))
    final = model(reading="last", **options)
    if not options:
        assert_close(scores[[2, 3, 8]], final(inputs)[[0, 2, 3]])
    assert ours(Ragged(torch.empty(0, dtype=torch.int64), torch.tensor([0]))).shape == (0, 3)


@pytest.mark.parametrize(
    ("options", "training"),
    [
        ({"recurrent_dropout": 0.5}, True),
        ({"zoneout": 0.5}, False),
        ({"model": "lstm", "zoneout": (0.0, 0.5)}, False),
        ({"proj_size": 2}, False),
        ({"model": "lstm", "proj_size": 2, "bidirectional": True}, False),
        ({"layer_norm": True}, False),
        ({"model": "lstm", "peephole": True}, False),
        ({"model": "gru", "reset": "before"}, False),
        ({"model": "lstm", "forget_bias": 1.0}, False),
        ({"recurrent_init": "orthogonal"}, False),
    ],
)
def test_every_option_of_the_layer_changes_the_scores(options, training):
    plain = {name: options[name] for name in ("model", "bidirectional") if name in options}
    for reading in ("last", "mean"):
        changed, same = model(reading=reading, **options).train(training), model(reading=reading, **plain)
        assert changed(batch()).shape == (4, 3)
        assert (changed(batch()) - same(batch())).abs().max() > 1e-4
        assert model(reading=reading, **options).linear.in_features == changed.linear.in_features


def test_truncation_changes_the_gradient_alone():
    whole, cut = model(), model(bptt=2)
    scores = [network(batch()) for network in (whole, cut)]
    assert torch.equal(*scores)
    gradients = [
        torch.autograd.grad(s.square().sum(), n.rnn.weight_hh_l0)[0] for s, n in zip(scores, (whole, cut), strict=True)
    ]
    assert (gradients[0] - gradients[1]).abs().max() > 1e-6


def test_mean_and_maximum_by_hand():
    states = Ragged(torch.tensor([[1.0, -4.0], [3.0, -2.0], [5.0, -7.0]]), torch.tensor([0, 2, 2, 3]))
    assert_close(mean(states), torch.tensor([[2.0, -3.0], [0.0, 0.0], [5.0, -7.0]]))
    assert_close(maximum(states), torch.tensor([[3.0, -2.0], [0.0, 0.0], [5.0, -7.0]]))


@pytest.mark.parametrize("read", [mean, maximum])
def test_readings_have_exact_gradients(read):
    values = torch.randn(6, 2, dtype=torch.float64, requires_grad=True)
    offsets = torch.tensor([0, 4, 4, 6])
    assert torch.autograd.gradcheck(lambda v: read(Ragged(v, offsets)), values)


@pytest.mark.parametrize("reading", ["last", "mean", "max"])
@pytest.mark.parametrize("channels", [None, 2])
def test_an_empty_batch_has_zero_gradients(reading, channels):
    ours = model(channels, reading=reading)
    nothing = torch.empty(0, dtype=torch.int64) if channels is None else torch.empty(0, channels)
    logits = ours(Ragged(nothing, torch.tensor([0])))
    assert logits.shape == (0, 3)
    logits.sum().backward()
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None, name
        assert_close(parameter.grad, torch.zeros_like(parameter), msg=name)


@pytest.mark.parametrize("changed", [{"dropout": 0.5}, {"dropout": 0.5, "num_layers": 2}])
def test_dropout_acts_in_training_alone(changed):
    ours, inputs = model(**changed), batch()
    assert_close(ours(inputs), twin(ours, inputs))
    ours.train()
    assert (ours(inputs) - ours(inputs)).abs().max() > 1e-3
    assert ours.rnn.dropout == (0.5 if changed.get("num_layers") == 2 else 0.0)


def test_numbers_of_another_dtype_are_taken():
    ours, inputs = model(2), batch(2)
    assert inputs.values.dtype == torch.float32
    assert_close(ours(inputs), ours(inputs.with_values(inputs.values.double())))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocabulary_size": 3, "num_channels": 3}, "vocabulary_size or num_channels, found 3 and 3"),
        ({}, "vocabulary_size or num_channels, found None and None"),
        (
            {"vocabulary_size": 3, "reading": "first"},
            "reading must be one of last, mean, max, attention, each, found 'first'",
        ),
        ({"vocabulary_size": 3, "model": "lstn"}, "model must be one of rnn, lstm, gru, found 'lstn'"),
        ({"vocabulary_size": 0}, "input size must be at least 1, found 0"),
        ({"vocabulary_size": 3, "nonlinearity": "sin"}, "nonlinearity must be"),
    ],
)
def test_mistakes(options, message):
    with pytest.raises(ValueError, match=message):
        SequenceClassifier(2, **options)


def test_an_argument_that_the_layer_does_not_have():
    with pytest.raises(TypeError, match="nonlinearity"):
        SequenceClassifier(2, vocabulary_size=3, model="gru", nonlinearity="relu")


def test_the_other_kind_of_input():
    with pytest.raises(TypeError, match="reads numbers"):
        model(2)(batch())
    with pytest.raises(TypeError, match="reads token numbers"):
        model()(batch(2))
