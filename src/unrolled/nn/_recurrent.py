"""What RNN, LSTM and GRU share: parameters, layers, directions, dropout, zoneout, the forms of input."""

from __future__ import annotations

from math import isfinite
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from unrolled.nn._forms import Batch, read
from unrolled.nn._initial import check_sizes, initialise, shapes
from unrolled.ops.dropout import dropout
from unrolled.ops.recurrence import CELLS, Weights, Zoneout, recurrence
from unrolled.ragged import Lengths, check_keys

State = Tensor | tuple[Tensor, Tensor]  # h, for the LSTM (h, c)


class Recurrent(nn.Module):
    """The arguments are those of the three; one that a layer does not have keeps its default."""

    mode: str  # torch's name for the layer
    _cell: str  # in ops.recurrence
    _options: ClassVar[dict[str, Any]] = {
        "proj_size": 0,
        "num_layers": 1,
        "nonlinearity": "tanh",
        "bias": True,
        "batch_first": False,
        "dropout": 0.0,
        "bidirectional": False,
        "learn_initial_state": False,
        "reset": "after",
        "peephole": False,
        "layer_norm": False,
        "recurrent_dropout": 0.0,
        "zoneout": 0.0,
        "forget_bias": None,
        "recurrent_init": "uniform",
        "bptt": 0,
    }
    proj_size: int
    num_layers: int
    bias: bool
    batch_first: bool
    dropout: float
    bidirectional: bool
    learn_initial_state: bool
    peephole: bool
    layer_norm: bool
    recurrent_dropout: float
    zoneout: float | tuple[float, float]
    forget_bias: float | None
    recurrent_init: str
    bptt: int

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.input_size, self.hidden_size = input_size, hidden_size
        vars(self).update(self._options | options)
        self._check()
        new = {"device": device, "dtype": dtype}
        for layer in range(self.num_layers):
            width = input_size if layer == 0 else self._widths[0] * self.num_directions
            sizes = width, hidden_size, self.proj_size
            own = shapes(self._cell, *sizes, self.bias, self.layer_norm, self.peephole)
            for suffix in self._suffixes(layer):
                for name, shape in own.items():
                    self.register_parameter(f"{name}_{suffix}", nn.Parameter(torch.empty(shape, **new)))  # type: ignore[arg-type]
        self._names = tuple(own)
        for name, width in zip(self._initial_names, self._widths, strict=True):
            if self.learn_initial_state:
                states = torch.empty(self.num_layers * self.num_directions, width, **new)  # type: ignore[arg-type]
                self.register_parameter(name, nn.Parameter(states))
        self.reset_parameters()

    def _check(self) -> None:
        check_sizes(self.input_size, hidden_size=self.hidden_size, num_layers=self.num_layers)
        if not 0 <= self.dropout <= 1:
            raise ValueError(f"dropout must lie in [0, 1], found {self.dropout}")
        if self.dropout > 0 and self.num_layers == 1:
            raise ValueError(
                "dropout lies between layers and does nothing with num_layers=1; use nn.Dropout on the output, or "
                "recurrent_dropout"
            )
        if not 0 <= self.proj_size < self.hidden_size:
            raise ValueError(
                f"proj_size must lie in [0, hidden_size), 0 for no projection; found {self.proj_size} with "
                f"hidden_size={self.hidden_size}"
            )
        if not _is_rate(self.recurrent_dropout):
            raise ValueError(f"recurrent_dropout must lie in [0, 1), found {self.recurrent_dropout!r}")
        pair = isinstance(self.zoneout, tuple | list) and len(self.zoneout) == len(self._widths) == 2
        if not all(map(_is_rate, self.zoneout if pair else [self.zoneout])):  # type: ignore[arg-type]
            kind = "a number or a pair (of h, of c)" if len(self._widths) == 2 else "a number"
            raise ValueError(f"zoneout must be {kind} in [0, 1), found {self.zoneout!r}")
        if self.recurrent_init not in ("uniform", "orthogonal"):
            raise ValueError(f'recurrent_init must be "uniform" or "orthogonal", found {self.recurrent_init!r}')
        if not (self.forget_bias is None or (isinstance(self.forget_bias, int | float) and isfinite(self.forget_bias))):
            raise ValueError(f"forget_bias must be a finite number or None, found {self.forget_bias!r}")
        if self.forget_bias is not None and not self.bias:
            raise ValueError(f"forget_bias={self.forget_bias} needs a bias, found bias=False")
        if not isinstance(self.bptt, int) or not 0 <= self.bptt < 2**63:
            raise ValueError(f"bptt must be a whole number of steps below 2**63, 0 for all; found {self.bptt!r}")

    @property
    def num_directions(self) -> int:
        return 2 if self.bidirectional else 1

    @property
    def _widths(self) -> tuple[int, ...]:
        """Of h, and of c."""
        return (self.proj_size or self.hidden_size, self.hidden_size)[: CELLS[self._cell].states]

    @property
    def _initial_names(self) -> tuple[str, ...]:
        return ("initial_state", "initial_memory")[: CELLS[self._cell].states]

    def reset_parameters(self) -> None:
        """Uniform in +-1/sqrt(H), drawn in torch's order, or as the options say; learned initial states begin at 0."""
        initialise(self.named_parameters(), self.hidden_size, self.recurrent_init, self.forget_bias)

    def flatten_parameters(self) -> None:
        """Nothing to do; torch's callers expect it to exist."""

    def forward(
        self, input: Batch, hx: State | None = None, lengths: Lengths | None = None, *, keys: Tensor | None = None
    ) -> tuple[Batch, Any]:
        """All states of the last layer, in the form of `input`, and the last state of each layer and direction.

        Shapes: input (T, B, I), with `batch_first` (B, T, I), either with `lengths` (B,) or without; (T, I) for one
        sequence; a PackedSequence; a jagged nested tensor (B, *, I); a Ragged of (N, I). The output is D * P wide.
        hx and h_n (num_layers * D, B, P), P = H without a projection, and without B for one sequence; for the LSTM
        pairs (h, c), c with H in the place of P. `keys` (B,): whole numbers that take the place of a sequence's index
        in the masks of dropout, recurrent dropout and zoneout.
        Edges: rows beyond a length are 0; a sequence of length 0 has h_n = hx.
        Errors: ValueError for shapes that do not fit.
        """
        form = read(input, lengths, self.batch_first)
        if form.values.shape[1] != self.input_size:
            raise ValueError(f"this layer reads {self.input_size} features, the input has {form.values.shape[1]}")
        sequences, device = form.rows.start.shape[0], form.values.device
        initial = self._initial_states(hx, sequences, form.values, form.batched)
        keys = None if keys is None else check_keys(keys, sequences).to(device)
        rates = self.zoneout if isinstance(self.zoneout, tuple | list) else (self.zoneout, self.zoneout)
        seed, seed_recurrent, seed_zoneout = (
            torch.randint(2**63 - 1, ()).to(device) if rate > 0 and self.training else None
            for rate in (self.dropout, self.recurrent_dropout, max(rates))
        )
        y, lasts, mask, zoneout = form.values, [], None, None
        for layer in range(self.num_layers):
            if layer > 0 and seed is not None:
                sequence, t = form.positions()
                y = dropout(y, self.dropout, seed, layer - 1, sequence if keys is None else keys[sequence], t)
            if seed_recurrent is not None:
                mask = self._mask(layer, seed_recurrent, _keys(keys, sequences, device))
            if max(rates) > 0:
                zoneout = Zoneout(*rates, seed_zoneout, _keys(keys, sequences, device), layer)
            own = slice(layer * self.num_directions, (layer + 1) * self.num_directions)
            weights = Weights(**{name: self._joined(name, layer) for name in self._names})
            options: Any = {"mask": mask, "zoneout": zoneout, "bptt": self.bptt}
            y, last = recurrence(self._cell, y, [s[own] for s in initial], weights, form.rows, **options)
            lasts.append(last)
        states = lasts[0] if len(lasts) == 1 else tuple(torch.cat(parts) for parts in zip(*lasts, strict=True))
        states = states if form.batched else tuple(s.squeeze(1) for s in states)
        if not torch.compiler.is_compiling():
            for s in states:
                s.num_directions = self.num_directions  # type: ignore[attr-defined]
        return form.restore(y), states[0] if len(states) == 1 else states

    def _initial_states(self, hx: State | None, sequences: int, values: Tensor, batched: bool) -> tuple[Tensor, ...]:
        wanted = [(self.num_layers * self.num_directions, sequences, width) for width in self._widths]
        if hx is None and self.learn_initial_state:
            names = zip(self._initial_names, wanted, strict=True)
            return tuple(getattr(self, name).unsqueeze(1).expand(shape) for name, shape in names)
        if hx is None:
            zeros = [values.new_zeros(shape, dtype=self.weight_hh_l0.dtype) for shape in wanted]  # type: ignore[arg-type]
            return tuple(zeros)
        given: tuple[Tensor, ...] = tuple(hx) if isinstance(hx, tuple | list) else (hx,)
        if len(given) != len(wanted) or not all(isinstance(s, Tensor) for s in given):
            form = "a tensor" if len(wanted) == 1 else "a pair of tensors (h, c)"
            raise TypeError(f"hx must be {form}, found {type(hx).__name__}")
        given = tuple(s if batched or s.ndim != 2 else s.unsqueeze(1) for s in given)
        for s, shape in zip(given, wanted, strict=True):
            if s.shape != shape:
                expected = shape if batched else (shape[0], shape[2])
                found = tuple(s.shape if batched else s.squeeze(1).shape)
                raise ValueError(f"hx must have shape {expected}, found {found}")
        return given

    def _mask(self, layer: int, seed: Tensor, keys: Tensor) -> Tensor:
        """(D, B, P): 0 or 1 / (1 - p), the same at all steps of a sequence, other numbers in each direction."""
        ones = torch.ones(keys.shape[0], self._widths[0], device=keys.device, dtype=self.weight_hh_l0.dtype)  # type: ignore[arg-type]
        streams = range(2 * layer, 2 * layer + self.num_directions)
        t = torch.zeros_like(keys)
        return torch.stack([dropout(ones, self.recurrent_dropout, seed, stream, keys, t) for stream in streams])

    def _joined(self, name: str, layer: int) -> Tensor:
        parts = [getattr(self, f"{name}_{suffix}") for suffix in self._suffixes(layer)]
        joined: Tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
        return joined

    def _suffixes(self, layer: int) -> list[str]:
        return [f"l{layer}", f"l{layer}_reverse"][: self.num_directions]

    def extra_repr(self) -> str:
        changed = [f"{k}={getattr(self, k)!r}" for k, default in self._options.items() if getattr(self, k) != default]
        return ", ".join([str(self.input_size), str(self.hidden_size), *changed])


def _keys(keys: Tensor | None, sequences: int, device: torch.device) -> Tensor:
    return torch.arange(sequences, device=device) if keys is None else keys


def _is_rate(rate: Any) -> bool:
    return isinstance(rate, int | float) and 0 <= rate < 1
