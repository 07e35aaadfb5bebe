"""Options of the recurrent modules that torch has not: what each computes, that it does something, errors."""

from __future__ import annotations

import copy
import math
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
    every_kind,
    gradients,
    listed,
    make,
    packed_up,
    seeded,
    states,
    step_by_step,
    stirred,
)
from peers import agree, ids
from tolerances import GRADIENTS, NORMS, STATES, close, same_bits

IN_EVALUATION = [
    *({"kind": kind, **options} for kind in KINDS for options in ({}, {"layer_norm": True}, {"zoneout": 0.3})),
    *({"kind": kind, "layer_norm": True, "bias": False} for kind in KINDS),
    {"kind": "RNN", "proj_size": 2},
    {"kind": "RNN", "proj_size": 2, "layer_norm": True, "zoneout": 0.3, "nonlinearity": "relu"},
    {"kind": "LSTM", "peephole": True},
    {"kind": "LSTM", "peephole": True, "bias": False, "proj_size": 3},
    {"kind": "LSTM", "zoneout": (0.2, 0.0)},
    {"kind": "LSTM", "zoneout": (0.0, 0.4), "proj_size": 2},
    {"kind": "LSTM", "peephole": True, "layer_norm": True, "zoneout": (0.2, 0.4), "proj_size": 2},
    {"kind": "GRU", "reset": "before"},
    {"kind": "GRU", "reset": "before", "bias": False},
    {"kind": "GRU", "reset": "before", "layer_norm": True, "zoneout": 0.3},
]


def by_hand(layer: Any, x: Tensor, *hx: Tensor) -> tuple[Tensor, ...]:
    steps = step_by_step(layer, x, [s[0] for s in hx])
    return torch.stack(steps.h), *(s[-1][None] for s in (steps.h, steps.c) if s)


@pytest.mark.parametrize("options", IN_EVALUATION, ids=ids)
def test_a_layer_against_one_step_after_the_other_in_plain_torch(options: dict[str, Any], backend: str) -> None:
    layer = stirred(make(**options)).eval()
    x = torch.randn(6, 4, INPUT, dtype=torch.float64)
    terms = GRADIENTS * (NORMS if layer.layer_norm else 1)
    agree(layer, copy.deepcopy(layer), packed_up, x, *listed(states(layer, 4)), other=by_hand, terms=terms)


CELLS = [
    *({"kind": kind, "layer_norm": True, "bias": bias} for kind in KINDS for bias in (True, False)),
    {"kind": "RNN", "layer_norm": True, "nonlinearity": "relu"},
    {"kind": "LSTM", "peephole": True},
    {"kind": "LSTM", "peephole": True, "layer_norm": True},
    {"kind": "GRU", "reset": "before"},
    {"kind": "GRU", "reset": "before", "layer_norm": True},
]


@pytest.mark.parametrize("options", CELLS, ids=ids)
def test_a_cell_step_by_step_is_the_layer(options: dict[str, Any], backend: str) -> None:
    layer = stirred(make(**options))
    cell = getattr(unrolled.nn, f"{options['kind']}Cell")(
        INPUT, HIDDEN, dtype=torch.float64, **{k: v for k, v in options.items() if k != "kind"}
    )
    cell.load_state_dict({name.removesuffix("_l0"): p for name, p in layer.state_dict().items()})
    x, hx = torch.randn(4, 2, INPUT, dtype=torch.float64), listed(states(layer, 2))
    state = tuple(s[0] for s in hx)
    for x_t in x:
        state = tuple(listed(cell(x_t, state if len(state) == 2 else state[0])))
    _, *last = packed_up(layer, x, *hx)
    norms = NORMS if layer.layer_norm else 1
    for found, reference in zip(state, last, strict=True):
        close(found, reference[0], STATES * norms)
    for found, reference in zip(gradients(cell, state), gradients(layer, tuple(last)), strict=True):
        close(found, reference, GRADIENTS * norms)
    for name, value in options.items():
        if name != "kind":
            assert (f"{name}={value}" in repr(cell)) == ((name, value) != ("bias", True))
    one, other = cell(x[0]), copy.deepcopy(cell)(x[0])
    for found, reference in zip(listed(one), listed(other), strict=True):
        same_bits(found, reference)


