"""Zoneout: some units of a state keep their old value."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor


def zoneout_forward(new: Float[Tensor, "n H"], old: Float[Tensor, "n H"], z: Float[Tensor, "n H"]) -> Tensor:
    """One step of zoneout, of h or of c.

    Definition::

        s_t = z_t * s_{t-1} + (1 - z_t) * new       (1)

    Gradient::

        dnew = ds_t * (1 - z_t)
        ds_{t-1} = ds_t * z_t

    Shapes: all (n, H). z in training: 1 with probability p, else 0; in evaluation: p, its expectation.
    Source: Krueger 2017, equations 2 and 3.
    Derivation: docs/en/recurrent_options.md.
    """
    return z * old + (1 - z) * new  # (1)


def zoneout_backward(ds: Float[Tensor, "n H"], z: Float[Tensor, "n H"]) -> tuple[Tensor, Tensor]:
    """`(dnew, dold)`."""
    return ds * (1 - z), ds * z  # (1)
