"""Positions: the modules in every form of a batch, decoding step by step, what rotary and ALiBi promise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unrolled
from tolerances import close, same_bits
from unrolled import Ragged
from unrolled.equations.positions import alibi_slopes, sinusoidal
from unrolled.ops.rotary import rotary

WIDTH = 5
MODULES: dict[str, Callable[..., nn.Module]] = {
    "sinusoidal": lambda **options: unrolled.nn.SinusoidalPositions(WIDTH, **options),
    "learned": lambda **options: unrolled.nn.LearnedPositions(9, WIDTH, **options),
}
every_module = pytest.mark.parametrize("name", MODULES)


def vectors(module: Any, t: Tensor) -> Tensor:
    if isinstance(module, unrolled.nn.LearnedPositions):
        return module.weight[t]
    return sinusoidal(t.flatten(), WIDTH).float().view(*t.shape, WIDTH)


@pytest.mark.parametrize("width", [1, 2, 5, 8])
def test_sinusoidal_is_the_papers(width: int) -> None:
    t = torch.tensor([0, 1, 7, 10**6])
    p = sinusoidal(t, width)
    for n, position in enumerate(t.tolist()):
        for d in range(width):
            angle = torch.tensor(position / 10000 ** ((d - d % 2) / width), dtype=torch.float64)
            close(p[n, d], angle.cos() if d % 2 else angle.sin(), position)


@every_module
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("start", [None, 2, [3, 0, 1]], ids=str)
def test_every_form_of_a_batch(name: str, batch_first: bool, start: Any, backend: str) -> None:
    module = MODULES[name](batch_first=batch_first)
    batch = Ragged(torch.randn(9, WIDTH), [0, 4, 4, 9])
    first = torch.tensor([start or 0] * 3 if not isinstance(start, list) else start)
    t = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 4]) + first[[0] * 4 + [2] * 5]
    expected = batch.values + vectors(module, t)
    same_bits(module(batch, start=start).values, expected)
    padded = module(batch.to_padded(batch_first), start=start)
    same_bits(Ragged.from_padded(padded, batch.lengths, batch_first).values, expected)
    nested = module(batch.to_nested(), start=start)
    same_bits(nested.values(), expected)
    full = Ragged(batch.values, [0, 4, 9])
    own = [start[0], start[2]] if isinstance(start, list) else start
    same_bits(Ragged.from_packed(module(full.to_packed(), start=own)).values, expected)
    alone = module(batch[2], start=int(first[2]))
    same_bits(alone, expected[4:])


@every_module
def test_decoding_step_by_step_is_the_whole(name: str, backend: str) -> None:
    module, x = MODULES[name](batch_first=True), torch.randn(3, 6, WIDTH)
    whole = module(x)
    steps = [module(x[:, t : t + 1], start=t) for t in range(6)]
    same_bits(torch.cat(steps, 1), whole)
    before = torch.tensor([0, 2, 5])
    rows = torch.stack([x[b, t] for b, t in enumerate(before)])[:, None]
    found = module(rows, start=before)
    same_bits(found[:, 0], torch.stack([whole[b, t] for b, t in enumerate(before)]))


def test_learned_positions_receive_gradients_and_end() -> None:
    module = unrolled.nn.LearnedPositions(4, WIDTH)
    batch = Ragged(torch.randn(5, WIDTH), [0, 3, 5])
    module(batch, start=[0, 2]).values.sum().backward()
    same_bits(module.weight.grad[:, 0], torch.tensor([1.0, 1.0, 2.0, 1.0]))
    assert list(module.state_dict()) == ["weight"]
    for given in ({}, {"start": 1}, {"start": [1, 3]}):
        with pytest.raises(ValueError, match=r"position [45] lies beyond the 4 that are learned"):
            module(batch if given.get("start") == [1, 3] else torch.zeros(4 + (not given), 2, WIDTH), **given)


def test_refusals() -> None:
    positions = unrolled.nn.SinusoidalPositions(WIDTH)
    for given in (torch.zeros(2, 3, 4), Ragged(torch.zeros(2, 4), [0, 2])):
        with pytest.raises(ValueError, match="have 5 features, the input has 4"):
            positions(given)
    for start in (-1, [0, -1, 0]):
        with pytest.raises(ValueError, match="start must be at least 0, found -1"):
            positions(torch.zeros(2, 3, WIDTH), start=start)
    with pytest.raises(ValueError, match="start must have one number for each of 3 sequences"):
        positions(torch.zeros(2, 3, WIDTH), start=[0, 1])
    with pytest.raises(TypeError, match="start must be whole numbers"):
        positions(torch.zeros(2, 3, WIDTH), start=torch.zeros(3))
    with pytest.raises(ValueError, match="d_model must be at least 1, found 0"):
        unrolled.nn.SinusoidalPositions(0)
    with pytest.raises(ValueError, match="max_positions must be at least 1, found 0"):
        unrolled.nn.LearnedPositions(0, 3)
    with pytest.raises(ValueError, match="heads must be at least 1, found 0"):
        alibi_slopes(0)


@pytest.mark.parametrize("heads", [1, 2, 8, 3, 12])
def test_slopes_are_the_papers(heads: int) -> None:
    """For 8 heads 1/2, 1/4 ... 1/256; for 12 those and the odd ones of 16."""
    known = {
        1: [2.0**-8],
        2: [2.0**-4, 2.0**-8],
        3: [2.0**-4, 2.0**-8, 2.0**-2],
        8: [2.0**-a for a in range(1, 9)],
        12: [2.0**-a for a in (*range(1, 9), 0.5, 1.5, 2.5, 3.5)],
    }
    close(alibi_slopes(heads), torch.tensor(known[heads], dtype=torch.float64), 1)


def test_rotary_makes_products_depend_on_the_distance_alone(backend: str) -> None:
    q, k = torch.randn(2, 1, 12, dtype=torch.float64)
    far = 10**6

    def product(i: int, j: int) -> Tensor:
        at = [rotary(x, torch.tensor([t]), heads=2) for x, t in ((q, i), (k, j))]
        return (at[0] * at[1]).view(2, 6).sum(1)

    close(product(far + 7, far + 3), product(4, 0), far)
    assert float((product(4, 0) - product(0, 4)).abs().max()) > 0.1


def test_rotary_turns_pairs_of_neighbours_and_keeps_their_length(backend: str) -> None:
    x, t = torch.randn(5, 24, dtype=torch.float64), torch.tensor([0, 1, 5, 1000, -3])
    y = rotary(x, t, heads=2, columns=16, base=100.0)
    same_bits(y[0], x[0])
    same_bits(y[:, 16:], x[:, 16:])
    a, b = (torch.view_as_complex(v[:, :16].reshape(5, 2, 4, 2)) for v in (x, y))
    theta = 100.0 ** -(torch.arange(4, dtype=torch.float64) / 4)
    close(torch.view_as_real(b), torch.view_as_real(a * torch.exp(1j * t[:, None, None] * theta)), 1000)


def test_rotary_is_linear_so_its_second_derivative_is_exact(backend: str) -> None:
    x, t = torch.randn(3, 8, dtype=torch.float64, requires_grad=True), torch.tensor([0, 2, 9])
    torch.autograd.gradgradcheck(lambda x: rotary(x, t, heads=2) ** 3, (x,))


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"t": torch.zeros(3)}, ValueError, r"x \(N, D\) and t \(N,\), found \(2, 12\) and \(3,\)"),
        ({"t": torch.zeros(2)}, TypeError, "whole numbers, found torch.float32"),
        ({"columns": 13}, ValueError, r"columns must lie in \[0, 12\], found 13"),
        ({"heads": 4}, ValueError, "12 columns are not 4 heads of an even size"),
        ({"heads": 0}, ValueError, "12 columns are not 0 heads"),
        ({"base": 0.0}, ValueError, "base must be above 0, found 0.0"),
    ],
)
def test_refusals_of_rotary(given: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        rotary(torch.zeros(2, 12), **{"t": torch.zeros(2, dtype=torch.int64), "heads": 2, **given})
