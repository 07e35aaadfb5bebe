"""unrolled.nn against torch.nn, the plain layers and losses; the recurrent ones are in test_recurrent_parity.py."""

from __future__ import annotations

import inspect
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unrolled
from peers import DTYPES, agree, ids
from tolerances import same_bits
from unrolled import Ragged

INPUT, HIDDEN = 3, 5


def test_arguments_are_torchs() -> None:
    for name in ("Linear", "Embedding", "Dropout", "CrossEntropyLoss", "MSELoss"):
        own, theirs = (inspect.signature(getattr(m, name)).parameters for m in (unrolled.nn, nn))
        assert {k: p.default for k, p in own.items()} == {k: p.default for k, p in theirs.items()}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(INPUT,), (4, INPUT), (2, 5, INPUT), (0, INPUT), (2, 0, INPUT)], ids=str)
def test_linear(shape: tuple[int, ...], bias: bool, dtype: torch.dtype, backend: str) -> None:
    torch.manual_seed(3)
    ours = unrolled.nn.Linear(INPUT, HIDDEN, bias, dtype=dtype)
    torch.manual_seed(3)
    peer = nn.Linear(INPUT, HIDDEN, bias, dtype=dtype)
    agree(ours, peer, lambda m, x: (m(x),), torch.randn(shape, dtype=dtype))


TOKENS = [torch.tensor([[3, 0, 5, 3], [6, 5, 5, 0]]), torch.tensor([1, 5, 1], dtype=torch.int32), torch.tensor(3)]


@pytest.mark.parametrize("token", [*TOKENS, torch.zeros(2, 0, dtype=torch.int64)], ids=lambda t: str(t.shape))
@pytest.mark.parametrize("options", [{}, {"padding_idx": 0}, {"padding_idx": -2}, {"max_norm": 1.0}], ids=ids)
def test_embedding(options: dict[str, Any], token: Tensor, backend: str) -> None:
    for dtype in DTYPES:
        torch.manual_seed(3)
        ours = unrolled.nn.Embedding(7, 3, dtype=dtype, **options)
        torch.manual_seed(3)
        peer = nn.Embedding(7, 3, dtype=dtype, **options)
        agree(ours, peer, lambda m: (m(token),))


def test_embedding_options_that_are_torchs_own() -> None:
    ours, peer = (m.Embedding(7, 3, scale_grad_by_freq=True, dtype=torch.float64) for m in (unrolled.nn, nn))
    peer.load_state_dict(ours.state_dict())
    agree(ours, peer, lambda m: (m(TOKENS[0]),))
    unrolled.nn.Embedding(7, 3, sparse=True)(TOKENS[0]).sum().backward()


@pytest.mark.parametrize("wrong", [-1, 7])
def test_embedding_outside_the_table(wrong: int, backend: str) -> None:
    with pytest.raises(IndexError):
        unrolled.nn.Embedding(7, 3)(torch.tensor([0, wrong]))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", [(4, 3), (7,), (), (2, 3, 5)], ids=str)
def test_mean_squared_error(shape: tuple[int, ...], reduction: str, backend: str) -> None:
    for dtype in DTYPES:
        y, target = torch.randn(2, *shape, dtype=dtype).unbind()
        agree(
            unrolled.nn.MSELoss(reduction=reduction),
            nn.MSELoss(reduction=reduction),
            lambda m, y, target: (m(y, target),),
            y,
            target,
        )


def test_mean_squared_error_refuses_to_broadcast(backend: str) -> None:
    with pytest.raises(ValueError, match=r"\(3, 1\) and \(3,\)"):
        unrolled.nn.MSELoss()(torch.zeros(3, 1), torch.zeros(3))


CLASSES = 5
CROSS_ENTROPY = [
    {"reduction": reduction, "label_smoothing": smoothing, "ignore_index": ignored, "weighted": weighted}
    for (reduction, smoothing), (ignored, weighted) in product(
        product(("mean", "sum", "none"), (0.0, 0.2)), ((-100, False), (-100, True), (1, True))
    )
]


@pytest.mark.parametrize("options", CROSS_ENTROPY, ids=ids)
@pytest.mark.parametrize("shape", [(6, CLASSES), (CLASSES,), (2, CLASSES, 3), (2, CLASSES, 2, 2)], ids=str)
def test_cross_entropy(shape: tuple[int, ...], options: dict[str, Any], backend: str) -> None:
    options = dict(options)
    weighted = options.pop("weighted")
    for dtype in DTYPES:
        weight = torch.rand(CLASSES, dtype=dtype) if weighted else None
        target = torch.randint(CLASSES, [n for i, n in enumerate(shape) if i != (len(shape) > 1)])
        target.view(-1)[1::3] = options["ignore_index"]
        target.view(-1)[0] = 2  # torch's mean over nothing is NaN, ours 0
        losses = [m.CrossEntropyLoss(weight, **options) for m in (unrolled.nn, nn)]
        agree(*losses, lambda m, z, k=target: (m(z, k),), torch.randn(shape, dtype=dtype))


def test_cross_entropy_against_probabilities_is_torchs() -> None:
    losses = [m.CrossEntropyLoss(label_smoothing=0.1) for m in (unrolled.nn, nn)]
    target = torch.rand(6, CLASSES, dtype=torch.float64)
    agree(*losses, lambda m, z: (m(z, target),), torch.randn(6, CLASSES, dtype=torch.float64))


@pytest.mark.parametrize("wrong", [-1, 5, 2**40])
def test_cross_entropy_of_a_class_that_is_none(wrong: int, backend: str) -> None:
    with pytest.raises(IndexError):
        unrolled.nn.CrossEntropyLoss()(torch.zeros(2, CLASSES), torch.tensor([0, wrong]))


def test_cross_entropy_wrong_use() -> None:
    with pytest.raises(ValueError, match=r"\(2, 5\) and target \(3,\)"):
        unrolled.nn.CrossEntropyLoss()(torch.zeros(2, 5), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"\[0, 1\], found 1.5"):
        unrolled.nn.CrossEntropyLoss(label_smoothing=1.5)(torch.zeros(2, 5), torch.zeros(2, dtype=torch.int64))


def test_ragged_through_the_plain_layers(backend: str) -> None:
    batch = Ragged(torch.randn(5, INPUT), [0, 2, 2, 5])
    linear, embedding, dropout = unrolled.nn.Linear(INPUT, 4), unrolled.nn.Embedding(7, 4), unrolled.nn.Dropout(0.5)
    tokens = Ragged(torch.tensor([1, 4, 0, 6, 6]), batch.offsets)
    for module, given in ((linear, batch), (embedding, tokens), (dropout.eval(), batch)):
        found = module(given)
        same_bits(found.values, module(given.values))
        same_bits(found.offsets, batch.offsets)
