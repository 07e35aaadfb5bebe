"""The one batch type: sequences of different lengths, end to end, with no padding.

Letters here and everywhere: `B` sequences, `N` tokens in all of them, `T` the longest length, `I` features of a token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

Lengths = Tensor | Sequence[int]


class Ragged:
    """`B` sequences as `values` (N, ...) and `offsets` (B + 1,): sequence `b` is `values[offsets[b]:offsets[b + 1]]`.

    Edges: `B` = 0, `N` = 0 and sequences of length 0 are legal. Two batches may share one offsets tensor.
    Errors: ValueError if the offsets do not start at 0, decrease, or do not end at `N`; TypeError for other dtypes.
    """

    __slots__ = ("offsets", "values")

    def __init__(self, values: Tensor, offsets: Lengths) -> None:
        offsets = integers(offsets, "offsets").to(values.device)
        if offsets.ndim != 1 or len(offsets) == 0:
            raise ValueError(f"offsets must hold B + 1 numbers in one dimension, found shape {tuple(offsets.shape)}")
        if values.ndim == 0:
            raise ValueError("values must have at least one dimension, the tokens; found a scalar")
        if int(offsets[0]) != 0 or int(offsets[-1]) != len(values) or bool((offsets[1:] < offsets[:-1]).any()):
            raise ValueError(
                f"offsets must rise from 0 to the number of tokens {len(values)}, found {offsets[:8].tolist()}"
                f"{' ...' if len(offsets) > 8 else ''} ending at {int(offsets[-1])}"
            )
        self.values = values
        self.offsets = offsets

    @property
    def lengths(self) -> Tensor:
        """(B,) tokens of each sequence."""
        return self.offsets.diff()

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, b: int) -> Tensor:
        if not -len(self) <= b < len(self):
            raise IndexError(f"sequence {b} of a batch of {len(self)}")
        b %= len(self)
        return self.values[int(self.offsets[b]) : int(self.offsets[b + 1])]

    def __iter__(self) -> Iterator[Tensor]:
        return (self[b] for b in range(len(self)))

    def __repr__(self) -> str:
        return f"Ragged(values={tuple(self.values.shape)}, lengths={self.lengths.tolist()})"

    def with_values(self, values: Tensor) -> Ragged:
        """The same sequences with other features: `values` (N, ...)."""
        if len(values) != len(self.values):
            raise ValueError(f"the batch has {len(self.values)} tokens, the new values have {len(values)}")
        return _unchecked(values, self.offsets)

    def to(self, *args: object, **kwargs: object) -> Ragged:
        """`values` and `offsets` on another device; a dtype concerns the values alone."""
        values = self.values.to(*args, **kwargs)  # type: ignore[call-overload]
        return _unchecked(values, self.offsets.to(values.device))

    # From and to the other forms of a batch: each pair is an exact round trip.

    @classmethod
    def from_list(cls, sequences: Sequence[Tensor]) -> Ragged:
        """Sequences (T_b, ...) end to end. Errors: ValueError for an empty list, which does not say what a token is."""
        if not sequences:
            raise ValueError("an empty list does not say what a token is: use Ragged(torch.empty(0, I), [0])")
        return cls(torch.cat(list(sequences)), _offsets(torch.tensor([len(s) for s in sequences])))

    def to_list(self) -> list[Tensor]:
        return list(self)

    @classmethod
    def from_padded(cls, padded: Tensor, lengths: Lengths, batch_first: bool = False) -> Ragged:
        """From (T, B, ...) or, with `batch_first`, (B, T, ...); what lies beyond a length is dropped."""
        padded = padded if batch_first else padded.transpose(0, 1)
        lengths = check_lengths(lengths, padded.shape[0], padded.shape[1]).to(padded.device)
        live = torch.arange(padded.shape[1], device=padded.device) < lengths[:, None]
        return _unchecked(padded[live], _offsets(lengths))

    def to_padded(
        self, batch_first: bool = False, total_length: int | None = None, padding_value: float = 0.0
    ) -> Tensor:
        """To (T, B, ...), or (B, T, ...) with `batch_first`; `total_length` sets T, else the longest sequence does."""
        longest = int(self.lengths.max()) if len(self) else 0
        steps = longest if total_length is None else total_length
        if steps < longest:
            raise ValueError(f"total_length {steps} is shorter than the longest sequence, {longest}")
        live = torch.arange(steps, device=self.values.device) < self.lengths[:, None]
        padded = self.values.new_full((len(self), steps, *self.values.shape[1:]), padding_value)
        padded = padded.index_put((live,), self.values)
        return padded if batch_first else padded.transpose(0, 1)

    @classmethod
    def from_packed(cls, packed: PackedSequence) -> Ragged:
        """From torch's PackedSequence, in the order its caller gave."""
        source, offsets = _packed_rows(packed)
        return _unchecked(packed.data[source], offsets)

    def to_packed(self) -> PackedSequence:
        """To torch's PackedSequence, which knows no length 0: ValueError names the first such sequence."""
        lengths = self.lengths
        if not len(self) or int(lengths.min()) == 0:
            where = "the batch is empty" if not len(self) else f"sequence {int(lengths.argmin())} has length 0"
            raise ValueError(f"a PackedSequence cannot hold this: {where}")
        order, steps = live_rows(Rows(self.offsets[:-1], 1, lengths))
        sizes = torch.tensor([len(rows) for rows in steps])
        return PackedSequence(self.values[torch.cat(steps)], sizes, order, order.argsort())

    @classmethod
    def from_nested(cls, nested: Tensor) -> Ragged:
        """From a jagged torch.nested tensor (B, *, ...), read through its offsets and lengths (it may have holes)."""
        if not nested.is_nested or nested.layout != torch.jagged:
            raise TypeError("expected a torch.nested tensor with layout=torch.jagged")
        jagged: Any = nested
        offsets, lengths = jagged.offsets(), jagged.lengths()
        if lengths is None:
            return _unchecked(nested.values(), offsets)
        own = _offsets(lengths)
        rows = torch.arange(int(own[-1]), device=own.device) + (offsets[:-1] - own[:-1]).repeat_interleave(lengths)
        return _unchecked(nested.values()[rows], own)

    def to_nested(self) -> Tensor:
        return torch.nested.nested_tensor_from_jagged(self.values, self.offsets)


