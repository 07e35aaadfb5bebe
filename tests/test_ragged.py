"""Ragged batches: exact round trips to and from every other form, at every length, and clear errors."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence
from torch.utils import _pytree as pytree

from tolerances import same_bits
from unrolled import Ragged
from unrolled.ragged import Rows, live_rows

LENGTHS = st.lists(st.integers(0, 7), max_size=9)
FEATURES = st.sampled_from([(), (1,), (3,), (2, 5)])


def make(lengths: list[int], features: tuple[int, ...] = (2,), dtype: torch.dtype = torch.float32) -> Ragged:
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    return Ragged(torch.randn(sum(lengths), *features).mul(100).to(dtype), offsets)


def same(found: Ragged, expected: Ragged) -> None:
    same_bits(found.values, expected.values)
    same_bits(found.offsets, expected.offsets)


@given(
    LENGTHS, FEATURES, st.sampled_from([torch.float32, torch.float64, torch.int64]), st.booleans(), st.integers(0, 3)
)
def test_padded_round_trip(
    lengths: list[int], features: tuple[int, ...], dtype: torch.dtype, batch_first: bool, more: int
) -> None:
    batch = make(lengths, features, dtype)
    longest = max(lengths, default=0) + more
    padded = batch.to_padded(batch_first, longest, padding_value=-7)
    assert padded.shape == ((len(lengths), longest) if batch_first else (longest, len(lengths))) + features
    for b, n in enumerate(lengths):
        own = padded[b] if batch_first else padded[:, b]
        same_bits(own[:n], batch[b])
        assert bool((own[n:] == -7).all())
    same(Ragged.from_padded(padded, lengths, batch_first), batch)
    same(Ragged.from_padded(padded, torch.tensor(lengths, dtype=torch.int32), batch_first), batch)


@given(st.lists(st.integers(1, 7), min_size=1, max_size=9), FEATURES, st.booleans())
def test_packed_round_trip(lengths: list[int], features: tuple[int, ...], sort: bool) -> None:
    lengths = sorted(lengths, reverse=True) if sort else lengths
    batch = make(lengths, features)
    same(Ragged.from_packed(pack_sequence(list(batch), enforce_sorted=sort)), batch)
    packed = batch.to_packed()
    same(Ragged.from_packed(packed), batch)
    padded, found = pad_packed_sequence(packed)
    assert found.tolist() == lengths
    same_bits(padded, batch.to_padded())


@given(LENGTHS.filter(bool), FEATURES)
def test_nested_round_trip(lengths: list[int], features: tuple[int, ...]) -> None:
    batch = make(lengths, features)
    nested = batch.to_nested()
    assert nested.is_nested
    assert nested.layout == torch.jagged
    for own, part in zip(batch, nested.unbind(), strict=True):
        same_bits(part, own)
    same(Ragged.from_nested(nested), batch)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), min_size=1, max_size=7))
def test_nested_with_holes(parts: list[tuple[int, int]]) -> None:
    lengths, holes = (torch.tensor(numbers) for numbers in zip(*parts, strict=True))
    offsets = torch.nn.functional.pad((lengths + holes).cumsum(0), (1, 0))
    values = torch.randn(int(offsets[-1]), 3)
    nested = torch.nested.nested_tensor_from_jagged(values, offsets, lengths)
    found = Ragged.from_nested(nested)
    assert found.lengths.tolist() == lengths.tolist()
    for b, own in enumerate(found):
        same_bits(own, values[int(offsets[b]) : int(offsets[b] + lengths[b])])


@given(LENGTHS.filter(bool), FEATURES)
def test_list_round_trip(lengths: list[int], features: tuple[int, ...]) -> None:
    batch = make(lengths, features)
    parts = batch.to_list()
    assert [len(part) for part in parts] == lengths == [len(batch[b]) for b in range(-len(batch), 0)]
    same(Ragged.from_list(parts), batch)


def test_gradients_pass_through_every_form() -> None:
    batch = make([3, 1, 2], dtype=torch.float64)
    values = batch.values.requires_grad_()
    weights = torch.arange(12.0, dtype=torch.float64).view(6, 2)
    forms = [
        lambda r: Ragged.from_padded(r.to_padded(), r.lengths),
        lambda r: Ragged.from_packed(r.to_packed()),
        lambda r: Ragged.from_nested(r.to_nested()),
        lambda r: Ragged.from_list(r.to_list()),
    ]
    for form in forms:
        (grad,) = torch.autograd.grad((form(Ragged(values, batch.offsets)).values * weights).sum(), values)
        same_bits(grad, weights)


@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(-20, 20)), max_size=8), st.sampled_from([1, 3, -2]), st.booleans()
)
def test_live_rows(parts: list[tuple[int, int]], step: int, reverse: bool) -> None:
    length, start = (torch.tensor([p[i] for p in parts], dtype=torch.int64) for i in range(2))
    rows = Rows(start, step, length)
    order, steps = live_rows(rows.reverse() if reverse else rows)
    assert sorted(order.tolist()) == list(range(len(parts)))
    assert len(steps) == max((n for n, _ in parts), default=0)
    for place, b in enumerate(order.tolist()):
        n, first = parts[b]
        expected = [first + t * step for t in range(n)]
        assert [int(own[place]) for own in steps if place < len(own)] == (expected[::-1] if reverse else expected)


def test_with_values_to_and_pytree_keep_the_sequences() -> None:
    batch = make([2, 0, 1])
    same_bits(batch.with_values(batch.values * 2).offsets, batch.offsets)
    assert batch.to(torch.float64).values.dtype == torch.float64
    assert batch.to("meta").offsets.device.type == "meta"
    same(pytree.tree_map(lambda t: t, batch), batch)
    same(copy.deepcopy(batch), batch)
    with pytest.raises(ValueError, match="3 tokens, the new values have 2"):
        batch.with_values(batch.values[:2])


def _bad(values: Tensor, offsets: object) -> Ragged:
    return Ragged(values, offsets)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("offsets", "error", "message"),
    [
        ([1, 3], ValueError, "rise from 0"),
        ([0, 2], ValueError, "number of tokens 3"),
        ([0, 2, 1, 3], ValueError, "rise from 0"),
        ([], ValueError, "B \\+ 1 numbers"),
        ([[0, 3]], ValueError, "one dimension"),
        ([0.0, 3.0], TypeError, "whole numbers, found torch.float32"),
        (torch.tensor([False, True]), TypeError, "whole numbers, found torch.bool"),
    ],
)
def test_wrong_offsets(offsets: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        _bad(torch.zeros(3, 2), offsets)


def test_wrong_use() -> None:
    batch = make([2, 0])
    with pytest.raises(ValueError, match="at least one dimension"):
        _bad(torch.zeros(()), [0])
    with pytest.raises(ValueError, match="total_length 1 is shorter than the longest sequence, 2"):
        batch.to_padded(total_length=1)
    with pytest.raises(ValueError, match="sequence 1 has length 0"):
        batch.to_packed()
    with pytest.raises(ValueError, match="the batch is empty"):
        make([]).to_packed()
    with pytest.raises(ValueError, match="empty list does not say what a token is"):
        Ragged.from_list([])
    with pytest.raises(TypeError, match="jagged"):
        Ragged.from_nested(torch.zeros(2, 3))
    with pytest.raises(IndexError, match="sequence 2 of a batch of 2"):
        batch[2]
    padded = torch.zeros(3, 2, 1)
    for lengths, error, message in [
        ([3], ValueError, "one number for each of 2 sequences"),
        ([3, 4], ValueError, r"lie in \[0, 3\], found 3 to 4"),
        ([-1, 0], ValueError, r"lie in \[0, 3\], found -1 to 0"),
        ([1.5, 2.0], TypeError, "whole numbers"),
    ]:
        with pytest.raises(error, match=message):
            Ragged.from_padded(padded, lengths)
