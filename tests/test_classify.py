"""The classify task: metrics by hand, losses that add up over parts, files saved and read back, mistakes named."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from unrolled.config import parse_config, read_yaml
from unrolled.data.batches import BatchSampler
from unrolled.data.values import DataError
from unrolled.tasks import TASKS, metrics, task_class
from unrolled.tasks.classify import ClassifyTask

VOWEL = ["apple", "egg", "igloo", "orange", "umbrella", "ant", "eel", "ice", "owl", "urn"]
CONSONANT = ["bat", "cat", "dog", "fox", "goat", "hen", "jar", "kite", "lion", "mule"]
TRAIN = "".join(f"{label}\t{word}\n" for label, words in (("vowel", VOWEL), ("consonant", CONSONANT)) for word in words)


@pytest.fixture
def words(tmp_path):
    path = tmp_path / "words.txt"
    path.write_text(TRAIN + "vowel\t\n")
    return path


def prepare(path, data=None, **sections) -> ClassifyTask:
    model = {"embedding_size": 8, "hidden_size": 8, **sections.pop("model", {})}
    fractions = {"valid_fraction": 0, "test_fraction": 0, "min_frequency": 1}
    config = {"data": {"train": str(path), **fractions, **(data or {})}, "model": model, **sections}
    torch.manual_seed(0)
    return ClassifyTask.prepare(parse_config(config))


def numbers(tmp_path, name="a.jsonl", channels=2, count=12):
    rng = np.random.default_rng(0)
    rows = []
    for i in range(count):
        steps = (rng.normal(size=(i % 5, channels)) + 5 * (i % 2)).tolist()
        rows.append(json.dumps({"values": steps, "label": "high" if i % 2 else "low"}))
    path = tmp_path / name
    path.write_text("\n".join(rows))
    return path


# Metrics


def test_metrics_of_two_classes_by_hand():
    confusion = metrics.confusion_matrix([0] * 50 + [1] * 50, [0] * 45 + [1] * 5 + [0] * 10 + [1] * 40, 2)
    assert confusion.tolist() == [[45, 5], [10, 40]]
    assert metrics.accuracy(confusion) == 0.85
    assert metrics.majority_baseline(confusion) == 0.5
    table = metrics.per_class(confusion, ["a", "b"])
    assert table["a"] == {"precision": 45 / 55, "recall": 0.9, "f1": 90 / 105, "count": 50}
    assert table["b"] == {"precision": 40 / 45, "recall": 0.8, "f1": 80 / 95, "count": 50}
    assert metrics.macro_f1(confusion) == pytest.approx((90 / 105 + 80 / 95) / 2)
    assert metrics.mcc(confusion) == pytest.approx((45 * 40 - 5 * 10) / math.sqrt(55 * 50 * 45 * 50))


def test_metrics_of_three_classes_by_hand():
    confusion = metrics.confusion_matrix([0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 2, 0], 3)
    assert confusion.tolist() == [[1, 1, 0], [0, 2, 0], [1, 0, 1]]
    assert metrics.accuracy(confusion) == pytest.approx(4 / 6)
    assert metrics.macro_f1(confusion) == pytest.approx((2 / 4 + 4 / 5 + 2 / 3) / 3)
    # covariance 4 * 6 - (2 * 2 + 2 * 3 + 2 * 1), variances 36 - (4 + 9 + 1) and 36 - (4 + 4 + 4)
    assert metrics.mcc(confusion) == pytest.approx(12 / math.sqrt(22 * 24))


def test_metrics_where_a_definition_divides_by_zero():
    one_sided = metrics.confusion_matrix([0, 0, 1], [0, 0, 0], 3)
    assert metrics.mcc(one_sided) == 0
    assert metrics.per_class(one_sided, "abc")["c"] == {"precision": 0.0, "recall": 0.0, "f1": 0.0, "count": 0}
    assert metrics.macro_f1(one_sided) == pytest.approx((4 / 5 + 0) / 2)
    nothing = metrics.confusion_matrix([], [], 2)
    scores = [f(nothing) for f in (metrics.accuracy, metrics.majority_baseline, metrics.macro_f1, metrics.mcc)]
    assert scores == [0, 0, 0, 0]


def test_mcc_of_perfect_and_reversed_answers():
    assert metrics.mcc(metrics.confusion_matrix([0, 1, 2], [0, 1, 2], 3)) == pytest.approx(1)
    assert metrics.mcc(metrics.confusion_matrix([0, 1], [1, 0], 2)) == pytest.approx(-1)


# Data to batches


def test_tasks_are_found_by_name():
    assert task_class("classify") is ClassifyTask
    assert list(TASKS) == ["classify", "memory"]
    with pytest.raises(ValueError, match=r"no task 'clasify': did you mean classify\?"):
        task_class("clasify")


def test_collate(words):
    task = prepare(words)
    examples = [task.splits["train"][i] for i in (0, 20, 13)]
    batch = task.collate(examples)
    assert batch.inputs.lengths.tolist() == [5, 0, 3] == [task.num_tokens(e) for e in examples]
    assert [task.encoder.id_to_token(i) for i in batch.inputs[2].tolist()] == ["f", "o", "x"]
    assert [task.labels[i] for i in batch.targets] == ["vowel", "vowel", "consonant"]
    assert batch.rows == [1, 21, 14]
    moved = batch.to("meta")
    assert moved.inputs.values.device.type == moved.targets.device.type == "meta"


def test_collate_numbers_scales_by_the_training_data(tmp_path):
    task = prepare(numbers(tmp_path), {"values_column": "values", "min_frequency": 2})
    batch = task.collate(task.splits["train"])
    assert batch.inputs.values.shape == (sum(i % 5 for i in range(12)), 2)
    assert_close(batch.inputs.values.mean(0), torch.zeros(2), atol=1e-6, rtol=0)
    assert_close(batch.inputs.values.std(0, correction=0), torch.ones(2))


# Loss


@pytest.mark.parametrize("class_weights", ["none", "balanced"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_loss_is_torchs_and_adds_up_over_parts(words, class_weights, smoothing):
    training = {"class_weights": class_weights, "label_smoothing": smoothing}
    task = prepare(words, training=training, model={"dropout": 0.0})
    model, examples = task.build_model(), task.splits["train"]
    batch = task.collate(examples)
    weights = None if class_weights == "none" else torch.tensor([21 / (2 * 10), 21 / (2 * 11)])
    expected = torch.nn.functional.cross_entropy(
        model(batch.inputs), batch.targets, weight=weights, label_smoothing=smoothing
    )
    loss, count = task.loss_sum(model, batch)
    assert_close(loss / count, expected)
    parts = [task.loss_sum(model, task.collate(part)) for part in (examples[:4], [], examples[4:])]
    assert_close(sum(part for part, _ in parts), loss)
    assert_close(sum(part for _, part in parts), count)


def test_the_loss_of_no_example_is_zero_with_zero_gradients(words):
    task = prepare(words)
    model = task.build_model()
    loss, count = task.loss_sum(model, task.collate([]))
    loss.backward()
    assert (float(loss.detach()), float(count)) == (0, 0)
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


# Scores and predictions


def test_the_confusion_names_the_pairs_that_occur():
    confusion = metrics.confusion_matrix([0, 0, 0, 2], [0, 1, 1, 2], 3)
    assert metrics.counts(confusion, ["a", "b", "c"]) == {"a": {"a": 1, "b": 2}, "c": {"c": 1}}
    many = metrics.confusion_matrix([0], [1], 3000)
    assert metrics.counts(many, [str(i) for i in range(3000)]) == {"0": {"1": 1}}


def test_scores_do_not_depend_on_the_batch_size_and_leave_the_mode(words):
    task = prepare(words, model={"dropout": 0.5}, training={"class_weights": "balanced", "label_smoothing": 0.3})
    model, examples = task.build_model(), task.splits["train"]
    one, three = task.metrics(model, examples, batch_size=1), task.metrics(model, examples, batch_size=3)
    assert model.training
    assert one["loss"] == pytest.approx(three["loss"], rel=1e-5)
    assert one["confusion"] == three["confusion"]
    model.eval()
    batch = task.collate(examples)
    with torch.no_grad():
        assert one["loss"] == pytest.approx(
            float(torch.nn.functional.cross_entropy(model(batch.inputs), batch.targets))
        )
    assert one["examples"] == sum(row["count"] for row in one["per_class"].values()) == 21
    assert one["majority_baseline"] == 11 / 21
    assert json.loads(json.dumps(one)) == one


def test_scores_of_no_example(words):
    task = prepare(words)
    scores = task.metrics(task.build_model(), [])
    assert (scores["examples"], scores["loss"], scores["accuracy"]) == (0, 0, 0)


def test_predictions(words):
    task = prepare(words)
    model = task.build_model()
    results = task.predictions(model, ["apple", "", "中 unseen", "cafe\u0301"], probabilities=True)
    for result in results:
        assert sum(result["probabilities"].values()) == pytest.approx(1, abs=1e-6)
        assert (
            result["probability"] == max(result["probabilities"].values()) == result["probabilities"][result["label"]]
        )
    plain = task.predictions(model, ["apple"])
    assert list(plain[0]) == ["label", "probability"]
    assert task.predictions(model, []) == []


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ("apple", "give a list of texts, found one text 'apple'"),
        (["a", 3], "input 1: the input must be a text, found '3'"),
        (["a", "b\ud800"], "input 1: character 2 is half of a surrogate pair"),
        ([[[1.0]]], "input 0: the input must be a text, found a list"),
    ],
)
def test_mistakes_in_texts_to_predict(words, inputs, message):
    task = prepare(words)
    with pytest.raises(DataError, match=message):
        task.predictions(task.build_model(), inputs)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (["apple"], "input 0: expected a list of time steps"),
        ([[[1.0, 2.0]], [[1.0]]], "input 1: 1 numbers a time step, but the training data have 2"),
        ([[[1.0, math.nan]]], "input 0: time step 1, channel 2 must be a finite number, found 'NaN'"),
    ],
)
def test_mistakes_in_numbers_to_predict(tmp_path, inputs, message):
    task = prepare(numbers(tmp_path), {"values_column": "values", "min_frequency": 2})
    with pytest.raises(DataError, match=message):
        task.predictions(task.build_model(), inputs)


def test_scores_that_are_not_finite_are_no_prediction(words):
    task = prepare(words)
    model = task.build_model()
    torch.nn.init.constant_(model.linear.bias, math.inf)
    with pytest.raises(DataError, match="input 0: the model's scores are not finite"):
        task.predictions(model, ["apple"])


# Files


@pytest.mark.parametrize("kind", ["characters", "words", "bpe", "numbers"])
def test_saved_and_loaded_it_predicts_the_same(tmp_path, words, kind):
    if kind == "numbers":
        data, inputs = {"values_column": "values", "min_frequency": 2}, [[[1.0, 2.0], [3.0, 4.0]], []]
        task = prepare(numbers(tmp_path), data)
    else:
        inputs = ["apple", "Zebra crossing", ""]
        task = prepare(words, {"tokens": kind, "lowercase": True, "max_length": 4})
    model = task.build_model()
    folder = tmp_path / "model"
    folder.mkdir()
    task.save(folder)
    again = ClassifyTask.load(folder)
    assert again.config == task.config
    assert again.labels == task.labels
    assert again.splits == {}
    assert again.predictions(model, inputs, True) == task.predictions(model, inputs, True)
    state = again.build_model().state_dict()
    assert {k: v.shape for k, v in state.items()} == {k: v.shape for k, v in model.state_dict().items()}
    names = {"config.json", "labels.json", "scaler.json" if kind == "numbers" else "tokenizer.json"}
    assert {path.name for path in folder.iterdir()} == names


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("labels.json", None),
        ("labels.json", "[1, 2]"),
        ("labels.json", "[]"),
        ("config.json", "{"),
        ("tokenizer.json", "{}"),
        ("scaler.json", "[]"),
        ("scaler.json", '{"mean": [0, 0], "deviation": [1, 0], "max_length": 0}'),
        ("scaler.json", '{"mean": [0, 0], "deviation": [1], "max_length": 0}'),
        ("scaler.json", '{"mean": [0, "a"], "deviation": [1, 1], "max_length": 0}'),
    ],
)
def test_a_damaged_run_names_the_file(tmp_path, words, name, content):
    if name == "scaler.json":
        prepare(numbers(tmp_path), {"values_column": "values", "min_frequency": 2}).save(tmp_path)
    else:
        prepare(words).save(tmp_path)
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=name):
        ClassifyTask.load(tmp_path)


def test_arrays_are_numbers_too(tmp_path):
    task = prepare(numbers(tmp_path), {"values_column": "values", "min_frequency": 2})
    model, steps = task.build_model(), [[1.0, 2.0], [0.5, -3.0]]
    expected = task.predictions(model, [steps])
    assert task.predictions(model, [np.array(steps)]) == expected
    assert task.predictions(model, [torch.tensor(steps)]) == expected
    assert task.predictions(model, [np.empty((0, 2))]) == task.predictions(model, [[]])


def test_labels_unknown_to_training_name_file_line_and_label(tmp_path, words):
    other = tmp_path / "other.txt"
    other.write_text("vowel\tape\n\nneither\tyes\n")
    message = r"other\.txt, line 3: label 'neither' is not one of training: consonant, vowel"
    with pytest.raises(DataError, match=message):
        prepare(words).examples(str(other))
    with pytest.raises(DataError, match=message):
        prepare(words, {"test": str(other), "test_fraction": 0.1})


def test_a_test_file_of_other_channels(tmp_path):
    data = {"values_column": "values", "min_frequency": 2, "test_fraction": 0.1}
    with pytest.raises(DataError, match=r"b\.jsonl, line 2: 3 numbers a time step, but the training data have 2"):
        prepare(numbers(tmp_path), {**data, "test": str(numbers(tmp_path, "b.jsonl", channels=3))})


@pytest.mark.parametrize(
    ("content", "message"),
    [("a\tx\na\ty\n", "only one label, 'a'"), ("a\t\nb\t\n", "every input is empty")],
)
def test_data_from_which_nothing_can_be_learned(tmp_path, content, message):
    path = tmp_path / "a.txt"
    path.write_text(content)
    with pytest.raises(DataError, match=f"a.txt: {message}"):
        prepare(path)


# Learning


OPTIONS = {
    "rnn": {"proj_size": 3, "recurrent_dropout": 0.1, "bptt": 4},
    "lstm": {"zoneout": 0.05, "zoneout_c": 0.5, "forget_bias": 1.0, "peephole": True, "layer_norm": True},
    "gru": {"reset": "before", "zoneout": 0.1, "recurrent_init": "orthogonal", "layer_norm": True},
}
ATTENDING = {
    "attention": {"encoder": "gru", "attention_size": 3, "reset": "before"},
    "transformer": {"embedding_size": 64, "heads": 2, "feed_forward_size": 12, "gated": True, "positions": "rotary"},
}


@pytest.mark.parametrize("model", ["rnn", "lstm", "gru"])
@pytest.mark.parametrize("options", [False, True])
def test_the_kind_of_network_is_saved(tmp_path, words, model, options):
    task = prepare(words, model={"model": model, **(OPTIONS[model] if options else {})})
    task.save(tmp_path)
    built, again = task.build_model(), ClassifyTask.load(tmp_path).build_model()
    assert str(again) == str(built)
    assert built.rnn.mode.startswith(model.upper())
    if options:
        for name in OPTIONS[model]:
            assert name in str(built.rnn) or name == "zoneout_c"


@pytest.mark.parametrize("model", ATTENDING)
def test_a_network_that_attends_is_saved(tmp_path, words, model):
    task = prepare(words, model={"model": model, **ATTENDING[model]})
    task.save(tmp_path)
    again, built = ClassifyTask.load(tmp_path), task.build_model()
    assert again.config == task.config
    other = again.build_model()
    assert str(other) == str(built)
    other.load_state_dict(built.state_dict())
    assert again.predictions(other, ["apple", ""], True) == task.predictions(built, ["apple", ""], True)


def test_a_sequence_without_a_learned_position_is_named(words):
    network = {"model": "transformer", "embedding_size": 64, "positions": "learned", "max_positions": 7}
    with pytest.raises(DataError, match=r"words\.txt, line 5: 8 steps, and model\.max_positions = 7: give more"):
        prepare(words, model=network)
    task = prepare(words, {"max_length": 7}, model=network)
    assert len(task.predictions(task.build_model(), ["umbrella" * 9])) == 1


@pytest.mark.parametrize("kind", ["text", "numbers", "lstm", "gru", *ATTENDING])
def test_it_learns(tmp_path, words, kind):
    torch.set_num_threads(1)
    data = {"values_column": "values", "min_frequency": 2} if kind == "numbers" else {}
    path = numbers(tmp_path, count=40) if kind == "numbers" else words
    network = {"model": kind} if kind not in ("text", "numbers") else {}
    network |= {"embedding_size": 64, "heads": 2} if kind == "transformer" else {"bidirectional": True}
    task = prepare(path, data, model={**network, "hidden_size": 16, "dropout": 0.0})
    model, examples = task.build_model(), task.splits["train"]
    optimizer = torch.optim.AdamW(model.parameters(), 0.02)
    sampler = BatchSampler([task.num_tokens(e) for e in examples], batch_size=8)
    for _ in range(30):
        for indices in sampler:
            loss, count = task.loss_sum(model, task.collate([examples[i] for i in indices]))
            (loss / count).backward()
            optimizer.step()
            optimizer.zero_grad()
    scores = task.metrics(model, examples)
    empty = sum(task.num_tokens(e) == 0 for e in examples)
    assert scores["accuracy"] >= 1 - empty / len(examples)
    assert scores["majority_baseline"] < 0.6


def test_the_recipe_is_valid():
    from importlib.resources import files

    config = parse_config(read_yaml(str(files("unrolled") / "recipes" / "names.yaml")))
    assert config.data.train == "builder:names"