class Rows(NamedTuple):
    """Where sequences lie in a two-dimensional memory: step `t` of sequence `b` is row `start[b] + t * step`."""

    start: Tensor  # (B,) int64
    step: int
    length: Tensor  # (B,) int64

    @property
    def longest(self) -> int:
        return int(self.length.max()) if len(self.length) else 0

    def check(self, count: int) -> None:
        """Errors: ValueError for a sequence that does not lie within `count` rows."""
        last = self.start + (self.length - 1) * self.step
        low, high = torch.minimum(self.start, last), torch.maximum(self.start, last)
        wrong = ((low < 0) | (high >= count)) & (self.length > 0) | (self.length < 0)
        if readable(wrong) and bool(wrong.any()):
            b = int(wrong.int().argmax())
            found = f"row {int(self.start[b])}, step {self.step}, length {int(self.length[b])}"
            raise ValueError(f"sequence {b} ({found}) leaves the {count} rows of memory")

    def reverse(self) -> Rows:
        """The same rows walked from the last step to the first."""
        return Rows(self.start + (self.length - 1) * self.step, -self.step, self.length)


def pad_rows(x: Tensor, rows: Rows) -> Tensor:
    """(B, T, ...) the steps of each sequence out of `x` (R, ...), T the longest; 0 beyond a length."""
    rows.check(x.shape[0])
    live, index = _steps(rows)
    return x.new_zeros(*live.shape, *x.shape[1:]).index_put((live,), x[index])


def unpad_rows(padded: Tensor, rows: Rows, count: int) -> Tensor:
    """Back to `count` rows (R, ...): 0 for a row of no sequence, the sum for a row of several."""
    live, index = _steps(rows)
    return padded.new_zeros(count, *padded.shape[2:]).index_put((index,), padded[live], accumulate=True)


def _steps(rows: Rows) -> tuple[Tensor, Tensor]:
    """(B, T) which steps there are, and for each of those its row."""
    t = torch.arange(rows.longest, device=rows.length.device)
    live = t < rows.length[:, None]
    return live, (rows.start[:, None] + t * rows.step)[live]


