"""What layer_norm, rms_norm and residual_norm share: one pair of kernels, over rows with or without a residual."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from unrolled.equations.layer_norm import LayerNormSaved, layer_norm_forward
from unrolled.equations.residual_norm import ResidualNormSaved, residual_norm_backward, residual_norm_forward
from unrolled.equations.rms_norm import RMSNormSaved, rms_norm_forward
from unrolled.ops._backend import HALF, arrays, core, dropping_of, full_precision, on_core, one_kind
from unrolled.ops._register import register


def in_float(name: str, x: Tensor, *others: Tensor | None) -> list[Any]:
    """Half precision in float32, for sums of squares overflow there; the rest as it is, all of one kind."""
    wide: list[Any] = [t.float() if t is not None and t.dtype in HALF else t for t in (x, *others)]
    one_kind(name, *wide)
    return wide


def out_dtype(x: Tensor) -> torch.dtype:
    return full_precision(x)[0].dtype  # type: ignore[no-any-return]


def check_epsilon(epsilon: float | None) -> None:
    """Errors: ValueError for a number below 0, and for NaN."""
    if epsilon is not None and not epsilon >= 0:
        raise ValueError(f"epsilon of a norm must be at least 0, found {epsilon}")


def check_row(name: str, width: int, epsilon: float | None, **rows: Tensor | None) -> None:
    """Errors: ValueError for a gain or a bias that has not one number for each feature, and for epsilon below 0."""
    check_epsilon(epsilon)
    for part, value in rows.items():
        if value is not None and value.shape != (width,):
            raise ValueError(f"{name}: {part} must be ({width},) for rows of {width}, found {tuple(value.shape)}")


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
        new = [x.new_empty(shape) for shape in _forward_shapes(x, s is not None, centred)]
        given = x, s, gain, bias, seed, key, t
        core.norm_forward(*arrays(*given, *_present(new[:3]), new[3]), epsilon, layer, p, torch.get_num_threads())
        r, y, mean, scale = new
        return r, y, mean, scale
    norm: LayerNormSaved | RMSNormSaved
    r = x
    if s is not None:
        dropping, kind = dropping_of(p, seed, layer, key, t), "layer" if centred else "rms"
        r, y, saved = residual_norm_forward(x, s, gain, bias, kind, epsilon, dropping)  # type: ignore[arg-type]
        norm = saved.norm
    elif centred:
        y, norm = layer_norm_forward(x, gain, bias, epsilon)
    else:
        y, norm = rms_norm_forward(x, gain, epsilon)
    mean = r.mean(1) if centred else x.new_empty(0)
    return x.new_empty(0) if s is None else r, y, mean, norm.scale.squeeze(1)


def _forward_shapes(x: Tensor, residual: bool, centred: bool) -> list[list[Any]]:
    """Of r, y, mean, scale; [0] for what there is not."""
    both, rows, nothing = list(x.shape), [x.shape[0]], [0]
    return [both if residual else nothing, both, rows if centred else nothing, rows]


def _backward_kernel(
    dr: Tensor | None,
    dy: Tensor,
    r: Tensor,
    mean: Tensor,
    scale: Tensor,
    gain: Tensor | None,
    centred: bool,
    need_dbias: bool,
    seed: Tensor | None,
    key: Tensor | None,
    t: Tensor | None,
    layer: int,
    p: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    shapes = _backward_shapes(r, gain is not None, need_dbias, seed is not None)
    if on_core(*(v for v in (r, dr, dy, gain) if v is not None)):
        new = [r.new_empty(shape) for shape in shapes]
        given = dr, dy, r, mean if centred else None, scale, gain, seed, key, t
        core.norm_backward(*arrays(*given, *_present(new)), layer, p, torch.get_num_threads())
    else:
        saved = ResidualNormSaved(_normal(r, mean, scale, centred), gain, dropping_of(p, seed, layer, key, t))
        grads = residual_norm_backward(torch.zeros_like(dy) if dr is None else dr, dy, saved)
        new = [r.new_empty(0) if d is None or shape == [0] else d for shape, d in zip(shapes, grads, strict=True)]
    dx, ds, dgain, dbias = new
    return dx, ds, dgain, dbias


def _backward_shapes(r: Tensor, need_dgain: bool, need_dbias: bool, dropped: bool) -> list[list[Any]]:
    """Of dx, ds, dgain, dbias; [0] for what there is not."""
    both, row, nothing = list(r.shape), [r.shape[1]], [0]
    return [both, both if dropped else nothing, row if need_dgain else nothing, row if need_dbias else nothing]


def _present(tensors: list[Tensor]) -> list[Tensor | None]:
    """None where an empty tensor of one dimension says that there is nothing."""
    return [None if t.shape == (0,) else t for t in tensors]


def _normal(r: Tensor, mean: Tensor, scale: Tensor, centred: bool) -> LayerNormSaved | RMSNormSaved:
    scale = scale[:, None]
    return LayerNormSaved((r - mean[:, None]) * scale, scale) if centred else RMSNormSaved(r * scale, scale)


forward = register(
    "norm_forward(Tensor x, Tensor? s, Tensor? gain, Tensor? bias, bool centred, float epsilon, Tensor? seed, "
    "Tensor? key, Tensor? t, int layer, float p) -> (Tensor, Tensor, Tensor, Tensor)",
    _forward_kernel,
    lambda x, s, gain, bias, centred, *_: tuple(
        x.new_empty(shape) for shape in _forward_shapes(x, s is not None, centred)
    ),
)
backward = register(
    "norm_backward(Tensor? dr, Tensor dy, Tensor r, Tensor mean, Tensor scale, Tensor? gain, bool centred, "
    "bool need_dbias, Tensor? seed, Tensor? key, Tensor? t, int layer, float p) -> (Tensor, Tensor, Tensor, Tensor)",
    _backward_kernel,
    lambda dr, dy, r, mean, scale, gain, centred, need_dbias, seed, *_: tuple(
        r.new_empty(shape) for shape in _backward_shapes(r, gain is not None, need_dbias, seed is not None)
    ),
)
NO_DROPPING = (None, None, None, 0, 0)  # no float: under torch.compile one from outside is a free size
