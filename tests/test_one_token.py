"""One token of each sequence goes the short way where everything is plain, with the same bits; else the other way."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

import unrolled
from test_incremental import MODELS, begin
from test_transformer import BATCH, WIDTH, build
from test_transformer_masks import OPTIONS
from tolerances import same_bits
from unrolled.nn import _one_token, transformer

STEPS = 4


class Ways:
    """Decodes both ways, and counts the steps that went the short one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.short, self._open = 0, True
        call, ask = _one_token.Step.__call__, transformer.one_token

        def counted(step: Any, *args: Any) -> Any:
            self.short += 1
            return call(step, *args)

        monkeypatch.setattr(_one_token.Step, "__call__", counted)
        monkeypatch.setattr(transformer, "one_token", lambda *args: ask(*args) if self._open else None)

    def both(self, run: Callable[[], Tensor]) -> tuple[int, Tensor, Tensor]:
        """How many steps went the short way, and what comes out of both."""
        self.short, self._open = 0, True
        y, count = run(), self.short
        self._open = False
        expected = run()
        self._open = True
        return count, y, expected


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


def turned(model: Any, state: Any) -> None:
    """The same memory, read the other way."""
    weight = model.layers[0].self_attn.out_proj.weight
    weight.data = weight.data.t()


def in_place(model: Any, state: Any) -> None:
    with torch.no_grad():
        model.layers[1].self_attn.in_proj_weight.neg_()


def other_parameter(model: Any, state: Any) -> None:
    norm = model.layers[0].norm1
    norm.weight = nn.Parameter(-norm.weight.detach())


def other_module(model: Any, state: Any) -> None:
    linear = nn.Linear(model.layers[1].linear2.in_features, WIDTH, dtype=torch.float64)
    model.layers[1].linear2 = linear.eval()


def a_gate(model: Any, state: Any) -> None:
    model.layers[1].gate = nn.Linear(WIDTH, model.layers[1].linear1.out_features, dtype=torch.float64).eval()


def other_activation(model: Any, state: Any) -> None:
    model.layers[0].activation = nn.SiLU().eval()


def approximate(model: Any, state: Any) -> None:
    model.layers[0].activation.approximate = "tanh"


def other_heads(model: Any, state: Any) -> None:
    model.layers[0].self_attn.num_heads = 1


def other_layers(model: Any, state: Any) -> None:
    layer = copy.deepcopy(model.layers[0])
    layer.linear1.weight.data.neg_()
    model.layers[0] = layer


def a_norm(model: Any, state: Any) -> None:
    model.norm = unrolled.nn.LayerNorm(WIDTH, dtype=torch.float64).eval()


def a_copy(model: Any, state: Any) -> Any:
    in_place(model, state)
    return copy.deepcopy(state)


def beams(model: Any, state: Any) -> None:
    state.select([2, 2, 0])


@pytest.mark.parametrize(
    "between",
    [
        *(other_data, turned, in_place, other_parameter, other_module, a_gate, other_activation, approximate),
        *(other_heads, other_layers, a_norm, a_copy, beams),
    ],
)
def test_a_change_between_two_steps_is_seen(between: Any, ways: Ways) -> None:
    model = build(unrolled.nn, "TransformerDecoder", batch_first=True, activation=nn.GELU()).eval()
    x, memory = inputs()

    def run() -> Tensor:
        torch.manual_seed(5)
        return decode(copy.deepcopy(model), "TransformerDecoder", x, memory, between)

    count, y, expected = ways.both(run)
    assert count == (2 if between is turned else STEPS)
    same_bits(y, expected)
    before = decode(model, "TransformerDecoder", x, memory)
    same_bits(y[:, :2], before[:, :2])
    assert not torch.equal(y[:, 2:], before[:, 2:])


def test_fewer_and_more_sequences_and_another_model(ways: Ways) -> None:
    one, other = (build(unrolled.nn, "TransformerEncoder", batch_first=True).eval() for _ in range(2))
    x, _ = inputs()

    def run() -> Tensor:
        state = one.begin(BATCH)
        ys = [one.step(x[:, :1], state), other.step(x[:, 1:2], state)]
        for chosen in ([2, 0], [1, 0, 1, 0, 1], []):
            state.select(chosen)
            ys.append(one.step(x[:1, 2:3].expand(len(chosen), 1, WIDTH), state))
        return torch.cat(ys)

    count, y, expected = ways.both(run)
    assert count == 5
    same_bits(y, expected)


