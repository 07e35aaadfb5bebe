"""Which of the two runs: the equation or the core."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from typing import Any, Literal

import torch
from torch import Tensor

from unrolled.equations.dropout import Dropping
from unrolled.ragged import Rows

Backend = Literal["auto", "core", "equations"]
HALF = (torch.float16, torch.bfloat16)
BUILD_COMMAND = "pip install --force-reinstall --no-deps .   (in the sources, with a C++17 compiler)"

try:
    core: Any = import_module("unrolled._core")
except ModuleNotFoundError:  # installed without a C++ compiler
    core = None
    warnings.warn(
        f"the core is not built, the equations do its work, slower. To build it: {BUILD_COMMAND}", stacklevel=2
    )

_backend: Backend = "auto"


def backends() -> dict[str, str | None]:
    """What can run: "equations" always; "core" with the CPU variant it uses, or None where it is not built."""
    return {"equations": "torch", "core": core.variant() if core else None}


def use(backend: Backend) -> AbstractContextManager[None]:
    """Choose for the whole process what the operators run on; as a context manager, until its end.

    "auto": the core for float32 and float64 on the CPU, else the equation. "core": the core alone, an error where it
    cannot run. "equations": no operator, autograd differentiates the plain forward; slow, derivatives of any order.
    Errors: ValueError for another name; RuntimeError for "core" where it is not built.
    """
    global _backend
    if backend not in ("auto", "core", "equations"):
        raise ValueError(f'use() takes "auto", "core" or "equations", found {backend!r}')
    if backend == "core" and core is None:
        raise RuntimeError(f"the core is not built; to build it: {BUILD_COMMAND}")
    before, _backend = _backend, backend
    return _restore(before)


@contextmanager
def _restore(before: Backend) -> Iterator[None]:
    global _backend
    try:
        yield
    finally:
        _backend = before


def equations_only() -> bool:
    return _backend == "equations"


def on_core(*tensors: Tensor) -> bool:
    """Whether the core takes these tensors. Under `use("core")` a TypeError says why not."""
    dtype = tensors[0].dtype
    fits = dtype is torch.float32 or dtype is torch.float64
    for t in tensors:
        fits = fits and t.dtype is dtype and t.device.type == "cpu"
    if _backend == "core" and not fits:
        found = ", ".join(f"{t.dtype} on {t.device}" for t in tensors)
        raise TypeError(f"the core takes float32 or float64 on the CPU, all alike; found {found}")
    return fits and core is not None


def full_precision(x: Tensor, *others: Tensor | None) -> tuple[Any, ...]:
    """Under autocast our arithmetic is float32: half and bfloat16 are cast, of inputs, states and parameters alike."""
    if not torch._C._is_any_autocast_enabled():
        return x, *others
    device = x.device.type
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return x, *others
    return tuple(t.float() if t is not None and t.dtype in HALF else t for t in (x, *others))


def one_kind(name: str, x: Tensor, *others: Tensor | None) -> None:
    """TypeError, with what was found, unless all have one floating dtype and one device."""
    dtype, device = x.dtype, x.device
    if not dtype.is_floating_point:
        raise TypeError(f"{name}: expected a floating dtype, found {dtype}")
    for t in others:
        if t is not None and (t.dtype is not dtype or t.device != device):
            found = ", ".join(dict.fromkeys(f"{t.dtype} on {t.device}" for t in (x, *others) if t is not None))
            raise TypeError(f"{name}: inputs, states and parameters must have one dtype and device, found {found}")


def check_rows(rows: Rows, sequences: int) -> None:
    """Errors: TypeError for another dtype than int64, ValueError for another number of sequences."""
    start, _, length = rows
    if start.dtype is not torch.int64 or length.dtype is not torch.int64:
        raise TypeError(f"start and length of rows must be torch.int64, found {start.dtype} and {length.dtype}")
    if start.shape != (sequences,) or length.shape != (sequences,):
        found = f"{tuple(start.shape)} and {tuple(length.shape)}"
        raise ValueError(f"start and length of rows must be ({sequences},), one for each sequence, found {found}")


def check_dropping(dropping: Dropping, rows: int) -> None:
    """Errors: ValueError for a probability or a shape that does not fit, TypeError for another dtype than int64."""
    if not 0 <= dropping.p <= 1:
        raise ValueError(f"the dropout probability must lie in [0, 1], found {dropping.p}")
    check_numbers("dropout: seed", dropping.seed, ())
    check_numbers("dropout: key", dropping.key, (rows,))
    check_numbers("dropout: t", dropping.t, (rows,))


def check_numbers(name: str, x: Tensor, shape: tuple[int, ...]) -> None:
    """Errors: TypeError for another dtype than int64, ValueError for another shape."""
    if x.dtype is not torch.int64:
        raise TypeError(f"{name} must be torch.int64, found {x.dtype}")
    if x.shape != shape:
        raise ValueError(f"{name} must be {shape}, found {tuple(x.shape)}")


def dropping_of(p: float, seed: Tensor | None, layer: int, key: Tensor | None, t: Tensor | None) -> Dropping | None:
    """What a kernel was given in its parts."""
    return None if seed is None or key is None or t is None else Dropping(p, seed, layer, key, t)


def forward_mode() -> bool:
    """Whether derivatives travel forwards; only a Function refuses that, a plain kernel would lose them in silence."""
    return torch.autograd.forward_ad._current_level >= 0


def arrays(*tensors: Tensor | None) -> list[Any]:
    """numpy views for the core, whose arrays lie row by row."""
    return [None if t is None else (t.detach() if t.requires_grad else t).contiguous().numpy() for t in tensors]
