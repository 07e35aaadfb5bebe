"""Positions to add to what stands at them: sinusoidal, and learned."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from unrolled.equations.positions import sinusoidal
from unrolled.nn._forms import Batch, read
from unrolled.nn._initial import check_sizes
from unrolled.ops.embedding import embedding
from unrolled.ragged import Lengths, check_keys, readable

_STANDARD_DEVIATION = 0.02  # of Devlin 2018


class _Positions(nn.Module, ABC):
    def __init__(self, d_model: int, batch_first: bool) -> None:
        super().__init__()
        check_sizes(0, d_model=d_model)
        self.d_model, self.batch_first = d_model, batch_first

    def forward(self, input: Batch, *, start: Lengths | int | None = None) -> Any:
        """`input` with a vector for its position added to each of its tokens, in the same form.

        Shapes: input (T, B, D), with `batch_first` (B, T, D); (T, D) for one sequence; a PackedSequence; a jagged
        nested tensor (B, *, D); a Ragged of (N, D). `start`: the position of the first token, for all sequences or
        (B,) for each; 0 without it. In incremental decoding that is how many tokens came before.
        Errors: ValueError for another width and for a start below 0; TypeError for an input of whole numbers.
        """
        if isinstance(input, Tensor) and not input.is_nested and input.ndim in (2, 3):
            self._check(input)
            return input + self._vectors(self._of_padded(input, start), input.dtype)
        form = read(input, None, self.batch_first)
        self._check(form.values)
        sequence, t = form.positions()
        first = _first(start, len(form.rows.length), t.device)
        t = t + (first[sequence] if isinstance(first, Tensor) else first)
        return form.restore(form.values + self._vectors(t, form.values.dtype))

    def _of_padded(self, input: Tensor, start: Lengths | int | None) -> Tensor:
        """(T,), (T, 1 or B) or (1 or B, T): the positions as they are broadcast over the input."""
        time = 1 if input.ndim == 3 and self.batch_first else 0
        t = torch.arange(input.shape[time], device=input.device)
        first = _first(start, input.shape[1 - time] if input.ndim == 3 else 1, input.device)
        if input.ndim == 2:
            return t + first
        t = t if time else t[:, None]
        if isinstance(first, Tensor):
            return t + (first[:, None] if time else first)
        return t + first

    def _check(self, x: Tensor) -> None:
        if not x.is_floating_point():
            raise TypeError(f"positions are added to a floating dtype, found {x.dtype}")
        if x.shape[-1] != self.d_model:
            raise ValueError(f"these positions have {self.d_model} features, the input has {x.shape[-1]}")

    @abstractmethod
    def _vectors(self, t: Tensor, dtype: torch.dtype) -> Tensor:
        """(..., D) for positions of any shape."""


class SinusoidalPositions(_Positions):
    """Adds the waves of Vaswani 2017, section 3.5 (`equations.positions.sinusoidal`); there is no largest position."""

    def __init__(self, d_model: int, *, batch_first: bool = False) -> None:
        super().__init__(d_model, batch_first)

    def _vectors(self, t: Tensor, dtype: torch.dtype) -> Tensor:
        flat = t.flatten()
        if readable(flat) and len(flat):  # many tokens stand at few positions
            low, high = (int(bound) for bound in torch.aminmax(flat))
            if high - low + 1 < len(flat):
                table = sinusoidal(torch.arange(low, high + 1, device=t.device), self.d_model).to(dtype)
                return table[t - low]
        return sinusoidal(flat, self.d_model).to(dtype).view(*t.shape, self.d_model)

    def extra_repr(self) -> str:
        return f"{self.d_model}, batch_first={self.batch_first}"


class LearnedPositions(_Positions):
    """Adds a row of `weight` (max_positions, D), normal with standard deviation 0.02 at first.

    Errors: ValueError for a position that has no row.
    """

    def __init__(
        self,
        max_positions: int,
        d_model: int,
        *,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(d_model, batch_first)
        check_sizes(0, max_positions=max_positions)
        self.max_positions = max_positions
        self.weight = nn.Parameter(torch.empty(max_positions, d_model, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=_STANDARD_DEVIATION)

    def _vectors(self, t: Tensor, dtype: torch.dtype) -> Tensor:
        if readable(t) and t.numel() and int(t.max()) >= self.max_positions:
            raise ValueError(
                f"position {int(t.max())} lies beyond the {self.max_positions} that are learned, from 0 on"
            )
        return embedding(t, self.weight)

    def extra_repr(self) -> str:
        return f"{self.max_positions}, {self.d_model}, batch_first={self.batch_first}"


def _first(start: Lengths | int | None, sequences: int, device: torch.device) -> Tensor | int:
    """One number for all sequences, or (B,)."""
    if start is None:
        return 0
    if isinstance(start, int):
        if start < 0:
            raise ValueError(f"start must be at least 0, found {start}")
        return start
    if isinstance(start, Tensor) and start.ndim == 0:
        start = start.expand(sequences)
    first = check_keys(start, sequences, "start").to(device)
    if readable(first) and len(first) and int(first.min()) < 0:
        raise ValueError(f"start must be at least 0, found {int(first.min())}")
    return first
