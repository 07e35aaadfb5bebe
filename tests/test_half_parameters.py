"""Parameters in half precision under autocast: the arithmetic is float32, the gradients come back in their dtype."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tolerances import HALF_GRADIENTS, close, same_bits
from unrolled import nn

T, B, D, V = 4, 3, 8, 5
TARGET = torch.randint(0, V, (T, B))
Call = Callable[[Any, Tensor], Tensor]


def first(model: Any, x: Tensor) -> Tensor:
    found: Tensor = model(x)[0]
    return found


def itself(model: Any, x: Tensor) -> Tensor:
    found: Tensor = model(x, x, x)[0]
    return found


def plain(model: Any, x: Tensor) -> Tensor:
    found: Tensor = model(x)
    return found


def pair(model: Any, x: Tensor) -> Tensor:
    found: Tensor = model(x, x)
    return found


def stepped(model: Any, x: Tensor) -> Tensor:
    state = model.begin(B) if type(model) is nn.TransformerEncoder else model.begin(x)
    return torch.cat([model.step(x[t : t + 1], state) for t in range(T)])


def encoder(**options: Any) -> nn.TransformerEncoder:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(D, 2, 6, 0.0, **options), 2, nn.LayerNorm(D))


def decoder() -> nn.TransformerDecoder:
    return nn.TransformerDecoder(nn.TransformerDecoderLayer(D, 2, 6, 0.0), 2)


WEIGHT = torch.rand(V).bfloat16().float()
MODELS: dict[str, tuple[Callable[[], torch.nn.Module], Call]] = {
    "Linear": (lambda: nn.Linear(D, 3), plain),
    "Embedding": (lambda: nn.Embedding(V, D), lambda model, x: model(TARGET) * x),
    "LayerNorm": (lambda: nn.LayerNorm(D), plain),
    "RMSNorm": (lambda: nn.RMSNorm(D), plain),
    "RNN": (lambda: nn.RNN(D, 4, 2, bidirectional=True), first),
    "LSTM": (lambda: nn.LSTM(D, 4, layer_norm=True, peephole=True, proj_size=2, learn_initial_state=True), first),
    "GRU": (lambda: nn.GRU(D, 4, reset="before"), first),
    "GRUCell": (lambda: nn.GRUCell(D, 4), lambda model, x: model(x[0])),
    "MultiheadAttention": (lambda: nn.MultiheadAttention(D, 2, positions="alibi"), itself),
    "add_bias_kv": (lambda: nn.MultiheadAttention(D, 2, add_bias_kv=True), itself),
    "encoder": (lambda: encoder(positions="rotary"), plain),
    "gated encoder": (lambda: encoder(gated=True, norm="rms", norm_first=True), plain),
    "decoder": (decoder, pair),
    "encoder by steps": (encoder, stepped),
    "decoder by steps": (decoder, stepped),
    "AdditiveAttention": (lambda: nn.AdditiveAttention(D, D, 4), pair),
    "MultiplicativeAttention": (lambda: nn.MultiplicativeAttention(D, D), pair),
    "LinearCrossEntropyLoss": (lambda: nn.LinearCrossEntropyLoss(D, V), lambda model, x: model(x, TARGET)),
    "class_weight": (
        lambda: nn.LinearCrossEntropyLoss(D, V, class_weight=WEIGHT),
        lambda model, x: model(x, TARGET),
    ),
    "CrossEntropyLoss": (
        lambda: nn.CrossEntropyLoss(WEIGHT),
        lambda model, x: model(x[..., :V].flatten(0, 1), TARGET.flatten()),
    ),
    "LearnedPositions": (lambda: nn.LearnedPositions(T, D), plain),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_they_are_computed_in_float32(name: str, dtype: torch.dtype, backend: str) -> None:
    make, call = MODELS[name]
    half = make().bfloat16()
    whole = copy.deepcopy(half).float()
    x = torch.randn(T, B, D).bfloat16()
    given, expected = (v.requires_grad_() for v in (x.to(dtype, copy=True), x.float()))
    with torch.autocast("cpu", torch.bfloat16):
        y = call(half, given)
    reference = call(whole, expected)
    same_bits(y, reference)
    assert y.dtype == torch.float32
    if not y.requires_grad:  # a step
        return
    for v in (y, reference):
        v.square().sum().backward()
    for own, other in zip((given, *half.parameters()), (expected, *whole.parameters()), strict=True):
        assert own.grad is not None
        assert own.grad.dtype == own.dtype
        close(own.grad, other.grad, HALF_GRADIENTS)  # of several uses they are summed in that dtype
