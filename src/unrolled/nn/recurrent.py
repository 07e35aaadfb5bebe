"""Recurrent layers with torch.nn's names, arguments, parameters and results."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from unrolled.nn._forms import Batch, read
from unrolled.ops.dropout import dropout
from unrolled.ops.recurrence import CELLS, Weights, recurrence
from unrolled.ragged import Lengths, check_keys

State = Tensor | tuple[Tensor, Tensor]  # h, for the LSTM (h, c)


class Recurrent(nn.Module):
    """What RNN, LSTM and GRU share: parameters, layers, directions, dropout between layers, the forms of input."""

    _cell: str  # in ops.recurrence
    _options: ClassVar[dict[str, Any]] = {
        "num_layers": 1,
        "bias": True,
        "batch_first": False,
        "dropout": 0.0,
        "bidirectional": False,
        "learn_initial_state": False,
    }

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int,
        bias: bool,
        batch_first: bool,
        dropout: float,
        bidirectional: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        learn_initial_state: bool,
    ) -> None:
        super().__init__()
        for name, size in (("hidden_size", hidden_size), ("num_layers", num_layers)):
            if size < 1:
                raise ValueError(f"{name} must be at least 1, found {size}")
        if input_size < 0 or not 0 <= dropout <= 1:
            raise ValueError(f"input_size must be >= 0 and dropout lie in [0, 1], found {input_size}, {dropout}")
        if dropout > 0 and num_layers == 1:
            raise ValueError(
                "dropout lies between layers and does nothing with num_layers=1; use nn.Dropout on the output"
            )
        self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, num_layers
        self.bias, self.batch_first, self.dropout = bias, batch_first, dropout
        self.bidirectional, self.learn_initial_state = bidirectional, learn_initial_state
        rows = CELLS[self._cell].gates * hidden_size
        for layer in range(num_layers):
            width = input_size if layer == 0 else hidden_size * self.num_directions
            for suffix in self._suffixes(layer):
                shapes: dict[str, tuple[int, ...]] = {"weight_ih": (rows, width), "weight_hh": (rows, hidden_size)}
                if bias:
                    shapes |= {"bias_ih": (rows,), "bias_hh": (rows,)}
                for name, shape in shapes.items():
                    value = torch.empty(shape, device=device, dtype=dtype)
                    self.register_parameter(f"{name}_{suffix}", nn.Parameter(value))
        if learn_initial_state:
            shape = (num_layers * self.num_directions, hidden_size)
            for name in self._initial_names():
                self.register_parameter(name, nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))
        self.reset_parameters()

    @property
    def num_directions(self) -> int:
        return 2 if self.bidirectional else 1

    @property
    def mode(self) -> str:
        """torch's name for the cell."""
        return self._cell.upper()

    def reset_parameters(self) -> None:
        """Uniform in +-1/sqrt(H), drawn in torch's order; a learned initial state begins at 0."""
        bound = 1 / math.sqrt(self.hidden_size)
        for name, parameter in self.named_parameters():
            if name in self._initial_names():
                nn.init.zeros_(parameter)
            else:
                nn.init.uniform_(parameter, -bound, bound)

    def flatten_parameters(self) -> None:
        """Nothing to do; torch's callers expect it to exist."""

    def forward(
        self, input: Batch, hx: State | None = None, lengths: Lengths | None = None, *, keys: Tensor | None = None
    ) -> tuple[Batch, Any]:
        """All states of the last layer, in the form of `input`, and the last state of each layer and direction.

        Shapes: input (T, B, I), with `batch_first` (B, T, I), either with `lengths` (B,) or without; (T, I) for one
        sequence; a PackedSequence; a jagged nested tensor (B, *, I); a Ragged of (N, I). hx and h_n
        (num_layers * D, B, H), without B for one sequence; for the LSTM pairs (h, c) of these. `keys` (B,): whole
        numbers that take the place of a sequence's index in the dropout mask.
        Edges: rows beyond a length are 0; a sequence of length 0 has h_n = hx.
        Errors: ValueError for shapes that do not fit.
        """
        form = read(input, lengths, self.batch_first)
        if form.values.shape[1] != self.input_size:
            raise ValueError(f"this layer reads {self.input_size} features, the input has {form.values.shape[1]}")
        initial = self._initial_states(hx, form.rows.start.shape[0], form.values, form.batched)
        seed = torch.randint(2**63 - 1, ()) if self.dropout > 0 and self.training else None
        y, lasts = form.values, []
        for layer in range(self.num_layers):
            if layer > 0 and seed is not None:
                key, t = form.positions()
                key = key if keys is None else check_keys(keys, form.rows.start.shape[0]).to(key)[key]
                y = dropout(y, self.dropout, seed.to(key.device), layer - 1, key, t)
            own = slice(layer * self.num_directions, (layer + 1) * self.num_directions)
            names = ("weight_ih", "weight_hh", *(("bias_ih", "bias_hh") if self.bias else ()))
            weights = Weights(**{name: self._joined(name, layer) for name in names})
            y, last = recurrence(self._cell, y, [s[own] for s in initial], weights, form.rows)
            lasts.append(last)
        states = lasts[0] if len(lasts) == 1 else tuple(torch.cat(parts) for parts in zip(*lasts, strict=True))
        states = states if form.batched else tuple(s.squeeze(1) for s in states)
        if not torch.compiler.is_compiling():
            for s in states:
                s.num_directions = self.num_directions  # type: ignore[attr-defined]
        return form.restore(y), states[0] if len(states) == 1 else states

    def _initial_states(self, hx: State | None, sequences: int, values: Tensor, batched: bool) -> tuple[Tensor, ...]:
        names = self._initial_names()
        shape = (self.num_layers * self.num_directions, sequences, self.hidden_size)
        if hx is None and self.learn_initial_state:
            return tuple(getattr(self, name).unsqueeze(1).expand(shape) for name in names)
        if hx is None:
            return (values.new_zeros(shape, dtype=self.weight_hh_l0.dtype),) * len(names)  # type: ignore[arg-type]
        given: tuple[Tensor, ...] = tuple(hx) if isinstance(hx, tuple | list) else (hx,)
        if len(given) != len(names) or not all(isinstance(s, Tensor) for s in given):
            form = "a tensor" if len(names) == 1 else "a pair of tensors (h, c)"
            raise TypeError(f"hx must be {form}, found {type(hx).__name__}")
        given = tuple(s if batched or s.ndim != 2 else s.unsqueeze(1) for s in given)
        for s in given:
            if s.shape != shape:
                wanted = shape if batched else (shape[0], shape[2])
                raise ValueError(
                    f"hx must have shape {wanted}, found {tuple(s.shape if batched else s.squeeze(1).shape)}"
                )
        return given

    def _initial_names(self) -> tuple[str, ...]:
        return ("initial_state",) if CELLS[self._cell].states == 1 else ("initial_state", "initial_memory")

    def _joined(self, name: str, layer: int) -> Tensor:
        parts = [getattr(self, f"{name}_{suffix}") for suffix in self._suffixes(layer)]
        joined: Tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
        return joined

    def _suffixes(self, layer: int) -> list[str]:
        return [f"l{layer}", f"l{layer}_reverse"][: self.num_directions]

    def extra_repr(self) -> str:
        changed = [f"{k}={getattr(self, k)!r}" for k, default in self._options.items() if getattr(self, k) != default]
        return ", ".join([str(self.input_size), str(self.hidden_size), *changed])


