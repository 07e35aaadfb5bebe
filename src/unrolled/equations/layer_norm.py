"""Layer normalisation."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

EPSILON = 1e-5  # torch's, and that of the recurrent layers


class LayerNormSaved(NamedTuple):
    normal: Float[Tensor, "N F"]  # mean 0 and variance 1 in each row
    scale: Float[Tensor, "N 1"]  # what it was multiplied by to become so


class LayerNormGrads(NamedTuple):
    dx: Float[Tensor, "N F"]
    dgain: Float[Tensor, "F"]
    dbias: Float[Tensor, "F"]


def layer_norm_forward(
    x: Float[Tensor, "N F"],
    gain: Float[Tensor, "F"] | None,
    bias: Float[Tensor, "F"] | None,
    epsilon: float = EPSILON,
) -> tuple[Float[Tensor, "N F"], LayerNormSaved]:
    """Each row to mean 0 and variance 1, then a gain and a bias for each of its numbers.

    Definition, mean and var over the F numbers of a row::

        scale = 1 / sqrt(var(x) + epsilon)          (1)
        normal = (x - mean(x)) * scale              (2)
        y = normal * gain + bias                    (3)

    Gradient::

        dnormal = dy * gain
        dx = scale * (dnormal - mean(dnormal) - normal * mean(dnormal * normal))
        dgain = sum_n dy * normal
        dbias = sum_n dy

    Shapes: x (N, F), gain and bias (F,), or None for a gain of 1 and a bias of 0.
    Edges: a row of equal numbers gives y = bias.
    Source: Ba 2016, equation 3; epsilon, 1e-5 as in torch, is not in the paper.
    Derivation: docs/en/normalisation.md.
    """
    centred = x - x.mean(1, keepdim=True)
    scale = ((centred * centred).mean(1, keepdim=True) + epsilon).rsqrt()  # (1)
    normal = centred * scale  # (2)
    y = normal if gain is None else normal * gain  # (3)
    return y if bias is None else y + bias, LayerNormSaved(normal, scale)


def layer_norm_backward(
    dy: Float[Tensor, "N F"], saved: LayerNormSaved, gain: Float[Tensor, "F"] | None
) -> LayerNormGrads:
    normal, scale = saved
    dnormal = dy if gain is None else dy * gain  # (3)
    slope = (dnormal * normal).mean(1, keepdim=True)
    dx = scale * (dnormal - dnormal.mean(1, keepdim=True) - normal * slope)  # (2), (1)
    return LayerNormGrads(dx, (dy * normal).sum(0), dy.sum(0))  # (3)
