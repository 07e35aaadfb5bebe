"""The classifiers that attend, against the same networks made of torch.nn, one sequence at a time."""

from __future__ import annotations

import math
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from test_resume import outcome
from tolerances import FINITE_BOUND, ROUNDING, TRANSFORMER, close
from toy import toy_config
from unrolled.config import parse_config
from unrolled.models import SequenceClassifier, TransformerClassifier, classifier
from unrolled.ragged import Ragged
from unrolled.run import train
from unrolled.training import Interrupted, Progress
from unrolled.verify.judges import autograd, finite_difference_errors

NUMBERS = [0, 3, 3, 4, 9]  # lengths 3, 0, 1, 5
MODELS: dict[str, dict[str, Any]] = {
    "attention": {"model": "attention", "encoder": "lstm", "embedding_size": 4, "hidden_size": 6, "attention_size": 5},
    "transformer": {"model": "transformer", "hidden_size": 8, "heads": 2, "feed_forward_size": 7},
}


def batch(channels: int | None = None) -> Ragged:
    torch.manual_seed(1)
    tokens = torch.randint(7, (9,)) if channels is None else torch.randn(9, channels)
    return Ragged(tokens, torch.tensor(NUMBERS))


def model(kind: str, channels: int | None = None, **options: Any) -> Any:
    torch.manual_seed(0)
    source = {"vocabulary_size": 7} if channels is None else {"num_channels": channels}
    built = classifier(3, **source, **MODELS[kind], **options).double().eval()
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)  # no gain of 1, no bias of 0
    return built


def embedded(ours: Any, sequence: torch.Tensor) -> torch.Tensor:
    if sequence.dtype == torch.int64:
        return torch.nn.functional.embedding(sequence, ours.embedding.weight)
    return torch.nn.functional.linear(sequence.double(), ours.embedding.weight, ours.embedding.bias)


def read_by_attention(ours: SequenceClassifier, x: torch.Tensor) -> torch.Tensor:
    kind, rnn, attention = type(ours.rnn).__name__, ours.rnn, ours.attention
    theirs = getattr(torch.nn, kind)(4, 6, rnn.num_layers, bidirectional=rnn.bidirectional).double()
    theirs.load_state_dict(rnn.state_dict())
    states, final = theirs(x)
    h = (final[0] if kind == "LSTM" else final)[-rnn.num_directions :].flatten()
    a = torch.tanh(attention.weight_query @ h + attention.bias + states @ attention.weight_key.T)
    return (a @ attention.v).softmax(0) @ states


def read_by_transformer(ours: TransformerClassifier, x: torch.Tensor) -> torch.Tensor:
    first, width = ours.encoder.layers[0], x.shape[1]
    layer = torch.nn.TransformerEncoderLayer(
        *(width, first.self_attn.num_heads, first.linear1.out_features, 0.0),
        activation=first.activation,
        batch_first=True,
        norm_first=first.norm_first,
    )
    norm = torch.nn.LayerNorm(width) if ours.encoder.norm is not None else None
    theirs = torch.nn.TransformerEncoder(layer, len(ours.encoder.layers), norm, enable_nested_tensor=False)
    theirs = theirs.double().eval()
    theirs.load_state_dict(ours.encoder.state_dict())
    t, i = torch.arange(len(x)).double()[:, None], torch.arange(0, width, 2).double()
    angle = t * 10000 ** (-i / width)
    states = theirs((x + torch.stack([angle.sin(), angle.cos()], 2).flatten(1)).unsqueeze(0))[0]
    return {"mean": states.mean(0), "max": states.amax(0), "last": states[-1]}[ours.reading]


def twin(ours: Any, inputs: Ragged) -> torch.Tensor:
    read = read_by_attention if isinstance(ours, SequenceClassifier) else read_by_transformer
    nothing = torch.zeros(ours.linear.in_features, dtype=torch.float64)
    rows = [read(ours, embedded(ours, sequence)) if len(sequence) else nothing for sequence in inputs]
    return torch.nn.functional.linear(torch.stack(rows), ours.linear.weight, ours.linear.bias)


@pytest.mark.parametrize("channels", [None, 2])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("attention", {}),
        ("attention", {"bidirectional": True, "num_layers": 2}),
        ("transformer", {"num_layers": 2}),
        ("transformer", {"norm_first": False, "reading": "max"}),
        ("transformer", {"activation": "gelu", "reading": "last"}),
    ],
)
def test_equals_torch_modules_on_each_sequence_alone(channels: int | None, kind: str, options: dict[str, Any]) -> None:
    ours, inputs = model(kind, channels, **options), batch(channels)
    logits = ours(inputs)
    assert logits.shape == (4, 3)
    close(logits, twin(ours, inputs), TRANSFORMER)


@pytest.mark.parametrize(("kind", "encoder"), [("attention", "gru"), ("attention", "rnn")])
def test_any_recurrent_layer_may_be_read(kind: str, encoder: str) -> None:
    torch.manual_seed(0)
    ours = classifier(3, vocabulary_size=7, **{**MODELS[kind], "encoder": encoder}).double()
    assert type(ours.rnn).__name__ == encoder.upper()
    close(ours(batch()), twin(ours, batch()), TRANSFORMER)


