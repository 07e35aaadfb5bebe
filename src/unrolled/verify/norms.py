"""The operators of the normalisations and positions as their judges see them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from unrolled.equations import positions
from unrolled.equations.dropout import Dropping
from unrolled.equations.layer_norm import layer_norm_backward, layer_norm_forward
from unrolled.equations.residual_norm import residual_norm_backward, residual_norm_forward
from unrolled.equations.rms_norm import rms_norm_backward, rms_norm_forward
from unrolled.ops.layer_norm import layer_norm
from unrolled.ops.residual_norm import residual_norm
from unrolled.ops.rms_norm import rms_norm
from unrolled.ops.rotary import rotary
from unrolled.verify.formulations import plain_dropout
from unrolled.verify.inputs import normal
from unrolled.verify.judges import Inputs
from unrolled.verify.operator import Operator


def make_norm(
    generator: Generator,
    dtype: torch.dtype,
    rows: int = 3,
    features: int = 5,
    gain: bool = True,
    bias: bool = True,
    epsilon: float = 1e-5,
    mean: float = 0.0,
) -> dict[str, Any]:
    x = normal(generator, dtype, rows, features, scale=2.0)
    return {
        "x": (x.detach() + mean).requires_grad_(),
        "gain": normal(generator, dtype, features) if gain else None,
        "bias": normal(generator, dtype, features) if bias else None,
        "epsilon": epsilon,
    }


def make_rms_norm(generator: Generator, dtype: torch.dtype, **options: Any) -> dict[str, Any]:
    inputs = make_norm(generator, dtype, bias=False, **options)
    del inputs["bias"]
    return inputs


def make_residual_norm(
    generator: Generator, dtype: torch.dtype, kind: str = "layer", p: float = 0.0, layer: int = 1, **options: Any
) -> dict[str, Any]:
    inputs = make_norm(generator, dtype, **{"bias": kind == "layer", **options})
    rows, features = inputs["x"].shape
    key, t = (torch.randint(high, (rows,), generator=generator) for high in (2**40, 1000))
    seed = torch.randint(2**63 - 1, (), generator=generator)
    inputs["s"] = normal(generator, dtype, rows, features)
    return inputs | {"kind": kind, "dropping": Dropping(p, seed, layer, key, t) if p else None}


def layer_norm_pair_forward(
    x: Tensor, gain: Tensor | None, bias: Tensor | None, epsilon: float
) -> tuple[Tensor, tuple[Any, ...]]:
    y, saved = layer_norm_forward(x, gain, bias, epsilon)
    return y, (saved, gain)


def layer_norm_pair_backward(
    dy: Tensor, saved: tuple[Any, ...], backward: Callable[..., Any] = layer_norm_backward
) -> Any:
    return backward(dy, *saved)


def rms_norm_pair_forward(x: Tensor, gain: Tensor | None, epsilon: float) -> tuple[Tensor, tuple[Any, ...]]:
    y, saved = rms_norm_forward(x, gain, epsilon)
    return y, (saved, gain)


def rms_norm_pair_backward(dy: Tensor, saved: tuple[Any, ...], backward: Callable[..., Any] = rms_norm_backward) -> Any:
    return backward(dy, *saved)


def plain_layer_norm(x: Tensor, gain: Tensor | None, bias: Tensor | None, epsilon: float) -> Tensor:
    """The variance from all pairs of numbers: no mean in it."""
    rows = []
    for row in x:
        variance = (row[:, None] - row).square().mean() / 2
        rows.append((row[:, None] - row).mean(1) / (variance + epsilon).sqrt())
    y = torch.stack(rows) if rows else 0 * x
    y = y if gain is None else torch.einsum("nf,f->nf", y, gain)
    return y if bias is None else y + bias


def plain_rms_norm(x: Tensor, gain: Tensor | None, epsilon: float) -> Tensor:
    """Over the length of the row with one number more, which is epsilon's."""
    size = x.shape[1]
    longer = torch.cat([x, x.new_full((len(x), 1), (size * epsilon) ** 0.5)], 1)
    y = size**0.5 * x / torch.linalg.vector_norm(longer, dim=1, keepdim=True)
    return y if gain is None else torch.einsum("nf,f->nf", y, gain)


def plain_residual_norm(
    x: Tensor,
    s: Tensor,
    gain: Tensor | None,
    bias: Tensor | None,
    kind: str,
    epsilon: float,
    dropping: Dropping | None,
) -> tuple[Tensor, Tensor]:
    if dropping is not None:
        s = plain_dropout(s, dropping.p, dropping.seed, dropping.layer, dropping.key, dropping.t)
    r = x + s
    y = plain_layer_norm(r, gain, bias, epsilon) if kind == "layer" else plain_rms_norm(r, gain, epsilon)
    return r, y


