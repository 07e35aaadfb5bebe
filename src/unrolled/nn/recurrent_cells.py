"""Single steps of the recurrent layers, with torch.nn's names, arguments, parameters and results."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from unrolled.nn.recurrent import State
from unrolled.ops.recurrence import CELLS, Weights, recurrence
from unrolled.ragged import Rows


class _RecurrentCell(nn.Module):
    """What RNNCell, LSTMCell and GRUCell share: one step of the layer above, with torch's arguments and parameters."""

    _cell: str
    weight_ih: Tensor
    weight_hh: Tensor
    bias_ih: Tensor | None
    bias_hh: Tensor | None

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.input_size, self.hidden_size, self.bias = input_size, hidden_size, bias
        rows = CELLS[self._cell].gates * hidden_size
        shapes: dict[str, tuple[int, ...]] = {"weight_ih": (rows, input_size), "weight_hh": (rows, hidden_size)}
        shapes |= {"bias_ih": (rows,), "bias_hh": (rows,)}
        for name, shape in shapes.items():
            value = nn.Parameter(torch.empty(shape, device=device, dtype=dtype)) if "weight" in name or bias else None
            self.register_parameter(name, value)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform in +-1/sqrt(H), drawn in torch's order."""
        bound = 1 / math.sqrt(self.hidden_size) if self.hidden_size else 0
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def forward(self, input: Tensor, hx: State | None = None) -> Any:
        """The state after one step. Shapes: input (B, I) or (I,); hx and the result (B, H) or (H,), for the LSTM pairs.

        Errors: ValueError for shapes that do not fit.
        """
        if input.ndim not in (1, 2) or input.shape[-1] != self.input_size:
            raise ValueError(
                f"expected input (B, {self.input_size}) or ({self.input_size},), found {tuple(input.shape)}"
            )
        x = input.reshape(-1, self.input_size) if input.ndim == 2 else input.unsqueeze(0)
        shape = (*input.shape[:-1], self.hidden_size)
        states = CELLS[self._cell].states
        given = (x.new_zeros(shape, dtype=self.weight_hh.dtype),) * states if hx is None else hx
        given = (given,) if isinstance(given, Tensor) else tuple(given)
        if len(given) != states or any(s.shape != shape for s in given):
            raise ValueError(f"hx must hold {states} of shape {shape}, found {[tuple(s.shape) for s in given]}")
        sequence = torch.arange(x.shape[0], device=x.device)
        rows = Rows(sequence, 1, torch.ones_like(sequence))
        initial = [s.reshape(1, x.shape[0], self.hidden_size) for s in given]
        weights = Weights(self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh)
        _, last = recurrence(self._cell, x, initial, weights, rows)
        after = tuple(s.reshape(shape) for s in last)
        return after[0] if states == 1 else after

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.hidden_size}" + ("" if self.bias else ", bias=False")


class RNNCell(_RecurrentCell):
    """torch.nn.RNNCell."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        nonlinearity: str = "tanh",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if nonlinearity not in ("tanh", "relu"):
            raise ValueError(f'nonlinearity must be "tanh" or "relu", found {nonlinearity!r}')
        self._cell = f"rnn_{nonlinearity}"
        super().__init__(input_size, hidden_size, bias, device, dtype)
        self.nonlinearity = nonlinearity

    def extra_repr(self) -> str:
        return super().extra_repr() + ("" if self.nonlinearity == "tanh" else f", nonlinearity={self.nonlinearity}")


class LSTMCell(_RecurrentCell):
    """torch.nn.LSTMCell."""

    _cell = "lstm"

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(input_size, hidden_size, bias, device, dtype)


class GRUCell(_RecurrentCell):
    """torch.nn.GRUCell."""

    _cell = "gru"

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(input_size, hidden_size, bias, device, dtype)
