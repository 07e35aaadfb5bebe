"""The dropout mask: Philox itself, and what a mask of random numbers must look like."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import unrolled
from conftest import VARIANTS, on
from tolerances import DEVIATIONS, close, same_bits
from unrolled import Ragged
from unrolled.equations import dropout as equation
from unrolled.ops.dropout import dropout
from unrolled.verify.formulations import philox

# Philox4x32 of Random123's own table of known answers: rounds, counter, key, four words.
KNOWN = [
    (7, "00000000 00000000 00000000 00000000", "00000000 00000000", "5f6fb709 0d893f64 4f121f81 4f730a48"),
    (7, "ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "5207ddc2 45165e59 4d8ee751 8c52f662"),
    (7, "243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "4dfccaba 190a87f0 c47362ba b6b5242a"),
    (10, "00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    (10, "ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (10, "243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


@pytest.mark.parametrize(("rounds", "counter", "key", "words"), KNOWN)
def test_known_answers(rounds: int, counter: str, key: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    c, (k0, k1), expected = ([int(word, 16) for word in text.split()] for text in (counter, key, words))
    seed = k0 + (k1 << 32)
    assert list(philox(tuple(c), seed, rounds)) == expected
    monkeypatch.setattr(equation, "_ROUNDS", rounds)
    signed = seed - (1 << 64) * (seed >> 63)
    found = equation._philox(tuple(torch.tensor([word]) for word in c), torch.tensor(signed))
    assert [int(word) for word in found] == expected


def mask(
    tokens: int,
    features: int,
    p: float,
    *,
    seed: int = 7,
    layer: int = 0,
    key: Tensor | None = None,
    t: Tensor | None = None,
) -> Tensor:
    """Which units are kept."""
    index = torch.arange(tokens)
    y = dropout(
        torch.ones(tokens, features),
        p,
        torch.tensor(seed),
        layer,
        torch.zeros_like(index) if key is None else key,
        index if t is None else t,
    )
    return y != 0


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_rate_and_scale(p: float, backend: str) -> None:
    tokens, features = 400, 250
    y = dropout(
        torch.ones(tokens, features), p, torch.tensor(3), 0, torch.arange(tokens) % 7, torch.arange(tokens) // 7
    )
    kept = (y != 0).double()
    assert abs(float(kept.mean()) - (1 - p)) <= DEVIATIONS * math.sqrt(p * (1 - p) / kept.numel())
    close(y[y != 0].unique(), torch.full((0 if p == 1 else 1,), 1 / (1 - p) if p < 1 else 0.0).double(), 1)


def chi_square(counts: Tensor, expected: Tensor) -> float:
    """The statistic in standard deviations from its mean: about normal for many cells."""
    freedom = counts.numel() - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


def neighbours(axis: str, p: float) -> Tensor:
    """(groups, 8): units kept that lie next to each other along an axis."""
    n, index = 4096, torch.arange(4096)
    if axis == "unit":
        return mask(n // 8, 64, p).view(-1, 8)
    if axis in ("t", "key"):
        place = {"key": torch.zeros_like(index), "t": torch.zeros_like(index), axis: index}
        return mask(n, 8, p, **place).T.reshape(-1, 8)
    return torch.stack([mask(n, 1, p, **{axis: value})[:, 0] for value in range(8)], 1)


def surprise(kept: Tensor, p: float) -> float:
    """How far the 256 patterns of groups are from as frequent as independence says, in standard deviations."""
    patterns = (kept.long() * 2 ** torch.arange(8)).sum(1).bincount(minlength=256).double()
    ones = torch.tensor([i.bit_count() for i in range(256)], dtype=torch.float64)
    expected = len(kept) * (1 - p) ** ones * p ** (8 - ones)
    rare = expected < 5  # taken together
    return chi_square(
        torch.cat([patterns[~rare], patterns[rare].sum()[None]]),
        torch.cat([expected[~rare], expected[rare].sum()[None]]),
    )


AXES = ["unit", "t", "key", "layer", "seed"]


@pytest.mark.parametrize("axis", AXES)
def test_neighbours_along_every_axis_are_independent(axis: str, backend: str) -> None:
    assert abs(surprise(neighbours(axis, 0.3), 0.3)) <= DEVIATIONS


@pytest.mark.parametrize("axis", AXES)
def test_two_rounds_of_philox_would_not_pass(axis: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equation, "_ROUNDS", 2)
    with on("equation"):
        assert surprise(neighbours(axis, 0.3), 0.3) > DEVIATIONS


def test_every_unit_is_kept_equally_often(backend: str) -> None:
    p, tokens = 0.5, 2000
    counts = mask(tokens, 130, p).double().sum(0)
    deviations = (counts - tokens * (1 - p)).abs() / math.sqrt(tokens * p * (1 - p))
    assert float(deviations.max()) <= DEVIATIONS


def test_the_mask_depends_on_each_coordinate_and_on_nothing_else(backend: str) -> None:
    index = torch.arange(50)
    base = mask(50, 33, 0.5)
    same_bits(mask(50, 33, 0.5), base)
    same_bits(mask(50, 40, 0.5)[:, :33], base)
    same_bits(mask(20, 33, 0.5), base[:20])
    order = torch.randperm(50)
    same_bits(mask(50, 33, 0.5, t=index[order]), base[order])
    torch.set_num_threads(2)
    same_bits(mask(50, 33, 0.5), base)
    others = [
        mask(50, 33, 0.5, seed=8),
        mask(50, 33, 0.5, seed=7 + 2**32),
        mask(50, 33, 0.5, layer=1),
        mask(50, 33, 0.5, t=index + 1),
        mask(50, 33, 0.5, key=torch.ones_like(index)),
    ]
    for other in others:
        assert not torch.equal(other, base)


def test_same_mask_in_forward_and_backward(backend: str) -> None:
    x = torch.randn(40, 19, requires_grad=True)
    index = torch.arange(40)
    y = dropout(x, 0.4, torch.tensor(2), 3, index, index * 5)
    y.backward(torch.ones_like(y))
    same_bits(x.grad != 0, y != 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_equation_and_core_draw_the_same_mask_to_the_bit(p: float, dtype: torch.dtype) -> None:
    seeds = torch.tensor([0, 1, -1, 2**62, -(2**63), 2**63 - 1])
    key, t = torch.randint(2**62, (300,)), torch.randint(2**40, (300,))
    x = torch.randn(300, 67, dtype=dtype)
    for seed in seeds:
        expected, _ = equation.dropout_forward(x, seed, 5, key, t, p)
        for variant in VARIANTS:
            for threads in (1, 2):
                torch.set_num_threads(threads)
                with on(variant):
                    found = dropout(x, p, seed, 5, key, t)
                same_bits(found != 0, expected != 0)
                close(found, expected.double(), 1)


def test_module_follows_torchs_generator(backend: str) -> None:
    module, x = unrolled.nn.Dropout(0.5), torch.ones(8, 33)
    torch.manual_seed(1)
    first, second = module(x), module(x)
    torch.manual_seed(1)
    same_bits(module(x), first)
    assert not torch.equal(first, second)
    same_bits(module.eval()(x), x)
    assert set(first.unique().tolist()) == {0.0, 2.0}
    for shape in ((), (5,), (2, 3, 4), (0, 3)):
        assert module.train()(torch.ones(shape)).shape == shape


def test_module_in_place(backend: str) -> None:
    x = torch.ones(8, 33)
    torch.manual_seed(1)
    expected = unrolled.nn.Dropout(0.5)(x)
    torch.manual_seed(1)
    y = unrolled.nn.Dropout(0.5, inplace=True)(x)
    assert y is x
    same_bits(x, expected)


def test_module_on_ragged_batches_is_keyed_by_sequence_and_step(backend: str) -> None:
    module, parts = unrolled.nn.Dropout(0.5), [torch.ones(n, 21) for n in (3, 0, 5, 2)]

    def run(which: list[int], keys: list[int] | None = None) -> list[Tensor]:
        torch.manual_seed(1)
        batch = Ragged.from_list([parts[b] for b in which])
        return module(batch, keys=None if keys is None else torch.tensor(keys)).to_list()

    expected = run([0, 1, 2, 3])
    for found, reference in zip(run([3, 2, 0], [3, 2, 0]), (expected[b] for b in (3, 2, 0)), strict=True):
        same_bits(found, reference)
    same_bits(run([2], [2])[0], expected[2])
    same_bits(run([0, 0])[1][:3], run([3, 2])[1][:3])
    assert not torch.equal(expected[0], expected[2][:3])


def test_wrong_use() -> None:
    for p in (-0.1, 1.1):
        with pytest.raises(ValueError, match=f"lie in .0, 1., found {p}"):
            mask(1, 1, p)
    with pytest.raises(ValueError, match="keys= belongs to a Ragged"):
        unrolled.nn.Dropout(0.5)(torch.ones(2, 3), keys=torch.tensor([1, 2]))
