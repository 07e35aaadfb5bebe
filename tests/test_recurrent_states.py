"""States in the recurrent modules with every option: layers, directions, streams, initial states, records."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import unrolled
from every_option import (
    EVERY,
    HIDDEN,
    INPUT,
    KINDS,
    LENGTHS,
    every_kind,
    every_option,
    gradients,
    listed,
    make,
    packed_up,
    seeded,
    states,
    step_by_step,
    stirred,
    total,
)
from peers import ids
from tolerances import GRADIENTS, NORMS, STATES, close, same_bits
from unrolled.ops.recurrence import record


@every_kind
def test_all_options_together_against_autograd(kind: str, backend: str) -> None:
    layer = every_option(kind)
    x = torch.randn(6, 4, INPUT, dtype=torch.float64, requires_grad=True)
    outputs = seeded(layer, x, lengths=LENGTHS)
    with unrolled.use("equations"):
        expected = seeded(layer, x, lengths=LENGTHS)
        expected_grads = gradients(layer, expected, x)
    for found, reference in zip(outputs, expected, strict=True):
        close(found, reference, STATES * NORMS)
    for found, reference in zip(gradients(layer, outputs, x), expected_grads, strict=True):
        assert bool((reference != 0).any())
        close(found, reference, GRADIENTS * NORMS)


@every_kind
def test_layers_are_single_ones_one_after_the_other(kind: str, backend: str) -> None:
    deep = every_option(kind).eval()
    single = {k: v for k, v in EVERY[kind].items() if k not in ("num_layers", "dropout")}
    y = x = torch.randn(6, 4, INPUT, dtype=torch.float64)
    hx, lasts = states(deep, 4), []
    for number in range(2):
        layer = getattr(unrolled.nn, kind)(y.shape[2], HIDDEN, dtype=torch.float64, **single).eval()
        own = {n.replace(f"_l{number}", "_l0"): p for n, p in deep.state_dict().items() if f"_l{number}" in n}
        layer.load_state_dict(own, strict=False)
        here = [s[2 * number : 2 * number + 2] for s in listed(hx)]
        y, *last = packed_up(layer, y, *here)
        lasts.append(last)
    found, *last = packed_up(deep, x, *listed(hx))
    same_bits(found, y)
    for state, parts in zip(last, zip(*lasts, strict=True), strict=True):
        same_bits(state, torch.cat(parts))


@every_kind
def test_the_reverse_direction_is_the_forward_one_on_the_sequence_turned_round(kind: str, backend: str) -> None:
    both = every_option(kind, num_layers=1, dropout=0.0, bptt=2).eval()
    one = every_option(kind, num_layers=1, dropout=0.0, bptt=2, bidirectional=False).eval()
    one.load_state_dict({n: both.state_dict()[n + "_reverse"] for n in one.state_dict() if "_l0" in n}, strict=False)
    x, hx = torch.randn(5, 2, INPUT, dtype=torch.float64), listed(states(both, 2))
    y, *last = packed_up(both, x, *hx)
    turned, *own = packed_up(one, x.flip(0), *(s[1:] for s in hx))
    width = turned.shape[2]
    close(y[..., width:], turned.flip(0), STATES * NORMS)
    for found, reference in zip(last, own, strict=True):
        close(found[1:], reference, STATES * NORMS)
    names = [n for n in one.state_dict() if "_l0" in n]
    there = torch.autograd.grad(turned.pow(2).sum(), [one.get_parameter(n) for n in names])
    here = torch.autograd.grad(y[..., width:].pow(2).sum(), [both.get_parameter(n + "_reverse") for n in names])
    for found, reference in zip(here, there, strict=True):
        close(found, reference, GRADIENTS * NORMS)


@every_kind
@pytest.mark.parametrize("k", [0, 1, 2, 3])
def test_a_stream_of_chunks_is_the_whole_sequence(k: int, kind: str, backend: str) -> None:
    """State carried over chunks of k steps, detached in between, against `bptt=k` on the whole; k = 0: nothing cut."""
    quiet = {"dropout": 0.0, "recurrent_dropout": 0.0, "bidirectional": False}
    whole = every_option(kind, **quiet, bptt=k).eval()  # in evaluation zoneout too is the same for both
    chunked = every_option(kind, **quiet, bptt=0).eval()
    chunked.load_state_dict(whole.state_dict())
    lengths, step = torch.tensor([7, 0, 4, 3, 1]), k or 2
    x = torch.randn(7, 5, INPUT, dtype=torch.float64)
    leaves = [[s.clone().requires_grad_() for s in listed(states(whole, 5))] for _ in range(2)]
    leaves[1] = [s.detach().clone().requires_grad_() for s in leaves[0]]
    y, last = whole(x, tuple(leaves[0]) if kind == "LSTM" else leaves[0][0], lengths=lengths)
    state, ys = tuple(leaves[1]), []
    for start in range(0, 7, step):
        if k:
            # an ended sequence keeps its state, and the gradient of that does not pass through a cut of its own
            alive = (lengths > start)[None, :, None]
            state = tuple(torch.where(alive & (start > 0), s.detach(), s) for s in state)
        own = (lengths - start).clamp(0, min(step, 7 - start))
        part, new = chunked(x[start : start + step], state if kind == "LSTM" else state[0], lengths=own)
        state = tuple(listed(new))
        ys.append(part)
    close(torch.cat(ys), y, STATES * NORMS)
    for found, reference in zip(state, listed(last), strict=True):
        close(found, reference, STATES * NORMS)
    names = [n for n in whole.state_dict() if not n.startswith("initial")]
    grads = []
    for layer, initial, outputs in (
        (chunked, leaves[1], (torch.cat(ys), *state)),
        (whole, leaves[0], (y, *listed(last))),
    ):
        loss = sum((factor * part.pow(2).sum() for factor, part in enumerate(outputs, 1)), torch.zeros(()))
        grads.append(torch.autograd.grad(loss, [*initial, *(layer.get_parameter(n) for n in names)]))
    for found, reference in zip(*grads, strict=True):
        close(found, reference, GRADIENTS * NORMS)


@every_kind
def test_learned_initial_states_stand_for_hx(kind: str, backend: str) -> None:
    layer = every_option(kind).eval()
    x = torch.randn(6, 4, INPUT, dtype=torch.float64)
    names = ["initial_state", "initial_memory"][: 1 + (kind == "LSTM")]
    widths = [2 if kind != "GRU" else HIDDEN, HIDDEN]
    assert [tuple(layer.get_parameter(n).shape) for n in names] == [(4, width) for width in widths[: len(names)]]
    given = [layer.get_parameter(n).detach()[:, None].repeat(1, 4, 1).requires_grad_() for n in names]
    learned, explicit = seeded(layer, x, lengths=LENGTHS), packed_up_with_lengths(layer, x, given)
    for found, reference in zip(learned, explicit, strict=True):
        same_bits(found, reference)
    own = torch.autograd.grad(total(learned), [layer.get_parameter(n) for n in names])
    for found, reference in zip(own, torch.autograd.grad(total(explicit), given), strict=True):
        close(found, reference.sum(1), GRADIENTS * NORMS)


def packed_up_with_lengths(layer: Any, x: Tensor, hx: list[Tensor]) -> tuple[Tensor, ...]:
    y, last = layer(x, tuple(hx) if len(hx) == 2 else hx[0], lengths=LENGTHS)
    return y, *listed(last)


@every_kind
@pytest.mark.parametrize("steps", [0, 3])
def test_sequences_of_length_0(steps: int, kind: str, backend: str) -> None:
    layer = every_option(kind)
    x = torch.randn(steps, 2, INPUT, dtype=torch.float64)
    hx = [s.requires_grad_() for s in listed(states(layer, 2))]
    y, last = layer(x, tuple(hx) if kind == "LSTM" else hx[0], lengths=[0, 0])
    assert y.shape == (steps, 2, 2 * hx[0].shape[2])
    assert not bool(y.any())
    own = [p for n, p in layer.named_parameters() if not n.startswith("initial")]
    dlast = [torch.randn_like(s) for s in hx]
    grads = torch.autograd.grad(listed(last), [*hx, *own], dlast)
    for state, s0, found, reference in zip(listed(last), hx, grads, dlast, strict=False):
        same_bits(state, s0)
        same_bits(found, reference)
    assert not any(bool(d.any()) for d in grads[len(hx) :])


GATES = {"RNN": [], "LSTM": ["i", "f", "g", "o"], "GRU": ["r", "z", "n"]}


@pytest.mark.parametrize(
    "options",
    [
        *({"kind": kind, "bidirectional": both} for kind in KINDS for both in (False, True)),
        {"kind": "LSTM", "peephole": True, "layer_norm": True, "zoneout": (0.2, 0.4), "proj_size": 2},
        {"kind": "GRU", "reset": "before", "layer_norm": True, "zoneout": 0.3},
        {"kind": "RNN", "proj_size": 2, "layer_norm": True},
    ],
    ids=ids,
)
def test_a_record_has_the_gates_and_the_derivative_of_every_state(options: dict[str, Any], backend: str) -> None:
    layer = stirred(make(**options)).eval()
    T, B, D = 4, 3, layer.num_directions
    x, hx = torch.randn(T, B, INPUT, dtype=torch.float64), listed(states(layer, B))
    with record() as records:
        y, *last = packed_up(layer, x, *hx)
    (own,) = records
    norms = NORMS if layer.layer_norm else 1
    assert set(own.gates) >= set(GATES[options["kind"]])
    assert own.gradients == {}
    total((y, *last)).backward()
    same_bits(own.y.view(T, B, -1), y)
    for d in range(D):
        turned = x.flip(0) if d else x
        steps = step_by_step(layer, turned, [s[d] for s in hx], "_l0_reverse" if d else "_l0")
        width = steps.h[0].shape[1]
        loss = torch.stack(steps.h).pow(2).sum()
        for factor, s in enumerate((s[-1] for s in (steps.h, steps.c) if s), 2):
            loss = loss + factor * s.pow(2).sum()
        found = [own.gradients[n].view(T, B, D, -1)[:, :, d] for n in ("dh", "dc") if n in own.gradients]
        expected = [torch.stack(torch.autograd.grad(loss, s, retain_graph=True)) for s in (steps.h, steps.cell) if s]
        assert found[0].shape[2] == width
        for grad, reference in zip(found, expected, strict=True):
            close(grad.flip(0) if d else grad, reference, GRADIENTS * norms)
        for name in GATES[options["kind"]]:
            values = own.gates[name].view(T, B, D, HIDDEN)[:, :, d]
            close(values.flip(0) if d else values, torch.stack([g[name] for g in steps.gates]), STATES * norms)


def test_records_come_layer_by_layer_and_only_within(backend: str) -> None:
    gru, x = make("GRU", num_layers=2), torch.randn(4, 2, INPUT, dtype=torch.float64)
    with record() as records:
        gru(x)
        with torch.no_grad():
            gru(x)
    gru(x)
    assert [r.cell for r in records] == ["gru", "gru"]
    assert not torch.equal(records[0].y, records[1].y)
