"""The judges of a gradient: what each computes, and how far it may lie from another."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Inputs = Mapping[str, Any]
Function = Callable[..., Any]
Result = tuple[dict[str, Tensor], dict[str, Tensor]]  # outputs and gradients by name

ULPS = 4  # a sum of K terms errs by about sqrt(K) eps / 2 of its size; a layer is a handful of such sums
FINITE_STEP = 1e-6  # central differences err by step^2 f''' / 6 and by eps f / step: both about 1e-10
FINITE_BOUND = 1e-6


def bound(dtype: torch.dtype, length: int) -> float:
    """The largest relative error between two ways to compute the same sums of `length` terms."""
    return ULPS * math.sqrt(max(length, 1)) * torch.finfo(dtype).eps


def relative_error(found: Tensor, reference: Tensor, floor: float = 0.0) -> float:
    """The largest difference over the largest entry of the reference, or over `floor`; infinite for a NaN."""
    if found.shape != reference.shape:
        return math.inf
    found, reference = found.detach().double(), reference.detach().double()
    difference = (found - reference).abs()
    if not difference.numel() or bool((difference == 0).all()):
        return 0.0
    error = float(difference.max() / reference.abs().max().clamp(min=floor))
    return error if math.isfinite(error) else math.inf


def compare(found: Result, reference: Result, floor: float = 0.0) -> float:
    """The largest relative error among all outputs and gradients of the reference."""
    pairs = [(f.get(name), r[name]) for f, r in zip(found, reference, strict=True) for name in r]
    return max((math.inf if f is None else relative_error(f, r, floor) for f, r in pairs), default=0.0)


def differentiable(inputs: Inputs) -> dict[str, Tensor]:
    return {name: value for name, value in inputs.items() if isinstance(value, Tensor) and value.requires_grad}


def cotangents(outputs: Mapping[str, Tensor], seed: int = 0) -> dict[str, Tensor]:
    """A random derivative of some loss for every output, the same for every judge."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y)
        for name, y in outputs.items()
        if y.is_floating_point()
    }


def by_name(values: Any, prefix: str = "y") -> dict[str, Tensor]:
    """Outputs or gradients as a dictionary: the fields of a NamedTuple, or `prefix` and a number."""
    if isinstance(values, Tensor):
        return {f"{prefix}0": values}
    names = getattr(values, "_fields", None) or [f"{prefix}{i}" for i in range(len(values))]
    return dict(zip(names, values, strict=True))


def autograd(function: Function, inputs: Inputs) -> Result:
    """Outputs, and gradients as torch differentiates `function`; an input without influence has gradient 0."""
    leaves = {name: value.detach().requires_grad_() for name, value in differentiable(inputs).items()}
    outputs = by_name(function(**{**inputs, **leaves}))
    weights = cotangents(outputs)
    reached = [name for name in weights if outputs[name].requires_grad]
    grads = [torch.zeros_like(leaf) for leaf in leaves.values()]
    if reached:
        ys, dys = [outputs[name] for name in reached], [weights[name] for name in reached]
        grads = list(torch.autograd.grad(ys, list(leaves.values()), dys, materialize_grads=True))
    return {name: y.detach() for name, y in outputs.items()}, dict(zip(leaves, grads, strict=True))


def closed_form(forward: Function, backward: Function, inputs: Inputs) -> Result:
    """Outputs and gradients of a pair `forward(...) -> (*outputs, saved)`, `backward(*doutputs, saved) -> gradients`.

    Gradients are matched to inputs by name, `d<name>`, if they come as a NamedTuple, else by the order of the
    differentiable inputs.
    """
    wanted = differentiable(inputs)
    with torch.no_grad():
        *results, saved = forward(**inputs)
        outputs = by_name(results)
        grads = by_name(backward(*cotangents(outputs).values(), saved))
    if set(grads) >= {f"d{name}" for name in wanted}:
        return outputs, {name: grads[f"d{name}"] for name in wanted}
    if len(grads) != len(wanted):
        raise ValueError(f"the backward gives {len(grads)} gradients for {len(wanted)} inputs: {', '.join(wanted)}")
    return outputs, dict(zip(wanted, grads.values(), strict=True))


Differences = tuple[dict[str, list[tuple[Tensor, float]]], float]  # directions with their differences, and a floor


def finite_difference_errors(function: Function, inputs: Inputs, grads: Mapping[str, Tensor]) -> dict[str, float]:
    """For each gradient its relative error against central differences of `function` along four random directions."""
    return errors_against(finite_differences(function, inputs), grads)


def finite_differences(function: Function, inputs: Inputs) -> Differences:
    """Central differences of `function` along four random directions of each input.

    A direction moves all entries of one input at once, so the cost does not grow with its size and no entry escapes.
    """
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        outputs = by_name(function(**inputs))
        weights = cotangents(outputs)

        def loss(**moved: Tensor) -> float:
            ys = by_name(function(**{**inputs, **moved}))
            return sum(float((ys[name] * w).sum()) for name, w in weights.items())

        found: dict[str, list[tuple[Tensor, float]]] = {}
        for name, x in differentiable(inputs).items():
            for _ in range(4):
                v = torch.randn(x.shape, generator=generator, dtype=x.dtype)
                ahead, behind = (loss(**{name: x + step * v}) for step in (FINITE_STEP, -FINITE_STEP))
                found.setdefault(name, []).append((v, (ahead - behind) / (2 * FINITE_STEP)))
        return found, 1e-3 * sum(float((outputs[name] * w).abs().sum()) for name, w in weights.items())


def errors_against(differences: Differences, grads: Mapping[str, Tensor]) -> dict[str, float]:
    """The relative error of each gradient; infinite for one of another shape."""
    errors, (found, floor) = {}, differences
    for name, directions in found.items():
        error, scale = 0.0, floor
        for v, by_difference in directions:
            if grads[name].shape != v.shape:
                error = math.inf
                continue
            by_gradient = float((grads[name] * v).sum())
            difference = abs(by_difference - by_gradient)
            error = max(error, difference if math.isfinite(difference) else math.inf)
            scale = max(scale, abs(by_difference), abs(by_gradient))
        errors[name] = error / scale if 0 < error < math.inf else error
    return errors