def live_rows(rows: Rows) -> tuple[Tensor, list[Tensor]]:
    """Which row each step reads: `order` (B,), longest first, and for each step the rows of the sequences still alive.

    The sequences alive at a step are the first `len(steps[t])` of `order`: the number never grows with `t`.
    """
    order = rows.length.argsort(descending=True, stable=True)
    start, length = rows.start[order], rows.length[order]
    longest = int(length[0]) if len(length) else 0
    alive = (length[:, None] > torch.arange(longest, device=length.device)).sum(0).tolist()
    return order, [start[:n] + t * rows.step for t, n in enumerate(alive)]


def all_rows(steps: Sequence[Tensor], device: torch.device) -> Tensor:
    """(N,) the rows of all steps, step after step: those that belong to a sequence."""
    return torch.cat([*steps, torch.empty(0, dtype=torch.int64, device=device)])


def check_lengths(lengths: Lengths, sequences: int, longest: int) -> Tensor:
    """`lengths` as int64 (B,). ValueError where it does not fit `sequences` of at most `longest` steps."""
    lengths = integers(lengths, "lengths")
    if lengths.shape != (sequences,):
        raise ValueError(
            f"lengths must have one number for each of {sequences} sequences, found shape {tuple(lengths.shape)}"
        )
    if torch.compiler.is_compiling():
        fits = ((lengths >= 0) & (lengths <= longest)).all()
        torch._assert_async(fits, "lengths must lie between 0 and the steps of the input")
    # under vmap the numbers cannot be read; the core looks at each example
    elif sequences and readable(lengths):
        shortest, highest = int(lengths.min()), int(lengths.max())
        if shortest < 0 or highest > longest:
            raise ValueError(f"lengths must lie in [0, {longest}], found {shortest} to {highest}")
    return lengths


def check_keys(keys: Lengths, sequences: int, name: str = "keys") -> Tensor:
    """`keys` as int64 (B,), a whole number for each sequence; else ValueError or TypeError."""
    keys = integers(keys, name)
    if keys.shape != (sequences,):
        raise ValueError(
            f"{name} must have one number for each of {sequences} sequences, found shape {tuple(keys.shape)}"
        )
    return keys


def readable(t: Tensor) -> bool:
    """Whether its numbers can be looked at: not while a graph is made of them, and not where they are many at once."""
    return not (torch.compiler.is_compiling() or is_functorch_wrapped_tensor(t) or t.is_meta)


def integers(numbers: Lengths, name: str) -> Tensor:
    """Errors: TypeError for anything but whole numbers."""
    if not isinstance(numbers, Tensor):
        try:
            numbers = torch.as_tensor(numbers, dtype=None if len(numbers) else torch.int64)
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(f"{name} must be a tensor or a list of whole numbers, found {numbers!r}") from None
    if numbers.is_floating_point() or numbers.is_complex() or numbers.dtype == torch.bool:
        raise TypeError(f"{name} must be whole numbers, found {numbers.dtype}")
    return numbers.to(torch.int64)


def _offsets(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.to(torch.int64).cumsum(0), (1, 0))


def _packed_rows(packed: PackedSequence) -> tuple[Tensor, Tensor]:
    """For a PackedSequence: the row of `packed.data` of each ragged token, and the offsets."""
    sizes = packed.batch_sizes
    data_device = packed.data.device
    order = packed.unsorted_indices
    lengths = (sizes[:, None] > torch.arange(int(sizes[0]))).sum(0)
    lengths = lengths if order is None else lengths[order.cpu()]
    place = torch.arange(len(lengths)) if order is None else order.cpu()
    offsets = _offsets(lengths)
    step = torch.arange(int(offsets[-1])) - offsets[:-1].repeat_interleave(lengths)
    source = _offsets(sizes)[step] + place.repeat_interleave(lengths)
    return source.to(data_device), offsets.to(data_device)


def _unchecked(values: Tensor, offsets: Tensor) -> Ragged:
    ragged = Ragged.__new__(Ragged)
    ragged.values, ragged.offsets = values, offsets
    return ragged


pytree.register_pytree_node(
    Ragged,
    lambda r: ([r.values, r.offsets], None),
    lambda children, _: _unchecked(*children),
    serialized_type_name="unrolled.Ragged",
    to_dumpable_context=lambda _: None,
    from_dumpable_context=lambda _: None,
)
