"""The gated recurrent unit, its reset gate after the recurrent product."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from unrolled.equations.recurrence import Cell, State


class GRUGates(NamedTuple):
    r: Float[Tensor, "N H"]
    z: Float[Tensor, "N H"]
    n: Float[Tensor, "N H"]
    v_n: Float[Tensor, "N H"]  # W_hn h + b_hn, which r scales


def gru_forward(u: Float[Tensor, "N GH"], v: Float[Tensor, "N GH"], h: Tensor) -> tuple[State, GRUGates]:
    """One step of the GRU; the loop around it is `recurrence_forward`.

    Definition, u and v cut into three blocks::

        r = sigmoid(u_r + v_r)                      (3)
        z = sigmoid(u_z + v_z)                      (4)
        n = tanh(u_n + r * v_n)                     (5)
        h_t = (1 - z) * n + z * h_{t-1}             (6)

    Gradient::

        dh_{t-1} = dh_t * z                         besides what comes through v
        du_n = dh_t * (1 - z) * (1 - n^2)
        dv_n = du_n * r
        du_z = dv_z = dh_t * (h_{t-1} - n) * z (1 - z)
        du_r = dv_r = du_n * v_n * r (1 - r)

    Shapes: u, v (n, 3H) in torch's order r, z, n; h (n, H).
    Source: Cho 2014, but the reset gate after the recurrent product, as torch and cuDNN have it.
    Derivation: docs/en/gru.md.
    """
    u_r, u_z, u_n = u.chunk(3, 1)
    v_r, v_z, v_n = v.chunk(3, 1)
    r = torch.sigmoid(u_r + v_r)  # (3)
    z = torch.sigmoid(u_z + v_z)  # (4)
    n = torch.tanh(u_n + r * v_n)  # (5)
    h_next = (1 - z) * n + z * h  # (6)
    return (h_next,), GRUGates(r, z, n, v_n)


def gru_backward(dafter: State, after: State, before: State, kept: State) -> tuple[Tensor, Tensor, State]:
    (dh,), (h_prev,), (r, z, n, v_n) = dafter, before, kept
    du_n = dh * (1 - z) * (1 - n * n)  # (6), (5)
    dv_n = du_n * r  # (5)
    dz = dh * (h_prev - n) * z * (1 - z)  # (6), (4)
    dr = du_n * v_n * r * (1 - r)  # (5), (3)
    return torch.cat([dr, dz, du_n], 1), torch.cat([dr, dz, dv_n], 1), (dh * z,)  # (6)


GRU = Cell(gru_forward, gru_backward)
