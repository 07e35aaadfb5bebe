"""Losses with torch.nn's names and arguments; a loss over no target is 0, not NaN."""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn

from unrolled.equations.linear_cross_entropy import Reduction
from unrolled.nn._initial import check_sizes
from unrolled.ops.cross_entropy import cross_entropy
from unrolled.ops.linear import linear
from unrolled.ops.linear_cross_entropy import linear_cross_entropy
from unrolled.ops.mean_squared_error import mean_squared_error
from unrolled.ragged import Ragged


class MSELoss(nn.MSELoss):
    """torch.nn.MSELoss. Errors: ValueError where input and target differ in shape."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        if self.reduction == "mean":
            return mean_squared_error(input, target)
        if self.reduction == "sum":
            return mean_squared_error(input, target) * input.numel()
        return super().forward(input, target)


class CrossEntropyLoss(nn.CrossEntropyLoss):
    """torch.nn.CrossEntropyLoss for classes, (N, C), (N, C, d1, ...) or (C,); class probabilities are torch's own code.

    "mean" divides by the class weights of the targets that are not ignored, as torch does.
    """

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        if target.is_floating_point():
            return super().forward(input, target)
        logits = input.movedim(1, -1) if input.ndim > 1 else input
        if logits.shape[:-1] != target.shape:
            raise ValueError(f"input {tuple(input.shape)} and target {tuple(target.shape)} do not fit")
        classes = logits.shape[-1]
        flat = target.reshape(-1)
        if self.reduction not in ("none", "sum", "mean"):
            raise ValueError(f'reduction must be "none", "sum" or "mean", found {self.reduction!r}')
        loss = cross_entropy(logits.reshape(-1, classes), flat, self.weight, self.ignore_index, self.label_smoothing)
        if self.reduction == "none":
            return loss.reshape(target.shape)
        if self.reduction == "sum":
            return loss.sum()
        counted = flat != self.ignore_index
        weights = counted.to(loss.dtype)
        if self.weight is not None:
            weights = torch.where(counted, self.weight.to(loss.dtype)[torch.where(counted, flat, 0)], 0)
        total = weights.sum()
        return loss.sum() / torch.where(total == 0, 1, total)


class LinearCrossEntropyLoss(nn.Module):
    """The output projection and its cross-entropy in one, for a loss over many classes: the logits are never stored.

    Parameters: weight (num_classes, in_features) and, with `bias`, bias (num_classes,), with the initial values of
    torch.nn.Linear; the other arguments are those of torch.nn.CrossEntropyLoss. Keyword only:

    - `weight`: a parameter of another module to be shared, such as that of the embedding (tied weights).

    Source: `equations.linear_cross_entropy`.
    Errors: ValueError for a size below 1, a weight of another shape, another reduction than "mean" and "sum", a
    smoothing outside [0, 1]; TypeError for a shared weight that is no Parameter.
    """

    class_weight: Tensor | None

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        bias: bool = True,
        class_weight: Tensor | None = None,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        weight: nn.Parameter | None = None,
    ) -> None:
        super().__init__()
        check_sizes(0, in_features=in_features, num_classes=num_classes)
        if reduction not in ("mean", "sum"):
            raise ValueError(f'reduction must be "mean" or "sum", found {reduction!r}')
        if not 0 <= label_smoothing <= 1:
            raise ValueError(f"label_smoothing must lie in [0, 1], found {label_smoothing}")
        if class_weight is not None and not isinstance(class_weight, Tensor):
            raise TypeError(f"class_weight must be a tensor or None, found {type(class_weight).__name__}")
        if class_weight is not None and class_weight.shape != (num_classes,):
            raise ValueError(f"class_weight must be ({num_classes},), found {tuple(class_weight.shape)}")
        shape = (num_classes, in_features)
        if weight is not None and not isinstance(weight, nn.Parameter):
            raise TypeError(f"a shared weight must be a Parameter, found {type(weight).__name__}")
        if weight is not None and weight.shape != shape:
            raise ValueError(f"a shared weight must be {shape}, found {tuple(weight.shape)}")
        self.in_features, self.num_classes = in_features, num_classes
        self.ignore_index, self.label_smoothing, self.reduction = ignore_index, label_smoothing, reduction
        self.register_buffer("class_weight", class_weight)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype)) if weight is None else weight
        self.bias = nn.Parameter(torch.empty(num_classes, device=device, dtype=dtype)) if bias else None
        bound = 1 / math.sqrt(in_features)
        for parameter in ([] if weight is not None else [self.weight]) + ([] if self.bias is None else [self.bias]):
            nn.init.uniform_(parameter, -bound, bound)

    def forward(self, input: Tensor | Ragged, target: Tensor | Ragged) -> Tensor:
        """The loss of input (..., in_features) and the classes (...), or of two Ragged of the same sequences."""
        x, k = input, target
        if isinstance(x, Ragged) and isinstance(k, Ragged):
            if x.offsets is not k.offsets and not torch.equal(x.offsets, k.offsets):
                raise ValueError(f"input and target are other sequences: {x} and {k}")
            x, k = x.values, k.values
        if not isinstance(x, Tensor) or not isinstance(k, Tensor):
            raise TypeError("input and target must both be tensors, or both Ragged")
        if x.ndim == 0 or x.shape[:-1] != k.shape or x.shape[-1] != self.in_features:
            found = f"{tuple(x.shape)}, {tuple(k.shape)}"
            raise ValueError(f"expected input (..., {self.in_features}) and a target for each, found {found}")
        return linear_cross_entropy(
            x.reshape(k.numel(), self.in_features),
            self.weight,
            self.bias,
            k.reshape(-1),
            class_weight=self.class_weight,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            reduction=cast(Reduction, self.reduction),
        )

    def logits(self, input: Tensor) -> Tensor:
        """(..., num_classes) what the loss is taken of, for those who want to choose a class."""
        return linear(input, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.num_classes}, bias={self.bias is not None}, reduction={self.reduction!r}"