# Every option with a value, and what must differ from the layer without it: the results in training, those in
# evaluation, the gradients, or the parameters to begin with.
CHANGES: list[tuple[str, dict[str, Any], set[str]]] = [
    *((kind, {"layer_norm": True}, {"train", "eval", "gradients"}) for kind in KINDS),
    *((kind, {"recurrent_dropout": 0.5}, {"train", "gradients"}) for kind in KINDS),
    *((kind, {"zoneout": 0.5}, {"train", "eval", "gradients"}) for kind in KINDS),
    *((kind, {"bptt": 2}, {"gradients"}) for kind in KINDS),
    *((kind, {"recurrent_init": "orthogonal"}, {"parameters", "train", "eval", "gradients"}) for kind in KINDS),
    ("LSTM", {"zoneout": (0.5, 0.0)}, {"train", "eval", "gradients"}),
    ("LSTM", {"zoneout": (0.0, 0.5)}, {"train", "eval", "gradients"}),
    ("LSTM", {"peephole": True}, {"train", "eval", "gradients"}),
    ("LSTM", {"forget_bias": 1.0}, {"parameters", "train", "eval", "gradients"}),
    ("GRU", {"reset": "before"}, {"train", "eval", "gradients"}),
]


@pytest.mark.parametrize(("kind", "options", "changed"), CHANGES, ids=str)
def test_every_option_changes_what_it_should_and_nothing_else(
    kind: str, options: dict[str, Any], changed: set[str], backend: str
) -> None:
    x = torch.randn(5, 3, INPUT, dtype=torch.float64)
    found = []
    for own in ({}, options):
        torch.manual_seed(1)
        layer = make(kind, num_layers=2, bidirectional=True, **own)
        torchs = [name for name in layer.state_dict() if name.startswith(("weight_ih", "weight_hh", "bias_ih"))]
        parts = {"parameters": [p for name, p in layer.named_parameters() if name in torchs]}
        parts["train"] = list(seeded(layer, x))
        grads = dict(zip(layer.state_dict(), gradients(layer, tuple(parts["train"])), strict=True))
        parts["gradients"] = [grads[name] for name in torchs]
        parts["eval"] = list(seeded(layer.eval(), x))
        found.append(parts)
    for part, without in found[0].items():
        same = all(torch.equal(a, b) for a, b in zip(without, found[1][part], strict=True))
        assert same == (part not in changed), part


@every_kind
def test_torchs_parameters_are_drawn_as_without_the_options(kind: str) -> None:
    options = EVERY[kind] | {"recurrent_init": "uniform"} | ({"forget_bias": None} if kind == "LSTM" else {})
    torch.manual_seed(1)
    layer = make(kind, **options)
    torch.manual_seed(1)
    own = {name: options[name] for name in ("num_layers", "bidirectional", "dropout")}
    plain = make(kind, **own, proj_size=2) if kind != "GRU" else make(kind, **own)
    for name, value in plain.state_dict().items():
        same_bits(layer.state_dict()[name], value)
    more = {name: p for name, p in layer.state_dict().items() if name not in plain.state_dict()}
    for name, p in more.items():
        if name.startswith("peephole"):
            assert 0 < float(p.abs().max()) <= 1 / math.sqrt(HIDDEN)
        else:
            same_bits(p, torch.full_like(p, float(name.startswith("norm"))))


@every_kind
def test_orthogonal_blocks_and_the_bias_of_the_forget_gate(kind: str) -> None:
    for dtype in (torch.float64, torch.float16):
        layer = make(kind, dtype=dtype, **EVERY[kind])
        for name, weight in layer.named_parameters():
            for block in weight.detach().split(HIDDEN) if name.startswith("weight_hh") else ():
                gram = block.double().T @ block.double()
                close(gram, torch.eye(block.shape[1], dtype=torch.float64), HIDDEN, dtype)
            if name.startswith("bias_") and kind == "LSTM" and not name.startswith("bias_c"):
                forget = weight.detach()[HIDDEN : 2 * HIDDEN]
                same_bits(forget, torch.full_like(forget, float(name.startswith("bias_ih"))))
                assert not bool((weight[:HIDDEN] == weight[0]).all())
    assert [p.device.type for p in make(kind, device="meta", **EVERY[kind]).parameters()].count("cpu") == 0


