"""The operator of additive attention, over sequences wherever their rows lie; memory linear in tokens on the core."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from unrolled.equations.additive_attention import (
    AdditiveAttentionSaved,
    additive_attention_backward,
    additive_attention_forward,
)
from unrolled.ops._backend import arrays, check_rows, core, equations_only, full_precision, on_core, one_kind
from unrolled.ops._register import backward_op, call, register, with_signature
from unrolled.ops.attention import check_steps
from unrolled.ragged import Rows


def additive_attention(
    q: Tensor,
    k: Tensor,
    value: Tensor,
    v: Tensor,
    *,
    queries: Rows,
    keys: Rows,
    mask: Tensor | None = None,
    need_weights: bool = False,
) -> Any:
    """o (N, D), or with `need_weights` (o, weights (B, Tq, Tk)); the equation is in `equations.additive_attention`.

    Shapes: q (N, H), k (M, H), value (M, D), v (H,); `queries` and `keys` say where the B sequences lie among the N and
    the M rows. mask (B, Tq, Tk), each dimension that or 1, or longer: bool (true = may attend) or numbers of q's dtype,
    added. A gradient of the weights or of the mask is computed by the equation, which holds H numbers for each pair.
    Errors: ValueError for shapes that do not fit, TypeError for dtypes. A second derivative is refused unless
    `unrolled.use("equations")`.
    """
    q, k, value, v, mask = full_precision(q, k, value, v, mask)
    one_kind("additive_attention", q, k, value, v)
    _check(q, k, value, v, queries, keys, mask)
    if equations_only():
        o, weights, _ = additive_attention_forward(q, k, value, v, queries, keys, mask)
        return (o, weights) if need_weights else o
    args = q, k, value, v, mask, queries.start, queries.length, keys.start, keys.length, queries.step, keys.step
    o, weights, _ = call(_AdditiveAttention, _forward, *args, need_weights)
    return (o, weights) if need_weights else o


def _check(q: Tensor, k: Tensor, value: Tensor, v: Tensor, queries: Rows, keys: Rows, mask: Tensor | None) -> None:
    fits = all(t.ndim == 2 for t in (q, k, value)) and q.shape[1] == k.shape[1] and v.shape == q.shape[1:]
    if not fits or len(k) != len(value):
        found = ", ".join(str(tuple(t.shape)) for t in (q, k, value, v))
        raise ValueError(f"expected q (N, H), k (M, H), value (M, D) and v (H,), found {found}")
    if len(queries.length) != len(keys.length):
        raise ValueError(f"queries have {len(queries.length)} sequences, keys {len(keys.length)}")
    check_rows(queries, len(queries.length))
    check_rows(keys, len(queries.length))
    if mask is None:
        return
    if mask.dtype not in (torch.bool, q.dtype):
        raise TypeError(f"mask must be torch.bool or {q.dtype}, found {mask.dtype}")
    if mask.ndim != 3 or mask.shape[0] not in (1, len(queries.length)):
        raise ValueError(f"expected mask ({len(queries.length)} or 1, Tq or 1, Tk or 1), found {tuple(mask.shape)}")


@with_signature
class _AdditiveAttention(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> Any:
        return _forward(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        o, weights, log_sum = output
        ctx.mark_non_differentiable(*([log_sum] if inputs[-1] else [weights, log_sum]))
        ctx.set_materialize_grads(False)
        ctx.steps = inputs[9:11]
        ctx.save_for_backward(*inputs[:9], o, log_sum)

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dweights: Tensor | None, _: Any) -> Any:
        *given, o, log_sum = ctx.saved_tensors
        do = torch.zeros_like(o) if do is None else do
        grads = _backward_once(do, dweights, *given, *ctx.steps, o, log_sum, ctx.needs_input_grad[4])
        wanted = zip(grads, ctx.needs_input_grad[:5], strict=True)
        return *(d if needed else None for d, needed in wanted), *[None] * 7


def _forward_kernel(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    q, k, value, v, mask, *where, query_step, key_step, need_weights = args
    queries, keys = Rows(where[0], query_step, where[1]), Rows(where[2], key_step, where[3])
    if not on_core(q, k, value, v):
        o, weights, saved = additive_attention_forward(q, k, value, v, queries, keys, mask)
        return o, weights if need_weights else q.new_empty(0), saved.log_sum
    steps = queries.longest, keys.longest
    check_steps(mask, *steps)
    shape = [len(queries.length), *steps] if need_weights else [0]
    o, log_sum, weights = (q.new_empty(s) for s in ([len(q), value.shape[1]], [len(q)], shape))
    core.additive_attention_forward(
        *arrays(q, k, value, v, _added(mask, q), *where, o, log_sum, weights if need_weights else None),
        *(query_step, key_step, torch.get_num_threads()),
    )
    return o, weights, log_sum


def _added(mask: Tensor | None, q: Tensor) -> Tensor | None:
    """A mask as numbers that are added to the scores."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return q.new_zeros(mask.shape).masked_fill(~mask, -torch.inf)


def _backward_kernel(do: Tensor, dweights: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
    q, k, value, v, mask, *where, query_step, key_step, o, log_sum, need_dmask = args
    if dweights is not None or need_dmask or not on_core(do, q, k, value, v):
        queries, keys = Rows(where[0], query_step, where[1]), Rows(where[2], key_step, where[3])
        saved = AdditiveAttentionSaved(q, k, value, v, o, log_sum, queries, keys, mask)
        *grads, dmask = additive_attention_backward(do, dweights, saved)
        return *grads, dmask if need_dmask and dmask is not None else q.new_empty(0)
    grads = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, value, v)]
    core.additive_attention_backward(
        *arrays(do, q, k, value, v, _added(mask, q), *where, o, log_sum, *grads),
        *(query_step, key_step, torch.get_num_threads()),
    )
    return *grads, q.new_empty(0)


def _forward_fake(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    q, value, sequences, need_weights = args[0], args[2], args[5].shape[0], args[-1]
    shape: list[Any] = [0]
    if need_weights:
        context = torch.library.get_ctx()
        shape = [sequences, context.new_dynamic_size(), context.new_dynamic_size()]
    return q.new_empty(q.shape[0], value.shape[1]), q.new_empty(shape), q.new_empty(q.shape[0])


def _backward_fake(do: Tensor, dweights: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
    *given, mask = args[:5]
    return *(t.new_empty(t.shape) for t in given), given[0].new_empty(mask.shape if args[-1] else 0)


_INPUTS = (
    "Tensor q, Tensor k, Tensor value, Tensor v, Tensor? mask, Tensor query_start, Tensor query_length, "
    "Tensor key_start, Tensor key_length, SymInt query_step, SymInt key_step"
)
_forward = register(
    f"additive_attention_forward({_INPUTS}, bool need_weights) -> (Tensor, Tensor, Tensor)",
    _forward_kernel,
    _forward_fake,
)
_backward = register(
    f"additive_attention_backward(Tensor do, Tensor? dweights, {_INPUTS}, Tensor o, Tensor log_sum, bool need_dmask) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward_kernel,
    _backward_fake,
)
_backward_once = backward_op(_backward, "additive_attention")
