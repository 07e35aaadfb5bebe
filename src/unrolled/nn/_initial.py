"""The parameters of a recurrent layer or cell: their names, shapes and first values."""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Integral

import torch
from torch import Tensor, nn

from unrolled.ops.recurrence import CELLS

_CONSTANT = {"norm_ih": 1, "norm_hh": 1, "norm_c": 1, "bias_c": 0, "initial_state": 0, "initial_memory": 0}


def is_whole(x: object) -> bool:
    return isinstance(x, Integral)


def check_sizes(input_size: int, **at_least_one: int) -> None:
    """Errors: TypeError for what is no whole number; ValueError for a negative input_size, another size below 1."""
    for name, size in {"input_size": input_size, **at_least_one}.items():
        if not is_whole(size):
            raise TypeError(f"{name} must be a whole number, found {size!r}")
    for name, size in at_least_one.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, found {size}")
    if input_size < 0:
        raise ValueError(f"input_size must be at least 0, found {input_size}")


def shapes(
    cell: str, input_size: int, hidden_size: int, proj_size: int, bias: bool, layer_norm: bool, peephole: bool
) -> dict[str, tuple[int, ...]]:
    """Of one layer in one direction, torch's first and in torch's order."""
    rows, memory = CELLS[cell].gates * hidden_size, CELLS[cell].states == 2
    found: dict[str, tuple[int, ...]] = {
        "weight_ih": (rows, input_size),
        "weight_hh": (rows, proj_size or hidden_size),
    }
    if bias:
        found |= {"bias_ih": (rows,), "bias_hh": (rows,)}
    if proj_size:
        found["weight_hr"] = (proj_size, hidden_size)
    if layer_norm:
        found |= {"norm_ih": (rows,), "norm_hh": (rows,)}
    if peephole:
        found["peephole"] = (3 * hidden_size,)
    if layer_norm and memory:
        found["norm_c"] = (hidden_size,)
    if layer_norm and memory and bias:
        found["bias_c"] = (hidden_size,)
    return found


@torch.no_grad()
def initialise(
    parameters: Iterable[tuple[str, Tensor]],
    hidden_size: int,
    recurrent_init: str = "uniform",
    forget_bias: float | None = None,
) -> None:
    """Uniform in +-1/sqrt(H), drawn in torch's order; gains 1, learned initial states and the bias of c 0.

    "orthogonal": each gate's (H, P) block of weight_hh has orthonormal columns. `forget_bias`: the sum of the LSTM's
    two forget biases, all of it in bias_ih.
    """
    named = [(name.rsplit("_l", 1)[0], parameter) for name, parameter in parameters]
    bound = 1 / math.sqrt(hidden_size)
    for name, parameter in sorted(named, key=lambda pair: pair[0] == "peephole"):  # torch's are drawn as without it
        if name in _CONSTANT:
            nn.init.constant_(parameter, _CONSTANT[name])
        else:
            nn.init.uniform_(parameter, -bound, bound)
    for name, parameter in named:
        if name == "weight_hh" and recurrent_init == "orthogonal":
            for block in parameter.chunk(len(parameter) // hidden_size):  # half precision has no QR decomposition
                block.copy_(nn.init.orthogonal_(torch.empty_like(block, dtype=torch.float64)))
        if name in ("bias_ih", "bias_hh") and forget_bias is not None:
            parameter[hidden_size : 2 * hidden_size] = forget_bias if name == "bias_ih" else 0
