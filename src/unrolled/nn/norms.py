"""LayerNorm and RMSNorm: torch.nn's modules, computed by our operators; each maps a Ragged to a Ragged too."""

from __future__ import annotations

import math
from typing import TypeVar

import torch
from torch import Tensor, nn

from unrolled.ops._norm import check_epsilon
from unrolled.ops.layer_norm import layer_norm
from unrolled.ops.rms_norm import rms_norm
from unrolled.ragged import Ragged

Values = TypeVar("Values", Tensor, Ragged)


class LayerNorm(nn.LayerNorm):
    """torch.nn.LayerNorm; in a Ragged the last axes of its values are normalised. A nested tensor is torch's own code.

    Errors: ValueError for an input that does not end with `normalized_shape`, and for eps below 0.
    """

    def __init__(
        self,
        normalized_shape: int | list[int] | torch.Size,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_epsilon(eps)
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)

    def forward(self, input: Values) -> Values:
        if isinstance(input, Ragged):
            return input.with_values(self.forward(input.values))
        if input.is_nested:
            return super().forward(input)
        y = layer_norm(_rows(input, self.normalized_shape), _flat(self.weight), _flat(self.bias), self.eps)
        return y.reshape(input.shape)


class RMSNorm(nn.RMSNorm):
    """torch.nn.RMSNorm; in a Ragged the last axes of its values are normalised. A nested tensor is torch's own code.

    Errors: ValueError for an input that does not end with `normalized_shape`, and for eps below 0.
    """

    def __init__(
        self,
        normalized_shape: int | list[int] | torch.Size,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_epsilon(eps)
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)

    def forward(self, x: Values) -> Values:
        if isinstance(x, Ragged):
            return x.with_values(self.forward(x.values))
        if x.is_nested:
            return super().forward(x)
        return rms_norm(_rows(x, self.normalized_shape), _flat(self.weight), self.eps).reshape(x.shape)


def _rows(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    axes = len(shape)
    if axes == 0 or x.shape[-axes:] != shape:
        raise ValueError(f"this layer normalises {tuple(shape)} at the end of a shape, the input has {tuple(x.shape)}")
    return x.reshape(math.prod(x.shape[:-axes]), math.prod(shape))


def _flat(weight: Tensor | None) -> Tensor | None:
    return None if weight is None else weight.flatten()
