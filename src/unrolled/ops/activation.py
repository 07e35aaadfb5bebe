"""The activation operator: relu, gelu in both its forms, silu."""

from __future__ import annotations

from typing import Any, get_args

import torch
from torch import Tensor

from unrolled.equations.activations import ActivationSaved, Kind, activation_backward, activation_forward
from unrolled.ops._backend import arrays, core, equations_only, full_precision, on_core, one_kind
from unrolled.ops._register import apply, backward_op, register, with_signature

KINDS: tuple[Kind, ...] = get_args(Kind)


def activation(x: Tensor, kind: Kind) -> Tensor:
    """The activation of that name of each number of x, of any shape; the equation is in `equations.activations`.

    Errors: ValueError for a kind that is none of "relu", "gelu", "gelu_tanh", "silu"; TypeError for whole numbers.
    """
    known("activation", kind)
    (x,) = full_precision(x)
    one_kind("activation", x)
    if equations_only():
        return activation_forward(x, kind)[0]
    y: Tensor = apply(_Activation, x, kind)
    return y


def known(name: str, kind: str) -> None:
    if kind not in KINDS:
        raise ValueError(f"{name}: the activation must be one of {', '.join(map(repr, KINDS))}, found {kind!r}")


@with_signature
class _Activation(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, kind: Kind) -> Tensor:
        y: Tensor = _forward(x, kind)
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, ctx.kind = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return _backward_once(dy, *ctx.saved_tensors, ctx.kind), None


def _forward_kernel(x: Tensor, kind: Kind) -> Tensor:
    if not on_core(x):
        return activation_forward(x, kind)[0]
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    core.activation_forward(kind, *arrays(x, y), torch.get_num_threads())
    return y


def _backward_kernel(dy: Tensor, x: Tensor, kind: Kind) -> Tensor:
    if on_core(dy, x):
        dx = torch.empty_like(x, memory_format=torch.contiguous_format)
        core.activation_backward(kind, *arrays(dy, x, dx), torch.get_num_threads())
        return dx
    return activation_backward(dy, ActivationSaved(x, kind))


_forward = register(
    "activation_forward(Tensor x, str kind) -> Tensor", _forward_kernel, lambda x, kind: x.new_empty(x.shape)
)
_backward = register(
    "activation_backward(Tensor dy, Tensor x, str kind) -> Tensor",
    _backward_kernel,
    lambda dy, x, kind: x.new_empty(x.shape),
)
_backward_once = backward_op(_backward, "activation")
