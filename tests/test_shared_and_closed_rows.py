"""What no judge of one operator asks: autograd through the plain forward, and rows that sequences share."""

from __future__ import annotations

import pytest
import torch

from tolerances import close
from unrolled import nn, use
from unrolled.ops.additive_attention import additive_attention
from unrolled.ops.attention import attention
from unrolled.ragged import Rows

CLOSED = torch.tensor([[0.0, -torch.inf, 0.0], [-torch.inf] * 3, [1.0, 0.0, -torch.inf]], dtype=torch.float64)


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("mask", [CLOSED, CLOSED.isfinite()], ids=["numbers", "truth"])
def test_a_closed_row_has_a_gradient_of_0_through_the_plain_forward_too(mask: torch.Tensor) -> None:
    x, rows = draw(3, 6), Rows(torch.tensor([0]), 1, torch.tensor([3]))
    (expected,) = torch.autograd.grad(attention(x, heads=2, queries=rows, mask=mask[None, None]).sum(), x)
    with use("equations"):
        (found,) = torch.autograd.grad(attention(x, heads=2, queries=rows, mask=mask[None, None]).sum(), x)
    close(found, expected, 20)
    assert not bool(found[1, :2].any())


def test_masks_of_both_kinds_may_close_a_row_through_the_plain_forward_too() -> None:
    layer, x = nn.MultiheadAttention(4, 2, batch_first=True, dtype=torch.float64), draw(1, 3, 4)
    padding = torch.tensor([[0.0, 0.0, -torch.inf]], dtype=torch.float64)
    masks = {"attn_mask": ~CLOSED.isfinite(), "key_padding_mask": padding}
    (expected,) = torch.autograd.grad(layer(x, x, x, **masks)[0].sum(), x)
    with use("equations"):
        (found,) = torch.autograd.grad(layer(x, x, x, **masks)[0].sum(), x)
    close(found, expected, 20)


def test_additive_attention_does_not_write_the_gradient_of_shared_rows_twice(backend: str) -> None:
    q, k, value, v = draw(4, 3), draw(5, 3), draw(5, 2), draw(3)
    two = torch.tensor([2, 2])
    queries, shared = Rows(torch.tensor([0, 2]), 1, two), Rows(torch.zeros(2, dtype=torch.int64), 1, two + 3)
    o = additive_attention(q, k, value, v, queries=queries, keys=shared)
    both = Rows(torch.tensor([0, 5]), 1, two + 3)
    apart = additive_attention(q, torch.cat([k, k]), torch.cat([value, value]), v, queries=queries, keys=both)
    close(o, apart, 20)
    (expected,) = torch.autograd.grad(apart.sum(), k)
    if backend == "equation":
        close(torch.autograd.grad(o.sum(), k)[0], expected, 20)
    else:
        with pytest.raises(ValueError, match="a row must not belong to two sequences"):
            torch.autograd.grad(o.sum(), k)
