"""How an operator becomes known to PyTorch: plain kernels with fake and vmap rules, and one Function above them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from unrolled.ops._backend import forward_mode

Kernel = Callable[..., Any]


def register(schema: str, kernel: Kernel, fake: Kernel) -> Kernel:
    """Define `unrolled::<schema>` with its kernel, fake kernel, vmap rule (a loop) and autocast to float32."""
    name = "unrolled::" + schema[: schema.index("(")]
    torch.library.define(name, schema[schema.index("(") :])
    torch.library.impl(name, "default", kernel)
    torch.library.register_fake(name, fake)
    op: Kernel = getattr(torch.ops.unrolled, name.removeprefix("unrolled::")).default
    torch.library.register_vmap(name, _loop_over_examples(op))
    for device in ("cpu", "cuda"):
        torch.library.register_autocast(name, device, torch.float32)
    return op


def _loop_over_examples(op: Kernel) -> Kernel:
    def rule(info: Any, in_dims: Sequence[int | None], *args: Any) -> tuple[Any, Any]:
        def example(i: int) -> Any:
            return op(*(a if d is None else a.select(d, i) for a, d in zip(args, in_dims, strict=True)))

        results = [example(i) for i in range(info.batch_size)]
        if isinstance(results[0], Tensor):
            return torch.stack(results), 0
        stacked = tuple(torch.stack(parts) for parts in zip(*results, strict=True))
        return stacked, (0,) * len(stacked)

    return rule


def with_signature(function: Any) -> Any:
    """Keeps the signature that Function.apply would work out anew at each call, 20 us of its 30."""
    function.forward.__signature__ = inspect.signature(function.forward)
    return function


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    if forward_mode() and any(_has_tangent(a) for a in args):
        raise NotImplementedError(
            "our operators have no derivative in forward mode (jvp); run under `with unrolled.use('equations'):`"
        )
    if torch.compiler.is_compiling():  # a float from outside would be one more free size, which must not go in twice
        args = tuple(float.fromhex(a.hex()) if isinstance(a, float) else a for a in args)
    return function.apply(*args)  # type: ignore[no-untyped-call]


def call(function: type[torch.autograd.Function], kernel: Kernel, *args: Any) -> Any:
    """The Function where something is to be differentiated, else the kernel by itself."""
    wanted = torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in args)
    return apply(function, *args) if wanted or forward_mode() else kernel(*args)


def _has_tangent(value: Any) -> bool:
    return isinstance(value, Tensor) and unpack_dual(value).tangent is not None  # type: ignore[no-untyped-call]


def backward_op(op: Kernel, name: str) -> Kernel:
    """`op`, which computes a gradient in closed form, made to refuse a second derivative instead of being wrong."""

    @with_signature
    class Once(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(*args: Any) -> Any:
            return op(*args)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            raise RuntimeError(
                f"{name}: its backward is a closed form that autograd cannot differentiate again; "
                'for second derivatives run the model under `with unrolled.use("equations"):`'
            )

    def call(*args: Any) -> Any:
        return apply(Once, *args) if torch.is_grad_enabled() else op(*args)

    return call
