"""One token of each sequence goes the short way where everything is plain, with the same bits; else the other way."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unrolled
from test_incremental import MODELS, begin
from test_transformer import BATCH, WIDTH, build
from test_transformer_masks import OPTIONS
from tolerances import same_bits
from unrolled.nn import _one_token

STEPS = 4


class Ways:
    """Decodes both ways, and counts the steps that went the short one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.short, self._open, call = 0, True, _one_token.Step.__call__
        new = _one_token.Step.__init__

        def counted(step: Any, *args: Any) -> Tensor:
            self.short += 1
            return call(step, *args)

        def closed(step: Any, *args: Any) -> None:
            if not self._open:
                raise _one_token.Others
            new(step, *args)

        monkeypatch.setattr(_one_token.Step, "__call__", counted)
        monkeypatch.setattr(_one_token.Step, "__init__", closed)

    def both(self, run: Callable[[], Tensor]) -> tuple[int, Tensor, Tensor]:
        """How many steps went the short way, and what comes out of both."""
        self.short, self._open = 0, True
        y, count = run(), self.short
        self._open = False
        return count, y, run()


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> Ways:
    return Ways(monkeypatch)


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    return torch.randn(BATCH, STEPS, WIDTH, dtype=dtype), torch.randn(BATCH, 5, WIDTH, dtype=dtype)


def decode(model: Any, name: str, x: Tensor, memory: Tensor, between: Any = None, **given: Any) -> Tensor:
    """Step by step; `between` is called with the model and the state after the second step."""
    state, ys = begin(model, name, memory, capacity=3, **given), []
    for t in range(x.shape[1]):
        ys.append(model.step(x[:, t : t + 1], state))
        if between and t == 1:
            state = between(model, state) or state
    return torch.cat(ys, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "options", [*OPTIONS, {"bias": False, "activation": "gelu"}, {"norm_first": True, "norm": "rms"}]
)
@pytest.mark.parametrize("name", MODELS)
def test_the_same_bits(name: str, options: dict[str, Any], dtype: torch.dtype, ways: Ways) -> None:
    model = build(unrolled.nn, name, batch_first=True, dtype=dtype, **options).eval()
    x, memory = inputs(dtype)
    count, y, expected = ways.both(lambda: decode(model, name, x, memory))
    assert count == STEPS
    same_bits(y, expected)


@pytest.mark.parametrize("kind", ["lengths", "holes", "numbers"])
def test_a_padded_memory(kind: str, ways: Ways) -> None:
    model = build(unrolled.nn, "TransformerDecoder", batch_first=True).eval()
    x, memory = inputs()
    mask = torch.zeros(BATCH, 5, dtype=torch.bool)
    mask[1, 2] = True
    given: dict[str, Any] = {"memory_key_padding_mask": mask if kind == "holes" else torch.randn(BATCH, 5).double()}
    given = {"lengths": [3, 0, 5]} if kind == "lengths" else given
    count, y, expected = ways.both(lambda: decode(model, "TransformerDecoder", x, memory, **given))
    assert count == STEPS
    same_bits(y, expected)


def other_data(model: Any, state: Any) -> None:
    model.layers[0].linear1.weight.data = -model.layers[0].linear1.weight.data


def in_place(model: Any, state: Any) -> None:
    with torch.no_grad():
        model.layers[1].self_attn.in_proj_weight.neg_()


def other_parameter(model: Any, state: Any) -> None:
    norm = model.layers[0].norm1
    norm.weight = nn.Parameter(-norm.weight.detach())


def other_module(model: Any, state: Any) -> None:
    linear = nn.Linear(model.layers[1].linear2.in_features, WIDTH, dtype=torch.float64)
    model.layers[1].linear2 = linear.eval()


def other_activation(model: Any, state: Any) -> None:
    model.layers[0].activation = torch.nn.functional.silu


def a_copy(model: Any, state: Any) -> Any:
    state = pickle.loads(pickle.dumps(copy.deepcopy(state)))
    in_place(model, state)
    return state


def beams(model: Any, state: Any) -> None:
    state.select([2, 2, 0])


@pytest.mark.parametrize(
    "between", [other_data, in_place, other_parameter, other_module, other_activation, a_copy, beams]
)
def test_a_change_between_two_steps_is_seen(between: Any, ways: Ways) -> None:
    model = build(unrolled.nn, "TransformerDecoder", batch_first=True).eval()
    x, memory = inputs()

    def run() -> Tensor:
        torch.manual_seed(5)
        return decode(copy.deepcopy(model), "TransformerDecoder", x, memory, between)

    count, y, expected = ways.both(run)
    assert count == STEPS
    same_bits(y, expected)
    same_bits(y[:, :2], decode(model, "TransformerDecoder", x, memory)[:, :2])
    assert not torch.equal(y[:, 2:], decode(model, "TransformerDecoder", x, memory)[:, 2:])


def in_training(model: Any, state: Any) -> None:
    model.train()


def a_hook(model: Any, state: Any) -> None:
    model.layers[0].linear1.register_forward_hook(lambda *args: None)


def unknown(model: Any, state: Any) -> None:
    model.layers[0].activation = torch.sin


def a_cell_of_another_kind(model: Any, state: Any) -> None:
    class Own(nn.LayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    model.layers[0].norm1 = Own(WIDTH, dtype=torch.float64)


@pytest.mark.parametrize("between", [in_training, a_hook, unknown, a_cell_of_another_kind])
def test_what_is_not_plain_goes_the_other_way(between: Any, ways: Ways) -> None:
    model = build(unrolled.nn, "TransformerEncoder", batch_first=True, dropout=0.5).eval()
    x, memory = inputs()

    def run() -> Tensor:
        torch.manual_seed(5)
        return decode(copy.deepcopy(model), "TransformerEncoder", x, memory, between)

    count, y, expected = ways.both(run)
    assert count == 2
    same_bits(y, expected)


def test_equations_autocast_and_chunks(ways: Ways) -> None:
    model = build(unrolled.nn, "TransformerEncoder", batch_first=True).eval()
    x, memory = inputs()
    expected = decode(model, "TransformerEncoder", x, memory)
    ways.short = 0
    with unrolled.use("equations"):
        torch.testing.assert_close(decode(model, "TransformerEncoder", x, memory), expected)
    assert ways.short == 0
    state = model.begin(BATCH)
    first = model.step(x[:, :2], state)
    assert ways.short == 0
    ys = [first, *(model.step(x[:, t : t + 1], state) for t in (2, 3))]
    assert ways.short == 2
    torch.testing.assert_close(torch.cat(ys, 1), expected)