def in_training(model: Any, state: Any) -> None:
    model.train()


def a_hook(model: Any, state: Any) -> None:
    model.layers[0].linear1.register_forward_hook(lambda *args: None)


def unknown(model: Any, state: Any) -> None:
    model.layers[0].activation = torch.sin


class OwnNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class OwnDropout(nn.Dropout):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class OwnLinear(NonDynamicallyQuantizableLinear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def own_norm(model: Any, state: Any) -> None:
    model.layers[0].norm1 = OwnNorm(WIDTH, dtype=torch.float64)


def own_last_norm(model: Any, state: Any) -> None:
    model.norm = OwnNorm(WIDTH, dtype=torch.float64)


def own_dropout(model: Any, state: Any) -> None:
    model.layers[1].dropout2 = OwnDropout().eval()


def own_projection(model: Any, state: Any) -> None:
    model.layers[1].self_attn.out_proj = OwnLinear(WIDTH, WIDTH, dtype=torch.float64)


def own_layer(model: Any, state: Any) -> None:
    class Own(type(model.layers[0])):  # type: ignore[misc]
        def run(self, x: Any, *args: Any) -> Any:
            return super().run(x._replace(values=2 * x.values), *args)

    layer = copy.deepcopy(model.layers[0])
    layer.__class__ = Own
    model.layers[0] = layer


def own_attention(model: Any, state: Any) -> None:
    class Own(unrolled.nn.MultiheadAttention):
        def attend(self, x: Any, *args: Any) -> Any:
            return super().attend(x._replace(values=2 * x.values), *args)

    attention = copy.deepcopy(model.layers[0].self_attn)
    attention.__class__ = Own
    model.layers[0].self_attn = attention


@pytest.mark.parametrize(
    "between",
    [
        *(in_training, a_hook, unknown, own_norm, own_last_norm, own_dropout, own_projection, own_layer),
        own_attention,
    ],
)
@pytest.mark.parametrize("first", [False, True])
def test_what_is_not_plain_goes_the_other_way(between: Any, first: bool, ways: Ways) -> None:
    model = build(unrolled.nn, "TransformerEncoder", batch_first=True, dropout=0.5).eval()
    x, memory = inputs()

    def run() -> Tensor:
        torch.manual_seed(5)
        own = copy.deepcopy(model)
        if first:
            between(own, None)
        return decode(own, "TransformerEncoder", x, memory, None if first else between)

    count, y, expected = ways.both(run)
    assert count == (0 if first else 2)
    same_bits(y, expected)


def test_positions_of_the_memory_go_the_other_way(ways: Ways) -> None:
    model = build(unrolled.nn, "TransformerDecoder", batch_first=True).eval()
    model.layers[0].multihead_attn.positions = "rotary"
    x, memory = inputs()
    count, y, expected = ways.both(lambda: decode(model, "TransformerDecoder", x, memory))
    assert count == 0
    same_bits(y, expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # forward mode imports torch.jit
def test_equations_chunks_other_dtypes_and_forward_mode(ways: Ways) -> None:
    model = build(unrolled.nn, "TransformerEncoder", batch_first=True).eval()
    x, memory = inputs()
    expected = decode(model, "TransformerEncoder", x, memory)
    assert ways.short == STEPS
    with unrolled.use("equations"):
        torch.testing.assert_close(decode(model, "TransformerEncoder", x, memory), expected)
    state = model.begin(BATCH)
    first = model.step(x[:, :2], state)
    with pytest.raises(TypeError, match=r"torch\.float32"):
        model.step(x[:, 2:3].float(), state)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward mode"):
        model.step(forward_ad.make_dual(x[:, 2:3], x[:, 2:3]), state)
    assert ways.short == STEPS
    ys = [first, *(model.step(x[:, t : t + 1], state) for t in (2, 3))]
    assert ways.short == STEPS + 2
    torch.testing.assert_close(torch.cat(ys, 1), expected)


def test_a_state_keeps_no_model(ways: Ways) -> None:
    model = build(unrolled.nn, "TransformerEncoder", batch_first=True).eval()
    state = model.begin(BATCH)
    model.step(inputs()[0][:, :1], state)
    assert ways.short == 1
    gone = weakref.ref(model.layers[0].linear1.weight)
    del model
    gc.collect()
    assert gone() is None
    assert state.lengths.tolist() == [1] * BATCH
