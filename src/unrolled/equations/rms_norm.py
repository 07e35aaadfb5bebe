"""Normalisation by the root of the mean square."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor


class RMSNormSaved(NamedTuple):
    normal: Float[Tensor, "N F"]  # mean square 1 in each row
    scale: Float[Tensor, "N 1"]  # what it was multiplied by to become so


class RMSNormGrads(NamedTuple):
    dx: Float[Tensor, "N F"]
    dgain: Float[Tensor, "F"]


def rms_norm_forward(
    x: Float[Tensor, "N F"], gain: Float[Tensor, "F"] | None, epsilon: float
) -> tuple[Float[Tensor, "N F"], RMSNormSaved]:
    """Each row to mean square 1, then a gain for each of its numbers: layer normalisation without the mean.

    Definition, mean over the F numbers of a row::

        scale = 1 / sqrt(mean(x^2) + epsilon)       (1)
        normal = x * scale                          (2)
        y = normal * gain                           (3)

    Gradient::

        dnormal = dy * gain
        dx = scale * (dnormal - normal * mean(dnormal * normal))
        dgain = sum_n dy * normal

    Shapes: x (N, F), gain (F,) or None for a gain of 1.
    Edges: a row of zeros gives y = 0.
    Source: Zhang 2019, equation 4; epsilon is not in the paper, torch's is that of the dtype.
    Derivation: docs/en/normalisation.md.
    """
    scale = ((x * x).mean(1, keepdim=True) + epsilon).rsqrt()  # (1)
    normal = x * scale  # (2)
    return normal if gain is None else normal * gain, RMSNormSaved(normal, scale)  # (3)


def rms_norm_backward(dy: Float[Tensor, "N F"], saved: RMSNormSaved, gain: Float[Tensor, "F"] | None) -> RMSNormGrads:
    normal, scale = saved
    dnormal = dy if gain is None else dy * gain  # (3)
    dx = scale * (dnormal - normal * (dnormal * normal).mean(1, keepdim=True))  # (2), (1)
    return RMSNormGrads(dx, (dy * normal).sum(0))  # (3)
