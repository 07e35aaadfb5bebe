"""Single steps of the recurrent layers, with torch.nn's names, arguments, parameters and results."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from unrolled.nn._initial import check_sizes, initialise, shapes
from unrolled.nn._recurrent import Recurrent, State
from unrolled.nn.recurrent import gru_cell
from unrolled.ops.recurrence import CELLS, Weights, recurrence
from unrolled.ragged import Rows


class _RecurrentCell(nn.Module):
    """What RNNCell, LSTMCell and GRUCell share: one step of the layer above, with torch's arguments and parameters."""

    _cell: str
    weight_hh: Tensor

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        **options: Any,
    ) -> None:
        super().__init__()
        check_sizes(input_size, hidden_size=hidden_size)
        self.input_size, self.hidden_size = input_size, hidden_size
        self.bias, self._given = options["bias"], options
        extra = options.get("layer_norm", False), options.get("peephole", False)
        own = shapes(self._cell, input_size, hidden_size, 0, options["bias"], *extra)
        self._names = tuple(own)
        for name, shape in own.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))
        if not options["bias"]:
            for name in ("bias_ih", "bias_hh"):
                self.register_parameter(name, None)  # as torch has them
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform in +-1/sqrt(H), drawn in torch's order; gains of layer norm 1, the bias of c 0."""
        initialise(self.named_parameters(), self.hidden_size)

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
        if len(given) != states or any(not isinstance(s, Tensor) or s.shape != shape for s in given):
            found = [tuple(s.shape) if isinstance(s, Tensor) else s for s in given]
            raise ValueError(f"hx must hold {states} of shape {shape}, found {found}")
        sequence = torch.arange(x.shape[0], device=x.device)
        rows = Rows(sequence, 1, torch.ones_like(sequence))
        initial = [s.reshape(1, x.shape[0], self.hidden_size) for s in given]
        weights = Weights(**{name: getattr(self, name) for name in self._names})
        _, last = recurrence(self._cell, x, initial, weights, rows)
        after = tuple(s.reshape(shape) for s in last)
        return after[0] if states == 1 else after

    def extra_repr(self) -> str:
        changed = [f"{k}={value}" for k, value in self._given.items() if value != Recurrent._options[k]]
        return ", ".join([str(self.input_size), str(self.hidden_size), *changed])


class RNNCell(_RecurrentCell):
    """torch.nn.RNNCell; `layer_norm` as in RNN."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        nonlinearity: str = "tanh",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        layer_norm: bool = False,
    ) -> None:
        if nonlinearity not in ("tanh", "relu"):
            raise ValueError(f'nonlinearity must be "tanh" or "relu", found {nonlinearity!r}')
        self._cell = f"rnn_{nonlinearity}"
        options = {"bias": bias, "nonlinearity": nonlinearity, "layer_norm": layer_norm}
        super().__init__(input_size, hidden_size, device, dtype, **options)
        self.nonlinearity = nonlinearity


class LSTMCell(_RecurrentCell):
    """torch.nn.LSTMCell; `layer_norm` and `peephole` as in LSTM."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        layer_norm: bool = False,
        peephole: bool = False,
    ) -> None:
        self._cell = "lstm_options" if peephole or layer_norm else "lstm"
        options = {"bias": bias, "layer_norm": layer_norm, "peephole": peephole}
        super().__init__(input_size, hidden_size, device, dtype, **options)


class GRUCell(_RecurrentCell):
    """torch.nn.GRUCell; `layer_norm` and `reset` as in GRU."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        layer_norm: bool = False,
        reset: str = "after",
    ) -> None:
        self._cell = gru_cell(reset)
        options = {"bias": bias, "layer_norm": layer_norm, "reset": reset}
        super().__init__(input_size, hidden_size, device, dtype, **options)