def torch_residual_norm(
    x: Tensor, s: Tensor, gain: Tensor | None, bias: Tensor | None, kind: str, epsilon: float, **_: Any
) -> tuple[Tensor, Tensor]:
    r = x + s
    if kind == "rms":
        return r, F.rms_norm(r, r.shape[1:], gain, epsilon)
    return r, F.layer_norm(r, r.shape[1:], gain, bias, epsilon)


def _amplified(x: Tensor, epsilon: float, centred: bool) -> float:
    """By how much a row of small spread makes the rounding of its numbers larger, and of a gradient that may cancel."""
    row = x.detach().double()
    if not row.numel():
        return 1.0
    spread = row - row.mean(1, keepdim=True) if centred else row
    scale = (spread.square().mean(1) + epsilon).rsqrt()
    largest = row.abs().amax(1) if centred else 0
    return max(1.0, 4 * float((scale * (1 + scale * largest)).max()))


def _residual_amplified(inputs: Inputs) -> float:
    dropping, s = inputs["dropping"], inputs["s"].detach()
    m = 1 if dropping is None else dropping.mask(s.shape[1]).to(s.dtype)
    return _amplified(inputs["x"].detach() + m * s, inputs["epsilon"], inputs["kind"] == "layer")


def make_rotary(
    generator: Generator,
    dtype: torch.dtype,
    rows: int = 3,
    heads: int = 2,
    head: int = 4,
    more: int = 0,
    base: float = 10000.0,
    far: int = 30,
) -> dict[str, Any]:
    return {
        "x": normal(generator, dtype, rows, heads * head + more),
        "t": torch.randint(-far, far, (rows,), generator=generator),
        "heads": heads,
        "columns": heads * head,
        "base": base,
    }


def plain_rotary(x: Tensor, t: Tensor, heads: int, columns: int, base: float) -> Tensor:
    """Each pair as a complex number, multiplied by one of length 1."""
    head = columns // heads
    theta = torch.tensor([base ** (-2 * i / head) for i in range(head // 2)], dtype=torch.float64)
    unit = torch.polar(torch.ones(len(t), 1, head // 2, dtype=torch.float64), t[:, None, None] * theta)
    pairs = torch.view_as_complex(x[:, :columns].double().reshape(len(x), heads, head // 2, 2).contiguous())
    turned = torch.view_as_real(pairs * unit).reshape(len(x), columns)
    return torch.cat([turned.to(x.dtype), x[:, columns:]], 1)


def _rows_or_features(inputs: Inputs) -> int:
    longest: int = max(inputs["x"].shape)
    return longest


NORMS: dict[str, Operator] = {
    "layer_norm": Operator(
        make_norm,
        layer_norm,
        layer_norm_pair_forward,
        layer_norm_pair_backward,
        plain_layer_norm,
        lambda x, gain, bias, epsilon: F.layer_norm(x, x.shape[1:], gain, bias, epsilon),
        _rows_or_features,
        ({}, {"bias": False, "mean": 3.0}, {"rows": 67, "features": 33, "gain": False, "bias": False, "epsilon": 0.1}),
        cancels=lambda inputs: _amplified(inputs["x"], inputs["epsilon"], True),
    ),
    "rms_norm": Operator(
        make_rms_norm,
        rms_norm,
        rms_norm_pair_forward,
        rms_norm_pair_backward,
        plain_rms_norm,
        lambda x, gain, epsilon: F.rms_norm(x, x.shape[1:], gain, epsilon),
        _rows_or_features,
        ({}, {"mean": 3.0}, {"rows": 67, "features": 33, "gain": False, "epsilon": 0.1}),
        cancels=lambda inputs: _amplified(inputs["x"], inputs["epsilon"], False),
    ),
    "residual_norm": Operator(
        make_residual_norm,
        residual_norm,
        residual_norm_forward,
        residual_norm_backward,
        plain_residual_norm,
        torch_residual_norm,
        _rows_or_features,
        (
            {},
            {"p": 0.4},
            {"kind": "rms", "p": 0.3, "rows": 13, "features": 67},
            {"kind": "rms", "gain": False},
            {"p": 0.5, "rows": 67, "features": 33, "gain": False, "bias": False, "epsilon": 0.1},
        ),
        cancels=_residual_amplified,
        peer_has=lambda inputs: inputs["dropping"] is None,
    ),
    "rotary": Operator(
        make_rotary,
        rotary,
        positions.rotary_forward,
        positions.rotary_backward,
        plain_rotary,
        None,
        lambda inputs: 1,
        ({}, {"rows": 13, "heads": 3, "head": 6, "more": 5}, {"far": 10**6, "base": 500.0}),
        # an angle is known to that many times eps; of float32 too it is computed in float64
        cancels=lambda inputs: (
            max(1.0, float(inputs["t"].abs().max())) if inputs["x"].dtype is torch.float64 and len(inputs["t"]) else 1.0
        ),
    ),
}
