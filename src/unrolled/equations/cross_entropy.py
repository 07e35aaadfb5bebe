"""Softmax and cross-entropy in one: the gradient is p - y."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor


class CrossEntropySaved(NamedTuple):
    logits: Float[Tensor, "N C"]
    log_sum: Float[Tensor, "N"]
    target: Int[Tensor, "N"]
    class_weight: Float[Tensor, "C"] | None
    ignore_index: int
    label_smoothing: float


def cross_entropy_forward(
    logits: Float[Tensor, "N C"],
    target: Int[Tensor, "N"],
    class_weight: Float[Tensor, "C"] | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> tuple[Float[Tensor, "N"], CrossEntropySaved]:
    """The loss of each token against its target class; the mean over tokens is taken outside, by their weights.

    Definition, with z the logits of a token, C classes, w the class weights (1 without them), k the target and e the
    label smoothing::

        s = log sum_c exp(z_c)                              (1)
        y_c = w_c ((1 - e) [c = k] + e / C)                 (2)
        loss = sum_c y_c (s - z_c)                          (3)

    Gradient, with p_c = exp(z_c - s) the softmax and |y| = sum_c y_c (which is 1 without weights)::

        dz_c = dloss (|y| p_c - y_c)                        p - y

    Shapes: logits (N, C), target (N,) in [0, C) or `ignore_index`, class_weight (C,); loss (N,) in nats.
    Edges: an ignored target has loss 0 and gradient 0; a class of logit -inf is ruled out, with gradient 0.
    Errors: IndexError for a target outside the classes.
    Source: label smoothing of Szegedy 2016, section 7; class weights as torch.nn.CrossEntropyLoss applies them.
    Derivation: docs/en/losses.md.
    """
    outside = (target != ignore_index) & ((target < 0) | (target >= logits.shape[1]))
    if outside.any():
        raise IndexError(f"target {int(target[outside][0])} lies outside [0, {logits.shape[1]})")
    saved = CrossEntropySaved(logits, logits.logsumexp(1), target, class_weight, ignore_index, label_smoothing)  # (1)
    y = smoothed_target(saved)
    surprise = torch.where(y == 0, 0, saved.log_sum[:, None] - logits)  # 0 times infinity is 0: a logit may be -inf
    return torch.where(target == ignore_index, 0, (y * surprise).sum(1)), saved  # (3)


def cross_entropy_backward(dloss: Float[Tensor, "N"], saved: CrossEntropySaved) -> Float[Tensor, "N C"]:
    y = smoothed_target(saved)
    p = (saved.logits - saved.log_sum[:, None]).exp()
    dlogits = dloss[:, None] * (y.sum(1, keepdim=True) * p - y)  # (3), (1)
    return torch.where((saved.target == saved.ignore_index)[:, None], 0, dlogits)


def smoothed_target(saved: CrossEntropySaved) -> Float[Tensor, "N C"]:
    """Line (2) for every token; the row of an ignored one is meaningless."""
    logits, _, target, class_weight, ignore_index, label_smoothing = saved
    classes = logits.shape[1]
    y = logits.new_full(logits.shape, label_smoothing / classes)
    k = torch.where(target == ignore_index, 0, target)[:, None]
    y = y.scatter_add(1, k, y.new_full(k.shape, 1 - label_smoothing))
    return y if class_weight is None else y * class_weight  # (2)
