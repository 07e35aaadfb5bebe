"""A batch as the rows of its tokens: what is padding is left out once, at the entry, and put back once, at the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unrolled.nn._forms import Batch, Form, read
from unrolled.nn._masks import over_keys, padding
from unrolled.ops._backend import full_precision
from unrolled.ragged import Lengths, Ragged, Rows, check_keys, readable

Place = tuple[Tensor, Tensor]  # of each row: its sequence and its step, both (N,)


class Tokens(NamedTuple):
    values: Tensor  # (N, D)
    rows: Rows
    steps: int | None  # T of a padded batch; None: that of the longest sequence
    batched: bool
    place: Callable[[], Place]
    restore: Callable[[Tensor], Any]  # (N, F) -> the form that came in
    keep: Tensor | None = None  # which keys are tokens, (B, 1, 1, T), where rows that are none were left in; or numbers
    live: Tensor | None = None  # (B, T) the same, of the queries
    lengths: Tensor | None = None  # (B,) of a padded batch of which rows were left out
    keys: Tensor | None = None  # (B,) in the place of a sequence's index
    again: Callable[[Any], Tensor] | None = None

    @property
    def sequences(self) -> int:
        return self.rows.start.shape[0]

    @property
    def longest(self) -> int | None:
        """T as far as it is known; None where the lengths cannot be looked at."""
        return self.rows.longest if self.steps is None and readable(self.rows.length) else self.steps

    def back(self, y: Any) -> Tensor:
        """(N, F) out of the form that came in."""
        assert self.again is not None
        return self.again(y)

    def with_keys(self, keys: Lengths | None) -> Tokens:
        """With whole numbers (B,) in the place of a sequence's index."""
        if keys is None:
            return self
        own, place = check_keys(keys, self.sequences).to(self.values.device), self.place

        def placed() -> Place:
            sequence, t = place()
            return own[sequence], t

        return self._replace(place=once(placed), keys=own)


def enter(
    x: Batch, batch_first: bool, width: int, lengths: Lengths | None = None, padding_mask: Tensor | None = None
) -> Tokens:
    """The tokens of `x`, of which `lengths` or torch's `padding_mask` say what they are.

    Where the padding is known and comes last its rows are left out; under torch.compile and vmap, and where a mask has
    holes, they stay, as 0, and no query sees them. What comes out there is 0.
    Errors: ValueError for both, for one of them with a form that has its own lengths, and for another width.
    """
    tokens = _tokens(x, batch_first, width, lengths, padding_mask)

    def again(y: Batch) -> Tensor:
        return _tokens(y, batch_first, width, lengths, padding_mask).values

    return tokens._replace(again=again)


def _tokens(x: Batch, batch_first: bool, width: int, lengths: Lengths | None, padding_mask: Tensor | None) -> Tokens:
    if padding_mask is not None and lengths is not None:
        raise ValueError("lengths and a padding mask say the same thing: give one of them")
    if padding_mask is not None and not (isinstance(x, Tensor) and not x.is_nested):
        raise ValueError("a padding mask belongs to a padded batch; this input has its own lengths")
    if isinstance(x, Tensor) and x.is_nested and x.layout == torch.strided:
        parts = x.unbind()  # torch's encoder makes these of a padding mask
        counts = [len(part) for part in parts]
        inside = _tokens(Ragged.from_list(parts), batch_first, width, lengths, None)
        return inside._replace(restore=lambda y: torch.nested.as_nested_tensor(list(torch.split(y, counts))))
    form = read(x, lengths, batch_first)
    if form.values.shape[1] != width:
        raise ValueError(f"this layer reads {width} features, the input has {form.values.shape[1]}")
    (values,) = full_precision(form.values)
    if not isinstance(x, Tensor) or x.is_nested:
        return _without_holes(x, form, values)
    batch_first = batch_first or not form.batched
    batch = form.rows.start.shape[0]
    steps = x.shape[1] if form.batched and batch_first else x.shape[0]
    tokens = Tokens(values, form.rows, steps, form.batched, once(form.positions), form.restore)
    if padding_mask is not None:
        live, added = padding(padding_mask if form.batched else padding_mask[None], (batch, steps), values.dtype)
        return _padded(tokens, live, added, over_keys(live, added), batch_first)
    if lengths is not None:
        live = torch.arange(steps, device=values.device) < form.rows.length[:, None]
        return _padded(tokens, live, None, None, batch_first)
    return tokens


