"""The operators of scaled dot-product attention as their judges see them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from unrolled.equations.attention import attention_backward, attention_forward
from unrolled.equations.dropout import Dropping
from unrolled.ops.attention import attention
from unrolled.ragged import Rows, pad_rows, unpad_rows
from unrolled.verify.formulations import plain_dropout
from unrolled.verify.inputs import longest, mask_of, normal, rows_of
from unrolled.verify.judges import Inputs
from unrolled.verify.operator import Operator


def make_attention(
    generator: Generator,
    dtype: torch.dtype,
    steps: Sequence[tuple[int, int]] = ((3, 4), (2, 0), (1, 2)),
    heads: int = 2,
    size: int = 3,
    value_size: int | None = None,
    layout: str = "ragged",
    causal: bool = False,
    mask: str | None = None,
    repeated: Sequence[int] = (),
    slopes: bool = False,
    scale: float | None = None,
    p: float = 0.0,
    packed: int = 1,
    need_weights: bool = False,
) -> dict[str, Any]:
    """`steps`: queries and keys of each sequence. `packed`: how many of q, k and v the widest array holds.

    `layout` as in `rows_of`, `mask` as in `mask_of`; a mask is of size 1 in the dimensions `repeated`.
    """
    first, second = ([pair[i] for pair in steps] for i in (0, 0 if packed == 3 else 1))
    (queries, N), (keys, M) = rows_of(first, layout), rows_of(second, layout)
    width, values = heads * size, heads * (value_size or size)

    def draw(rows: int, columns: int) -> Tensor:
        return normal(generator, dtype, rows, columns)

    wide = {1: (N, width), 2: (N, width), 3: (N, 3 * width)}[packed]
    inputs: dict[str, Any] = {"q": draw(*wide), "heads": heads, "queries": queries, "causal": causal, "scale": scale}
    if packed < 3:
        inputs |= {"k": draw(M, packed * width), "keys": keys}
    if packed == 1:
        inputs["v"] = draw(M, values)
    if mask is not None:
        shape = [len(steps), heads, max(first, default=0) + 1, max(second, default=0)]
        inputs["mask"] = mask_of(generator, dtype, mask, [1 if i in repeated else n for i, n in enumerate(shape)])
    if slopes:
        inputs["slopes"] = torch.rand(heads, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    if p:
        seed = torch.randint(2**63 - 1, (), generator=generator)
        key, t = (torch.randint(2**40, (N,), generator=generator) for _ in range(2))
        inputs["dropping"] = Dropping(p, seed, 3, key, t)
    return inputs | {"need_weights": need_weights}


def attention_equation(inputs: Inputs) -> dict[str, Any] | None:
    """q, k and v side by side are no single call of the equation."""
    return dict(inputs) if "v" in inputs else None


def attention_pair(need_weights: bool, **inputs: Any) -> tuple[Any, ...]:
    o, weights, saved = attention_forward(**inputs)
    return (o, weights, saved) if need_weights else (o, saved)


def attention_pair_backward(do: Tensor, *rest: Any, backward: Callable[..., Any] = attention_backward) -> Any:
    *dweights, saved = rest
    return backward(do, dweights[0] if dweights else None, saved)


def plain_attention(
    q: Tensor,
    heads: int,
    queries: Rows,
    causal: bool,
    scale: float | None,
    need_weights: bool,
    k: Tensor | None = None,
    v: Tensor | None = None,
    keys: Rows | None = None,
    mask: Tensor | None = None,
    slopes: Tensor | None = None,
    dropping: Dropping | None = None,
) -> Any:
    """One query after the other, and of a query one key after the other."""
    q, k, v, keys = _apart(q, k, v, queries, keys)
    size, values = q.shape[1] // heads, v.shape[1] // heads
    scale = 1 / size**0.5 if scale is None else scale
    o = q.new_zeros(len(q), v.shape[1])
    weights = q.new_zeros(len(queries.length), heads, longest(queries), longest(keys))
    for b, a, i in _queries(queries, heads):
        row, Tk = int(queries.start[b]) + i * queries.step, int(keys.length[b])
        own, e, j_seen = slice(a * size, (a + 1) * size), [], []
        for j in range(Tk):
            past = i + Tk - int(queries.length[b]) - j
            score = (q[row, own] * k[int(keys.start[b]) + j * keys.step, own]).sum() * scale
            if mask is not None:
                m = mask.expand(len(queries.length), heads, -1, -1)[
                    b, a, min(i, mask.shape[2] - 1), min(j, mask.shape[3] - 1)
                ]
                if m == (False if mask.dtype == torch.bool else -torch.inf):
                    continue
                score = score if mask.dtype == torch.bool else score + m
            if slopes is not None:
                score = score - slopes[a] * abs(past)
            if not causal or past >= 0:
                e.append(score)
                j_seen.append(j)
        if not e:
            continue
        scores = torch.stack(e)
        w = 1 / (scores - scores[:, None]).exp().sum(1)  # p_j = 1 / sum_l exp(e_l - e_j)
        full = w.new_zeros(Tk).index_put((torch.tensor(j_seen),), w)
        if dropping is not None:
            p, seed, layer, key, t = dropping
            full = plain_dropout(full[None], p, seed, layer + a, key[row, None], t[row, None])[0]
        rows = int(keys.start[b]) + torch.arange(Tk) * keys.step
        read = full @ v[rows, a * values : (a + 1) * values]
        place = torch.arange(a * values, (a + 1) * values)
        o = o.index_put((torch.tensor(row), place), read)
        weights = weights.index_put((torch.tensor(b), torch.tensor(a), torch.tensor(i), torch.arange(Tk)), full)
    return (o, weights) if need_weights else o


def _queries(queries: Rows, heads: int) -> list[tuple[int, int, int]]:
    return [(b, a, i) for b, n in enumerate(queries.length.tolist()) for a in range(heads) for i in range(n)]


def _apart(
    q: Tensor, k: Tensor | None, v: Tensor | None, queries: Rows, keys: Rows | None
) -> tuple[Tensor, Tensor, Tensor, Rows]:
    if k is None:
        q, k, v = q.chunk(3, 1)
        return q, k, v, queries
    assert keys is not None
    if v is None:
        k, v = k.chunk(2, 1)
    return q, k, v, keys


def torch_attention(
    q: Tensor,
    heads: int,
    queries: Rows,
    causal: bool,
    scale: float | None,
    need_weights: bool,
    k: Tensor | None = None,
    v: Tensor | None = None,
    keys: Rows | None = None,
    mask: Tensor | None = None,
    slopes: Tensor | None = None,
) -> Tensor:
    """torch's on the padded batch, with everything that it does not know in its mask."""
    q, k, v, keys = _apart(q, k, v, queries, keys)
    count = len(q)
    own = [
        pad_rows(x.reshape(len(x), heads, x.shape[1] // heads), rows).transpose(1, 2)
        for x, rows in ((q, queries), (k, keys), (v, keys))
    ]
    bias = _bias(queries, keys, own[0].shape[2], own[1].shape[2], causal, mask, slopes)
    o = F.scaled_dot_product_attention(own[0], own[1], own[2], bias.to(q.dtype), scale=scale)
    return unpad_rows(o.transpose(1, 2), queries, count).flatten(1)


def _bias(
    queries: Rows, keys: Rows, Tq: int, Tk: int, causal: bool, mask: Tensor | None, slopes: Tensor | None
) -> Tensor:
    """(B, A or 1, Tq, Tk); a row beyond a length sees everything, so that it is not NaN."""
    rows = []
    for b, (nq, nk) in enumerate(zip(queries.length.tolist(), keys.length.tolist(), strict=True)):
        past = torch.arange(nk - nq, nk - nq + Tq)[:, None] - torch.arange(Tk)
        bias = torch.zeros(1, Tq, Tk, dtype=torch.float64)
        if slopes is not None:
            bias = bias - slopes[:, None, None].double() * past.abs()
        if mask is not None:
            own = mask[b % len(mask), :, :Tq, :Tk]
            bias = bias.masked_fill(~own, -torch.inf) if mask.dtype == torch.bool else bias + own
        hidden = (torch.arange(Tk) >= nk)[None] | (past < 0 if causal else torch.zeros(Tq, Tk, dtype=torch.bool))
        bias = bias.masked_fill(hidden, -torch.inf)
        rows.append(torch.where(torch.arange(Tq)[:, None] < nq, bias, 0))
    return torch.stack(rows)


def torch_has_attention(inputs: Inputs) -> bool:
    """No dropout of ours, no weights, and every query sees something."""
    if "dropping" in inputs or inputs["need_weights"] or not len(inputs["queries"].length):
        return False
    keys = inputs.get("keys", inputs["queries"])
    Tq, Tk = longest(inputs["queries"]), longest(keys)
    bias = _bias(inputs["queries"], keys, Tq, Tk, inputs["causal"], inputs.get("mask"), inputs.get("slopes"))
    return bool(Tk) and bool((bias > -torch.inf).any(3).all())


def _terms(inputs: Inputs) -> int:
    queries, keys = inputs["queries"], inputs.get("keys", inputs["queries"])
    Tq, Tk = longest(queries), longest(keys)
    width = sum(inputs[name].shape[1] for name in ("q", "k", "v") if name in inputs) // inputs["heads"]
    learned = inputs.get("slopes") is not None or inputs.get("mask") is not None
    return int(width + Tq + Tk + learned * len(queries.length) * Tq * Tk)


ATTENTIONS: dict[str, Operator] = {
    "attention": Operator(
        make_attention,
        attention,
        attention_pair,
        attention_pair_backward,
        plain_attention,
        torch_attention,
        _terms,
        (
            {},
            {"causal": True, "packed": 3, "steps": ((7, 7), (3, 3), (1, 1)), "size": 17},
            {"causal": True, "packed": 2, "steps": ((3, 5), (4, 2)), "mask": "boolean", "p": 0.3},
            {"mask": "added", "slopes": True, "repeated": (1,), "value_size": 5, "layout": "time_major"},
            {"mask": "learned", "repeated": (0, 2), "slopes": True, "causal": True, "p": 0.4, "need_weights": True},
            {"steps": ((70, 131), (5, 67)), "heads": 1, "size": 33, "p": 0.1},
        ),
        attention_equation,
        cancels=lambda inputs: 1.0,
        peer_has=torch_has_attention,
    ),
}
