"""Losses with torch.nn's names and arguments; a loss over no target is 0, not NaN."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from unrolled.ops.cross_entropy import cross_entropy
from unrolled.ops.mean_squared_error import mean_squared_error


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
            weights = torch.where(counted, self.weight[torch.where(counted, flat, 0)], 0)
        total = weights.sum()
        return loss.sum() / torch.where(total == 0, 1, total)
