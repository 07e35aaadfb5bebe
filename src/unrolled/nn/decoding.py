"""What a decoder remembers from one call to the next: the keys and values of all that came before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unrolled.nn._forms import Batch
from unrolled.nn._initial import is_whole
from unrolled.nn._masks import Masks
from unrolled.nn._tokens import Tokens, enter
from unrolled.nn.attention import Cache, Memory
from unrolled.ops._backend import full_precision
from unrolled.ragged import Lengths, Rows, integers, readable

_CAUSAL = Masks(True, None)


class Held(NamedTuple):
    """What a state holds and where one more token of each sequence goes, as numpy arrays."""

    t: Any  # (B,) the position of the new token
    row: Any  # (B,) of its keys and values
    queries: tuple[Any, Any, int]  # of the new tokens: first row, length, step
    keys: tuple[Any, Any, int]  # of all tokens, the new ones too
    key_value: list[Any]
    memory: list[tuple[Any, tuple[Any, Any, int]]]
    masks: tuple[Any, Any]  # of the memory: what may be seen, or what is added


def for_core(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether it lies as the core reads it."""
    on_core = x.is_cpu and x.dtype is dtype and dtype in (torch.float32, torch.float64)
    return on_core and x.is_contiguous() and readable(x)


class State:
    """Made by `begin` of a TransformerEncoder, TransformerDecoder or Transformer, read and changed by its `step`.

    `lengths` (B,) says how many tokens of each sequence it holds. `select` takes other sequences in their place.
    """

    def __init__(
        self,
        sequences: int,
        layers: int,
        like: Tensor,
        width: int,
        capacity: int,
        memory: Sequence[Memory] = (),
        memory_masks: Masks = Masks(False, None),  # noqa: B008
    ) -> None:
        if not (is_whole(sequences) and is_whole(capacity)):
            raise TypeError(f"sequences and capacity must be whole numbers, found {sequences!r} and {capacity!r}")
        if sequences < 0 or capacity < 1:
            raise ValueError(f"sequences must be at least 0 and capacity 1, found {sequences} and {capacity}")
        self.memory, self.memory_masks = list(memory), memory_masks
        self._capacity, self._longest = capacity, 0
        self._width = width
        self._index = torch.arange(sequences, device=like.device)
        self._one = torch.ones_like(self._index)
        self._start = self._index * capacity
        self._source = self._index
        self.lengths = torch.zeros_like(self._index)
        (like,) = full_precision(like[:0])
        with torch.inference_mode(False):  # they outlive an inference_mode, and are written to outside of it
            self._key_value = [like.new_zeros(sequences * capacity, 2 * width) for _ in range(layers)]

    def enter(
        self, x: Batch, lengths: Lengths | None, keys: Lengths | None, batch_first: bool, layers: int, memories: int
    ) -> tuple[Tokens, list[Cache], Masks]:
        """The new tokens, where each layer finds what came before them, and what they may attend to."""
        held = len(self._key_value), len(self.memory)
        if held != (layers, memories):
            raise ValueError(
                f"this model has {layers} layers, {memories} of which read a memory; "
                f"the state is of one with {held[0]} and {held[1]}"
            )
        tokens = self._tokens(x, lengths, batch_first)
        self._reserve(tokens.rows.longest if tokens.steps is None else tokens.steps, tokens.rows.length)
        sequence, t = tokens.place()
        t = t + self.lengths[sequence]
        row = self._start[sequence] + t
        if tokens.live is not None:
            raise ValueError("incremental decoding reads lengths that can be looked at, not under compile or vmap")
        key = sequence if keys is None else tokens.with_keys(keys).place()[0]
        rows = Rows(self._start, 1, self.lengths + tokens.rows.length)
        tokens = tokens._replace(place=lambda: (key, t))
        return tokens, [Cache(kv, row, rows) for kv in self._key_value], _CAUSAL

    def held(self, dtype: torch.dtype, layers: int, memories: int) -> Held | None:
        """With room for one token more of each sequence; None where the core cannot read it, or of another model."""
        mask, count = self.memory_masks.mask, len(self._key_value)
        parts = [*self._key_value, *(m.key for m in self.memory)]
        if (count, len(self.memory)) != (layers, memories) or not all(for_core(kv, dtype) for kv in parts):
            return None
        if self.lengths.dtype != torch.int64 or any(m.value is not None for m in self.memory):
            return None
        self._reserve(1, 1)
        t, start, seen = self.lengths.numpy(), self._start.numpy(), None if mask is None else mask.contiguous().numpy()
        return Held(
            t,
            start + t,
            (self._index.numpy(), self._one.numpy(), 1),
            (start, t + 1, 1),
            [kv.numpy() for kv in self._key_value],
            [(m.key.numpy(), (m.rows.start.numpy(), m.rows.length.numpy(), m.rows.step)) for m in self.memory],
            (seen, None) if mask is None or mask.dtype == torch.bool else (None, seen),
        )

    def advance(self, length: Tensor | int) -> None:
        self.lengths = self.lengths + length

    def select(self, sequences: Lengths) -> None:
        """Go on with these sequences, by their index in the batch, each any number of times: the beams of a search.

        Errors: TypeError for anything but whole numbers, a mask too; ValueError for more than one dimension.
        """
        index = integers(sequences, "sequences").to(self._index.device)
        if index.ndim != 1:
            raise ValueError(f"sequences must be indices in one dimension, found shape {tuple(index.shape)}")
        shape = (len(self._index), self._capacity, 2 * self._width)
        with torch.inference_mode(False):
            self._key_value = [kv.view(shape)[index].flatten(0, 1) for kv in self._key_value]
        self.lengths = self.lengths[index]
        self._index = torch.arange(len(index), device=index.device)
        self._one = torch.ones_like(self._index)
        self._start = self._index * self._capacity
        source = self._source[index]
        if not torch.equal(source, self._source):  # else each has what it had: the beams of one source changed places
            self.memory = [_selected(m, index) for m in self.memory]
            mask = self.memory_masks.mask
            self.memory_masks = self.memory_masks if mask is None else self.memory_masks._replace(mask=mask[index])
            self._source = source

    def _tokens(self, x: Batch, lengths: Lengths | None, batch_first: bool) -> Tokens:
        if isinstance(x, Tensor) and not x.is_nested and x.ndim == 3 and lengths is None:
            shape = (len(self._index), 1) if batch_first else (1, len(self._index))
            if x.shape == (*shape, self._width):
                return self._single(x)
        tokens = enter(x, batch_first, self._width, lengths)
        if tokens.sequences != len(self._index):
            raise ValueError(f"this state holds {len(self._index)} sequences, found {tokens.sequences}")
        return tokens

    def _single(self, x: Tensor) -> Tokens:
        """One token for each sequence."""
        place, rows = (self._index, torch.zeros_like(self._index)), Rows(self._index, 1, self._one)
        return Tokens(x.reshape(-1, self._width), rows, 1, True, lambda: place, lambda y: y.reshape(x.shape))

    def _reserve(self, new: int, length: Tensor | int) -> None:
        """Room for `length` (B,) more tokens, at most `new`: twice as much where it is full."""
        self._longest += new  # never less than the longest sequence
        if self._longest <= self._capacity:
            return
        self._longest = int((self.lengths + length).max()) if len(self.lengths) else 0
        if self._longest <= self._capacity:
            return
        old, self._capacity = self._capacity, max(2 * self._capacity, self._longest)
        count = len(self._index)
        self._start = self._index * self._capacity
        for layer, kv in enumerate(self._key_value):
            with torch.inference_mode(False):
                wider = kv.new_zeros(count * self._capacity, kv.shape[1])
            wider.view(count, self._capacity, kv.shape[1])[:, :old] = kv.view(count, old, kv.shape[1])
            self._key_value[layer] = wider


def _selected(memory: Memory, index: Tensor) -> Memory:
    """Rows of its own for each of these sequences."""
    first, length = memory.rows.start[index], memory.rows.length[index]
    start = length.cumsum(0) - length
    sequence = torch.repeat_interleave(length)
    t = torch.arange(len(sequence), device=index.device) - start[sequence]
    row = first[sequence] + t * memory.rows.step
    value = None if memory.value is None else memory.value.index_select(0, row)
    return memory._replace(key=memory.key.index_select(0, row), value=value, rows=Rows(start, 1, length))
