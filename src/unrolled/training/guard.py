"""NaN and infinity: the layer and time step they come from, found by running the batch through the equations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unrolled import use
from unrolled.nn.recurrent import Recurrent
from unrolled.ops.recurrence import CELLS
from unrolled.ragged import Ragged


@dataclass(frozen=True)
class Finding:
    """The first quantity that is not finite, in the order of computation; `step` 0 is the first of the sequence."""

    quantity: str
    layer: str | None = None
    step: int | None = None
    sequence: int | None = None  # in the batch that was searched

    def __str__(self) -> str:
        layer = f" of layer {self.layer}" if self.layer else ""
        step = f" at time step {self.step} (the first is 0)" if self.step is not None else ""
        return f"the {self.quantity}{layer}{step}"


class NonFiniteError(RuntimeError):
    """A loss or gradient was NaN or infinite: the step was not made and the weights are as they were before it."""


def explain(kind: str, step: int, finding: Finding | None, row: int | None, folder: Path) -> str:
    """The message of a NonFiniteError; `row` is the line in the data of the example that was found."""
    cause = "the equations give finite values for this batch, so the fault is in the core, the device or the precision"
    if finding is not None:
        cause = f"by the equations the first is {finding}" + (f", line {row} of the data" if row is not None else "")
    return (
        f"step {step}: the {kind} is not finite; {cause}. "
        f"The weights are as they were before the step; they and the batch are in {folder}"
    )


def find_nonfinite(model: nn.Module, inputs: Ragged, mean_loss: Callable[[], Tensor]) -> Finding | None:
    """Run `mean_loss`, which calls `model` on `inputs`, and its gradient by the equations; None if all is finite.

    The states h_t and c_t and their total gradients are watched step by step, other layers at their outputs.
    """
    if inputs.values.is_floating_point() and (place := _place(inputs.values, inputs.offsets)):
        return Finding("input", None, *place)
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            return Finding(f"parameter {name}")
    model.zero_grad()
    findings: list[Finding] = []
    with use("equations"), _watch(model, inputs, findings):
        loss = mean_loss()
        if not findings and not loss.isfinite():
            return Finding("loss")
        if not findings:
            loss.backward()  # type: ignore[no-untyped-call]
    if findings:
        return findings[0]
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not parameter.grad.isfinite().all():
            return Finding(f"gradient of parameter {name}")
    return None


@contextmanager
def _watch(model: nn.Module, inputs: Ragged, findings: list[Finding]) -> Iterator[None]:
    def module_done(name: str, module: nn.Module, args: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        values, offsets = (first.values, first.offsets) if isinstance(first, Ragged) else (first, None)

        def check(quantity: str, tensor: Tensor) -> None:
            place = _place(tensor, offsets)
            if place:
                step, sequence = place if offsets is not None else (None, place[1])
                findings.append(Finding(quantity, name or type(model).__name__, step, sequence))

        if isinstance(values, Tensor):
            check("output", values)
            if values.requires_grad:
                values.register_hook(partial(check, "gradient of the output"))  # type: ignore[no-untyped-call]

    with ExitStack() as stack:
        for name, module in model.named_modules():
            if isinstance(module, Recurrent):
                steps = _Steps(name, module, findings)
                stack.callback(module.register_forward_pre_hook(steps.begin).remove)
                stack.callback(module.register_forward_hook(steps.end).remove)
            stack.callback(module.register_forward_hook(partial(module_done, name)).remove)
        yield


class _Steps:
    """Sees every state of one recurrent module: the equation calls its cell once per layer, direction and step."""

    def __init__(self, name: str, module: Recurrent, findings: list[Finding]) -> None:
        self.name, self.module, self.findings = name, module, findings
        self.kind = CELLS[module._cell]

    def begin(self, module: nn.Module, args: Any) -> None:
        self.lengths = args[0].lengths
        self.order = self.lengths.argsort(descending=True, stable=True)
        self.longest = int(self.lengths.max()) if len(self.lengths) else 0
        self.calls = 0
        CELLS[self.module._cell] = self.kind._replace(equation=self.kind.equation._replace(forward=self.step))

    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        CELLS[self.module._cell] = self.kind

    def step(self, *args: Any) -> Any:
        after, kept = self.kind.equation.forward(*args)
        check = partial(self.check, self.calls)
        self.calls += 1
        for name, state in zip("hc", after, strict=False):
            check(f"state {name}_t", state)
            if state.requires_grad:
                state.register_hook(partial(check, f"gradient d{name}_t"))  # type: ignore[no-untyped-call]
        return after, kept

    def check(self, call: int, quantity: str, states: Tensor) -> None:
        place = _place(states, None)
        if not place:
            return
        layer, rest = divmod(call, self.longest * self.module.num_directions)
        reverse, step = divmod(rest, self.longest)
        sequence = int(self.order[place[1]])
        where = f"{self.name or type(self.module).__name__} (layer {layer}, {'reverse' if reverse else 'forward'})"
        step = int(self.lengths[sequence]) - 1 - step if reverse else step
        self.findings.append(Finding(quantity, where, step, sequence))


def _place(values: Tensor, offsets: Tensor | None) -> tuple[int, int] | None:
    """(step, sequence) of the first row that is not finite; without offsets, step 0 of that row."""
    bad = (~values.detach().isfinite()).reshape(len(values), -1).any(1).nonzero()
    if len(bad) == 0:
        return None
    row = bad[0, 0]
    if offsets is None:
        return 0, int(row)
    sequence = int(torch.searchsorted(offsets, row, right=True)) - 1
    return int(row - offsets[sequence]), sequence
