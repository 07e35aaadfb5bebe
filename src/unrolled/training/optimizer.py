"""The optimizer, its files, and the norm of the gradient."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from unrolled.config import TrainingConfig


def make_optimizer(model: nn.Module, training: TrainingConfig) -> torch.optim.Optimizer:
    """AdamW or SGD in which only weight matrices decay: no bias, no initial state."""
    decayed: list[nn.Parameter] = []
    other: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        (decayed if name.rpartition(".")[2].startswith("weight") and parameter.ndim > 1 else other).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": training.weight_decay},
        {"params": other, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if training.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=training.learning_rate, fused=True)
    return torch.optim.SGD(groups, lr=training.learning_rate, momentum=training.momentum, fused=True)


def gradient_norm(model: nn.Module) -> float:
    """Over all parameters together, in float64: it is infinite only where a gradient is."""
    norms = [
        torch.linalg.vector_norm(parameter.grad, dtype=torch.float64)
        for parameter in model.parameters()
        if parameter.grad is not None
    ]
    return float(torch.stack(norms).norm()) if norms else 0.0


def clip_gradient(model: nn.Module, norm: float, limit: float) -> None:
    """Scale all gradients alike so that their norm, found to be `norm`, is at most `limit`; 0 = no limit."""
    if 0 < limit < norm and math.isfinite(norm):
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(limit / norm)


def save_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, path: Path) -> None:
    """The optimizer's tensors as PARAMETER.KEY; its options are the configuration's and are not stored."""
    names = _names(model)
    tensors = {
        f"{names[parameter]}.{key}": value
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
        if isinstance(value, Tensor)
    }
    save_file(tensors, path)


def load_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, path: Path) -> None:
    stored: dict[str, dict[str, Tensor]] = {}
    for name, value in load_file(path).items():
        parameter, _, key = name.rpartition(".")
        stored.setdefault(parameter, {})[key] = value
    names = _names(model)
    order = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
    state = {i: stored[name] for i, name in enumerate(order) if name in stored}
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _names(model: nn.Module) -> dict[Tensor, str]:
    return {parameter: name for name, parameter in model.named_parameters()}