class RNN(Recurrent):
    """torch.nn.RNN with the gradient in closed form, for batches of any lengths, 0 included.

    Arguments, parameter names, initial values, `state_dict` and results are torch's. `learn_initial_state` (keyword
    only) adds a parameter `initial_state` (num_layers * D, H), used where no `hx` is given. Source: `equations.rnn`.
    Under autocast the arithmetic is float32.
    """

    _options: ClassVar[dict[str, Any]] = {"nonlinearity": "tanh", **Recurrent._options}

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        nonlinearity: str = "tanh",
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        learn_initial_state: bool = False,
    ) -> None:
        if nonlinearity not in ("tanh", "relu"):
            raise ValueError(f'nonlinearity must be "tanh" or "relu", found {nonlinearity!r}')
        self._cell = f"rnn_{nonlinearity}"
        sizes = input_size, hidden_size, num_layers
        super().__init__(*sizes, bias, batch_first, dropout, bidirectional, device, dtype, learn_initial_state)
        self.nonlinearity = nonlinearity


class LSTM(Recurrent):
    """torch.nn.LSTM likewise: `y, (h, c) = lstm(x)`. A learned initial state is `initial_state` and `initial_memory`.

    Source: `equations.lstm`. Errors: ValueError for `proj_size`, which is not offered yet.
    """

    _cell = "lstm"

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        learn_initial_state: bool = False,
    ) -> None:
        if proj_size != 0:
            raise ValueError(f"proj_size must be 0 here, found {proj_size}: a projected LSTM is torch.nn.LSTM's alone")
        sizes = input_size, hidden_size, num_layers
        super().__init__(*sizes, bias, batch_first, dropout, bidirectional, device, dtype, learn_initial_state)


class GRU(Recurrent):
    """torch.nn.GRU likewise, its reset gate after the recurrent product. Source: `equations.gru`."""

    _cell = "gru"

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        learn_initial_state: bool = False,
    ) -> None:
        sizes = input_size, hidden_size, num_layers
        super().__init__(*sizes, bias, batch_first, dropout, bidirectional, device, dtype, learn_initial_state)


def last(h: Tensor, *, bidirectional: bool | None = None) -> Tensor:
    """The final state of each sequence in the last layer, directions joined: (layers * D, B, H) -> (B, D * H).

    For the forward direction that is the state after a sequence's own last step, for the reverse one the state after
    its first. `h` comes from one of our layers and knows its directions; inside torch.compile, or for another `h`, say
    `bidirectional`. Unbatched: (layers * D, H) -> (D * H,).
    Errors: ValueError where the directions are not known or do not fit.
    """
    directions = getattr(h, "num_directions", None) if bidirectional is None else 1 + bool(bidirectional)
    if directions is None:
        raise ValueError("this h does not say how many directions it has: last(h, bidirectional=True or False)")
    if h.shape[0] % directions:
        raise ValueError(f"{h.shape[0]} states cannot be layers of {directions} directions")
    return torch.cat(h[h.shape[0] - directions :].unbind(0), dim=-1)
