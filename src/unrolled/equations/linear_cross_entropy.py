"""The output projection with its loss: the gradient of the logits is p - y, and nothing later is needed to form it."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unrolled.equations.cross_entropy import CrossEntropySaved, cross_entropy_backward, cross_entropy_forward
from unrolled.equations.linear import LinearGrads, LinearSaved, linear_backward, linear_forward

Reduction = Literal["mean", "sum"]


class LinearCrossEntropySaved(NamedTuple):
    linear: LinearSaved
    losses: CrossEntropySaved
    share: Float[Tensor, ""]


def linear_cross_entropy_forward(
    x: Float[Tensor, "N D"],
    weight: Float[Tensor, "V D"],
    bias: Float[Tensor, "V"] | None,
    target: Int[Tensor, "N"],
    class_weight: Float[Tensor, "V"] | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
) -> tuple[Float[Tensor, ""], LinearCrossEntropySaved]:
    """Scores of V classes by a linear map of every token, and the loss of all tokens against their target classes.

    Definition, with w the class weights (1 without them), k_n the target of token n, and y_n and s_n, the smoothed
    target and the logarithm of the sum, as in `equations.cross_entropy`::

        z_n = W x_n + b                                     (1)
        loss_n = sum_c y_nc (s_n - z_nc)                    (2)
        share = 1 / sum_n w[k_n], or 1 for "sum"            (3)
        loss = share sum_n loss_n                           (4)

    Gradient, with p_n = exp(z_n - s_n) the softmax and |y| = sum_c y_c::

        dz_n = dloss share (|y_n| p_n - y_n)                p - y
        dx = dz W
        dW = dz^T x
        db = sum_n dz_n

    dz depends on nothing that comes after a token's own logits: with dloss = 1 the gradients can be formed in the
    forward, some tokens at a time, and dloss multiplies them later. So the operator does, and never holds z for all.

    Shapes: x (N, D), weight (V, D), bias (V,) or None, target (N,) in [0, V) or `ignore_index`, class_weight (V,) or
    None; loss a scalar in nats, for "mean" the mean over the weights of the targets.
    Edges: an ignored target adds nothing to a sum; a loss over no target, or over targets of weight 0, has share 1.
    Errors: IndexError for a target outside the classes.
    Source: Jean 2015, equation 2 (the softmax of an output projection, and what it costs); Press 2017 for a weight
    shared with the embedding.
    Derivation: docs/en/losses.md.
    """
    logits, linear = linear_forward(x, weight, bias)  # (1)
    losses, saved = cross_entropy_forward(logits, target, class_weight, ignore_index, label_smoothing)  # (2)
    share = target_share(x, target, class_weight, ignore_index, reduction)
    return share * losses.sum(), LinearCrossEntropySaved(linear, saved, share)  # (4)


def linear_cross_entropy_backward(dloss: Float[Tensor, ""], saved: LinearCrossEntropySaved) -> LinearGrads:
    dlosses = (dloss * saved.share).expand(saved.losses.target.shape)  # (4)
    dlogits = cross_entropy_backward(dlosses, saved.losses)  # (2)
    return linear_backward(dlogits, saved.linear)  # (1)


def target_share(
    x: Float[Tensor, "N D"],
    target: Int[Tensor, "N"],
    class_weight: Float[Tensor, "V"] | None,
    ignore_index: int,
    reduction: Reduction,
) -> Float[Tensor, ""]:
    """Line (3), known before the first product."""
    if reduction == "sum":
        return x.new_ones(())
    counted = target != ignore_index
    weights = counted.to(x.dtype)
    if class_weight is not None:
        weights = torch.where(counted, class_weight[torch.where(counted, target, 0)], 0)
    total = weights.sum()
    return 1 / torch.where(total == 0, 1, total)  # (3)
