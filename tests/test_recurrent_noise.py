"""Recurrent dropout and zoneout in the modules: rates, masks by key, nothing drawn in evaluation."""

from __future__ import annotations

import math
from typing import Any

import torch

import unrolled
from every_option import (
    HIDDEN,
    INPUT,
    LENGTHS,
    every_kind,
    every_option,
    make,
    seeded,
    states,
    stirred,
)
from tolerances import DEVIATIONS, NORMS, STATES, close, same_bits
from unrolled import Ragged


@every_kind
def test_training_evaluation_and_no_grad_are_the_same_arithmetic(kind: str, backend: str) -> None:
    quiet = {"dropout": 0.0, "recurrent_dropout": 0.0, "zoneout": 0.0}
    x = torch.randn(6, 4, INPUT)
    for changed in ({}, quiet):
        layer = every_option(kind, torch.float32, **changed).eval()
        expected = seeded(layer, x, lengths=LENGTHS)
        with torch.no_grad():
            without = seeded(layer, x, lengths=LENGTHS)
        with torch.inference_mode():
            inference = seeded(layer, x, lengths=LENGTHS)
        training = seeded(layer.train(), x, lengths=LENGTHS)
        for parts in zip(expected, without, inference, strict=True):
            for found in parts[1:]:
                same_bits(found, parts[0])
        assert torch.equal(training[0], expected[0]) == (changed == quiet)


@every_kind
def test_random_numbers_are_drawn_only_when_needed(kind: str) -> None:
    x = torch.randn(6, 4, INPUT)
    quiet = {"dropout": 0.0, "recurrent_dropout": 0.0, "zoneout": 0.0}
    for layer in (every_option(kind, torch.float32).eval(), every_option(kind, torch.float32, **quiet)):
        before = torch.get_rng_state()
        layer(x)
        same_bits(torch.get_rng_state(), before)
    layer = every_option(kind, torch.float32)
    assert not torch.equal(layer(x)[0], layer(x)[0])
    same_bits(seeded(layer, x)[0], seeded(layer, x)[0])


def shows_its_mask(p: float, **options: Any) -> Any:
    """A layer whose state after t steps is, from ones, the t-th power of its recurrent dropout mask."""
    rnn = unrolled.nn.RNN(1, 7, nonlinearity="relu", bias=False, recurrent_dropout=p, dtype=torch.float64, **options)
    with torch.no_grad():
        for name, weight in rnn.named_parameters():
            weight.copy_(torch.eye(7) if name.startswith("weight_hh") else torch.zeros_like(weight))
    return rnn


def test_recurrent_dropout_is_one_mask_for_all_steps_of_a_sequence(backend: str) -> None:
    p, sequences = 0.3, 300
    rnn, h0 = shows_its_mask(p), torch.ones(1, sequences, 7, dtype=torch.float64)
    y, _ = seeded(rnn, torch.zeros(4, sequences, 1, dtype=torch.float64), h0)
    for t, y_t in enumerate(y):
        close(y_t, y[0] ** (t + 1), 1)
    kept = y[0] != 0
    close(y[0][kept], torch.full_like(y[0][kept], 1 / (1 - p)), 1)
    spread = DEVIATIONS * math.sqrt(p * (1 - p) / kept.numel())
    assert abs(float(kept.double().mean()) - (1 - p)) <= spread
    assert len(kept.unique(dim=0)) > 60, "an own mask for each sequence"


def test_recurrent_dropout_has_a_mask_for_each_layer_and_direction(backend: str) -> None:
    h0 = torch.ones(6, 20, 7, dtype=torch.float64)
    x = torch.zeros(1, 20, 1, dtype=torch.float64)
    deep = shows_its_mask(0.5, num_layers=3, bidirectional=True)
    _, masks = seeded(deep, x, h0)
    assert len(masks.flatten(1).unique(dim=0)) == 6
    _, one_way = seeded(shows_its_mask(0.5, num_layers=3), x, h0[:3])
    same_bits(one_way, masks[::2])


