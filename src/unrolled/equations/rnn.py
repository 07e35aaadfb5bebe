"""The plain recurrent network and back-propagation through time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unrolled.ragged import all_rows


class RNNSaved(NamedTuple):
    """What the backward needs; `h_prev` and `h_last` together are all `N + B` states."""

    x: Float[Tensor, "N I"]
    h_prev: Float[Tensor, "N H"]  # the state before each token: h0 at a sequence's first step
    h_last: Float[Tensor, "B H"]
    weight_ih: Float[Tensor, "H I"]
    weight_hh: Float[Tensor, "H H"]
    steps: Sequence[Int[Tensor, "_"]]
    nonlinearity: str


class RNNGrads(NamedTuple):
    dx: Float[Tensor, "N I"]
    dh0: Float[Tensor, "B H"]
    dweight_ih: Float[Tensor, "H I"]
    dweight_hh: Float[Tensor, "H H"]
    dbias_ih: Float[Tensor, "H"]
    dbias_hh: Float[Tensor, "H"]


def rnn_forward(
    x: Float[Tensor, "N I"],
    h0: Float[Tensor, "B H"],
    weight_ih: Float[Tensor, "H I"],
    weight_hh: Float[Tensor, "H H"],
    bias_ih: Float[Tensor, "H"] | None,
    bias_hh: Float[Tensor, "H"] | None,
    steps: Sequence[Int[Tensor, "_"]],
    nonlinearity: str = "tanh",
) -> tuple[Float[Tensor, "N H"], Float[Tensor, "B H"], RNNSaved]:
    """One layer in one direction over sequences of any lengths.

    Definition, for each sequence, t = 1 ... T_b::

        u_t = W_ih x_t + b_ih                       (1)
        a_t = u_t + W_hh h_{t-1} + b_hh             (2)
        h_t = phi(a_t),  phi = tanh or relu         (3)

    Gradient, dh_t being the total derivative of the loss with respect to h_t and dy_t the part that reaches h_t
    directly, through the output of step t::

        dh_t = dy_t + W_hh^T da_{t+1}               the direct and the indirect path; at t = T_b: dy_t + dh_last
        da_t = dh_t * phi'(a_t)                     tanh: 1 - h_t^2; relu: 1 where h_t > 0
        dh0 = W_hh^T da_1
        dW_hh = sum_t da_t h_{t-1}^T                one product over all tokens, and so are the next two
        dW_ih = sum_t da_t x_t^T
        dx_t = W_ih^T da_t
        db_ih = db_hh = sum_t da_t

    Shapes: x (N, I), one row per token; h0 (B, H), longest sequence first; `steps[t]` (n_t,) the rows of `x` that hold
    step t of the n_t sequences still alive (`ragged.live_rows`). Returns y (N, H), h_last (B, H) and `saved`. A row in
    no step (padding) has y = 0.
    Edges: a sequence of length 0 has no row, h_last = h0, and hands dh_last on to dh0.
    Errors: KeyError for another nonlinearity.
    Source: Elman 1990, eq. of section 2; Werbos 1990 for the gradient. Two biases as torch.nn.RNN has them.
    Derivation: docs/en/rnn.md and docs/en/backpropagation_through_time.md.
    """
    phi = {"tanh": torch.tanh, "relu": torch.relu}[nonlinearity]
    tokens = all_rows(steps, x.device)
    u = x[tokens] @ weight_ih.T  # (1)
    u = u if bias_ih is None else u + bias_ih
    h, before, after = h0, [h0[:0]], [h0[:0]]
    for u_t in torch.split(u, [len(rows) for rows in steps]):
        n = len(u_t)
        before.append(h[:n])
        a = u_t + h[:n] @ weight_hh.T  # (2)
        a = a if bias_hh is None else a + bias_hh
        after.append(phi(a))  # (3)
        h = torch.cat([after[-1], h[n:]])  # sequences that have ended keep their last state
    empty = u.new_zeros(len(x), u.shape[1])
    y = empty.index_copy(0, tokens, torch.cat(after))
    h_prev = empty.index_copy(0, tokens, torch.cat(before))
    return y, h, RNNSaved(x, h_prev, h, weight_ih, weight_hh, steps, nonlinearity)


def rnn_backward(dy: Float[Tensor, "N H"], dh_last: Float[Tensor, "B H"], saved: RNNSaved) -> RNNGrads:
    """Back-propagation through time: only dh travels, every weight gradient is one product over all tokens."""
    x, h_prev, h_last, weight_ih, weight_hh, steps, nonlinearity = saved
    phi_grad = {"tanh": tanh_grad_from_output, "relu": relu_grad_from_output}[nonlinearity]
    da = torch.zeros_like(h_prev)
    h, dh_next = h_last, dh_last
    for rows in reversed(steps):
        n = len(rows)
        dh = dy[rows] + dh_next[:n]
        da[rows] = dh * phi_grad(h[:n])  # (3)
        dh_next = torch.cat([da[rows] @ weight_hh, dh_next[n:]])  # (2)
        h = torch.cat([h_prev[rows], h[n:]])
    tokens = all_rows(steps, x.device)
    dweight_hh = da.T @ h_prev  # (2)
    dbias = da.sum(0)  # (2)
    dweight_ih = da[tokens].T @ x[tokens]  # (1): what lies in the padding of x may be anything
    dx = da @ weight_ih  # (1)
    return RNNGrads(dx, dh_next, dweight_ih, dweight_hh, dbias, dbias.clone())


def tanh_grad_from_output(h: Tensor) -> Tensor:
    return 1 - h * h


def relu_grad_from_output(h: Tensor) -> Tensor:
    return (h > 0).to(h.dtype)
