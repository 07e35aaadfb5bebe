"""Recurrent layers with torch.nn's names, arguments, parameters and results, and with options that torch has not."""

from __future__ import annotations

import torch
from torch import Tensor

from unrolled.nn._recurrent import Recurrent as Recurrent


class RNN(Recurrent):
    """torch.nn.RNN with the gradient in closed form, for batches of any lengths, 0 included.

    Arguments, parameter names, initial values, `state_dict` and results are torch's. Keyword only, of each layer and
    direction where nothing else is said:

    - `learn_initial_state`: a parameter `initial_state` (num_layers * D, P), used where no `hx` is given.
    - `proj_size`: the state is a projection of P < H units (`weight_hr` (P, H)); 0: none. Sak 2014.
    - `layer_norm`: of W_ih x and of W_hh h, gains `norm_ih` and `norm_hh` (H,). Ba 2016, equations 20 to 22.
    - `recurrent_dropout`: in training, the probability in [0, 1) with which a unit of h does not reach W_hh, one mask
      for all steps of a sequence. Gal and Ghahramani 2016.
    - `zoneout`: the probability in [0, 1) with which a unit of the state keeps its old value; in evaluation the
      expectation. Krueger 2017.
    - `recurrent_init`: "uniform" as torch, or "orthogonal" for each gate's block of weight_hh. Saxe 2014.
    - `bptt`: k lets no gradient pass from step t + 1 to step t where k divides t; 0: it passes everywhere. Williams and
      Peng 1990.

    Source: `equations.rnn`, `equations.recurrent_options`. half and bfloat16 are computed as such, by the equations;
    under autocast the arithmetic is float32.
    Errors: ValueError for an argument outside what is said here.
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
        proj_size: int = 0,
        layer_norm: bool = False,
        recurrent_dropout: float = 0.0,
        zoneout: float = 0.0,
        recurrent_init: str = "uniform",
        bptt: int = 0,
    ) -> None:
        if nonlinearity not in ("tanh", "relu"):
            raise ValueError(f'nonlinearity must be "tanh" or "relu", found {nonlinearity!r}')
        self._cell, self.mode = f"rnn_{nonlinearity}", f"RNN_{nonlinearity.upper()}"
        super().__init__(
            input_size,
            hidden_size,
            device,
            dtype,
            num_layers=num_layers,
            nonlinearity=nonlinearity,
            bias=bias,
            batch_first=batch_first,
            dropout=dropout,
            bidirectional=bidirectional,
            learn_initial_state=learn_initial_state,
            proj_size=proj_size,
            layer_norm=layer_norm,
            recurrent_dropout=recurrent_dropout,
            zoneout=zoneout,
            recurrent_init=recurrent_init,
            bptt=bptt,
        )


class LSTM(Recurrent):
    """torch.nn.LSTM likewise: `y, (h, c) = lstm(x)`, `proj_size` as torch's. The options are RNN's, and besides:

    - `learn_initial_state`: `initial_state` (num_layers * D, P) and `initial_memory` (num_layers * D, H).
    - `peephole`: the gates see the memory, `peephole` (3 * H,) for i, f, o. Gers and Schmidhuber 2000.
    - `layer_norm`: gains of 4 * H; the memory is normalised too on its way to h, gain `norm_c` and `bias_c` (H,).
    - `zoneout`: one probability for both, or a pair (of h, of c).
    - `forget_bias`: the bias of the forget gate at the beginning, all of it in bias_ih. Jozefowicz 2015 advises 1.

    Source: `equations.lstm`, `equations.lstm_options`.
    """

    mode = "LSTM"

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
        peephole: bool = False,
        layer_norm: bool = False,
        recurrent_dropout: float = 0.0,
        zoneout: float | tuple[float, float] = 0.0,
        forget_bias: float | None = None,
        recurrent_init: str = "uniform",
        bptt: int = 0,
    ) -> None:
        self._cell = "lstm_options" if peephole or layer_norm else "lstm"
        super().__init__(
            input_size,
            hidden_size,
            device,
            dtype,
            num_layers=num_layers,
            bias=bias,
            batch_first=batch_first,
            dropout=dropout,
            bidirectional=bidirectional,
            proj_size=proj_size,
            learn_initial_state=learn_initial_state,
            peephole=peephole,
            layer_norm=layer_norm,
            recurrent_dropout=recurrent_dropout,
            zoneout=zoneout,
            forget_bias=forget_bias,
            recurrent_init=recurrent_init,
            bptt=bptt,
        )


class GRU(Recurrent):
    """torch.nn.GRU likewise. The options are RNN's, without a projection (h goes its own path past W_hh), and besides:

    - `reset`: "after" the recurrent product as torch has it, or "before" it, W_hn (r * h), as in Cho 2014.
    - `layer_norm`: gains of 3 * H; with reset "before" W_hr h and W_hz h are normalised together, W_hn (r * h) alone.
    - `recurrent_dropout`: the mask is not on the GRU's own path z * h.

    Source: `equations.gru`, `equations.gru_before`.
    """

    mode = "GRU"

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
        reset: str = "after",
        layer_norm: bool = False,
        recurrent_dropout: float = 0.0,
        zoneout: float = 0.0,
        recurrent_init: str = "uniform",
        bptt: int = 0,
    ) -> None:
        self._cell = gru_cell(reset)
        super().__init__(
            input_size,
            hidden_size,
            device,
            dtype,
            num_layers=num_layers,
            bias=bias,
            batch_first=batch_first,
            dropout=dropout,
            bidirectional=bidirectional,
            learn_initial_state=learn_initial_state,
            reset=reset,
            layer_norm=layer_norm,
            recurrent_dropout=recurrent_dropout,
            zoneout=zoneout,
            recurrent_init=recurrent_init,
            bptt=bptt,
        )


def gru_cell(reset: str) -> str:
    """The name in `ops.recurrence`. Errors: ValueError for an unknown `reset`."""
    if reset not in ("after", "before"):
        raise ValueError(f'reset must be "after" or "before" the recurrent product, found {reset!r}')
    return "gru" if reset == "after" else "gru_before"


def last(h: Tensor, *, bidirectional: bool | None = None) -> Tensor:
    """The final state of each sequence in the last layer, directions joined: (layers * D, B, P) -> (B, D * P).

    For the forward direction that is the state after a sequence's own last step, for the reverse one the state after
    its first. `h` comes from one of our layers and knows its directions; inside torch.compile, or for another `h`, say
    `bidirectional`. Unbatched: (layers * D, P) -> (D * P,).
    Errors: ValueError where the directions are not known or do not fit.
    """
    directions = getattr(h, "num_directions", None) if bidirectional is None else 1 + bool(bidirectional)
    if directions is None:
        raise ValueError("this h does not say how many directions it has: last(h, bidirectional=True or False)")
    if h.shape[0] % directions:
        raise ValueError(f"{h.shape[0]} states cannot be layers of {directions} directions")
    return torch.cat(h[h.shape[0] - directions :].unbind(0), dim=-1)
