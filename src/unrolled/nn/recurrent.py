"""Recurrent layers with torch.nn's names, arguments, parameters and results."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from unrolled.nn._forms import Batch, read
from unrolled.ops.dropout import dropout
from unrolled.ops.rnn import rnn
from unrolled.ragged import Lengths


class RNN(nn.Module):
    """torch.nn.RNN with the gradient in closed form, for batches of any lengths, 0 included.

    Arguments, parameter names, initial values, `state_dict` and results are torch's. `learn_initial_state` (keyword
    only) adds a parameter `initial_state` (num_layers * D, H), used where no `hx` is given. Source: `equations.rnn`.
    Under autocast the arithmetic is float32.
    """

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
        super().__init__()
        if nonlinearity not in ("tanh", "relu"):
            raise ValueError(f'nonlinearity must be "tanh" or "relu", found {nonlinearity!r}')
        for name, size in (("hidden_size", hidden_size), ("num_layers", num_layers)):
            if size < 1:
                raise ValueError(f"{name} must be at least 1, found {size}")
        if input_size < 0 or not 0 <= dropout <= 1:
            raise ValueError(
                f"input_size must not be negative and dropout lie in [0, 1], found {input_size}, {dropout}"
            )
        if dropout > 0 and num_layers == 1:
            raise ValueError(
                "dropout lies between layers and does nothing with num_layers=1; use nn.Dropout on the output"
            )
        self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, num_layers
        self.nonlinearity, self.bias, self.batch_first = nonlinearity, bias, batch_first
        self.dropout, self.bidirectional = dropout, bidirectional
        self.learn_initial_state = learn_initial_state
        self.mode = f"RNN_{nonlinearity.upper()}"  # torch's name for it
        for layer in range(num_layers):
            width = input_size if layer == 0 else hidden_size * self.num_directions
            for suffix in self._suffixes(layer):
                shapes: dict[str, tuple[int, ...]] = {
                    "weight_ih": (hidden_size, width),
                    "weight_hh": (hidden_size, hidden_size),
                }
                if bias:
                    shapes |= {"bias_ih": (hidden_size,), "bias_hh": (hidden_size,)}
                for name, shape in shapes.items():
                    value = torch.empty(shape, device=device, dtype=dtype)
                    self.register_parameter(f"{name}_{suffix}", nn.Parameter(value))
        if learn_initial_state:
            shape = (num_layers * self.num_directions, hidden_size)
            self.initial_state = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.reset_parameters()

    @property
    def num_directions(self) -> int:
        return 2 if self.bidirectional else 1

    def reset_parameters(self) -> None:
        """Uniform in +-1/sqrt(H), drawn in torch's order; a learned initial state begins at 0."""
        bound = 1 / math.sqrt(self.hidden_size)
        for name, parameter in self.named_parameters():
            if name == "initial_state":
                nn.init.zeros_(parameter)
            else:
                nn.init.uniform_(parameter, -bound, bound)

    def flatten_parameters(self) -> None:
        """Nothing to do; torch's callers expect it to exist."""

    def forward(
        self, input: Batch, hx: Tensor | None = None, lengths: Lengths | None = None, *, keys: Tensor | None = None
    ) -> tuple[Batch, Tensor]:
        """All states of the last layer, in the form of `input`, and the last state of each layer and direction.

        Shapes: input (T, B, I), with `batch_first` (B, T, I), either with `lengths` (B,) or without; (T, I) for one
        sequence; a PackedSequence; a jagged nested tensor (B, *, I); a Ragged of (N, I). hx and h_n
        (num_layers * D, B, H), without B for one sequence. `keys` (B,): whole numbers that take the place of a
        sequence's index in the dropout mask.
        Edges: rows beyond a length are 0; a sequence of length 0 has h_n = hx.
        Errors: ValueError for shapes that do not fit.
        """
        form = read(input, lengths, self.batch_first)
        if form.values.shape[1] != self.input_size:
            raise ValueError(f"this layer reads {self.input_size} features, the input has {form.values.shape[1]}")
        h0 = self._initial_states(hx, form.rows.start.shape[0], form.values, form.batched)
        seed = torch.randint(2**63 - 1, ()) if self.dropout > 0 and self.training else None
        y, h_last = form.values, []
        for layer in range(self.num_layers):
            if layer > 0 and seed is not None:
                key, t = form.positions()
                key = key if keys is None else keys.to(key)[key]
                y = dropout(y, self.dropout, seed.to(key.device), layer - 1, key, t)
            states = h0[layer * self.num_directions : (layer + 1) * self.num_directions]
            weights = self._joined("weight_ih", layer), self._joined("weight_hh", layer)
            bias_ih, bias_hh = (self._joined(name, layer) if self.bias else None for name in ("bias_ih", "bias_hh"))
            y, h = rnn(y, states, *weights, bias_ih, bias_hh, form.rows, self.nonlinearity)
            h_last.append(h)
        h_n = h_last[0] if len(h_last) == 1 else torch.cat(h_last)
        h_n = h_n if form.batched else h_n.squeeze(1)
        if not torch.compiler.is_compiling():
            h_n.num_directions = self.num_directions  # type: ignore[attr-defined]
        return form.restore(y), h_n

    def _initial_states(self, hx: Tensor | None, sequences: int, values: Tensor, batched: bool) -> Tensor:
        shape = (self.num_layers * self.num_directions, sequences, self.hidden_size)
        if hx is not None:
            found = hx if batched or hx.ndim != 2 else hx.unsqueeze(1)
            if found.shape != shape:
                wanted = shape if batched else (shape[0], shape[2])
                raise ValueError(f"hx must have shape {tuple(wanted)}, found {tuple(hx.shape)}")
            return found
        if self.learn_initial_state:
            return self.initial_state.unsqueeze(1).expand(shape)
        return values.new_zeros(shape, dtype=self.weight_hh_l0.dtype)  # type: ignore[arg-type]

    def _joined(self, name: str, layer: int) -> Tensor:
        parts = [getattr(self, f"{name}_{suffix}") for suffix in self._suffixes(layer)]
        joined: Tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
        return joined

    def _suffixes(self, layer: int) -> list[str]:
        return [f"l{layer}", f"l{layer}_reverse"][: self.num_directions]

    def extra_repr(self) -> str:
        shown = [str(self.input_size), str(self.hidden_size)]
        defaults = {"num_layers": 1, "nonlinearity": "tanh", "bias": True, "batch_first": False, "dropout": 0.0}
        defaults |= {"bidirectional": False, "learn_initial_state": False}
        shown += [f"{k}={getattr(self, k)}" for k, default in defaults.items() if getattr(self, k) != default]
        return ", ".join(shown)


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
