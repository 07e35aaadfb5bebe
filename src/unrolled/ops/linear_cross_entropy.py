"""The output projection and its loss in one: the gradients are formed in the forward, some tokens at a time."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from unrolled.equations.linear_cross_entropy import (
    Reduction,
    linear_cross_entropy_backward,
    linear_cross_entropy_forward,
    target_share,
)
from unrolled.ops._backend import arrays, core, equations_only, forward_mode, full_precision, on_core, one_kind
from unrolled.ops._register import apply, backward_op, register, with_signature

_LOGITS = 2**22  # at a time, on the equation


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    *,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
) -> Tensor:
    """The loss, a scalar in nats; the equation is in `equations.linear_cross_entropy`.

    Shapes: x (N, D), weight (V, D), bias (V,) or None, target (N,) whole numbers, class_weight (V,) or None.
    What is kept for the backward are the gradients themselves: memory is that of dx and dweight, and no (N, V).
    Errors: IndexError for a target that is neither in [0, V) nor `ignore_index`; ValueError for a wrong smoothing or
    reduction, and for shapes that do not fit; TypeError for a target of another kind, or parameters of another dtype.
    """
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing must lie in [0, 1], found {label_smoothing}")
    if reduction not in ("mean", "sum"):
        raise ValueError(f'reduction must be "mean" or "sum", found {reduction!r}')
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1] or target.shape != x.shape[:1]:
        found = ", ".join(str(tuple(t.shape)) for t in (x, weight, target))
        raise ValueError(f"expected x (N, D), weight (V, D) and target (N,), found {found}")
    for name, each in (("bias", bias), ("class_weight", class_weight)):
        if each is not None and each.shape != weight.shape[:1]:
            raise ValueError(f"expected {name} ({weight.shape[0]},), found {tuple(each.shape)}")
    if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
        raise TypeError(f"target must be whole numbers, found {target.dtype}")
    x, weight, bias, class_weight = full_precision(x, weight, bias, class_weight)
    one_kind("linear_cross_entropy", x, weight, bias, class_weight)
    target = target.to(torch.int64)
    given = x, weight, bias, target, class_weight, ignore_index, label_smoothing, reduction
    if equations_only():
        return linear_cross_entropy_forward(*given)[0]
    grad = forward_mode() or torch.is_grad_enabled()
    need_dx, *need_dweight = (grad and t is not None and t.requires_grad for t in (x, weight, bias))
    loss: Tensor
    if forward_mode() or need_dx or any(need_dweight):
        loss = apply(_LinearCrossEntropy, *given, need_dx, any(need_dweight))[0]
    else:
        loss = _forward(*given, False, False)[0]
    return loss


@with_signature
class _LinearCrossEntropy(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> Any:
        return _forward(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, *grads = output
        ctx.mark_non_differentiable(*grads)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:3], *grads)

    @staticmethod
    def backward(ctx: Any, dloss: Tensor | None, *_: Any) -> Any:
        if dloss is None:
            return (None,) * 10
        grads = _backward_once(dloss, *ctx.saved_tensors)
        wanted = zip(grads, ctx.needs_input_grad[:3], strict=True)
        return *(d if needed else None for d, needed in wanted), *[None] * 7


class _Inputs(NamedTuple):
    """The arguments of the kernel in their order."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    class_weight: Tensor | None
    ignore_index: int
    label_smoothing: float
    reduction: Reduction
    need_dx: bool
    need_dweight: bool


def _forward_kernel(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    p = _Inputs(*args)
    if not on_core(p.x, p.weight):
        return _by_equation(p)
    loss, dx, dweight, dbias = (p.x.new_empty(shape) for shape in _shapes(*p[:3], *p[-2:]))
    core.linear_cross_entropy(
        *arrays(*p[:5], loss, dx if p.need_dx else None),
        *(arrays(dweight, None if p.bias is None else dbias) if p.need_dweight else (None, None)),
        *(p.ignore_index, p.label_smoothing, p.reduction == "mean", torch.get_num_threads()),
    )
    return loss, dx, dweight, dbias


def _shapes(
    x: Tensor, weight: Tensor, bias: Tensor | None, need_dx: bool, need_dweight: bool
) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
    """Of the loss, dx, dweight and dbias; [0] for what is not wanted."""
    dweight, dbias = (
        (list(weight.shape) if need_dweight else [0]),
        [weight.shape[0] if need_dweight and bias is not None else 0],
    )
    return [], list(x.shape) if need_dx else [0], dweight, dbias


def _by_equation(p: _Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """In chunks of tokens; sums over chunks in float32 at least."""
    x, weight, bias, target, class_weight, ignore_index, label_smoothing, reduction, need_dx, need_dweight = p
    share = target_share(x, target, class_weight, ignore_index, reduction)
    shapes = _shapes(x, weight, bias, need_dx, need_dweight)
    loss, dx, dweight, dbias = (x.new_zeros(s, dtype=torch.promote_types(x.dtype, torch.float32)) for s in shapes)
    chunk = max(64, _LOGITS // max(1, len(weight)))
    for first in range(0, len(x), chunk):
        rows = slice(first, first + chunk)
        part, saved = linear_cross_entropy_forward(
            x[rows], weight, bias, target[rows], class_weight, ignore_index, label_smoothing, "sum"
        )
        loss += share * part
        if need_dx or need_dweight:
            grads = linear_cross_entropy_backward(share, saved)
            if need_dx:
                dx[rows] = grads.dx
            if need_dweight:
                dweight += grads.dweight
            if dbias.numel():
                dbias += grads.dbias
    return loss.to(x.dtype), dx.to(x.dtype), dweight.to(x.dtype), dbias.to(x.dtype)


def _backward_kernel(dloss: Tensor, *args: Tensor | None) -> tuple[Tensor, ...]:
    """x, weight and bias are there because the gradients depend on them: who differentiates again is to be refused."""
    return tuple(dloss * gradient for gradient in args[3:] if gradient is not None)


_forward = register(
    "linear_cross_entropy_forward(Tensor x, Tensor weight, Tensor? bias, Tensor target, Tensor? class_weight, "
    "SymInt ignore_index, float label_smoothing, str reduction, bool need_dx, bool need_dweight) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _forward_kernel,
    lambda x, weight, bias, *args: tuple(x.new_empty(s) for s in _shapes(x, weight, bias, *args[-2:])),
)
_backward = register(
    "linear_cross_entropy_backward(Tensor dloss, Tensor x, Tensor weight, Tensor? bias, Tensor dx, Tensor dweight, "
    "Tensor dbias) -> (Tensor, Tensor, Tensor)",
    _backward_kernel,
    lambda dloss, x, weight, bias, *grads: tuple(torch.empty_like(g) for g in grads),
)
_backward_once = backward_op(_backward, "linear_cross_entropy")
