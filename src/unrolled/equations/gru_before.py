"""The gated recurrent unit, its reset gate before the recurrent product."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from unrolled.equations.recurrence import Cell, Reset, State


class GRUBeforeGates(NamedTuple):
    r: Float[Tensor, "N H"]
    z: Float[Tensor, "N H"]
    n: Float[Tensor, "N H"]


def reset_forward(u: Float[Tensor, "N GH"], v: Float[Tensor, "N KH"]) -> Float[Tensor, "N H"]:
    """The reset gate, which `recurrent_options` needs before it can form W_hn (r * h_{t-1}).

    Definition::

        r = sigmoid(u_r + v_r)                      (1)

    Gradient::

        du_r = dv_r = dr * r (1 - r)
    """
    (u_r, _, _), (v_r, _) = u.chunk(3, 1), v.chunk(2, 1)
    return torch.sigmoid(u_r + v_r)  # (1)


def reset_backward(dr: Float[Tensor, "N H"], kept: GRUBeforeGates) -> Float[Tensor, "N H"]:
    return dr * kept.r * (1 - kept.r)  # (1)


def gru_before_forward(u: Float[Tensor, "N GH"], v: Float[Tensor, "N GH"], h: Tensor) -> tuple[State, GRUBeforeGates]:
    """The rest of the step, with v_n = W_hn (r * h_{t-1}) + b_hn.

    Definition::

        z = sigmoid(u_z + v_z)                      (2)
        n = tanh(u_n + v_n)                         (3)
        h_t = (1 - z) * n + z * h_{t-1}             (4)

    Gradient::

        dh_{t-1} = dh_t * z                         besides what comes through v
        du_n = dv_n = dh_t * (1 - z) * (1 - n^2)
        du_z = dv_z = dh_t * (h_{t-1} - n) * z (1 - z)

    Shapes: u, v (n, 3H) in torch's order r, z, n; h (n, H).
    Source: Cho 2014, equations 5 to 8, with z and 1 - z as torch has them.
    Derivation: docs/en/gru.md.
    """
    u_r, u_z, u_n = u.chunk(3, 1)
    v_r, v_z, v_n = v.chunk(3, 1)
    r = torch.sigmoid(u_r + v_r)  # (1)
    z = torch.sigmoid(u_z + v_z)  # (2)
    n = torch.tanh(u_n + v_n)  # (3)
    h_next = (1 - z) * n + z * h  # (4)
    return (h_next,), GRUBeforeGates(r, z, n)


def gru_before_backward(
    dafter: State, after: State, before: State, kept: GRUBeforeGates
) -> tuple[Tensor, Tensor, State]:
    """With 0 in the place of da_r, which waits for `reset_backward`."""
    (dh,), (h_prev,), (_, z, n) = dafter, before, kept
    da_n = dh * (1 - z) * (1 - n * n)  # (4), (3)
    da_z = dh * (h_prev - n) * z * (1 - z)  # (4), (2)
    da = torch.cat([torch.zeros_like(da_z), da_z, da_n], 1)
    return da, da, (dh * z,)  # (4)


GRU_BEFORE = Cell(gru_before_forward, gru_before_backward, reset=Reset(reset_forward, reset_backward))