@pytest.mark.parametrize("kind", MODELS)
def test_gradients_of_every_parameter_are_slopes(kind: str) -> None:
    ours, inputs = model(kind), batch()

    def scores(**parameters: Tensor) -> Tensor:
        return torch.func.functional_call(ours, parameters, (inputs,))

    parameters = dict(ours.named_parameters())
    _, gradients = autograd(scores, parameters)
    assert max(finite_difference_errors(scores, parameters, gradients).values()) <= FINITE_BOUND
    for name, gradient in gradients.items():
        assert bool(gradient.any()), name


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("attention", {"attention_size": 9}),
        ("attention", {"layer_norm": True}),
        ("transformer", {"heads": 4}),
        ("transformer", {"activation": "gelu"}),
        ("transformer", {"activation": "gelu_tanh"}),
        ("transformer", {"activation": "silu"}),
        ("transformer", {"gated": True}),
        ("transformer", {"norm": "rms"}),
        ("transformer", {"norm_first": False}),
        ("transformer", {"positions": "learned", "max_positions": 5}),
        ("transformer", {"positions": "rotary"}),
        ("transformer", {"positions": "alibi"}),
        ("transformer", {"reading": "max"}),
        ("transformer", {"reading": "last"}),
    ],
)
def test_every_option_changes_the_scores_and_none_what_a_batch_is(kind: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    changed = classifier(3, vocabulary_size=7, **{**MODELS[kind], **options}).double().eval()
    torch.manual_seed(0)
    plain = classifier(3, vocabulary_size=7, **MODELS[kind]).double().eval()
    inputs = batch()
    scores = changed(inputs)
    assert scores.shape == (4, 3)
    assert (scores - plain(inputs)).abs().max() > ROUNDING
    alone = torch.cat([changed(Ragged(sequence, torch.tensor([0, len(sequence)]))) for sequence in inputs])
    close(scores, alone, TRANSFORMER)
    close(scores[1], changed.linear.bias, TRANSFORMER)  # of no token


@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "rotary", "alibi"])
def test_the_order_of_tokens_matters(positions: str) -> None:
    ours = model("transformer", positions=positions)
    once, again = (ours(Ragged(torch.tensor(tokens), torch.tensor([0, 3]))) for tokens in ([1, 2, 3], [2, 1, 3]))
    assert (once - again).abs().max() > ROUNDING


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("channels", [None, 2])
def test_an_empty_batch_has_zero_gradients(kind: str, channels: int | None) -> None:
    ours = model(kind, channels)
    nothing = torch.empty(0, dtype=torch.int64) if channels is None else torch.empty(0, channels)
    for offsets in ([0], [0, 0, 0]):
        logits = ours(Ragged(nothing, torch.tensor(offsets)))
        assert logits.shape == (len(offsets) - 1, 3)
        ours.zero_grad()
        (logits.sum() if len(offsets) == 1 else (logits - ours.linear.bias).sum()).backward()
        for name, parameter in ours.named_parameters():
            assert parameter.grad is not None, name
            assert not bool(parameter.grad.any()), name


@pytest.mark.parametrize("kind", MODELS)
def test_dropout_acts_in_training_alone(kind: str) -> None:
    ours, inputs = model(kind, dropout=0.5), batch()
    assert torch.equal(ours(inputs), ours(inputs))
    close(ours(inputs), model(kind)(inputs), TRANSFORMER)
    ours.train()
    assert (ours(inputs) - ours(inputs)).abs().max() > ROUNDING


def test_mistakes() -> None:
    ours = model("transformer", positions="learned", max_positions=4)
    with pytest.raises(ValueError, match="position 4 lies beyond the 4 that are learned"):
        ours(batch())
    with pytest.raises(ValueError, match="reading must be one of last, mean, max, found 'each'"):
        TransformerClassifier(2, vocabulary_size=3, reading="each")
    with pytest.raises(ValueError, match=r"positions must be one of sinusoidal, .*, found 'none'"):
        TransformerClassifier(2, vocabulary_size=3, positions="none")
    for options in ({"reading": "attention"}, {"attention_size": 3}, {"reading": "attention", "attention_size": 0}):
        with pytest.raises(ValueError, match='attention_size, at least 1, belongs to reading = "attention"'):
            SequenceClassifier(2, vocabulary_size=3, **options)


@pytest.mark.parametrize("kind", ["attention", "transformer"])
def test_interrupted_and_resumed_is_the_same_to_the_bit(kind: str, tmp_path: Path) -> None:
    network = {**MODELS[kind], "num_layers": 2, "dropout": 0.2}

    def config(run: str) -> Any:
        values = toy_config(tmp_path, run, epochs=1, eval_every=4).model_dump(mode="json")
        return parse_config({**values, "model": network})

    def interrupt(now: Progress) -> None:
        if now.step == 6:
            signal.raise_signal(signal.SIGINT)

    whole = train(config("whole"))
    with pytest.raises(Interrupted, match="after step 7"):
        train(config("cut"), progress=interrupt)
    again = train(config("cut"), resume=True)
    assert outcome(again.folder) == outcome(whole.folder)
    assert math.isfinite(whole.metrics["test"]["loss"])


def test_a_run_of_before_there_was_attention_loads() -> None:
    old = {"model": "gru", "embedding_size": 8, "hidden_size": 8, "reading": "last", "dropout": 0.1, "reset": "after"}
    config = parse_config({"model": old})
    built = classifier(3, vocabulary_size=7, **config.model.arguments())
    names = {name.partition(".")[0] for name in built.state_dict()}
    assert names == {"embedding", "rnn", "linear"}
