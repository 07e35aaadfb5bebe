"""Whether a module does what its class says and nothing else."""

from __future__ import annotations

from torch import nn


def hooked(module: nn.Module) -> bool:
    """Whether a call of the module does more than the forward of its class."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in vars(module)
    )


def plain(module: nn.Module | None, kinds: tuple[type, ...]) -> bool:
    """Whether it is one of these, of which a call does what our operators do with its parameters."""
    return type(module) in kinds and not hooked(module)  # type: ignore[arg-type]