def shows_zoneout(z: Any) -> Any:
    """A layer with state x_t, unless zoneout keeps the old one."""
    rnn = unrolled.nn.RNN(1, 7, nonlinearity="relu", bias=False, zoneout=z, dtype=torch.float64)
    with torch.no_grad():
        rnn.weight_ih_l0.fill_(1)
        rnn.weight_hh_l0.zero_()
    return rnn


def test_zoneout_keeps_units_at_its_rate_independently_at_each_step(backend: str) -> None:
    z, steps, sequences = 0.3, 5, 60
    x = torch.arange(1.0, steps + 1, dtype=torch.float64)[:, None, None].expand(steps, sequences, 1)
    y, _ = seeded(shows_zoneout(z), x)
    old = torch.cat([torch.zeros_like(y[:1]), y[:-1]])
    kept = y == old
    same_bits(y, torch.where(kept, old, x.expand_as(y)))
    for part in (kept, *kept):
        assert abs(float(part.double().mean()) - z) <= DEVIATIONS * math.sqrt(z * (1 - z) / part.numel())
    assert len(kept.transpose(0, 1).flatten(1).unique(dim=0)) == sequences


def test_zoneout_of_h_and_of_c_have_their_own_rates(backend: str) -> None:
    x = torch.randn(1, 50, INPUT, dtype=torch.float64)
    lstm = make("LSTM", zoneout=(0.2, 0.6))
    h0, c0 = states(lstm, 50)
    _, h, c = seeded(lstm, x, (h0, c0))
    lstm.zoneout = 0.0
    _, new_h, new_c = seeded(lstm, x, (h0, c0))
    for state, old, new, rate in ((h, h0, new_h, 0.2), (c, c0, new_c, 0.6)):
        kept = state == old
        assert abs(float(kept.double().mean()) - rate) <= DEVIATIONS * math.sqrt(rate * (1 - rate) / kept.numel())
        close(state, torch.where(kept, old, new), STATES)


@every_kind
def test_evaluation_of_zoneout_is_the_expectation_over_training(kind: str, backend: str) -> None:
    layer = stirred(make(kind, zoneout=0.4))
    count = 4000
    x = torch.randn(1, 1, INPUT, dtype=torch.float64).expand(1, count, INPUT)
    hx = states(layer, 1)
    hx = tuple(s.expand(1, count, HIDDEN) for s in hx) if kind == "LSTM" else hx.expand(1, count, HIDDEN)
    with torch.no_grad():
        draws, expected = seeded(layer, x, hx), seeded(layer.eval(), x, hx)
    for drawn, mean in zip(draws, expected, strict=True):
        error = (drawn[0] - mean[0]).mean(0).abs()
        assert bool((error <= DEVIATIONS * drawn[0].std(0) / math.sqrt(count)).all())


@every_kind
def test_masks_follow_the_keys_and_neither_neighbours_nor_lengths(kind: str, backend: str) -> None:
    layer = every_option(kind)
    x = torch.randn(6, 4, INPUT, dtype=torch.float64)
    keys = torch.tensor([11, 3, 2**40, 0])
    y, *last = seeded(layer, x, lengths=LENGTHS, keys=keys)
    for b, length in enumerate(LENGTHS):
        alone, *own = seeded(layer, x[:length, b : b + 1], keys=keys[b : b + 1])
        close(alone[:, 0], y[:length, b], STATES * NORMS)
        for found, reference in zip(own, last, strict=True):
            close(found[:, 0], reference[:, b], STATES * NORMS)
    order = torch.tensor([2, 0, 3, 1])
    ragged = Ragged.from_list([x[: LENGTHS[b], b] for b in order])
    found, *own = seeded(layer, ragged, keys=keys[order])
    for b, part in zip(order.tolist(), found.to_list(), strict=True):
        close(part, y[: LENGTHS[b], b], STATES * NORMS)
    one, two = (seeded(layer, x, keys=torch.tensor(k)) for k in ([0, 1, 2, 3], [0, 1, 2, 4]))
    by_index = seeded(layer, x)
    for found, reference, other in zip(one, by_index, two, strict=True):
        same_bits(found, reference)
        assert not torch.equal(found[:, 3], other[:, 3])
