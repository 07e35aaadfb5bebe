"""What a label and an input may be: a check returns the value or raises a DataError that names the place."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from unrolled.config import DataConfig

Numbers = list[list[float]]
Input = str | Numbers

LARGEST = 1e38  # what float32 can hold


class DataError(ValueError):
    """Data that cannot be used: names the file, the line, what was found and what is allowed."""


class Row(NamedTuple):
    """One example as it stands in a file."""

    line: int
    input: Input
    label: str


def check_label(value: Any, where: str) -> str:
    """A label as text on one line: no blanks around it, single ones inside; numbers and booleans as their JSON text."""
    if isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return json.dumps(value)
    if not isinstance(value, str):
        raise DataError(f"{where}: a label is a text or a number, found {kind(value)}")
    label = _unicode(" ".join(value.split()), where)
    if not label:
        raise DataError(f"{where}: the label is empty")
    return label


def check_input(value: Any, data: DataConfig, where: str) -> Input:
    """A text, or with `values_column` a list of time steps of equally many finite numbers; both may be empty."""
    if data.values_column is not None:
        return _numbers(value, where)
    if not isinstance(value, str):
        raise DataError(f"{where}: the input must be a text, found {kind(value)}")
    return _unicode(value, where)


def check_channels(inputs: Sequence[Input], where: Sequence[str], channels: int | None = None) -> None:
    """Every sequence of numbers has `channels` numbers a step, else as many as the first one that has a step."""
    reason = "the training data have"
    for value, place in zip(inputs, where, strict=True):
        if not value or isinstance(value, str):
            continue
        if channels is None:
            channels, reason = len(value[0]), f"{place.rpartition(', ')[2]} has"
        elif len(value[0]) != channels:
            raise DataError(f"{place}: {len(value[0])} numbers a time step, but {reason} {channels}")


def kind(value: Any) -> str:
    """What a JSON value is, for a message."""
    names = {dict: "an object", list: "a list", str: f"the text {short(str(value))}", type(None): "null"}
    return names.get(type(value)) or short(json.dumps(value, default=repr))


def short(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")


def _unicode(text: str, where: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: character {error.start + 1} is half of a surrogate pair, not Unicode text") from None
    return text


def _numbers(value: Any, where: str) -> Numbers:
    if not isinstance(value, list | tuple):
        raise DataError(f"{where}: expected a list of time steps [[...], [...]], found {kind(value)}")
    steps: Numbers = []
    for t, step in enumerate(value, 1):
        if not isinstance(step, list | tuple):
            raise DataError(f"{where}: time step {t} must be a list of numbers, one a channel, found {kind(step)}")
        if not step or len(step) != len(value[0]):
            raise DataError(f"{where}: time step {t} has {len(step)} numbers, the first has {len(value[0])}")
        steps.append([_number(x, where, t, c) for c, x in enumerate(step, 1)])
    return steps


def _number(value: Any, where: str, step: int, channel: int) -> float:
    number = math.nan
    if isinstance(value, int | float) and not isinstance(value, bool):
        number = float(value) if abs(value) < LARGEST else math.inf
    if not math.isfinite(number):
        raise DataError(f"{where}: time step {step}, channel {channel} must be a finite number, found {kind(value)}")
    return number
