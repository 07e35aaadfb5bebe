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

Backend = Literal["auto", "core", "equations"]
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


def full_precision(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Under autocast our arithmetic is float32: half and bfloat16 that come in are cast."""
    device = tensors[0].device.type
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return tensors
    return tuple(t.float() if t.dtype in (torch.float16, torch.bfloat16) else t for t in tensors)


def one_kind(name: str, *tensors: Tensor | None) -> None:
    """TypeError, with what was found, unless all have one floating dtype and one device."""
    given = [t for t in tensors if t is not None]
    dtype, device = given[0].dtype, given[0].device
    if not dtype.is_floating_point:
        raise TypeError(f"{name}: expected a floating dtype, found {dtype}")
    if any(t.dtype is not dtype or t.device != device for t in given):
        found = ", ".join(dict.fromkeys(f"{t.dtype} on {t.device}" for t in given))
        raise TypeError(f"{name}: inputs, states and parameters must have one dtype and device, found {found}")


def check_dropping(dropping: Dropping, rows: int) -> None:
    """Errors: ValueError for a probability or a shape that does not fit, TypeError for another dtype than int64."""
    if not 0 <= dropping.p <= 1:
        raise ValueError(f"the dropout probability must lie in [0, 1], found {dropping.p}")
    for name, shape in (("seed", ()), ("key", (rows,)), ("t", (rows,))):
        x = getattr(dropping, name)
        if x.dtype != torch.int64:
            raise TypeError(f"dropout: {name} must be torch.int64, found {x.dtype}")
        if x.shape != shape:
            raise ValueError(f"dropout: {name} of {rows} rows must be {shape}, found {tuple(x.shape)}")


def dropping_of(p: float, seed: Tensor | None, layer: int, key: Tensor | None, t: Tensor | None) -> Dropping | None:
    """What a kernel was given in its parts."""
    return None if seed is None or key is None or t is None else Dropping(p, seed, layer, key, t)


def forward_mode() -> bool:
    """Whether derivatives travel forwards; only a Function refuses that, a plain kernel would lose them in silence."""
    return torch.autograd.forward_ad._current_level >= 0


def arrays(*tensors: Tensor | None) -> list[Any]:
    """numpy views for the core, whose arrays lie row by row."""
    return [None if t is None else (t.detach() if t.requires_grad else t).contiguous().numpy() for t in tensors]
