"""Multiplicative attention: a decoder reads the states of an encoder by a product with each of them."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Bool, Float
from torch import Tensor

from unrolled.equations.attention import AttentionSaved, attention_backward, attention_forward
from unrolled.equations.linear import LinearSaved, linear_backward, linear_forward
from unrolled.ragged import Rows


class MultiplicativeAttentionSaved(NamedTuple):
    linear: LinearSaved | None
    attention: AttentionSaved


class MultiplicativeAttentionGrads(NamedTuple):
    dq: Float[Tensor, "N H"]
    dk: Float[Tensor, "M K"]
    dv: Float[Tensor, "M D"]
    dweight: Float[Tensor, "H K"] | None


def multiplicative_attention_forward(
    q: Float[Tensor, "N H"],
    k: Float[Tensor, "M K"],
    v: Float[Tensor, "M D"],
    weight: Float[Tensor, "H K"] | None,
    queries: Rows,
    keys: Rows,
    mask: Float[Tensor, "_ _ _ _"] | Bool[Tensor, "_ _ _ _"] | None = None,
) -> tuple[Float[Tensor, "N D"], Float[Tensor, "B 1 Q L"], MultiplicativeAttentionSaved]:
    """Luong's "general" score, and without a weight his "dot": attention of one head that scales nothing.

    Definition, for query i and key j of a sequence, W the unit matrix for "dot"::

        r_j = W k_j                                 (1)
        e_ij = q_i . r_j                            (2)
        o_i = sum_j softmax_j(e_ij) v_j             (3)

    Gradient: dq, dr, dv by the pair of `attention`, with F = 1 under the root, and those of the linear map::

        dk_j = W^T dr_j
        dW = sum_j dr_j k_j^T

    Shapes: q (N, H), k (M, K), v (M, D), weight (H, K) or None (H = K); o (N, D), the weights (B, 1, Tq, Tk).
    Edges: as those of `attention`: a query of a sequence without keys has o = 0.
    Source: Luong 2015, section 3.1, "dot" and "general"; there k = v, the states of the encoder.
    Derivation: docs/en/attention.md.
    """
    linear = None
    if weight is not None:
        k, linear = linear_forward(k, weight, None)  # (1)
    o, w, attention = attention_forward(q, k, v, 1, queries, keys, mask=mask, scale=1.0)  # (2), (3)
    return o, w, MultiplicativeAttentionSaved(linear, attention)


def multiplicative_attention_backward(
    do: Float[Tensor, "N D"], dweights: Float[Tensor, "B 1 Q L"] | None, saved: MultiplicativeAttentionSaved
) -> MultiplicativeAttentionGrads:
    dq, dr, dv, _, _ = attention_backward(do, dweights, saved.attention)  # (3), (2)
    if saved.linear is None:
        return MultiplicativeAttentionGrads(dq, dr, dv, None)
    dk, dweight, _ = linear_backward(dr, saved.linear)  # (1)
    return MultiplicativeAttentionGrads(dq, dk, dv, dweight)
