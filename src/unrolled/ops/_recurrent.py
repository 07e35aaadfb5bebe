"""What the recurrent operator is given and what it keeps."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from unrolled.equations.gru import GRU, GRUGates
from unrolled.equations.gru_before import GRU_BEFORE, GRUBeforeGates
from unrolled.equations.lstm import LSTM, LSTMGates
from unrolled.equations.lstm_options import LSTM_OPTIONS, LSTMOptionsKept
from unrolled.equations.recurrence import Cell
from unrolled.equations.recurrent_options import Weights
from unrolled.equations.rnn import RNN_RELU, RNN_TANH, Nothing
from unrolled.ragged import Rows


class Kind(NamedTuple):
    """A cell as the operator sees it."""

    equation: Cell
    gates: int  # blocks of H rows in its weights
    states: int  # h, or h and c
    fields: Any  # the NamedTuple of what it keeps for the backward
    kept: tuple[str, ...]  # of these the gates, each (N, H)


def _kind(equation: Cell, gates: int, states: int, fields: Any) -> Kind:
    return Kind(equation, gates, states, fields, tuple(name for name in fields._fields if name != "norm"))


CELLS = {
    "rnn_tanh": _kind(RNN_TANH, 1, 1, Nothing),
    "rnn_relu": _kind(RNN_RELU, 1, 1, Nothing),
    "lstm": _kind(LSTM, 4, 2, LSTMGates),
    "lstm_options": _kind(LSTM_OPTIONS, 4, 2, LSTMOptionsKept),  # with peepholes or a normalised memory
    "gru": _kind(GRU, 3, 1, GRUGates),
    "gru_before": _kind(GRU_BEFORE, 3, 1, GRUBeforeGates),
}


class Inputs(NamedTuple):
    """What the operator is given, in the order of its schema; directions one below the other in the weights."""

    cell: str
    x: Tensor
    h0: Tensor | None
    c0: Tensor | None
    weight_ih: Tensor
    weight_hh: Tensor
    bias_ih: Tensor | None
    bias_hh: Tensor | None
    weight_hr: Tensor | None
    norm_ih: Tensor | None
    norm_hh: Tensor | None
    peephole: Tensor | None
    norm_c: Tensor | None
    bias_c: Tensor | None
    mask: Tensor | None
    seed: Tensor | None
    keys: Tensor | None
    start: Tensor
    length: Tensor
    zoneout_h: float
    zoneout_c: float
    layer: int
    bptt: int
    step: int

    @property
    def tensors(self) -> tuple[Any, ...]:
        """From x to length."""
        return self[1:19]

    @property
    def numbers(self) -> tuple[Any, ...]:
        """From zoneout_h to step."""
        return self[19:]

    @property
    def weights(self) -> Weights:
        return Weights(*self[4:14])

    @property
    def rows(self) -> Rows:
        return Rows(self.start, self.step, self.length)

    @property
    def directions(self) -> int:
        return self.weight_hh.shape[0] // (CELLS[self.cell].gates * self.hidden)

    @property
    def hidden(self) -> int:
        """Units of a cell; without a projection as many as h has."""
        w = self.weight_hh if self.weight_hr is None else self.weight_hr
        return w.shape[1]

    @property
    def memory(self) -> bool:
        return CELLS[self.cell].states == 2

    @property
    def plain(self) -> bool:
        """No option but `bptt`: the recurrence of `equations.recurrence`, fused in the core."""
        options = (self.weight_hr, self.norm_ih, self.mask)
        zoneout = self.zoneout_h > 0 or self.zoneout_c > 0
        return all(o is None for o in options) and not zoneout and self.cell not in ("lstm_options", "gru_before")

    @property
    def kept_blocks(self) -> int:
        """Blocks of H numbers kept per token and direction: the cell's own; with options its outputs, the norms'."""
        blocks = len(CELLS[self.cell].kept)
        if not self.plain:
            blocks += CELLS[self.cell].states
            blocks += 0 if self.norm_ih is None else 2 * CELLS[self.cell].gates
            blocks += self.norm_c is not None
        return blocks


# of u, v, c, and what is reset first: the scales of layer norms kept per token and direction
SCALES = 4


class Saved(NamedTuple):
    """What the forward keeps; an empty tensor stands for what there is not."""

    h_prev: Tensor  # (R, D * P) the state before each row
    c_prev: Tensor  # (R, D * H)
    kept: Tensor  # (R, D * blocks * H)
    scales: Tensor  # (R, D * SCALES)
    h_end: Tensor  # (D, B, P)
    c_end: Tensor  # (D, B, H)
