"""Sequence models with every gradient written out, for PyTorch. Nothing here is imported before it is used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unrolled import nn as nn
    from unrolled import ops as ops
    from unrolled import verify as verify
    from unrolled.ops._backend import backends as backends
    from unrolled.ops._backend import use as use
    from unrolled.ragged import Ragged as Ragged
    from unrolled.run import load as load
    from unrolled.run import train as train

__version__ = "0.1.0"

_HOME = {"Ragged": "ragged", "backends": "ops._backend", "use": "ops._backend", "load": "run", "train": "run"}
_MODULES = ("nn", "ops", "verify")


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return import_module(f"unrolled.{name}")
    if name in _HOME:
        return getattr(import_module(f"unrolled.{_HOME[name]}"), name)
    raise AttributeError(f"module 'unrolled' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*_HOME, *_MODULES, "__version__"])
