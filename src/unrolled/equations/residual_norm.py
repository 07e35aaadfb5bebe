"""Residual connection, dropout and normalisation in one: what surrounds each sub-layer of a Transformer."""

from __future__ import annotations

from typing import Literal, NamedTuple

from jaxtyping import Float
from torch import Tensor

from unrolled.equations.dropout import Dropping
from unrolled.equations.layer_norm import LayerNormSaved, layer_norm_backward, layer_norm_forward
from unrolled.equations.rms_norm import RMSNormSaved, rms_norm_backward, rms_norm_forward

Kind = Literal["layer", "rms"]


class ResidualNormSaved(NamedTuple):
    norm: LayerNormSaved | RMSNormSaved
    gain: Float[Tensor, "F"] | None
    dropping: Dropping | None


class ResidualNormGrads(NamedTuple):
    dx: Float[Tensor, "N F"]
    ds: Float[Tensor, "N F"]
    dgain: Float[Tensor, "F"]
    dbias: Float[Tensor, "F"] | None  # None: this norm has no bias


def residual_norm_forward(
    x: Float[Tensor, "N F"],
    s: Float[Tensor, "N F"],
    gain: Float[Tensor, "F"] | None,
    bias: Float[Tensor, "F"] | None,
    kind: Kind,
    epsilon: float,
    dropping: Dropping | None = None,
) -> tuple[Float[Tensor, "N F"], Float[Tensor, "N F"], ResidualNormSaved]:
    """Adds the dropped output s of a sub-layer to its input x, and normalises the sum.

    Definition, with m the mask of `equations.dropout`, 1 without `dropping`, and norm by the kind `layer_norm`, with
    gain and bias, or `rms_norm`, with gain::

        r = x + m * s                               (1)
        y = norm(r)                                 (2)

    Gradient::

        dr = what arrives at r itself, plus the gradient of norm for dy
        dx = dr
        ds = m * dr
        dgain, dbias = those of norm

    Shapes: x, s, r, y (N, F); gain, bias (F,) or None. Returns r, y and saved. A Transformer that normalises after a
    sub-layer goes on with y; one that normalises before carries r on and gives y to the next sub-layer.
    Edges: those of the norm and of dropout. "rms" has no bias.
    Source: Vaswani 2017, section 5.4 (after); Xiong 2020, table 1 (before).
    Derivation: docs/en/normalisation.md.
    """
    m = 1 if dropping is None else dropping.mask(x.shape[1]).to(x.dtype)
    r = x + m * s  # (1)
    if kind == "rms":
        y, norm = rms_norm_forward(r, gain, epsilon)  # (2)
        return r, y, ResidualNormSaved(norm, gain, dropping)
    y, centred = layer_norm_forward(r, gain, bias, epsilon)  # (2)
    return r, y, ResidualNormSaved(centred, gain, dropping)


def residual_norm_backward(
    dr: Float[Tensor, "N F"], dy: Float[Tensor, "N F"], saved: ResidualNormSaved
) -> ResidualNormGrads:
    norm, gain, dropping = saved
    dnorm, dgain, dbias = norm_backward(dy, norm, gain)
    dx = dr + dnorm  # (1)
    ds = dx if dropping is None else dx * dropping.mask(dx.shape[1]).to(dx.dtype)  # (1)
    return ResidualNormGrads(dx, ds, dgain, dbias)


def norm_backward(
    dy: Float[Tensor, "N F"], norm: LayerNormSaved | RMSNormSaved, gain: Float[Tensor, "F"] | None
) -> tuple[Float[Tensor, "N F"], Float[Tensor, "F"], Float[Tensor, "F"] | None]:
    if isinstance(norm, LayerNormSaved):
        return layer_norm_backward(dy, norm, gain)  # (2)
    return *rms_norm_backward(dy, norm, gain), None  # (2)
