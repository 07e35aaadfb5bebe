"""Additive attention: a decoder scores each state of an encoder by one layer of tanh, and reads their weighted mean."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from unrolled.ragged import Rows, pad_rows, unpad_rows


class AdditiveAttentionSaved(NamedTuple):
    q: Float[Tensor, "N H"]
    k: Float[Tensor, "M H"]
    value: Float[Tensor, "M D"]
    v: Float[Tensor, "H"]
    o: Float[Tensor, "N D"]
    log_sum: Float[Tensor, "N"]
    queries: Rows
    keys: Rows
    mask: Float[Tensor, "#B #Q #K"] | Bool[Tensor, "#B #Q #K"] | None


class AdditiveAttentionGrads(NamedTuple):
    dq: Float[Tensor, "N H"]
    dk: Float[Tensor, "M H"]
    dvalue: Float[Tensor, "M D"]
    dv: Float[Tensor, "H"]
    dmask: Float[Tensor, "#B #Q #K"] | None


def additive_attention_forward(
    q: Float[Tensor, "N H"],
    k: Float[Tensor, "M H"],
    value: Float[Tensor, "M D"],
    v: Float[Tensor, "H"],
    queries: Rows,
    keys: Rows,
    mask: Float[Tensor, "_ _ _"] | Bool[Tensor, "_ _ _"] | None = None,
) -> tuple[Float[Tensor, "N D"], Float[Tensor, "B Q K"], AdditiveAttentionSaved]:
    """Each query reads the values of its sequence: their mean, by weights that a small network of two layers gives.

    Definition, for query i and key j of a sequence::

        a_ij = tanh(q_i + k_j)                          (1)
        e_ij = v . a_ij + mask_ij                       (2)
        l_i = log sum_j exp(e_ij)                       (3)
        p_ij = exp(e_ij - l_i)                          (4)
        o_i = sum_j p_ij value_j                        (5)

    Gradient, dp'_ij that of the weights where they are an output; no Jacobian matrix, a row has one number in common::

        dvalue_j = sum_i p_ij do_i
        dp_ij = do_i . value_j + dp'_ij
        c_i = sum_j p_ij dp_ij = do_i . o_i + sum_j p_ij dp'_ij
        de_ij = p_ij (dp_ij - c_i)
        dv = sum_ij de_ij a_ij
        ds_ij = de_ij v * (1 - a_ij^2)
        dq_i = sum_j ds_ij
        dk_j = sum_i ds_ij
        dmask_ij = de_ij

    a_ij is never kept: H numbers for each pair; the backward computes it again from q_i and k_j.

    Shapes: q (N, H), k (M, H), value (M, D), v (H,); `queries` and `keys` say where the steps of the B sequences lie
    among the N and the M rows; o (N, D), weights p (B, Tq, Tk), padded to the longest. mask (B, Tq, Tk), each dimension
    that or 1, or longer, which is not read: true where i may attend to j, or numbers.
    Edges: e_ij = -inf rules j out. A query that may attend to nothing, and a row of no sequence, has o = 0, l = 0 and
    p = 0, and passes no gradient on.
    Source: Bahdanau 2014, appendix A.1.2; his W_a s and U_a h are q and k here, linear maps outside.
    Derivation: docs/en/attention.md.
    """
    saved = AdditiveAttentionSaved(q, k, value, v, value, v, queries, keys, mask)
    e, _ = _scores(saved)
    log_sum = e.logsumexp(2)  # (3)
    log_sum = torch.where(log_sum == -torch.inf, 0, log_sum)
    p = (e - log_sum[..., None]).exp()  # (4)
    o = unpad_rows(p @ pad_rows(value, keys), queries, len(q))  # (5)
    return o, p, saved._replace(o=o, log_sum=unpad_rows(log_sum, queries, len(q)))


def additive_attention_backward(
    do: Float[Tensor, "N D"], dweights: Float[Tensor, "B Q K"] | None, saved: AdditiveAttentionSaved
) -> AdditiveAttentionGrads:
    q, k, value, v, o, log_sum, queries, keys, mask = saved
    do_padded = pad_rows(do, queries)
    e, a = _scores(saved)
    p = (e - pad_rows(log_sum, queries)[..., None]).exp()  # (4)
    dvalue = p.transpose(1, 2) @ do_padded  # (5)
    dp = do_padded @ pad_rows(value, keys).transpose(1, 2)  # (5)
    common = pad_rows((do * o).sum(1, keepdim=True), queries)
    if dweights is not None:
        dp, common = dp + dweights, common + (p * dweights).sum(2, keepdim=True)
    de = p * (dp - common)  # (4), (3)
    ds = de[..., None] * v * (1 - a * a)  # (2), (1)
    return AdditiveAttentionGrads(
        dq=unpad_rows(ds.sum(2), queries, len(q)),  # (1)
        dk=unpad_rows(ds.sum(1), keys, len(k)),  # (1)
        dvalue=unpad_rows(dvalue, keys, len(value)),
        dv=(de[..., None] * a).sum((0, 1, 2)),  # (2)
        dmask=None if mask is None or mask.dtype == torch.bool else _sum_to(mask, de),  # (2)
    )


def _scores(saved: AdditiveAttentionSaved) -> tuple[Float[Tensor, "B Q K"], Float[Tensor, "B Q K H"]]:
    """Lines (1) and (2): e, -inf where a query may not attend to a key, or where there is none; and a."""
    queries, keys, mask = saved.queries, saved.keys, saved.mask
    a = torch.tanh(pad_rows(saved.q, queries)[:, :, None] + pad_rows(saved.k, keys)[:, None])  # (1)
    e = a @ saved.v
    _, Q, K = e.shape
    i, j = torch.arange(Q, device=e.device), torch.arange(K, device=e.device)
    seen = (i < queries.length[:, None])[:, :, None] & (j < keys.length[:, None])[:, None]
    if mask is not None:
        read = mask[:, :Q, :K]
        seen = seen & (read if mask.dtype == torch.bool else read > -torch.inf)
        e = e if mask.dtype == torch.bool else e + read  # (2)
    return torch.where(seen, e, -torch.inf), a


def _sum_to(mask: Float[Tensor, "_ _ _"], de: Float[Tensor, "B Q K"]) -> Float[Tensor, "_ _ _"]:
    """The gradient of a mask: over the dimensions along which it was repeated, a sum."""
    dmask = torch.zeros_like(mask)
    read = dmask[:, : de.shape[1], : de.shape[2]]
    read += de.sum_to_size(read.shape)
    return dmask
