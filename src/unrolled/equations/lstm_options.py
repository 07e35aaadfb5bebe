"""The LSTM with peepholes and a normalised memory."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from unrolled.equations.layer_norm import LayerNormSaved, layer_norm_backward, layer_norm_forward
from unrolled.equations.recurrence import Cell, State


class LSTMOptionsKept(NamedTuple):
    i: Float[Tensor, "N H"]
    f: Float[Tensor, "N H"]
    g: Float[Tensor, "N H"]
    o: Float[Tensor, "N H"]
    norm: tuple[LayerNormSaved, ...] = ()  # of c, or nothing


def lstm_options_forward(
    u: Float[Tensor, "N GH"],
    v: Float[Tensor, "N GH"],
    h: Tensor,
    c: Tensor,
    peephole: Float[Tensor, "HHH"] | None,
    norm_c: Float[Tensor, "H"] | None,
    bias_c: Float[Tensor, "H"] | None,
) -> tuple[State, LSTMOptionsKept]:
    """One step; without peepholes or layer norm those lines are the plain LSTM's.

    Definition, N being the layer norm with gain norm_c and bias bias_c::

        a_i, a_f, a_g, a_o = u + v                  (1)
        i = sigmoid(a_i + p_i * c_{t-1})            (2)
        f = sigmoid(a_f + p_f * c_{t-1})            (3)
        g = tanh(a_g)                               (4)
        c_t = f * c_{t-1} + i * g                   (5)
        o = sigmoid(a_o + p_o * c_t)                (6)
        s = N(c_t)                                  (7)
        h_t = o * tanh(s)                           (8)

    Gradient, dc_t beginning as what comes from step t + 1::

        da_o = dh_t * tanh(s) * o (1 - o)
        ds = dh_t * o * (1 - tanh(s)^2)
        dc_t += the gradient of N(c_t) for ds, and da_o * p_o
        da_g = dc_t * i * (1 - g^2)
        da_f = dc_t * c_{t-1} * f (1 - f)
        da_i = dc_t * g * i (1 - i)
        dc_{t-1} = dc_t * f + da_i * p_i + da_f * p_f
        dp_i = sum da_i * c_{t-1},  dp_f = sum da_f * c_{t-1},  dp_o = sum da_o * c_t

    Shapes: u, v (n, 4H) in torch's order i, f, g, o; h and c (n, H); peephole p_i, p_f, p_o one after the other.
    Source: peepholes: Gers and Schmidhuber 2000; the normalised memory: Ba 2016, equation 22.
    Derivation: docs/en/recurrent_options.md.
    """
    p_i, p_f, p_o = (0, 0, 0) if peephole is None else peephole.chunk(3)
    a_i, a_f, a_g, a_o = (u + v).chunk(4, 1)  # (1)
    i = torch.sigmoid(a_i + p_i * c)  # (2)
    f = torch.sigmoid(a_f + p_f * c)  # (3)
    g = torch.tanh(a_g)  # (4)
    c_next = f * c + i * g  # (5)
    o = torch.sigmoid(a_o + p_o * c_next)  # (6)
    s, norm = (c_next, ()) if norm_c is None else _normed(c_next, norm_c, bias_c)  # (7)
    h_next = o * torch.tanh(s)  # (8)
    return (h_next, c_next), LSTMOptionsKept(i, f, g, o, norm)


def lstm_options_backward(
    dafter: State,
    after: State,
    before: State,
    kept: LSTMOptionsKept,
    peephole: Tensor | None,
    norm_c: Tensor | None,
    bias_c: Tensor | None,
) -> tuple[Tensor, Tensor, State, tuple[Tensor | None, ...]]:
    (dh, _), (_, c), (_, c_prev), (i, f, g, _, _) = dafter, after, before, kept
    da_o, _, dnorm_c, dbias_c = lstm_output_backward(dh, c, kept, norm_c, bias_c)
    _, dc = lstm_options_total(dafter, after, kept, peephole, norm_c, bias_c)
    da_g = dc * i * (1 - g * g)  # (5), (4)
    da_f = dc * c_prev * f * (1 - f)  # (5), (3)
    da_i = dc * g * i * (1 - i)  # (5), (2)
    da = torch.cat([da_i, da_f, da_g, da_o], 1)  # (1)
    dc_prev, dpeephole = dc * f, None  # (5)
    if peephole is not None:
        p_i, p_f, _ = peephole.chunk(3)
        dc_prev = dc_prev + da_i * p_i + da_f * p_f  # (2), (3)
        dpeephole = torch.cat([(da_i * c_prev).sum(0), (da_f * c_prev).sum(0), (da_o * c).sum(0)])  # (2), (3), (6)
    return da, da, (torch.zeros_like(dh), dc_prev), (dpeephole, dnorm_c, dbias_c)


def lstm_output_backward(
    dh: Tensor, c: Tensor, kept: LSTMOptionsKept, norm_c: Tensor | None, bias_c: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """From h_t back to c_t: `(da_o, dc, dnorm_c, dbias_c)`, dc without the peephole's path."""
    o = kept.o
    s = c if norm_c is None else kept.norm[0].normal * norm_c  # (7)
    tanh_s = torch.tanh(s if bias_c is None else s + bias_c)  # (7), (8)
    da_o = dh * tanh_s * o * (1 - o)  # (8), (6)
    ds = dh * o * (1 - tanh_s * tanh_s)  # (8)
    if norm_c is None:
        return da_o, ds, None, None
    return da_o, *layer_norm_backward(ds, kept.norm[0], norm_c)  # (7)


def lstm_options_total(
    dafter: State,
    after: State,
    kept: LSTMOptionsKept,
    peephole: Tensor | None,
    norm_c: Tensor | None,
    bias_c: Tensor | None,
) -> State:
    """dh_t, and dc_t with the paths through h_t."""
    (dh, dc), (_, c) = dafter, after
    da_o, dthrough, _, _ = lstm_output_backward(dh, c, kept, norm_c, bias_c)
    dc = dc + dthrough  # (8), (7)
    if peephole is not None:
        dc = dc + da_o * peephole.chunk(3)[2]  # (6)
    return dh, dc


def _normed(c: Tensor, gain: Tensor, bias: Tensor | None) -> tuple[Tensor, tuple[LayerNormSaved, ...]]:
    s, saved = layer_norm_forward(c, gain, bias)
    return s, (saved,)


_OWN = ("peephole", "norm_c", "bias_c")
LSTM_OPTIONS = Cell(lstm_options_forward, lstm_options_backward, _OWN, total=lstm_options_total)
