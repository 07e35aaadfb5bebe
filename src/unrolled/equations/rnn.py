"""The plain recurrent network."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from unrolled.equations.recurrence import Cell, State


class Nothing(NamedTuple):
    """What the cell keeps: its output is enough."""


def rnn_tanh_forward(u: Float[Tensor, "N H"], v: Float[Tensor, "N H"], h: Tensor) -> tuple[State, Nothing]:
    """One step of the plain network; the loop around it is `recurrence_forward`.

    Definition::

        a_t = u_t + v_t                             (2)
        h_t = phi(a_t),  phi = tanh or relu         (3)

    Gradient::

        du_t = dv_t = da_t = dh_t * phi'(a_t)       tanh: 1 - h_t^2; relu: 1 where h_t > 0

    Shapes: u, v, h (n, H).
    Source: Elman 1990. Two biases as torch.nn.RNN has them.
    Derivation: docs/en/rnn.md and docs/en/backpropagation_through_time.md.
    """
    a = u + v  # (2)
    return (torch.tanh(a),), Nothing()  # (3)


def rnn_tanh_backward(dafter: State, after: State, before: State, kept: State) -> tuple[Tensor, Tensor, State]:
    (dh,), (h,) = dafter, after
    da = dh * (1 - h * h)  # (3), (2)
    return da, da, (torch.zeros_like(dh),)


def rnn_relu_forward(u: Float[Tensor, "N H"], v: Float[Tensor, "N H"], h: Tensor) -> tuple[State, Nothing]:
    """The same with phi = relu."""
    a = u + v  # (2)
    return (torch.relu(a),), Nothing()  # (3)


def rnn_relu_backward(dafter: State, after: State, before: State, kept: State) -> tuple[Tensor, Tensor, State]:
    (dh,), (h,) = dafter, after
    da = torch.where(h > 0, dh, 0)  # (3), (2)
    return da, da, (torch.zeros_like(dh),)


RNN_TANH = Cell(rnn_tanh_forward, rnn_tanh_backward)
RNN_RELU = Cell(rnn_relu_forward, rnn_relu_backward)
