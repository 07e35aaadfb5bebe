"""The activations of the Transformer: relu, gelu in both its forms, silu."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

Kind = Literal["relu", "gelu", "gelu_tanh", "silu"]

_ROOT = math.sqrt(2 / math.pi)
_CUBE = 0.044715


class ActivationSaved(NamedTuple):
    x: Float[Tensor, "*shape"]
    kind: Kind


def activation_forward(x: Float[Tensor, "*shape"], kind: Kind) -> tuple[Float[Tensor, "*shape"], ActivationSaved]:
    """Each number by itself, through the function that `kind` names.

    Definition, with Phi the distribution function of the standard normal distribution and sigma the logistic function::

        relu:       y = max(x, 0)                                           (1)
        gelu:       y = x Phi(x) = x/2 (1 + erf(x / sqrt(2)))               (2)
        gelu_tanh:  y = x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))       (3)
        silu:       y = x sigma(x)                                          (4)

    Gradient, dx = dy times the derivative, with t the tanh of line (3)::

        relu:       [x > 0]
        gelu:       Phi(x) + x exp(-x^2 / 2) / sqrt(2 pi)
        gelu_tanh:  (1 + t) / 2 + x/2 (1 - t^2) sqrt(2/pi) (1 + 3 * 0.044715 x^2)
        silu:       sigma(x) (1 + x (1 - sigma(x)))

    Shapes: x and y of any one shape.
    Edges: the derivative of relu at 0 is 0.
    Source: gelu and its approximation by tanh, Hendrycks 2016, section 2; silu the same, also swish, Ramachandran 2017.
    Derivation: docs/en/transformer.md.
    """
    return activate(x, kind), ActivationSaved(x, kind)


def activation_backward(dy: Float[Tensor, "*shape"], saved: ActivationSaved) -> Float[Tensor, "*shape"]:
    x, kind = saved
    return dy * activation_derivative(x, kind)


def activate(x: Float[Tensor, "*shape"], kind: Kind) -> Float[Tensor, "*shape"]:
    """The value."""
    if kind == "relu":
        return torch.relu(x)  # (1)
    if kind == "gelu":
        return x * _normal_distribution(x)  # (2)
    if kind == "gelu_tanh":
        return x * (1 + torch.tanh(_ROOT * (x + _CUBE * x**3))) / 2  # (3)
    return x * torch.sigmoid(x)  # (4)


def activation_derivative(x: Float[Tensor, "*shape"], kind: Kind) -> Float[Tensor, "*shape"]:
    """The derivative at x."""
    if kind == "relu":
        return (x > 0).to(x.dtype)  # (1)
    if kind == "gelu":
        return _normal_distribution(x) + x * torch.exp(-x * x / 2) * _ROOT / 2  # (2)
    if kind == "gelu_tanh":
        t = torch.tanh(_ROOT * (x + _CUBE * x**3))
        return (1 + t) / 2 + x * (1 - t * t) * _ROOT * (1 + 3 * _CUBE * x * x) / 2  # (3)
    s = torch.sigmoid(x)
    return s * (1 + x * (1 - s))  # (4)


def _normal_distribution(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    return (1 + torch.erf(x / math.sqrt(2))) / 2
