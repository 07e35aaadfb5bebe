"""Equations without an operator of their own, as their judges see them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Generator, Tensor

from unrolled.equations.multiplicative_attention import (
    multiplicative_attention_backward,
    multiplicative_attention_forward,
)
from unrolled.equations.zoneout import zoneout_backward, zoneout_forward
from unrolled.ragged import Rows
from unrolled.verify.inputs import normal
from unrolled.verify.operator import Operator


def make_zoneout(
    generator: Generator, dtype: torch.dtype, rows: int = 3, units: int = 4, drawn: bool = True
) -> dict[str, Any]:
    z = torch.rand(rows, units, generator=generator, dtype=torch.float64)
    return {
        "new": normal(generator, dtype, rows, units),
        "old": normal(generator, dtype, rows, units),
        "z": (z < 0.4).to(dtype) if drawn else z.to(dtype),
    }


def zoneout_pair_forward(new: Tensor, old: Tensor, z: Tensor) -> tuple[Tensor, Any]:
    return zoneout_forward(new, old, z), z


def zoneout_pair_backward(ds: Tensor, z: Tensor, backward: Callable[..., Any] = zoneout_backward) -> Any:
    return backward(ds, z)


def plain_zoneout(new: Tensor, old: Tensor, z: Tensor) -> Tensor:
    return torch.lerp(new, old, z)


def make_multiplicative_attention(
    generator: Generator,
    dtype: torch.dtype,
    steps: Sequence[tuple[int, int]] = ((2, 3), (1, 4)),
    width: int = 3,
    weight: bool = True,
) -> dict[str, Any]:
    queries, keys = (torch.tensor([pair[i] for pair in steps], dtype=torch.int64) for i in (0, 1))
    read = width + 1 if weight else width
    return {
        "q": normal(generator, dtype, int(queries.sum()), width),
        "k": normal(generator, dtype, int(keys.sum()), read),
        "v": normal(generator, dtype, int(keys.sum()), 2),
        "weight": normal(generator, dtype, width, read) if weight else None,
        "queries": Rows(queries.cumsum(0) - queries, 1, queries),
        "keys": Rows(keys.cumsum(0) - keys, 1, keys),
    }


def plain_multiplicative_attention(
    q: Tensor, k: Tensor, v: Tensor, weight: Tensor | None, queries: Rows, keys: Rows
) -> tuple[Tensor, Tensor]:
    """The product with the query first: q^T W for each key."""
    q = q if weight is None else q @ weight
    longest = [int(rows.length.max()) if len(rows.length) else 0 for rows in (queries, keys)]
    o, weights = [v.new_zeros(0, v.shape[1])], [q.new_zeros(0, 1, *longest)]
    for i, nq, j, nk in zip(*(x.tolist() for x in (*queries[::2], *keys[::2])), strict=True):
        w = (q[i : i + nq] @ k[j : j + nk].T).softmax(1)
        o.append(w @ v[j : j + nk])
        weights.append(torch.nn.functional.pad(w, (0, longest[1] - nk, 0, longest[0] - nq))[None, None])
    return torch.cat(o), torch.cat(weights)


PAIRS = {
    "multiplicative_attention": Operator(
        make_multiplicative_attention,
        plain_multiplicative_attention,
        multiplicative_attention_forward,
        multiplicative_attention_backward,
        plain_multiplicative_attention,
        None,
        lambda inputs: sum(len(inputs[name]) for name in ("q", "k")) + inputs["k"].shape[1],
        (),
        cancels=lambda inputs: 1.0,
    ),
    "zoneout": Operator(
        make_zoneout,
        plain_zoneout,
        zoneout_pair_forward,
        zoneout_pair_backward,
        plain_zoneout,
        None,
        lambda inputs: 1,
        (),
    ),
}
