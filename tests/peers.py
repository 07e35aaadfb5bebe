"""One of our modules against torch's: outputs and every gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tolerances import close
from unrolled.verify.judges import cotangents

DTYPES = [torch.float64, torch.float32]


def ids(options: dict[str, Any]) -> str:
    return "-".join(str(v) if k == "kind" else f"{k}={v}" for k, v in options.items())


def results(module: nn.Module, call: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> list[Tensor]:
    """Outputs and the gradients of every input and parameter, for a random derivative of every output."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    outputs = call(module, *leaves)
    weights = cotangents({str(i): y for i, y in enumerate(outputs)})
    grads = torch.autograd.grad(outputs, [*leaves, *module.parameters()], list(weights.values()))
    return [y.detach() for y in outputs] + list(grads)


def agree(
    ours: nn.Module, peer: nn.Module, call: Callable[..., Any], *inputs: Tensor, other: Any = None, terms: int = 0
) -> None:
    """Outputs and all gradients of the two alike; torch's in float64. `terms`: in a sum beside those of the inputs."""
    expected = results(peer.double(), other or call, *(x.double() for x in inputs))
    length = max((x.numel() for x in inputs), default=0) + terms
    for found, reference in zip(results(ours, call, *inputs), expected, strict=True):
        close(found, reference, length)