_BOTH, _SIZES = ("RNN", "LSTM"), (-1, 5, 6)
_RATE, _INIT = (-0.1, 1.0, "x", None), 'recurrent_init must be "uniform" or "orthogonal", found '
_ZONEOUT, _RESET = r"zoneout must be a number.* in \[0, 1\), found ", 'reset must be "after" or "before" .*found '
WRONG: list[tuple[str, dict[str, Any], str]] = [
    *(
        (kind, {"proj_size": p}, f"in .0, hidden_size.*found {p} with hidden_size=5")
        for kind in _BOTH
        for p in (-1, 5, 6)
    ),
    *((kind, {"recurrent_dropout": p}, f"must lie in .0, 1., found {p!r}") for kind in KINDS for p in _RATE),
    *((kind, {"zoneout": z}, _ZONEOUT) for kind in KINDS for z in (*_RATE, (0.1,), (0.1, 0.2, 0.3))),
    *((kind, {"zoneout": (0.1, 0.2)}, "zoneout must be a number in .*found .0.1, 0.2") for kind in ("RNN", "GRU")),
    ("LSTM", {"zoneout": (0.1, 1.0)}, r"a number or a pair \(of h, of c\) in \[0, 1\), found \(0.1, 1.0\)"),
    *((kind, {"recurrent_init": "zeros"}, _INIT + "'zeros'") for kind in KINDS),
    *((kind, {"bptt": k}, f"a whole number of steps .*found {k!r}") for kind in KINDS for k in (-1, 1.5, None, 2**63)),
    ("LSTM", {"forget_bias": 1.0, "bias": False}, "forget_bias=1.0 needs a bias, found bias=False"),
    *(("LSTM", {"forget_bias": b}, f"a finite number or None, found {b!r}") for b in ("x", float("inf"))),
    ("GRU", {"reset": "never"}, _RESET + "'never'"),
    ("GRUCell", {"reset": "never"}, _RESET + "'never'"),
]


@pytest.mark.parametrize(("kind", "options", "message"), WRONG, ids=str)
def test_wrong_options_are_refused(kind: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(kind, **options)


@every_kind
@pytest.mark.parametrize("suffix", ["", "Cell"])
def test_wrong_sizes_are_refused(suffix: str, kind: str) -> None:
    made = getattr(unrolled.nn, kind + suffix)
    with pytest.raises(ValueError, match="hidden_size must be at least 1, found 0"):
        made(INPUT, 0)
    with pytest.raises(ValueError, match="input_size must be at least 0, found -1"):
        made(-1, HIDDEN)


_OTHERS = {"RNN": ("peephole", "forget_bias", "reset"), "LSTM": ("reset",), "GRU": ("proj_size", "peephole")}


@pytest.mark.parametrize(("kind", "option"), [(kind, option) for kind in KINDS for option in _OTHERS[kind]])
def test_options_of_other_layers_are_refused(kind: str, option: str) -> None:
    with pytest.raises(TypeError, match=option):
        make(kind, **{option: 1})


@pytest.mark.parametrize("kind", ["RNN", "LSTM"])
def test_wrong_states_of_a_projection_are_refused(kind: str) -> None:
    layer = make(kind, proj_size=2)
    h, c = torch.zeros(1, 2, 2), torch.zeros(1, 2, HIDDEN)
    wrong = [(c, c), (h, h)] if kind == "LSTM" else [c]
    for hx in wrong:
        with pytest.raises(ValueError, match=r"hx must have shape \(1, 2, \d\), found \(1, 2, \d\)"):
            layer(torch.zeros(3, 2, INPUT), hx)


@every_kind
def test_keys_are_looked_at_wherever_they_are_given(kind: str) -> None:
    with pytest.raises(ValueError, match="for each of 2 sequences"):
        make(kind)(torch.zeros(3, 2, INPUT), keys=torch.arange(3))
