"""The operators of the output projection with its loss, and of additive attention as their judges see them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from unrolled.equations.additive_attention import additive_attention_backward, additive_attention_forward
from unrolled.equations.linear_cross_entropy import (
    Reduction,
    linear_cross_entropy_backward,
    linear_cross_entropy_forward,
    target_share,
)
from unrolled.ops.additive_attention import additive_attention
from unrolled.ops.linear_cross_entropy import linear_cross_entropy
from unrolled.ragged import Rows
from unrolled.verify.formulations import plain_cross_entropy, plain_linear
from unrolled.verify.inputs import longest, mask_of, normal, rows_of
from unrolled.verify.judges import Inputs
from unrolled.verify.operator import Operator


def make_linear_cross_entropy(
    generator: Generator,
    dtype: torch.dtype,
    tokens: int = 6,
    width: int = 3,
    classes: int = 5,
    bias: bool = True,
    weights: bool = False,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    scale: float = 2.0,
) -> dict[str, Any]:
    """`scale`: the size of the logits, about."""
    target = torch.randint(classes, (tokens,), generator=generator)
    target[1::3] = ignore_index
    return {
        "x": normal(generator, dtype, tokens, width),
        "weight": normal(generator, dtype, classes, width, scale=scale / width**0.5),
        "bias": normal(generator, dtype, classes) if bias else None,
        "target": target,
        "class_weight": torch.rand(classes, generator=generator, dtype=torch.float64).to(dtype) if weights else None,
        "ignore_index": ignore_index,
        "label_smoothing": label_smoothing,
        "reduction": reduction,
    }


def plain_linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    reduction: Reduction,
) -> Tensor:
    losses = plain_cross_entropy(plain_linear(x, weight, bias), target, class_weight, ignore_index, label_smoothing)
    classes = [k for k in target.tolist() if k != ignore_index]
    total = float(len(classes) if class_weight is None else sum(class_weight[k] for k in classes))
    return losses.sum() / total if reduction == "mean" and classes else losses.sum()


def torch_linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    reduction: Reduction,
) -> Tensor:
    z = F.linear(x, weight, bias)
    return F.cross_entropy(z, target, class_weight, None, ignore_index, None, reduction, label_smoothing)


def _size_of_loss(inputs: Inputs) -> float:
    """A loss, and p - y, are differences of numbers as large as the logits, times the share of a token."""
    names = ("x", "target", "class_weight", "ignore_index", "reduction")
    share = target_share(*(inputs[name] for name in names))
    with torch.no_grad():
        z = F.linear(*(inputs[name] for name in ("x", "weight", "bias")))
    return float(share) * max(1.0, float(z.abs().max()) if z.numel() else 1.0)


def make_additive_attention(
    generator: Generator,
    dtype: torch.dtype,
    steps: Sequence[tuple[int, int]] = ((3, 4), (2, 0), (1, 2)),
    size: int = 3,
    value_size: int = 2,
    layout: str = "ragged",
    mask: str | None = None,
    repeated: Sequence[int] = (),
    need_weights: bool = False,
) -> dict[str, Any]:
    """`steps`: queries and keys of each sequence.

    `layout` as in `rows_of`, `mask` as in `mask_of`; a mask is of size 1 in the dimensions `repeated`.
    """
    (queries, N), (keys, M) = (rows_of([pair[i] for pair in steps], layout) for i in (0, 1))
    inputs: dict[str, Any] = {
        "q": normal(generator, dtype, N, size),
        "k": normal(generator, dtype, M, size),
        "value": normal(generator, dtype, M, value_size),
        "v": normal(generator, dtype, size, scale=2 / size**0.5),
        "queries": queries,
        "keys": keys,
        "need_weights": need_weights,
    }
    if mask is not None:
        shape = [len(steps), longest(queries) + 1, longest(keys)]
        inputs["mask"] = mask_of(generator, dtype, mask, [1 if i in repeated else n for i, n in enumerate(shape)])
    return inputs


def additive_attention_pair(need_weights: bool, **inputs: Any) -> tuple[Any, ...]:
    o, weights, saved = additive_attention_forward(**inputs)
    return (o, weights, saved) if need_weights else (o, saved)


def additive_attention_pair_backward(
    do: Tensor, *rest: Any, backward: Callable[..., Any] = additive_attention_backward
) -> Any:
    *dweights, saved = rest
    return backward(do, dweights[0] if dweights else None, saved)


def plain_additive_attention(
    q: Tensor,
    k: Tensor,
    value: Tensor,
    v: Tensor,
    queries: Rows,
    keys: Rows,
    need_weights: bool,
    mask: Tensor | None = None,
) -> Any:
    """One query after the other, and of a query one key after the other."""
    o = q.new_zeros(len(q), value.shape[1])
    weights = q.new_zeros(len(queries.length), longest(queries), longest(keys))
    for b, i in [(b, i) for b, n in enumerate(queries.length.tolist()) for i in range(n)]:
        row, e, seen = int(queries.start[b]) + i * queries.step, [], []
        for j in range(int(keys.length[b])):
            s = q[row] + k[int(keys.start[b]) + j * keys.step]
            score = (v * (1 - 2 / ((2 * s).exp() + 1))).sum()
            if mask is not None:
                m = mask[b % len(mask), i % mask.shape[1], j % mask.shape[2]]
                if m == (False if mask.dtype == torch.bool else -torch.inf):
                    continue
                score = score if mask.dtype == torch.bool else score + m
            e.append(score)
            seen.append(j)
        if e:
            scores, place = torch.stack(e), torch.tensor(seen)
            w = 1 / (scores - scores[:, None]).exp().sum(1)  # p_j = 1 / sum_l exp(e_l - e_j)
            o = o.index_put((torch.tensor(row),), w @ value[keys.start[b] + place * keys.step])
            weights = weights.index_put((torch.tensor(b), torch.tensor(i), place), w)
    return (o, weights) if need_weights else o


def _terms(inputs: Inputs) -> int:
    Tq, Tk = longest(inputs["queries"]), longest(inputs["keys"])
    return int(inputs["q"].shape[1] + inputs["value"].shape[1] + len(inputs["queries"].length) * Tq * Tk)


OUTPUTS: dict[str, Operator] = {
    "linear_cross_entropy": Operator(
        make_linear_cross_entropy,
        linear_cross_entropy,
        linear_cross_entropy_forward,
        linear_cross_entropy_backward,
        plain_linear_cross_entropy,
        torch_linear_cross_entropy,
        lambda inputs: max(*inputs["x"].shape, *inputs["weight"].shape),
        (
            {},
            {"weights": True, "label_smoothing": 0.1, "reduction": "sum"},
            {"tokens": 67, "width": 33, "classes": 141, "label_smoothing": 0.3, "ignore_index": 3, "bias": False},
        ),
        cancels=_size_of_loss,
        peer_has=lambda inputs: bool((inputs["target"] != inputs["ignore_index"]).any()),
    ),
    "additive_attention": Operator(
        make_additive_attention,
        additive_attention,
        additive_attention_pair,
        additive_attention_pair_backward,
        plain_additive_attention,
        None,
        _terms,
        (
            {},
            {"mask": "boolean", "layout": "time_major", "size": 17, "value_size": 5},
            {"mask": "learned", "repeated": (0, 2), "need_weights": True},
            {"steps": ((7, 33), (1, 20)), "size": 19, "mask": "added", "repeated": (1,)},
        ),
        cancels=lambda inputs: 1.0,
    ),
}
