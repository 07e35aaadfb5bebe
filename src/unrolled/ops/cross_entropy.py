"""The cross-entropy operator: softmax and loss in one, the logarithm of the sum is all that is kept."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from unrolled.equations.cross_entropy import CrossEntropySaved, cross_entropy_backward, cross_entropy_forward
from unrolled.ops._backend import arrays, core, equations_only, full_precision, on_core, one_kind
from unrolled.ops._register import apply, backward_op, register, with_signature


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """The loss (N,) of each token in nats; the equation is in `equations.cross_entropy`.

    Shapes: logits (N, C), target (N,) int64, class_weight (C,) or None.
    Errors: IndexError for a target that is neither in [0, C) nor `ignore_index`; ValueError for a wrong smoothing
    and for shapes that do not fit; TypeError for different dtypes.
    """
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing must lie in [0, 1], found {label_smoothing}")
    if logits.ndim != 2 or target.shape != logits.shape[:1]:
        raise ValueError(f"expected logits (N, C) and target (N,), found {tuple(logits.shape)}, {tuple(target.shape)}")
    if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
        raise TypeError(f"target must be whole numbers, found {target.dtype}")
    if class_weight is not None and class_weight.shape != logits.shape[1:]:
        raise ValueError(f"expected class_weight ({logits.shape[1]},), found {tuple(class_weight.shape)}")
    (logits, class_weight), target = full_precision(logits, class_weight), target.to(torch.int64)
    one_kind("cross_entropy", logits, class_weight)
    if equations_only():
        return cross_entropy_forward(logits, target, class_weight, ignore_index, label_smoothing)[0]
    loss: Tensor = apply(_CrossEntropy, logits, target, class_weight, ignore_index, label_smoothing)[0]
    return loss


@with_signature
class _CrossEntropy(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> Any:
        return _forward(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        logits, target, class_weight, ctx.ignore_index, ctx.label_smoothing = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(logits, output[1], target, class_weight)

    @staticmethod
    def backward(ctx: Any, dloss: Tensor, _: Any) -> Any:
        dlogits = _backward_once(dloss, *ctx.saved_tensors, ctx.ignore_index, ctx.label_smoothing)
        return dlogits, None, None, None, None


def _forward_kernel(
    logits: Tensor, target: Tensor, class_weight: Tensor | None, ignore_index: int, label_smoothing: float
) -> tuple[Tensor, Tensor]:
    if not on_core(logits, *([] if class_weight is None else [class_weight])):
        loss, saved = cross_entropy_forward(logits, target, class_weight, ignore_index, label_smoothing)
        return loss, saved.log_sum
    loss, log_sum = logits.new_empty(len(logits)), logits.new_empty(len(logits))
    core.cross_entropy_forward(
        *arrays(logits, target, class_weight, loss, log_sum), ignore_index, label_smoothing, torch.get_num_threads()
    )
    return loss, log_sum


def _backward_kernel(
    dloss: Tensor,
    logits: Tensor,
    log_sum: Tensor,
    target: Tensor,
    class_weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
) -> Tensor:
    if not on_core(dloss, logits, *([] if class_weight is None else [class_weight])):
        saved = CrossEntropySaved(logits, log_sum, target, class_weight, ignore_index, label_smoothing)
        return cross_entropy_backward(dloss, saved)
    dlogits = torch.empty_like(logits, memory_format=torch.contiguous_format)
    core.cross_entropy_backward(
        *arrays(dloss, logits, log_sum, target, class_weight, dlogits),
        ignore_index,
        label_smoothing,
        torch.get_num_threads(),
    )
    return dlogits


_forward = register(
    "cross_entropy_forward(Tensor logits, Tensor target, Tensor? class_weight, SymInt ignore_index, "
    "float label_smoothing) -> (Tensor, Tensor)",
    _forward_kernel,
    lambda logits, *_: (logits.new_empty(logits.shape[0]), logits.new_empty(logits.shape[0])),
)
_backward = register(
    "cross_entropy_backward(Tensor dloss, Tensor logits, Tensor log_sum, Tensor target, Tensor? class_weight, "
    "SymInt ignore_index, float label_smoothing) -> Tensor",
    _backward_kernel,
    lambda dloss, logits, *_: logits.new_empty(logits.shape),
)
_backward_once = backward_op(_backward, "cross_entropy")
