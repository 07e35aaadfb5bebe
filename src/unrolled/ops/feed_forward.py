"""The feed-forward operator: two linear maps with an activation, a gate and dropout between them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from unrolled.equations.activations import Kind
from unrolled.equations.dropout import Dropping
from unrolled.equations.feed_forward import FeedForwardSaved, feed_forward_backward, feed_forward_forward
from unrolled.ops._backend import (
    arrays,
    check_dropping,
    core,
    dropping_of,
    equations_only,
    full_precision,
    on_core,
    one_kind,
)
from unrolled.ops._register import backward_op, call, register, with_signature
from unrolled.ops.activation import known


class Inputs(NamedTuple):
    """What goes to the kernels, in the order of their schema; without dropout p is 0 and seed, key and t are None."""

    x: Tensor
    weight1: Tensor
    bias1: Tensor | None
    weight2: Tensor
    bias2: Tensor | None
    weight_gate: Tensor | None
    bias_gate: Tensor | None
    seed: Tensor | None
    key: Tensor | None
    t: Tensor | None
    activation: Kind
    p: float
    layer: int

    @property
    def weights(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.weight1, self.weight2, self.weight_gate

    @property
    def dropping(self) -> Dropping | None:
        return dropping_of(self.p, self.seed, self.layer, self.key, self.t)


def feed_forward(
    x: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    activation: Kind,
    weight_gate: Tensor | None = None,
    bias_gate: Tensor | None = None,
    dropping: Dropping | None = None,
) -> Tensor:
    """The feed-forward layer of x (N, D); the equation is in `equations.feed_forward`.

    Shapes: weight1 and weight_gate (F, D), weight2 (D, F), bias1 and bias_gate (F,), bias2 (D,); returns (N, D).
    Dropout of the hidden units by `dropping`: hidden unit f of row n is dropped by (seed, layer, key[n], t[n], f).
    Errors: ValueError for shapes that do not belong together or an unknown activation. A second derivative is refused
    unless `unrolled.use("equations")`.
    """
    known("feed_forward", activation)
    numbers = full_precision(x, weight1, bias1, weight2, bias2, weight_gate, bias_gate)
    one_kind("feed_forward", *numbers)
    x, weight1, bias1, weight2, bias2, weight_gate, bias_gate = numbers
    _check(x, weight1, bias1, weight2, bias2, weight_gate, bias_gate, dropping)
    if dropping is not None and dropping.p == 0:
        dropping = None
    if equations_only():
        return feed_forward_forward(x, weight1, bias1, weight2, bias2, activation, weight_gate, bias_gate, dropping)[0]
    d = dropping or Dropping(0.0, None, 0, None, None)  # type: ignore[arg-type]
    given = Inputs(
        *(x, weight1, bias1, weight2, bias2, weight_gate, bias_gate, d.seed, d.key, d.t, activation, d.p, d.layer)
    )
    y: Tensor = call(_FeedForward, lambda *args: _forward(*args, False), *given)[0]
    return y


def _check(
    x: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    weight_gate: Tensor | None,
    bias_gate: Tensor | None,
    dropping: Dropping | None,
) -> None:
    if x.ndim != 2 or weight1.ndim != 2 or x.shape[1] != weight1.shape[1]:
        raise ValueError(f"expected x (N, D) and weight1 (F, D), found {tuple(x.shape)} and {tuple(weight1.shape)}")
    units, width = weight1.shape
    shapes = {
        **{"weight2": (weight2, (width, units)), "weight_gate": (weight_gate, (units, width))},
        **{"bias1": (bias1, (units,)), "bias_gate": (bias_gate, (units,)), "bias2": (bias2, (width,))},
    }
    for name, (tensor, shape) in shapes.items():
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"expected {name} {shape}, found {tuple(tensor.shape)}")
    if bias_gate is not None and weight_gate is None:
        raise ValueError("bias_gate belongs to weight_gate, which is None")
    if dropping is not None:
        check_dropping(dropping, x.shape[0])


@with_signature
class _FeedForward(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> Any:
        return _forward(*args, True)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        p = Inputs(*inputs)
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)  # else autograd makes a gradient of zeros, as large as all that is kept
        ctx.rest = p.activation, p.p, p.layer
        ctx.save_for_backward(p.x, *p.weights, p.seed, p.key, p.t, *output[1:])

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, *_: Any) -> Any:
        if dy is None:
            return (None,) * len(Inputs._fields)
        grads = _backward_once(dy, *ctx.saved_tensors, *ctx.rest, ctx.needs_input_grad[0])
        wanted = zip(grads, ctx.needs_input_grad, strict=False)
        return *(d if needed else None for d, needed in wanted), *[None] * (len(Inputs._fields) - len(grads))


def _forward_kernel(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    p, need_saved = Inputs(*args[:-1]), args[-1]
    if on_core(*(v for v in p[:7] if isinstance(v, Tensor))):
        new = _forward_fake(*args)
        y, a, gate = new
        kept = (a if need_saved else None, gate if need_saved and p.weight_gate is not None else None)
        core.feed_forward_forward(p.activation, *arrays(*p[:10], y, *kept), p.p, p.layer, torch.get_num_threads())
        return new
    nothing = p.x.new_empty(0)
    y, saved = feed_forward_forward(*p[:5], p.activation, p.weight_gate, p.bias_gate, p.dropping)
    if not need_saved:
        return y, nothing, nothing
    return y, saved.a, nothing if saved.gate is None else saved.gate


def _forward_fake(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    p, need_saved = Inputs(*args[:-1]), args[-1]
    hidden, nothing = [p.x.shape[0], p.weight1.shape[0]], [0]
    gated = need_saved and p.weight_gate is not None
    shapes = p.x.shape, hidden if need_saved else nothing, hidden if gated else nothing
    y, a, gate = (p.x.new_empty(shape) for shape in shapes)
    return y, a, gate


def _backward_kernel(
    dy: Tensor,
    x: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    weight_gate: Tensor | None,
    seed: Tensor | None,
    key: Tensor | None,
    t: Tensor | None,
    a: Tensor,
    gate: Tensor,
    activation: Kind,
    p: float,
    layer: int,
    need_dx: bool,
) -> tuple[Tensor, ...]:
    new = _backward_fake(dy, x, weight1, weight2, weight_gate, need_dx)
    if on_core(dy, x, weight1, weight2):
        given = arrays(dy, x, a, gate if weight_gate is not None else None, weight1, weight2, weight_gate, seed, key, t)
        core.feed_forward_backward(
            activation, *given, *_written(new, need_dx, weight_gate is not None), p, layer, torch.get_num_threads()
        )
        return new
    dropping = dropping_of(p, seed, layer, key, t)
    kept = None if weight_gate is None else gate
    saved = FeedForwardSaved(x, a, kept, weight1, weight2, weight_gate, activation, dropping)
    grads = feed_forward_backward(dy, saved)
    return tuple(g if g is not None and empty.shape == g.shape else empty for g, empty in zip(grads, new, strict=True))


def _written(new: tuple[Tensor, ...], need_dx: bool, gated: bool) -> list[Any]:
    """What the core writes, None for what is not wanted: an empty dx may be that of no rows."""
    dx, *rest = new
    return arrays(dx if need_dx else None, *(rest if gated else [*rest[:4], None, None]))


def _backward_fake(
    dy: Tensor, x: Tensor, weight1: Tensor, weight2: Tensor, weight_gate: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    """dx, dweight1, dbias1, dweight2, dbias2, dweight_gate, dbias_gate; of shape (0,) what is not there."""
    (units, width), gated = weight1.shape, weight_gate is not None
    shapes = [x.shape if rest[-1] else [0], [units, width], [units], [width, units], [width]]
    shapes += [[units, width], [units]] if gated else [[0], [0]]
    return tuple(x.new_empty(shape) for shape in shapes)


_INPUTS = (
    "Tensor x, Tensor weight1, Tensor? bias1, Tensor weight2, Tensor? bias2, Tensor? weight_gate, Tensor? bias_gate, "
    "Tensor? seed, Tensor? key, Tensor? t, str activation, float p, int layer"
)
_forward = register(
    f"feed_forward_forward({_INPUTS}, bool need_saved) -> (Tensor, Tensor, Tensor)", _forward_kernel, _forward_fake
)
_backward = register(
    "feed_forward_backward(Tensor dy, Tensor x, Tensor weight1, Tensor weight2, Tensor? weight_gate, Tensor? seed, "
    "Tensor? key, Tensor? t, Tensor a, Tensor gate, str activation, float p, int layer, bool need_dx) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward_kernel,
    _backward_fake,
)
_backward_once = backward_op(_backward, "feed_forward")
