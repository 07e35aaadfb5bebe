"""The operator of scaled dot-product attention: the weights are never kept, the logarithm of their sum is."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from unrolled.equations.attention import AttentionSaved, attention_backward, attention_forward
from unrolled.equations.dropout import Dropping
from unrolled.ops._backend import (
    arrays,
    check_dropping,
    check_rows,
    core,
    dropping_of,
    equations_only,
    full_precision,
    on_core,
    one_kind,
)
from unrolled.ops._register import backward_op, call, register, with_signature
from unrolled.ragged import Rows


class _Inputs(NamedTuple):
    """The arguments of the kernels in their order."""

    q: Tensor
    k: Tensor | None
    v: Tensor | None
    mask: Tensor | None
    slopes: Tensor | None
    query_start: Tensor
    query_length: Tensor
    key_start: Tensor | None  # as are those of the queries
    key_length: Tensor | None
    seed: Tensor | None
    key: Tensor | None
    t: Tensor | None
    heads: int
    query_step: int
    key_step: int
    causal: bool
    scale: float
    p: float
    layer: int

    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, each by itself."""
        if self.k is None:
            q, k, v = self.q.chunk(3, 1)
            return q, k, v
        if self.v is None:
            k, v = self.k.chunk(2, 1)
            return self.q, k, v
        return self.q, self.k, self.v

    def packed(self, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients as the inputs came, an empty tensor for what was not given."""
        nothing = dq.new_empty(0)
        if self.k is None:
            return torch.cat([dq, dk, dv], 1), nothing, nothing
        if self.v is None:
            return dq, torch.cat([dk, dv], 1), nothing
        return dq, dk, dv

    @property
    def numbers(self) -> list[Tensor]:
        """What must be of one dtype for the core."""
        mask = None if self.mask is None or self.mask.dtype == torch.bool else self.mask
        return [x for x in (self.q, self.k, self.v, mask, self.slopes) if x is not None]

    @property
    def for_core(self) -> tuple[list[Any], tuple[Any, ...]]:
        """The arrays and, for the end of the call, the numbers."""
        boolean = self.mask is not None and self.mask.dtype == torch.bool
        masks = (self.mask, None) if boolean else (None, self.mask)
        where = (self.query_start, self.query_length, self.keys.start, self.keys.length)
        given = arrays(*self[:3], *masks, self.slopes, *where, *self[9:12])
        return given, (*self[12:], torch.get_num_threads())

    @property
    def queries(self) -> Rows:
        return Rows(self.query_start, self.query_step, self.query_length)

    @property
    def keys(self) -> Rows:
        start, length = self.key_start, self.key_length
        start, length = (self.query_start if start is None else start, self.query_length if length is None else length)
        return Rows(start, self.key_step, length)

    @property
    def dropping(self) -> Dropping | None:
        return dropping_of(self.p, self.seed, self.layer, self.key, self.t)


class _Saved(NamedTuple):
    o: Tensor
    log_sum: Tensor


def attention(
    q: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    heads: int,
    queries: Rows,
    keys: Rows | None = None,
    causal: bool = False,
    mask: Tensor | None = None,
    slopes: Tensor | None = None,
    scale: float | None = None,
    dropping: Dropping | None = None,
    need_weights: bool = False,
) -> Any:
    """What each query reads, (N, A * O), and with `need_weights` the weights too; see `equations.attention`.

    Shapes: q (N, A * F), k (M, A * F), v (M, A * O). Without v, k is k and v side by side; without k, q is q, k and v,
    and the keys are the queries. Their gradients come back the same way. mask as in the equation: true where a query
    may attend to a key, or numbers to be added to the scores.
    The weights (B, A, Tq, Tk) are those applied: after the dropout.
    Errors: ValueError for shapes that do not fit; TypeError for a mask that is neither boolean nor of the dtype of q.
    """
    q, k, v, mask, slopes = full_precision(q, k, v, mask, slopes)
    if k is None and keys is not None:
        raise ValueError("q, k and v side by side are the rows of one sequence each: keys must be None")
    keys = queries if keys is None else keys
    width = _check(q, k, v, heads, queries, keys)
    number = mask is not None and mask.dtype != torch.bool
    if mask is not None:
        _check_mask(mask, q, queries.length.shape[0], heads)
    one_kind("attention", q, k, v, mask if number else None, slopes)
    if slopes is not None and slopes.shape != (heads,):
        raise ValueError(f"slopes must be ({heads},), one for each head, found {tuple(slopes.shape)}")
    if dropping is not None:
        check_dropping(dropping, q.shape[0])
    d = dropping if dropping is not None and dropping.p else Dropping(0.0, *[None] * 4)  # type: ignore[arg-type]
    # a tensor twice among the inputs of a Function is more than torch.compile can follow
    start, length = (None if x is y else x for x, y in zip(keys[::2], queries[::2], strict=True))
    p = _Inputs(
        *(q, k, v, mask, slopes, queries.start, queries.length, start, length, d.seed, d.key, d.t),
        *(heads, queries.step, keys.step, causal, (width // heads) ** -0.5 if scale is None else scale),
        *(d.p, 0 if d.layer is None else d.layer),
    )
    if equations_only():
        o, weights, _ = _equation(p)
    else:
        o, weights, _ = call(_Attention, _forward, *p, need_weights)
    return (o, weights) if need_weights else o


def _check(q: Tensor, k: Tensor | None, v: Tensor | None, heads: int, queries: Rows, keys: Rows) -> int:
    """The numbers of a query, all heads together."""
    if any(x is not None and x.ndim != 2 for x in (q, k, v)):
        raise ValueError(f"expected q, k and v of two dimensions, found {_shapes(q, k, v)}")
    width, value = q.shape[1], q.shape[1]
    if k is None:
        width = value = width // 3
        fits = v is None and q.shape[1] == 3 * width
    elif v is None:
        fits = k.shape[1] == 2 * width
    else:
        value = v.shape[1]
        fits = k.shape[1] == width and v.shape[0] == k.shape[0]
    if not fits or heads < 1 or width < 1 or width % heads or value % heads:
        raise ValueError(
            f"expected q (N, A * F), k (M, A * F), v (M, A * O), or k and v side by side, or all three, "
            f"for A = {heads} heads and F at least 1; found {_shapes(q, k, v)}"
        )
    sequences = queries.length.shape[0]
    if keys.length.shape[0] != sequences:
        raise ValueError(f"there are {sequences} sequences of queries and {keys.length.shape[0]} of keys")
    check_rows(queries, sequences)
    if keys is not queries:
        check_rows(keys, sequences)
    return width


def _shapes(*tensors: Tensor | None) -> str:
    return ", ".join(str(tuple(x.shape)) for x in tensors if x is not None)


def _check_mask(mask: Tensor, q: Tensor, sequences: int, heads: int) -> None:
    if mask.dtype not in (torch.bool, q.dtype):
        raise TypeError(f"mask must be boolean, true where a query may attend, or {q.dtype}, found {mask.dtype}")
    if mask.ndim != 4 or mask.shape[0] not in (1, sequences) or mask.shape[1] not in (1, heads):
        raise ValueError(
            f"mask must be (1 or {sequences}, 1 or {heads}, 1 or Tq, 1 or Tk), found shape {tuple(mask.shape)}"
        )


def check_steps(mask: Tensor | None, *longest: int) -> None:
    """Errors: ValueError for a mask of fewer queries or keys than the longest sequence has."""
    if mask is not None and any(n != 1 and n < steps for n, steps in zip(mask.shape[-2:], longest, strict=True)):
        Tq, Tk = longest
        raise ValueError(f"mask must be of 1 or {Tq} queries and 1 or {Tk} keys, found shape {tuple(mask.shape)}")


@with_signature
class _Attention(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> Any:
        return _forward(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *given, ctx.need_weights = inputs
        o, weights, log_sum = output
        ctx.mark_non_differentiable(*([log_sum] if ctx.need_weights else [weights, log_sum]))
        ctx.set_materialize_grads(False)
        ctx.tensors = [i for i, v in enumerate(given) if isinstance(v, Tensor)]
        ctx.given = [None if isinstance(v, Tensor) else v for v in given]
        ctx.save_for_backward(*(given[i] for i in ctx.tensors), o, log_sum)

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dweights: Tensor | None, _: Any) -> Any:
        given, (*tensors, o, log_sum) = list(ctx.given), ctx.saved_tensors
        for i, tensor in zip(ctx.tensors, tensors, strict=True):
            given[i] = tensor
        do = torch.zeros_like(o) if do is None else do
        needed = ctx.needs_input_grad[:5]
        dweights = dweights if ctx.need_weights else None  # vmap and torch.compile give one to every output
        grads = _backward_once(do, dweights, *given, o, log_sum, *needed[3:])
        return *(g if need else None for g, need in zip(grads, needed, strict=True)), *[None] * (len(given) - 4)


def _equation(p: _Inputs) -> tuple[Tensor, Tensor, AttentionSaved]:
    where = p.queries, p.keys
    return attention_forward(*p.parts(), p.heads, *where, p.causal, p.mask, p.slopes, p.scale, p.dropping)


def _forward_kernel(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    p, need_weights = _Inputs(*args[:-1]), args[-1]
    nothing = p.q.new_empty(0)
    if not on_core(*p.numbers):
        o, weights, saved = _equation(p)
        return o, weights if need_weights else nothing, saved.log_sum
    longest = p.queries.longest, p.keys.longest
    check_steps(p.mask, *longest)
    rows, width = _sizes(p)
    o, log_sum, weights = p.q.new_empty(rows, width), p.q.new_empty(rows, p.heads), nothing
    if need_weights:
        weights = p.q.new_empty(len(p.query_length), p.heads, *longest)
    given, numbers = p.for_core
    core.attention_forward(*given, *arrays(o, log_sum, weights if need_weights else None), *numbers)
    return o, weights, log_sum


def _backward_kernel(do: Tensor, dweights: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
    p, saved = _Inputs(*args[: len(_Inputs._fields)]), _Saved(*args[len(_Inputs._fields) : -2])
    need_dmask, need_dslopes = args[-2:]
    if dweights is None and not need_dmask and not need_dslopes and on_core(do, *p.numbers):
        given, numbers = p.for_core
        grads = [None if x is None else torch.empty_like(x, memory_format=torch.contiguous_format) for x in p[:3]]
        core.attention_backward(*arrays(do), *given, *arrays(*saved, *grads), *numbers)
        return (*(do.new_empty(0) if g is None else g for g in (*grads, None, None)),)
    own = AttentionSaved(*p.parts(), *saved, p.queries, p.keys, p.causal, p.mask, p.slopes, p.scale, p.dropping)
    dq, dk, dv, dmask, dslopes = attention_backward(do, dweights, own)
    nothing = do.new_empty(0)
    more = dmask if need_dmask and dmask is not None else nothing, dslopes if need_dslopes else nothing
    return *p.packed(dq, dk, dv), *more  # type: ignore[return-value]


def _sizes(p: _Inputs) -> tuple[Any, Any]:
    """The rows of queries and the width of the output."""
    width = p.q.shape[1] // 3 if p.k is None else p.k.shape[1] // 2 if p.v is None else p.v.shape[1]
    return p.q.shape[0], width


def _forward_fake(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    p, need_weights = _Inputs(*args[:-1]), args[-1]
    rows, width = _sizes(p)
    shape: list[Any] = [0]
    if need_weights:
        context = torch.library.get_ctx()
        steps = [context.new_dynamic_size() for _ in range(2)]
        shape = [p.query_length.shape[0], p.heads, *steps]
    return p.q.new_empty(rows, width), p.q.new_empty(shape), p.q.new_empty(rows, p.heads)


def _backward_fake(do: Tensor, dweights: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
    p, (need_dmask, need_dslopes) = _Inputs(*args[: len(_Inputs._fields)]), args[-2:]
    wanted = (p.q, p.k, p.v, p.mask if need_dmask else None, p.slopes if need_dslopes else None)
    return tuple(do.new_empty(0 if x is None else x.shape) for x in wanted)


_TYPES = {"heads": "int", "causal": "bool", "scale": "float", "p": "float", "layer": "int"}
_TYPES |= dict.fromkeys(("query_step", "key_step"), "SymInt")
_TYPES |= dict.fromkeys(("k", "v", "mask", "slopes", "key_start", "key_length", "seed", "key", "t"), "Tensor?")
_INPUTS = ", ".join(f"{_TYPES.get(name, 'Tensor')} {name}" for name in _Inputs._fields)

_forward = register(
    f"attention_forward({_INPUTS}, bool need_weights) -> (Tensor, Tensor, Tensor)", _forward_kernel, _forward_fake
)
_backward = register(
    f"attention_backward(Tensor do, Tensor? dweights, {_INPUTS}, Tensor o, Tensor log_sum, bool need_dmask, "
    "bool need_dslopes) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward_kernel,
    _backward_fake,
)
_backward_once = backward_op(_backward, "attention")
