"""What an operator is to its judges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from unrolled.verify.judges import Function, Inputs


class Operator(NamedTuple):
    """All functions take the operator's arguments by name; `forward` and `backward` those of `to_equation`."""

    make: Callable[..., dict[str, Any]]  # (generator, dtype, **options): what is to be differentiated requires grad
    operator: Function
    forward: Function
    backward: Function
    plain: Function
    peer: Function | None  # torch.nn's
    length: Callable[[Inputs], int]  # terms in the longest sum
    options: Sequence[dict[str, Any]]  # what a certificate covers
    to_equation: Callable[[Inputs], dict[str, Any] | None] = dict  # None: no single call of the equation
    cancels: Callable[[Inputs], float] = lambda _: 0.0  # the size of numbers whose difference a result may be
    peer_has: Callable[[Inputs], bool] = lambda _: True  # whether the peer knows such inputs
