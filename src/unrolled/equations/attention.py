"""Scaled dot-product attention of several heads, over sequences of different lengths."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from unrolled.equations.dropout import Dropping
from unrolled.ragged import Rows, pad_rows, unpad_rows


class AttentionSaved(NamedTuple):
    q: Float[Tensor, "N D"]
    k: Float[Tensor, "M D"]
    v: Float[Tensor, "M E"]
    o: Float[Tensor, "N E"]
    log_sum: Float[Tensor, "N A"]
    queries: Rows
    keys: Rows
    causal: bool
    mask: Float[Tensor, "#B #A #Q #K"] | Bool[Tensor, "#B #A #Q #K"] | None
    slopes: Float[Tensor, "A"] | None
    scale: float
    dropping: Dropping | None


class AttentionGrads(NamedTuple):
    dq: Float[Tensor, "N D"]
    dk: Float[Tensor, "M D"]
    dv: Float[Tensor, "M E"]
    dmask: Float[Tensor, "#B #A #Q #K"] | None
    dslopes: Float[Tensor, "A"] | None


def attention_forward(
    q: Float[Tensor, "N D"],
    k: Float[Tensor, "M D"],
    v: Float[Tensor, "M E"],
    heads: int,
    queries: Rows,
    keys: Rows,
    causal: bool = False,
    mask: Float[Tensor, "_ _ _ _"] | Bool[Tensor, "_ _ _ _"] | None = None,
    slopes: Float[Tensor, "A"] | None = None,
    scale: float | None = None,
    dropping: Dropping | None = None,
) -> tuple[Float[Tensor, "N E"], Float[Tensor, "B A Q K"], AttentionSaved]:
    """Each query reads the values of the keys of its sequence: their mean, by weights that its products with them give.

    Definition, for query i of Tq and key j of Tk of a sequence, in each head, F its numbers of a query, m the dropout::

        s_ij = q_i . k_j / sqrt(F) + mask_ij - slope |i + Tk - Tq - j|     (1)
        l_i = log sum_j exp(s_ij)                                          (2)
        p_ij = exp(s_ij - l_i)                                             (3)
        w_ij = p_ij m_ij                                                   (4)
        o_i = sum_j w_ij v_j                                               (5)

    Gradient, dw'_ij that of the weights where they are an output; no Jacobian matrix, a row has one number in common::

        dv_j = sum_i w_ij do_i
        dw_ij = do_i . v_j + dw'_ij
        ds_ij = p_ij (m_ij dw_ij - c_i)
        c_i = sum_j p_ij m_ij dw_ij = do_i . o_i + sum_j w_ij dw'_ij
        dq_i = sum_j ds_ij k_j / sqrt(F)
        dk_j = sum_i ds_ij q_i / sqrt(F)
        dmask_ij = ds_ij
        dslope = - sum_ij ds_ij |i + Tk - Tq - j|

    Shapes: q (N, A * F), k (M, A * F), v (M, A * O), the heads side by side; `queries` and `keys` say where the steps
    of the B sequences lie among the N and the M rows; o (N, A * O), weights w (B, A, Tq, Tk), padded to the longest.
    mask (B, A, Tq, Tk), each dimension that or 1, or longer, which is not read: true where i may attend to j, or
    numbers. slopes (A,). `scale` stands for 1 / sqrt(F). `causal`: s_ij = -inf for j > i + Tk - Tq, so that the last
    query sees every key. `dropping` has a key and a t for each row of q; head a uses its layer + a, key j is unit j.
    Edges: s_ij = -inf rules j out. A query that may attend to nothing, and a row of no sequence, has o = 0, l = 0 and
    w = 0, and passes no gradient on.
    Errors: ValueError for a mask of fewer queries or keys than the longest sequence has.
    Source: Vaswani 2017, equation 1 and section 3.2.2; dropout of the weights as its authors' code has it; the row
    identity and l in the place of w: Dao 2022, appendix B; the slopes: Press 2022, section 3.
    Derivation: docs/en/self_attention.md.
    """
    scale = (q.shape[1] // heads) ** -0.5 if scale is None else scale
    saved = AttentionSaved(q, k, v, v, v, queries, keys, causal, mask, slopes, scale, dropping)
    _check_mask(mask, queries, keys)
    s = _scores(saved, heads)
    log_sum = s.logsumexp(3)  # (2)
    log_sum = torch.where(log_sum == -torch.inf, 0, log_sum)
    p = (s - log_sum[..., None]).exp()  # (3)
    w = _dropped(p, dropping, queries)  # (4)
    o = _joined(w @ _split(v, keys, heads), queries, len(q))  # (5)
    return o, w, saved._replace(o=o, log_sum=unpad_rows(log_sum.transpose(1, 2), queries, len(q)))


def attention_backward(
    do: Float[Tensor, "N E"], dweights: Float[Tensor, "B A Q K"] | None, saved: AttentionSaved
) -> AttentionGrads:
    q, k, v, o, log_sum, queries, keys, _, mask, slopes, scale, dropping = saved
    heads = log_sum.shape[1]
    do_heads = _split(do, queries, heads)
    p = (_scores(saved, heads) - pad_rows(log_sum, queries).transpose(1, 2)[..., None]).exp()  # (3)
    w = _dropped(p, dropping, queries)  # (4)
    dw = do_heads @ _split(v, keys, heads).transpose(2, 3)  # (5)
    common = (do_heads * _split(o, queries, heads)).sum(3, keepdim=True)
    if dweights is not None:
        dw, common = dw + dweights, common + (w * dweights).sum(3, keepdim=True)
    dp = _dropped(dw, dropping, queries)  # (4)
    ds = p * (dp - common)  # (3), (2)
    dq = scale * (ds @ _split(k, keys, heads))  # (1)
    dk = scale * (ds.transpose(2, 3) @ _split(q, queries, heads))  # (1)
    dv = w.transpose(2, 3) @ do_heads  # (5)
    return AttentionGrads(
        dq=_joined(dq, queries, len(q)),
        dk=_joined(dk, keys, len(k)),
        dv=_joined(dv, keys, len(v)),
        dmask=None if mask is None or not mask.is_floating_point() else _sum_to(ds, mask.shape),
        dslopes=None if slopes is None else -(ds * distance(queries, keys).abs()).sum((0, 2, 3)),
    )


def _scores(saved: AttentionSaved, heads: int) -> Float[Tensor, "B A Q K"]:
    """Line (1), -inf where a query may not attend to a key, or where there is none."""
    queries, keys, mask = saved.queries, saved.keys, saved.mask
    q, k = _split(saved.q, queries, heads), _split(saved.k, keys, heads)
    s = saved.scale * (q @ k.transpose(2, 3))
    if mask is not None and mask.is_floating_point():
        s = s + mask[:, :, : s.shape[2], : s.shape[3]]
    if saved.slopes is not None:
        s = s - saved.slopes[:, None, None] * distance(queries, keys).abs()  # (1)
    return torch.where(_seen(saved, s), s, -torch.inf)


def _seen(saved: AttentionSaved, s: Float[Tensor, "B A Q K"]) -> Bool[Tensor, "B #A Q K"]:
    """Which keys a query may attend to."""
    queries, keys, mask = saved.queries, saved.keys, saved.mask
    i, j = (torch.arange(n, device=s.device) for n in s.shape[2:])
    seen = (i < queries.length[:, None])[:, None, :, None] & (j < keys.length[:, None])[:, None, None, :]
    if saved.causal:
        seen = seen & (distance(queries, keys) > -1)
    if mask is not None:
        read = mask[:, :, : s.shape[2], : s.shape[3]]
        seen = seen & (read if mask.dtype == torch.bool else read > -torch.inf)
    return seen


def _check_mask(mask: Tensor | None, queries: Rows, keys: Rows) -> None:
    Tq, Tk = distance(queries, keys).shape[2:]
    if mask is not None and any(n != 1 and n < steps for n, steps in zip(mask.shape[2:], (Tq, Tk), strict=True)):
        raise ValueError(f"mask must be (1 or B, 1 or A, 1 or {Tq}, 1 or {Tk}), found shape {tuple(mask.shape)}")


def _dropped(x: Float[Tensor, "B A Q K"], dropping: Dropping | None, queries: Rows) -> Float[Tensor, "B A Q K"]:
    """x_ij times m_ij."""
    if dropping is None:
        return x
    m = torch.stack([dropping.mask(x.shape[3], head) for head in range(x.shape[1])], 1)
    return x * pad_rows(m.to(x.dtype), queries).transpose(1, 2)


def _sum_to(ds: Float[Tensor, "B A Q K"], shape: torch.Size) -> Float[Tensor, "_ _ _ _"]:
    """The gradient of a mask: over the dimensions along which it was repeated, a sum."""
    dmask = ds.new_zeros(shape)
    read = dmask[:, :, : ds.shape[2], : ds.shape[3]]
    read += ds.sum_to_size(read.shape)
    return dmask


def distance(queries: Rows, keys: Rows) -> Tensor:
    """(B, 1, Tq, Tk) how far key j lies before query i, where the last of each stand side by side: i + Tk - Tq - j."""
    first = keys.length - queries.length
    i, j = (torch.arange(rows.longest, device=first.device) for rows in (queries, keys))
    return i[:, None] + first[:, None, None, None] - j


def _split(x: Float[Tensor, "N D"], rows: Rows, heads: int) -> Float[Tensor, "B A T F"]:
    return pad_rows(x.reshape(len(x), heads, x.shape[1] // heads), rows).transpose(1, 2)


def _joined(x: Float[Tensor, "B A T F"], rows: Rows, count: int) -> Float[Tensor, "N D"]:
    return unpad_rows(x.transpose(1, 2), rows, count).flatten(1)
