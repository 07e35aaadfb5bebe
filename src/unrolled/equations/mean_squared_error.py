"""The mean squared error."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor


class MeanSquaredErrorSaved(NamedTuple):
    error: Float[Tensor, "*S"]


def mean_squared_error_forward(
    y: Float[Tensor, "*S"], target: Float[Tensor, "*S"]
) -> tuple[Float[Tensor, ""], MeanSquaredErrorSaved]:
    """The mean over all elements of the squared difference.

    Definition, over n elements::

        e = y - target          (1)
        loss = sum e^2 / n      (2)

    Gradient::

        dy = dloss * 2 e / n
        dtarget = -dy

    Shapes: y and target alike; the loss is a scalar, in the square of their unit.
    Edges: the loss over no element is 0.
    Derivation: docs/en/losses.md.
    """
    error = y - target  # (1)
    return (error * error).sum() / max(error.numel(), 1), MeanSquaredErrorSaved(error)  # (2)


def mean_squared_error_backward(
    dloss: Float[Tensor, ""], saved: MeanSquaredErrorSaved
) -> tuple[Float[Tensor, "*S"], Float[Tensor, "*S"]]:
    """Gives (dy, dtarget)."""
    (error,) = saved
    derror = dloss * 2 * error / max(error.numel(), 1)  # (2)
    return derror, -derror  # (1)
