"""The examples of a run in three parts, and remarks on what in them deserves a look."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Sequence

from unrolled.config import DataConfig
from unrolled.data import builders
from unrolled.data.readers import read_examples
from unrolled.data.splits import split
from unrolled.data.tokenizer import normalize
from unrolled.data.values import DataError, Input, Row


def load(source: str, data: DataConfig) -> list[Row]:
    """The examples of a file or of builder:NAME."""
    return builders.build(source) if source.startswith(builders.PREFIX) else read_examples(source, data)


def load_splits(data: DataConfig) -> tuple[dict[str, list[Row]], list[str]]:
    """The rows of "train" and, where there are any, "valid" and "test"; and the remarks, a line each.

    Parts without a file of their own are taken from the training file: equal inputs stay together. Files given by the
    user are left as they are; inputs that stand in two of them are remarked on.
    """
    if data.train is None:
        raise DataError("data.train is missing: name the file of labelled examples to train on")
    rows = load(data.train, data)
    notes = _remarks(data.train, rows, data)
    counts = Counter(row.label for row in rows)
    once = [row.line for row in rows if counts[row.label] == 1]
    if once:
        notes.append(f"{data.train}: {_count(once, 'label')} seen once only, in training")
    given = {name: path for name, path in (("valid", data.valid), ("test", data.test)) if path is not None}
    wanted = {"test": data.test_fraction, "valid": data.valid_fraction}
    fractions = {name: share for name, share in wanted.items() if name not in given and share > 0}
    keys = [input_key(row.input, data) for row in rows]
    parts = split(keys, [row.label for row in rows], fractions, data.split_seed)
    splits = {name: [rows[i] for i in indices] for name, indices in parts.items()}
    for name in fractions:
        if not splits[name]:
            notes.append(f"{data.train}: {len(rows)} examples are too few for a {name} part of {fractions[name]:g}")
            del splits[name]
    for name, path in given.items():
        splits[name] = load(path, data)
        notes += _remarks(path, splits[name], data)
        notes += _shared(path, splits[name], data.train, splits["train"], data)
    return {name: splits[name] for name in ("train", "valid", "test") if name in splits}, notes


def input_key(value: Input, data: DataConfig) -> str:
    """Equal for inputs that a model cannot tell apart, but for `max_length` and unknown tokens."""
    return normalize(value, data) if isinstance(value, str) else json.dumps(value)


def source_of(data: DataConfig, part: str) -> str:
    """The file that a part of the data comes from."""
    return {"valid": data.valid, "test": data.test}.get(part) or str(data.train)


def _remarks(source: str, rows: Sequence[Row], data: DataConfig) -> list[str]:
    notes = []
    empty = [row.line for row in rows if not row.input]
    if empty:
        notes.append(f"{source}: {_count(empty, 'empty input')}, kept as sequences of length 0")
    labels: dict[str, set[str]] = defaultdict(set)
    repeated: list[int] = []
    contrary: list[int] = []
    for row in rows:
        key = input_key(row.input, data)
        if key in labels:
            (repeated if row.label in labels[key] else contrary).append(row.line)
        labels[key].add(row.label)
    if repeated:
        notes.append(f"{source}: {_count(repeated, 'repeated example')}, kept")
    if contrary:
        notes.append(f"{source}: {_count(contrary, 'input')} seen before with another label, kept")
    return notes


def _shared(source: str, rows: Sequence[Row], train: str, trained: Sequence[Row], data: DataConfig) -> list[str]:
    known = {input_key(row.input, data) for row in trained}
    again = [row.line for row in rows if input_key(row.input, data) in known]
    return [f"{source}: {_count(again, 'input')} also in {train}, kept: the scores flatter"] if again else []


def _count(lines: Sequence[int], noun: str) -> str:
    return f"{len(lines)} {noun}{'s' if len(lines) > 1 else ''} (first: line {lines[0]})"
