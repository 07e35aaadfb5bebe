"""Equations without an operator of their own, as their judges see them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor

from unrolled.equations.layer_norm import layer_norm_backward, layer_norm_forward
from unrolled.equations.zoneout import zoneout_backward, zoneout_forward
from unrolled.verify.inputs import normal
from unrolled.verify.operator import Operator


def make_layer_norm(
    generator: Generator, dtype: torch.dtype, rows: int = 3, features: int = 5, bias: bool = True
) -> dict[str, Any]:
    return {
        "x": normal(generator, dtype, rows, features, scale=2.0),
        "gain": normal(generator, dtype, features),
        "bias": normal(generator, dtype, features) if bias else None,
    }


def layer_norm_pair_forward(x: Tensor, gain: Tensor, bias: Tensor | None) -> tuple[Tensor, Any]:
    y, saved = layer_norm_forward(x, gain, bias)
    return y, (saved, gain)


def layer_norm_pair_backward(dy: Tensor, saved: Any, backward: Callable[..., Any] = layer_norm_backward) -> Any:
    return backward(dy, *saved)


def plain_layer_norm(x: Tensor, gain: Tensor, bias: Tensor | None) -> Tensor:
    """The variance from all pairs of numbers: no mean in it."""
    rows = []
    for row in x:
        variance = (row[:, None] - row).square().mean() / 2
        rows.append((row[:, None] - row).mean(1) / (variance + 1e-5).sqrt())
    y = torch.stack(rows) * gain if rows else x * gain
    return y if bias is None else y + bias


def torch_layer_norm(x: Tensor, gain: Tensor, bias: Tensor | None) -> Tensor:
    return torch.nn.functional.layer_norm(x, gain.shape, gain, bias, 1e-5)


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
    "layer_norm": Operator(
        make_layer_norm,
        plain_layer_norm,
        layer_norm_pair_forward,
        layer_norm_pair_backward,
        plain_layer_norm,
        torch_layer_norm,
        lambda inputs: max(inputs["x"].shape),
        (),
        cancels=lambda inputs: 1.0,
    ),
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
