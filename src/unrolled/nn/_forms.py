"""The forms a batch comes in: padded, unbatched, packed, nested, ragged; read as rows and given back alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from unrolled.ragged import Lengths, Ragged, Rows, check_lengths

Batch = Tensor | PackedSequence | Ragged


class Form(NamedTuple):
    values: Tensor  # (R, I)
    rows: Rows
    batched: bool
    positions: Callable[[], tuple[Tensor, Tensor]]  # of each row: its sequence and its step, both (R,)
    restore: Callable[[Tensor], Batch]  # (R, F) -> the form that came in


def read(x: Batch, lengths: Lengths | None, batch_first: bool) -> Form:
    """Errors: ValueError where `lengths` comes with a form that has lengths of its own, or x has another rank."""
    if lengths is not None and not (isinstance(x, Tensor) and not x.is_nested and x.ndim == 3):
        raise ValueError("lengths= belongs to a padded batch (3-D); this input has its own lengths")
    if isinstance(x, Ragged):
        return _ragged(x, x.with_values)
    if isinstance(x, PackedSequence):
        return _packed(x)
    if not isinstance(x, Tensor):
        raise TypeError(f"expected a tensor, a PackedSequence or a Ragged, found {type(x).__name__}")
    if x.is_nested:
        return _nested(x)
    if x.ndim == 2:
        return _padded(x.unsqueeze(0), None, True, lambda y: y, batched=False)
    if x.ndim == 3:
        return _padded(x, lengths, batch_first, lambda y: y.reshape(x.shape[0], x.shape[1], y.shape[1]), batched=True)
    raise ValueError(f"expected a 2-D (unbatched) or 3-D tensor, found {x.ndim}-D")


def _padded(
    x: Tensor, lengths: Lengths | None, batch_first: bool, restore: Callable[[Tensor], Batch], batched: bool
) -> Form:
    b, t = (x.shape[0], x.shape[1]) if batch_first else (x.shape[1], x.shape[0])
    sequence = torch.arange(b, device=x.device)
    length = torch.full_like(sequence, t) if lengths is None else check_lengths(lengths, b, t).to(x.device)

    def positions() -> tuple[Tensor, Tensor]:
        time = torch.arange(t, device=x.device)
        key, step = (sequence[:, None], time) if batch_first else (sequence, time[:, None])
        shape = (b, t) if batch_first else (t, b)
        return key.expand(shape).reshape(-1), step.expand(shape).reshape(-1)

    rows = Rows(sequence * t, 1, length) if batch_first else Rows(sequence, b, length)
    return Form(x.reshape(b * t, x.shape[2]), rows, batched, positions, restore)


def _ragged(x: Ragged, restore: Callable[[Tensor], Batch]) -> Form:
    if x.values.ndim != 2:
        raise ValueError(f"expected ragged values (N, I), found shape {tuple(x.values.shape)}")
    start, length = x.offsets[:-1], x.lengths

    def positions() -> tuple[Tensor, Tensor]:
        key = torch.repeat_interleave(length, output_size=x.values.shape[0])
        return key, torch.arange(x.values.shape[0], device=key.device) - start[key]

    return Form(x.values, Rows(start, 1, length), True, positions, restore)


def _packed(x: PackedSequence) -> Form:
    ragged, source = Ragged.from_packed(x), Ragged.from_packed(x._replace(data=torch.arange(len(x.data))))
    back = source.values.argsort().to(x.data.device)
    return _ragged(ragged, lambda y: x._replace(data=y[back]))


def _nested(x: Tensor) -> Form:
    if x.layout != torch.jagged:
        raise TypeError(f"a nested tensor must have layout=torch.jagged, found {x.layout}")
    jagged: Any = x
    values, offsets, lengths = jagged.values(), jagged.offsets(), jagged.lengths()

    def restore(y: Tensor) -> Tensor:
        return torch.nested.nested_tensor_from_jagged(y, offsets, lengths=lengths)

    start = offsets[:-1]
    rows = Rows(start, 1, offsets.diff() if lengths is None else lengths)

    def positions() -> tuple[Tensor, Tensor]:
        row = torch.arange(len(values), device=start.device)
        key = (torch.searchsorted(start, row, right=True) - 1).clamp(min=0)  # that of a row in a hole does not matter
        return key, row - start[key]

    return Form(values, rows, True, positions, restore)
