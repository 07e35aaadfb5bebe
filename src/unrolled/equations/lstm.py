"""The long short-term memory."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from unrolled.equations.recurrence import Cell, State


class LSTMGates(NamedTuple):
    i: Float[Tensor, "N H"]
    f: Float[Tensor, "N H"]
    g: Float[Tensor, "N H"]
    o: Float[Tensor, "N H"]


def lstm_forward(u: Float[Tensor, "N GH"], v: Float[Tensor, "N GH"], h: Tensor, c: Tensor) -> tuple[State, LSTMGates]:
    """One step of the LSTM; the loop around it is `recurrence_forward`.

    Definition::

        a_i, a_f, a_g, a_o = u + v                  (2)
        i = sigmoid(a_i)                            (3)
        f = sigmoid(a_f)                            (4)
        g = tanh(a_g)                               (5)
        o = sigmoid(a_o)                            (6)
        c_t = f * c_{t-1} + i * g                   (7)
        h_t = o * tanh(c_t)                         (8)

    Gradient, dc_t beginning as what comes from step t + 1::

        dc_t += dh_t * o * (1 - tanh(c_t)^2)
        dc_{t-1} = dc_t * f
        da_o = dh_t * tanh(c_t) * o (1 - o)
        da_g = dc_t * i * (1 - g^2)
        da_f = dc_t * c_{t-1} * f (1 - f)
        da_i = dc_t * g * i (1 - i)
        du = dv = da

    Shapes: u, v (n, 4H) in torch's order i, f, g, o; h and c (n, H).
    Source: Hochreiter and Schmidhuber 1997, with the forget gate of Gers 2000.
    Derivation: docs/en/lstm.md.
    """
    a_i, a_f, a_g, a_o = (u + v).chunk(4, 1)  # (2)
    i = torch.sigmoid(a_i)  # (3)
    f = torch.sigmoid(a_f)  # (4)
    g = torch.tanh(a_g)  # (5)
    o = torch.sigmoid(a_o)  # (6)
    c_next = f * c + i * g  # (7)
    h_next = o * torch.tanh(c_next)  # (8)
    return (h_next, c_next), LSTMGates(i, f, g, o)


def lstm_backward(dafter: State, after: State, before: State, kept: State) -> tuple[Tensor, Tensor, State]:
    (_, c), (_, c_prev), (i, f, g, o) = after, before, kept
    tanh_c = torch.tanh(c)
    dh, dc = lstm_total(dafter, after, kept)
    da_o = dh * tanh_c * o * (1 - o)  # (8), (6)
    da_g = dc * i * (1 - g * g)  # (7), (5)
    da_f = dc * c_prev * f * (1 - f)  # (7), (4)
    da_i = dc * g * i * (1 - i)  # (7), (3)
    da = torch.cat([da_i, da_f, da_g, da_o], 1)  # (2)
    return da, da, (torch.zeros_like(dh), dc * f)  # (7)


def lstm_total(dafter: State, after: State, kept: State) -> State:
    """dh_t, and dc_t with the path through h_t."""
    (dh, dc), (_, c), (_, _, _, o) = dafter, after, kept
    tanh_c = torch.tanh(c)
    return dh, dc + dh * o * (1 - tanh_c * tanh_c)  # (8)


LSTM = Cell(lstm_forward, lstm_backward, total=lstm_total)