def _without_holes(x: Any, form: Form, values: Tensor) -> Tokens:
    tokens = Tokens(values, form.rows, None, True, once(form.positions), form.restore)
    if not isinstance(x, Tensor) or x.lengths() is None:  # type: ignore[attr-defined]
        return tokens
    length, own = form.rows.length, Ragged.from_nested(x)
    row = Ragged.from_nested(_like(x, torch.arange(len(values), device=values.device))).values
    start = length.cumsum(0) - length
    key = torch.repeat_interleave(length, output_size=len(row))
    t = torch.arange(len(row), device=row.device) - start[key]
    return tokens._replace(
        values=own.values.to(values.dtype),
        rows=Rows(start, 1, length),
        place=lambda: (key, t),
        restore=lambda y: form.restore(_scattered(y, row, len(values))),
    )


def _like(x: Tensor, values: Tensor) -> Tensor:
    jagged: Any = x
    return torch.nested.nested_tensor_from_jagged(values, jagged.offsets(), lengths=jagged.lengths())


def _padded(tokens: Tokens, live: Tensor, added: Tensor | None, keep: Tensor | None, batch_first: bool) -> Tokens:
    """`live` (B, T) says which of the rows are tokens."""
    length = live.sum(1)
    if not readable(live):
        return _zeroed(tokens, live, keep, batch_first, length if keep is None else None)
    keep = None if added is None else keep
    if bool(live.all()):
        return tokens._replace(keep=keep)
    if bool((live[:, 1:] & ~live[:, :-1]).any()):
        return _zeroed(tokens, live, over_keys(live, added), batch_first, None)
    sequences, steps = live.shape
    at = live.flatten().nonzero().squeeze(1)
    sequence, t = at // steps, at % steps
    row = at if batch_first else t * sequences + sequence
    whole, restore = tokens.values.shape[0], tokens.restore
    return tokens._replace(
        values=tokens.values.index_select(0, row),
        rows=Rows(length.cumsum(0) - length, 1, length),
        place=lambda: (sequence, t),
        restore=lambda y: restore(_scattered(y, row, whole)),
        keep=keep,
        lengths=length,
    )


def _zeroed(tokens: Tokens, live: Tensor, keep: Tensor | None, batch_first: bool, lengths: Tensor | None) -> Tokens:
    dead = ~(live if batch_first else live.T).reshape(-1, 1)
    restore = tokens.restore
    return tokens._replace(
        values=tokens.values.masked_fill(dead, 0),
        restore=lambda y: restore(y.masked_fill(dead, 0)),
        keep=keep,
        live=live,
        lengths=lengths,
    )


def _scattered(y: Tensor, row: Tensor, count: int) -> Tensor:
    return y.new_zeros(count, y.shape[1]).index_copy(0, row, y)


def once(function: Callable[[], Place]) -> Callable[[], Place]:
    """The same answer at every call, worked out at the first."""
    answer: list[Place] = []

    def call() -> Place:
        if not answer:
            answer.append(function())
        return answer[0]

    return call


def padded_weights(weights: Tensor, queries: Tokens, keys: Tokens) -> Tensor:
    """(B, A, Tq, Tk), of the longest sequences, as wide as the batches they belong to; without B for one sequence."""
    rows, columns = (
        0 if t.steps is None else t.steps - n for t, n in zip((queries, keys), weights.shape[2:], strict=True)
    )
    if torch.compiler.is_compiling() or rows > 0 or columns > 0:
        weights = torch.nn.functional.pad(weights, (0, columns, 0, rows))
    if queries.live is not None:
        weights = weights.masked_fill(~queries.live[:, None, :, None], 0)
    return weights if queries.batched else weights.squeeze(0)
