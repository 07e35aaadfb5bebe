"""What the mutation run (`python -m tests.mutate`) found untested; it asks these tests too, on every mutant."""

from __future__ import annotations

import pytest
import torch

from unrolled.ops import _backend
from unrolled.ops.cross_entropy import cross_entropy
from unrolled.ops.dropout import dropout
from unrolled.ops.embedding import embedding
from unrolled.verify.formulations import philox, plain_dropout

SEED, KEY, T, LAYER = torch.tensor(5), torch.tensor([3]), torch.tensor([2]), 1


def test_dropout_keeps_a_unit_whose_number_is_the_limit_itself(backend: str) -> None:
    word = philox((0, 2, 3, LAYER), 5)[0]
    x = torch.ones(1, 1, dtype=torch.float64)
    p = word / 2**32
    assert dropout(x, p, SEED, LAYER, KEY, T).item() == 1 / (1 - p)
    assert dropout(x, (word + 1) / 2**32, SEED, LAYER, KEY, T).item() == 0


def test_dropout_of_many_features(backend: str) -> None:
    x = torch.ones(1, 1100, dtype=torch.float64)
    found, expected = (f(x, 0.5, SEED, LAYER, KEY, T) for f in (dropout, plain_dropout))
    assert torch.equal(found, expected)


def test_an_ignored_target_has_a_gradient_of_exactly_0(backend: str) -> None:
    logits = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    cross_entropy(logits, torch.tensor([1, -100, 2]), None, -100, 0.1).sum().backward()
    assert logits.grad is not None
    assert bool((logits.grad[1] == 0).all())


def test_a_token_outside_the_table_is_refused_wherever_it_stands(backend: str) -> None:
    """By the core's backward too, which no operator calls with a token that its forward refused."""
    weight, dy = torch.zeros(4, 2, dtype=torch.float64), torch.zeros(3, 2, dtype=torch.float64)
    for token in ([4, 0, 0], [0, 0, 4], [-1, 0, 0], [0, 0, -1]):
        with pytest.raises(IndexError):
            embedding(torch.tensor(token), weight, None)
        if _backend.core is not None:
            with pytest.raises(IndexError):
                _backend.core.embedding_backward(*_backend.arrays(dy, torch.tensor(token), weight), -1, 1)
