"""Readers, splits and batches: what is read, and what is refused with which words."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unrolled.config import DataConfig
from unrolled.data.batches import BatchSampler
from unrolled.data.builders import build
from unrolled.data.load import load_splits
from unrolled.data.readers import read_examples, read_inputs
from unrolled.data.splits import split
from unrolled.data.values import DataError, Row

SMS = Path(__file__).parents[2] / "shared" / "data" / "sms_spam" / "SMSSpamCollection"
TEXT = DataConfig()
NUMBERS = DataConfig(values_column="values")


# Readers


def test_csv_quotes_line_breaks_and_bom(file):
    path = file("a.csv", '\ufefftext,id,label\r\n"a ""b"", c\nd",1, x \r\n\r\n,2,y\r\n')
    assert read_examples(path, TEXT) == [Row(2, 'a "b", c\nd', "x"), Row(5, "", "y")]


def test_tsv_does_not_quote(file):
    path = file("a.tsv", 'label\ttext\nx\t"a\ny\tb"c\n')
    assert read_examples(path, TEXT) == [Row(2, '"a', "x"), Row(3, 'b"c', "y")]


def test_pairs_keep_tabs_quotes_and_odd_line_separators(file):
    path = file("a.txt", 'ham\t"a\tb\r\n\nspam\tc\u2028\x85d\n')
    assert read_examples(path, TEXT) == [Row(1, '"a\tb', "ham"), Row(3, "c\u2028\x85d", "spam")]


def test_jsonl_columns_by_name_and_labels_of_other_kinds(file):
    data = DataConfig(text_column="body", label_column="class")
    lines = [{"body": "a", "class": 1}, {"body": "", "class": True, "more": None}, {"body": "é", "class": "x"}]
    path = file("a.jsonl", "\n\n".join(json.dumps(line) for line in lines))
    assert read_examples(path, data) == [Row(1, "a", "1"), Row(3, "", "true"), Row(5, "é", "x")]


def test_a_label_is_one_line(file):
    path = file("a.jsonl", json.dumps({"text": "a", "label": "\tone \n two\u2028three "}))
    assert [row.label for row in read_examples(path, TEXT)] == ["one two three"]


def test_numbers(file):
    path = file("a.jsonl", '{"values": [[1, 2.5], [-3e2, 0]], "label": "x"}\n{"values": [], "label": "y"}\n')
    assert read_examples(path, NUMBERS) == [Row(1, [[1.0, 2.5], [-300.0, 0.0]], "x"), Row(2, [], "y")]


@pytest.mark.parametrize(("name", "content"), [("a.csv.gz", b"text,label\na,x\n"), ("a.gz", b"x\ta\n")])
def test_gzip(file, name, content):
    assert [row[1:] for row in read_examples(file(name, gzip.compress(content)), TEXT)] == [("a", "x")]


def test_encoding_by_name(file):
    path = file("a.csv", "text,label\ncafé,x\n".encode("latin-1"))
    assert read_examples(path, DataConfig(encoding="latin-1")) == [Row(2, "café", "x")]


def test_a_field_longer_than_the_csv_module_allows(file):
    assert len(read_examples(file("a.csv", f"text,label\n{'a' * 200_000},x\n"), TEXT)[0].input) == 200_000


@pytest.mark.parametrize(
    ("name", "content", "data", "message"),
    [
        ("a.csv", "", TEXT, "no examples"),
        ("a.csv", "text,label\n", TEXT, "no examples"),
        ("a.txt", "\n\n", TEXT, "no examples"),
        ("a.jsonl", "", NUMBERS, "no examples"),
        ("a.csv", b"text,label\nok,x\ncaf\xe9,x\n", TEXT, "line 3: not utf-8 (byte 0xe9"),
        ("a.csv", "text,label\na,x\n", DataConfig(encoding="utf-9"), "data.encoding = 'utf-9'"),
        ("a.csv", "txt,label\na,x\n", TEXT, "line 1: no column 'text', did you mean 'txt'?"),
        ("a.csv", "a,b\na,x\n", TEXT, "line 1: no column 'label', found 'a', 'b'"),
        ("a.csv", "text,label,text\na,x,b\n", TEXT, "line 1: the header names column 'text' 2 times"),
        ("a.csv", "text,label\na,x\nb\n", TEXT, "line 3: 1 fields, but the header has 2"),
        ("a.csv", "text,label\na,b,x\n", TEXT, "line 2: 3 fields, but the header has 2"),
        ("a.csv", 'text,label\na,x\n"b,x\nc,x\n', TEXT, "line 3: not CSV (unexpected end of data)"),
        ("a.csv", "text,label\na,\n", TEXT, "line 2: the label is empty"),
        ("a.tsv", "text\tlabel\na\tb\tc\n", TEXT, "line 2: 3 fields, but the header has 2"),
        ("a.txt", "x\ta\nno tab here\n", TEXT, "line 2: expected label<TAB>text, found no tab in 'no tab here'"),
        ("a.jsonl", '{"text": "a"}', TEXT, "line 1: no field 'label'"),
        ("a.jsonl", '{"label": "a"}', TEXT, "line 1: no field 'text'"),
        ("a.jsonl", '{"text": "a", "label": "x"}\n{oops', TEXT, "line 2: not JSON"),
        ("a.jsonl", '["a", "x"]', TEXT, "line 1: expected an object {...}, found a list"),
        ("a.jsonl", "[" * 100_000, TEXT, "line 1: not JSON"),
        ("a.jsonl", '{"text": null, "label": "x"}', TEXT, "line 1: the input must be a text, found null"),
        ("a.jsonl", '{"text": 3, "label": "x"}', TEXT, "line 1: the input must be a text, found '3'"),
        ("a.jsonl", '{"text": "a", "label": null}', TEXT, "line 1: a label is a text or a number, found null"),
        ("a.jsonl", '{"text": "a", "label": NaN}', TEXT, "line 1: a label is a text or a number, found 'NaN'"),
        ("a.csv", "text,label\na,x\n", DataConfig(encoding="undefined"), "'undefined' is not an encoding Python knows"),
        ("a.jsonl", '{"text": "a\\ud800", "label": "x"}', TEXT, "line 1: character 2 is half of a surrogate pair"),
        ("a.jsonl", '{"values": "1 2", "label": "x"}', NUMBERS, "line 1: expected a list of time steps"),
        ("a.jsonl", '{"values": [1, 2], "label": "x"}', NUMBERS, "time step 1 must be a list of numbers"),
        ("a.jsonl", '{"values": [[1, 2], [3]], "label": "x"}', NUMBERS, "time step 2 has 1 numbers, the first has 2"),
        ("a.jsonl", '{"values": [[]], "label": "x"}', NUMBERS, "time step 1 has 0 numbers"),
        ("a.jsonl", '{"values": [[1, NaN]], "label": "x"}', NUMBERS, "line 1: time step 1, channel 2 must be a finite"),
        (
            "a.jsonl",
            '{"values": [[1e999]], "label": "x"}',
            NUMBERS,
            "channel 1 must be a finite number, found 'Infinity'",
        ),
        ("a.jsonl", f'{{"values": [[1{"0" * 400}]], "label": "x"}}', NUMBERS, "must be a finite number"),
        ("a.jsonl", '{"values": [[null]], "label": "x"}', NUMBERS, "must be a finite number, found null"),
        ("a.jsonl", '{"values": [[true]], "label": "x"}', NUMBERS, "must be a finite number, found 'true'"),
        (
            "a.jsonl",
            '{"values": [], "label": "x"}\n{"values": [[1]], "label": "x"}\n{"values": [[1, 2]], "label": "x"}',
            NUMBERS,
            "line 3: 2 numbers a time step, but line 2 has 1",
        ),
        ("a.csv.gz", b"text,label", TEXT, "not a gzipped file"),
        ("a.csv.gz", gzip.compress(b"text,label\na,x\n" * 50)[:-12], TEXT, "damaged gzip file"),
    ],
)
def test_mistakes_in_files_name_file_and_line(file, name, content, data, message):
    path = file(name, content)
    with pytest.raises(DataError) as error:
        read_examples(path, data)
    assert message in str(error.value)
    assert str(error.value).startswith(str(path))


def test_a_missing_file_and_a_folder(tmp_path):
    with pytest.raises(DataError, match=r"none.csv: no such file or directory"):
        read_examples(tmp_path / "none.csv", TEXT)
    with pytest.raises(DataError, match="is a directory"):
        read_examples(tmp_path, TEXT)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(["csv", "tsv", "jsonl", "pairs"]), st.booleans(), st.binary(max_size=60))
def test_any_bytes_give_rows_or_a_data_error(tmp_path_factory, format, numbers, content):
    path = tmp_path_factory.getbasetemp() / "any"
    header = b'{"values": ' if numbers else {"csv": b"text,label\n", "tsv": b"text\tlabel\n"}.get(format, b"")
    path.write_bytes(header + content)
    try:
        rows = read_examples(path, NUMBERS if numbers else DataConfig(format=format))
    except DataError as error:
        message, rows = str(error), []
    assert rows or message.startswith(str(path))
    assert all(row.label for row in rows)


def test_inputs_without_labels(file):
    assert read_inputs("-", TEXT, b"one\n\ntwo,\tthree\n") == ["one", "", "two,\tthree"]
    assert read_inputs(file("a.csv", "id,text\n1,a\n2,\n"), TEXT) == ["a", ""]
    assert read_inputs(file("a.jsonl", '{"text": "a"}\n'), TEXT) == ["a"]
    assert read_inputs("-", NUMBERS, b'[[1, 2]]\n{"values": [[3, 4]]}\n[]\n') == [[[1.0, 2.0]], [[3.0, 4.0]], []]
    with pytest.raises(DataError, match="-, line 2: 1 numbers a time step, but line 1 has 2"):
        read_inputs("-", NUMBERS, b"[[1, 2]]\n[[3]]\n")


# Splits


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.sampled_from("abc")), min_size=1, max_size=80), st.integers(0, 99))
def test_split_is_a_partition_that_keeps_equal_inputs_together(examples, seed):
    keys, labels = [f"key {k}" for k, _ in examples], [label for _, label in examples]
    parts = split(keys, labels, {"test": 0.2, "valid": 0.2}, seed)
    assert sorted(i for part in parts.values() for i in part) == list(range(len(examples)))
    places = [{name for name, part in parts.items() if any(keys[i] == key for i in part)} for key in set(keys)]
    assert all(len(place) == 1 for place in places)
    assert {labels[i] for i in parts["train"]} == set(labels)


def test_split_is_stratified_to_the_example():
    labels = ["a"] * 500 + ["b"] * 300 + ["c"] * 14
    parts = split([str(i) for i in range(814)], labels, {"test": 0.1, "valid": 0.2}, 1)
    counts = {name: Counter(labels[i] for i in part) for name, part in parts.items()}
    assert counts["test"] == {"a": 50, "b": 30, "c": 1}
    assert counts["valid"] == {"a": 100, "b": 60, "c": 3}


def test_split_of_many_small_classes_has_the_size_asked_for():
    labels = [f"label {i // 4}" for i in range(400)]
    parts = split([str(i) for i in range(400)], labels, {"test": 0.1}, 1)
    assert len(parts["test"]) == 40
    assert len({labels[i] for i in parts["train"]}) == 100


def test_split_depends_on_the_seed_and_not_on_the_order():
    keys = [f"text {i}" for i in range(200)]
    labels = ["a" if i % 3 else "b" for i in range(200)]
    parts = split(keys, labels, {"test": 0.25}, 7)
    turned = split(keys[::-1], labels[::-1], {"test": 0.25}, 7)
    assert {keys[i] for i in parts["test"]} == {keys[::-1][i] for i in turned["test"]}
    assert parts != split(keys, labels, {"test": 0.25}, 8)


def test_a_label_seen_once_is_trained_on_and_remarked(file):
    path = file("a.txt", "".join(f"{label}\ttext {i}\n" for i, label in enumerate("a" * 30 + "b" * 30 + "c")))
    splits, notes = load_splits(DataConfig(train=str(path)))
    assert "c" in {row.label for row in splits["train"]}
    assert f"{path}: 1 label (first: line 61) seen once only, in training" in notes


def test_equal_texts_do_not_leak_and_are_remarked(file):
    lines = [f"a\tsome text {i % 40}\n" for i in range(120)] + [f"b\tcafe\u0301 {i}\n b\tcafé {i}\n" for i in range(40)]
    path = file("a.txt", "".join(lines) + "a\tcafé 3\n")
    splits, notes = load_splits(DataConfig(train=str(path), valid_fraction=0.2, test_fraction=0.2))
    seen = {name: {row.input.replace("e\u0301", "é") for row in rows} for name, rows in splits.items()}
    assert not seen["train"] & seen["test"]
    assert not seen["train"] & seen["valid"]
    assert not seen["valid"] & seen["test"]
    assert f"{path}: 120 repeated examples (first: line 41), kept" in notes
    assert f"{path}: 1 input (first: line 201) seen before with another label, kept" in notes


def test_given_files_are_kept_and_shared_inputs_remarked(file):
    train = file("train.txt", "a\tone\nb\ttwo\na\tthree\nb\tfour\n")
    test = file("test.txt", "a\tfive\nb\ttwo\n")
    splits, notes = load_splits(DataConfig(train=str(train), test=str(test), valid_fraction=0))
    assert {name: len(rows) for name, rows in splits.items()} == {"train": 4, "test": 2}
    assert notes == [f"{test}: 1 input (first: line 2) also in {train}, kept: the scores flatter"]
    _, notes = load_splits(DataConfig(train=str(train), valid=str(train), test_fraction=0))
    assert notes == [f"{train}: 4 inputs (first: line 1) also in {train}, kept: the scores flatter"]


def test_empty_texts_are_kept_and_remarked(file):
    path = file("a.csv", "text,label\n,x\nb,y\n,x\n")
    splits, notes = load_splits(DataConfig(train=str(path), valid_fraction=0, test_fraction=0))
    assert [row.input for row in splits["train"]] == ["", "b", ""]
    assert f"{path}: 2 empty inputs (first: line 2), kept as sequences of length 0" in notes


def test_too_few_examples_to_split(file):
    path = file("a.txt", "a\tone\nb\ttwo\n")
    splits, notes = load_splits(DataConfig(train=str(path)))
    assert list(splits) == ["train"]
    assert any("2 examples are too few for a valid part of 0.1" in note for note in notes)


def test_no_training_file():
    with pytest.raises(DataError, match=r"data\.train is missing"):
        load_splits(DataConfig())


# Batches

sizes = st.lists(st.integers(0, 9), max_size=40)


@settings(max_examples=100, deadline=None)
@given(sizes, st.integers(1, 7), st.sampled_from([0, 1, 12, 30]), st.integers(1, 3), st.integers(0, 5))
def test_batches_are_a_partition_shared_over_processes(tokens, size, budget, world, seed):
    options = {"batch_size": size, "batch_tokens": budget, "seed": seed}
    whole = BatchSampler(tokens, **options).batches(3)
    assert sorted(i for batch in whole for i in batch) == list(range(len(tokens)))
    for batch in whole:
        filled = sum(max(tokens[i], 1) for i in batch)
        assert len(batch) <= size if not budget else filled <= budget or len(batch) == 1
    shares = [BatchSampler(tokens, **options, rank=rank, world_size=world) for rank in range(world)]
    for share in shares:
        share.epoch = 3
    for batch, *parts in zip(whole, *shares, strict=True):
        assert sorted(i for part in parts for i in part) == sorted(batch)
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


@settings(max_examples=60, deadline=None)
@given(sizes, st.integers(1, 5), st.integers(0, 20))
def test_a_sampler_continues_where_its_state_was_taken(tokens, size, stop):
    def batches(sampler, epochs):
        for _ in range(epochs):
            yield from sampler

    first = BatchSampler(tokens, batch_size=size)
    stream = batches(first, 3)
    given_out = [batch for _, batch in zip(range(stop), stream, strict=False)]
    state = json.loads(json.dumps(first.state_dict()))
    second = BatchSampler(tokens, batch_size=size)
    second.load_state_dict(state)
    rest = list(batches(second, 3 - state["epoch"]))
    assert given_out + rest == list(batches(BatchSampler(tokens, batch_size=size), 3))


def test_epochs_and_seeds_differ():
    sampler = BatchSampler([1] * 50)
    assert sampler.batches(0) != sampler.batches(1)
    assert sampler.batches(0) == BatchSampler([1] * 50).batches(0)
    assert sampler.batches(0) != BatchSampler([1] * 50, seed=1).batches(0)
    assert sampler.num_batches(0) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 2, "world_size": 2}, r"rank must lie in \[0, 1\], found 2"),
        ({"batch_size": 0}, "batch_size must be >= 1"),
    ],
)
def test_sampler_mistakes(options, message):
    with pytest.raises(ValueError, match=message):
        BatchSampler([1, 2], **options)


# Real data


def test_surnames():
    pytest.importorskip("faker", reason="needs the extra examples")
    rows = build("builder:names")
    counts = Counter(row.label for row in rows)
    assert len(counts) == 12
    assert min(counts.values()) > 300
    assert len({row.input.casefold() for row in rows}) == len(rows)
    assert rows == build("builder:names")


def test_an_unknown_builder():
    with pytest.raises(DataError, match=r"builder:nams: no such builder, did you mean builder:names\?"):
        load_splits(DataConfig(train="builder:nams"))


@pytest.mark.skipif(not SMS.exists(), reason="needs ../shared/data/sms_spam")
def test_sms_spam_is_read_whole_and_splits_without_leaks():
    rows = read_examples(SMS, TEXT)
    assert Counter(row.label for row in rows) == {"ham": 4827, "spam": 747}
    splits, notes = load_splits(DataConfig(train=str(SMS)))
    seen = [{row.input for row in rows} for rows in splits.values()]
    assert len(set.union(*seen)) == sum(map(len, seen)) == 5171
    assert len(splits["test"]) == 557
    assert notes == [f"{SMS}: 403 repeated examples (first: line 104), kept"]
