"""Equations without an operator of their own, as their judges see them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor

from unrolled.equations.zoneout import zoneout_backward, zoneout_forward
from unrolled.verify.inputs import normal
from unrolled.verify.operator import Operator


def make_zoneout(
    generator: Generator, dtype: torch.dtype, rows: int = 3, units: int = 4, drawn: bool = True
) -> dict[str, Any]:
    z = torch.rand(rows, units, generator=generator, dtype=torch.float64)
    return {
        "new": normal(generator, dtype, rows, units),
        "old": normal(generator, dtype, rows, units),
        "z": (z < 0.4).to(dtype) if drawn else z.to(dtype),
    }


def zoneout_pair_forward(new: Tensor, old: Tensor, z: Tensor) -> tuple[Tensor, Any]:
    return zoneout_forward(new, old, z), z


def zoneout_pair_backward(ds: Tensor, z: Tensor, backward: Callable[..., Any] = zoneout_backward) -> Any:
    return backward(ds, z)


def plain_zoneout(new: Tensor, old: Tensor, z: Tensor) -> Tensor:
    return torch.lerp(new, old, z)


PAIRS = {
    "zoneout": Operator(
        make_zoneout,
        plain_zoneout,
        zoneout_pair_forward,
        zoneout_pair_backward,
        plain_zoneout,
        None,
        lambda inputs: 1,
        (),
    ),
}
