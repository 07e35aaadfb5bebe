"""What layer_norm, rms_norm and residual_norm share: one pair of kernels, over rows with or without a residual."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from unrolled.equations.dropout import Dropping
from unrolled.equations.layer_norm import LayerNormSaved, layer_norm_forward
from unrolled.equations.residual_norm import ResidualNormSaved, residual_norm_backward, residual_norm_forward
from unrolled.equations.rms_norm import RMSNormSaved, rms_norm_forward
from unrolled.ops._backend import arrays, core, forward_mode, full_precision, on_core, one_kind
from unrolled.ops._register import apply, register

_HALF = (torch.float16, torch.bfloat16)


def in_float(name: str, x: Tensor, *others: Tensor | None) -> list[Any]:
    """Half precision in float32, for sums of squares overflow there; the rest as it is, all of one kind."""
    wide = [t.float() if t is not None and t.dtype in _HALF else t for t in (*full_precision(x), *others)]
    one_kind(name, *wide)
    return wide


def out_dtype(x: Tensor) -> torch.dtype:
    return full_precision(x)[0].dtype


def check_row(name: str, width: int, **rows: Tensor | None) -> None:
    """Errors: ValueError for a gain or a bias that has not one number for each feature."""
    for part, value in rows.items():
        if value is not None and value.shape != (width,):
            raise ValueError(f"{name}: {part} must be ({width},) for rows of {width}, found {tuple(value.shape)}")


def call(function: type[torch.autograd.Function], kernel: Any, args: tuple[Any, ...]) -> Any:
    """The Function where something is to be differentiated, else the kernel by itself."""
    wanted = torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in args)
    return apply(function, *args) if wanted or forward_mode() else kernel(*args)


def _dropping(seed: Tensor | None, key: Tensor | None, t: Tensor | None, layer: int, p: float) -> Dropping | None:
    return None if seed is None or key is None or t is None else Dropping(p, seed, layer, key, t)


def _forward_kernel(
    x: Tensor,
    s: Tensor | None,
    gain: Tensor | None,
    bias: Tensor | None,
    centred: bool,
    epsilon: float,
    seed: Tensor | None,
    key: Tensor | None,
    t: Tensor | None,
    layer: int,
    p: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if on_core(*(v for v in (x, s, gain, bias) if v is not None)):
        r = x.new_empty(0) if s is None else torch.empty_like(x, memory_format=torch.contiguous_format)
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        mean, scale = x.new_empty(len(x) if centred else 0), x.new_empty(len(x))
        new = None if s is None else r, y, mean if centred else None, scale
        core.norm_forward(*arrays(x, s, gain, bias, seed, key, t, *new), epsilon, layer, p, torch.get_num_threads())
        return r, y, mean, scale
    norm: LayerNormSaved | RMSNormSaved
    r = x
    if s is not None:
        dropping, kind = _dropping(seed, key, t, layer, p), "layer" if centred else "rms"
        r, y, saved = residual_norm_forward(x, s, gain, bias, kind, epsilon, dropping)  # type: ignore[arg-type]
        norm = saved.norm
    elif centred:
        y, norm = layer_norm_forward(x, gain, bias, epsilon)
    else:
        y, norm = rms_norm_forward(x, gain, epsilon)
    mean = r.mean(1) if centred else x.new_empty(0)
    return x.new_empty(0) if s is None else r, y, mean, norm.scale.squeeze(1)


def _backward_kernel(
    dr: Tensor | None,
    dy: Tensor,
    r: Tensor,
    mean: Tensor,
    scale: Tensor,
    gain: Tensor | None,
    centred: bool,
    seed: Tensor | None,
    key: Tensor | None,
    t: Tensor | None,
    layer: int,
    p: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if on_core(*(v for v in (r, dr, dy, gain) if v is not None)):
        dx = torch.empty_like(r, memory_format=torch.contiguous_format)
        ds = r.new_empty(0) if seed is None else torch.empty_like(dx)
        dgain, dbias = r.new_empty(r.shape[1]), r.new_empty(r.shape[1])
        given, new = (dr, dy, r, mean if centred else None, scale, gain), (dx, None if seed is None else ds)
        core.norm_backward(*arrays(*given, seed, key, t, *new, dgain, dbias), layer, p, torch.get_num_threads())
        return dx, ds, dgain, dbias
    norm: LayerNormSaved | RMSNormSaved
    if centred:
        norm = LayerNormSaved((r - mean[:, None]) * scale[:, None], scale[:, None])
    else:
        norm = RMSNormSaved(r * scale[:, None], scale[:, None])
    dropping = _dropping(seed, key, t, layer, p)
    dr = torch.zeros_like(dy) if dr is None else dr
    dx, ds, dgain, dbias = residual_norm_backward(dr, dy, ResidualNormSaved(norm, gain, dropping))
    return dx, dx.new_empty(0) if dropping is None else ds, dgain, dbias


forward = register(
    "norm_forward(Tensor x, Tensor? s, Tensor? gain, Tensor? bias, bool centred, float epsilon, Tensor? seed, "
    "Tensor? key, Tensor? t, int layer, float p) -> (Tensor, Tensor, Tensor, Tensor)",
    _forward_kernel,
    lambda x, s, gain, bias, centred, *_: (
        x.new_empty(0 if s is None else x.shape),
        x.new_empty(x.shape),
        x.new_empty(x.shape[0] if centred else 0),
        x.new_empty(x.shape[0]),
    ),
)
backward = register(
    "norm_backward(Tensor? dr, Tensor dy, Tensor r, Tensor mean, Tensor scale, Tensor? gain, bool centred, "
    "Tensor? seed, Tensor? key, Tensor? t, int layer, float p) -> (Tensor, Tensor, Tensor, Tensor)",
    _backward_kernel,
    lambda dr, dy, r, mean, scale, gain, centred, seed, *_: (
        r.new_empty(r.shape),
        r.new_empty(0 if seed is None else r.shape),
        r.new_empty(r.shape[1]),
        r.new_empty(r.shape[1]),
    ),
)
NO_DROPPING = (None, None, None, 0, 0.0)
