"""Decoding with a state, chunk after chunk, gives what the whole gives at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import unrolled
from test_transformer import BATCH, HEADS, WIDTH, build
from test_transformer_masks import OPTIONS
from tolerances import TRANSFORMER, close, same_bits
from unrolled import Ragged

MODELS = ["TransformerEncoder", "TransformerDecoder", "Transformer"]


def begin(model: Any, name: str, memory: Any, sequences: int = BATCH, **options: Any) -> Any:
    if name == "TransformerEncoder":
        return model.begin(sequences, **{k: v for k, v in options.items() if k == "capacity"})
    names = {"lengths": "src_lengths" if name == "Transformer" else "memory_lengths"}
    return model.begin(memory, **{names.get(k, k): v for k, v in options.items()})


def whole(model: Any, name: str, x: Any, memory: Any, **options: Any) -> Any:
    if name == "TransformerEncoder":
        return model(x, causal=True)
    names = {"lengths": "src_lengths" if name == "Transformer" else "memory_lengths"}
    inputs = (memory, x) if name == "Transformer" else (x, memory)
    return model(*inputs, causal=True, **{names.get(k, k): v for k, v in options.items()})


@pytest.mark.parametrize("name", MODELS)
@given(data=st.data())
def test_chunks_of_any_size_give_the_whole(name: str, data: st.DataObject) -> None:
    chunks = data.draw(st.lists(st.lists(st.integers(0, 3), min_size=3, max_size=3), min_size=1, max_size=4))
    lengths = data.draw(st.lists(st.integers(0, 4), min_size=3, max_size=3))
    capacity, form = data.draw(st.integers(1, 12)), data.draw(st.sampled_from(["ragged", "padded"]))
    batch_first = data.draw(st.booleans())
    model = build(unrolled.nn, name, batch_first=batch_first, **data.draw(st.sampled_from(OPTIONS)))
    memory = Ragged.from_list([torch.randn(n, WIDTH, dtype=torch.float64) for n in lengths])
    state = begin(model, name, memory, 3, capacity=capacity)
    parts: list[list[Tensor]] = [[], [], []]
    outputs: list[list[Tensor]] = [[], [], []]
    for chunk in chunks:
        new = Ragged.from_list([torch.randn(n, WIDTH, dtype=torch.float64) for n in chunk])
        if form == "ragged":
            y = model.step(new, state)
        else:
            padded = model.step(new.to_padded(batch_first, 3, float("nan")), state, chunk)
            y = Ragged.from_padded(padded, chunk, batch_first)
        for b in range(3):
            parts[b].append(new[b])
            outputs[b].append(y[b])
    assert state.lengths.tolist() == [sum(n) for n in zip(*chunks, strict=True)]
    expected = whole(model, name, Ragged.from_list([torch.cat(p) for p in parts]), memory)
    for b in range(3):
        close(torch.cat(outputs[b]), expected[b], TRANSFORMER)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_one_token_at_a_time_gives_the_whole(name: str, batch_first: bool, norm_first: bool, backend: str) -> None:
    model = build(unrolled.nn, name, batch_first=batch_first, norm_first=norm_first, nhead=4)
    time = 1 if batch_first else 0
    shapes = [(BATCH, n, WIDTH) if batch_first else (n, BATCH, WIDTH) for n in (7, 5)]
    x, memory = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    state = begin(model, name, memory, capacity=2)
    ys = [model.step(step, state) for step in x.split(1, time)]
    assert all(y.shape == step.shape for y, step in zip(ys, x.split(1, time), strict=True))
    assert not any(y.requires_grad for y in ys)
    close(torch.cat(ys, time), whole(model, name, x, memory), TRANSFORMER)


@pytest.mark.parametrize("name", MODELS)
def test_one_sequence_without_a_batch(name: str, backend: str) -> None:
    model = build(unrolled.nn, name)
    x, memory = torch.randn(5, WIDTH, dtype=torch.float64), torch.randn(4, WIDTH, dtype=torch.float64)
    state = begin(model, name, memory, 1)
    ys = [model.step(part, state) for part in x.split(2)]
    close(torch.cat(ys), whole(model, name, x, memory), TRANSFORMER)


@pytest.mark.parametrize("kind", ["lengths", "suffix", "holes", "numbers"])
@pytest.mark.parametrize("name", MODELS[1:])
def test_a_padded_memory(name: str, kind: str, backend: str) -> None:
    model = build(unrolled.nn, name, batch_first=True)
    x, memory = (torch.randn(BATCH, n, WIDTH, dtype=torch.float64) for n in (3, 5))
    mask = torch.arange(5) >= torch.tensor([3, 0, 5])[:, None]
    if kind == "holes":
        mask[2, 1] = True
    padding = torch.randn(BATCH, 5, dtype=torch.float64) if kind == "numbers" else mask
    word = "src_key_padding_mask" if name == "Transformer" else "memory_key_padding_mask"
    given = {"lengths": [3, 0, 5]} if kind == "lengths" else {word: padding}
    state = begin(model, name, memory, **given)
    ys = [model.step(x[:, t : t + 1], state) for t in range(3)]
    close(torch.cat(ys, 1), whole(model, name, x, memory, **given), TRANSFORMER)


@pytest.mark.parametrize("name", MODELS)
def test_other_sequences_in_their_place(name: str, backend: str) -> None:
    model = build(unrolled.nn, name, batch_first=True, positions="rotary")
    x, memory = (torch.randn(BATCH, n, WIDTH, dtype=torch.float64) for n in (6, 5))
    mask = torch.rand(BATCH, 5) < 0.4
    word = {"Transformer": "src_key_padding_mask", "TransformerDecoder": "memory_key_padding_mask"}.get(name)
    given = {word: mask} if word else {}
    state = begin(model, name, memory, **given)
    model.step(x[:, :3], state, [3, 1, 2])
    chosen = torch.tensor([2, 0, 0, 1])
    state.select(chosen)
    held = [m.key for m in state.memory]
    state.select([0, 2, 1, 3])
    assert all(m.key is key for m, key in zip(state.memory, held, strict=True)), "the same sources"
    assert state.lengths.tolist() == [2, 3, 3, 1]
    y = model.step(x[chosen, 3:], state)
    parts = Ragged.from_list([torch.cat([x[b, :n], x[b, 3:]]) for b, n in zip(chosen, [2, 3, 3, 1], strict=True)])
    given = {k: m[chosen] for k, m in given.items()}
    expected = whole(model, name, parts, memory[chosen], **given)
    for b in range(4):
        close(y[b], expected[b][-3:], TRANSFORMER)


def test_no_work_on_what_came_before(backend: str) -> None:
    """A step writes its own rows into the memory of the state, and concatenates nothing."""
    model = build(unrolled.nn, "TransformerDecoder", batch_first=True)
    x, memory = (torch.randn(BATCH, n, WIDTH, dtype=torch.float64) for n in (4, 5))
    state = begin(model, "TransformerDecoder", memory)
    model.step(x[:, :2], state)
    before = [kv.data_ptr() for kv in state._key_value]

    class Recorder(TorchDispatchMode):
        largest = 0
        names: set[str] = set()  # noqa: RUF012

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            self.names.add(func.name())
            if isinstance(result, Tensor) and "index_copy_" not in func.name() and "split" not in func.name():
                self.largest = max(self.largest, result.shape[0] if result.ndim == 2 else 0)
            return result

    with Recorder() as recorder:
        model.step(x[:, 2:3], state)
    assert recorder.largest <= 3 * WIDTH
    assert not any("aten::cat" in name for name in recorder.names)
    assert [kv.data_ptr() for kv in state._key_value] == before


def test_dropout_of_a_step_is_that_of_its_positions(backend: str) -> None:
    model = build(unrolled.nn, "TransformerEncoder", batch_first=True, dropout=0.5)
    x = torch.randn(BATCH, 4, WIDTH, dtype=torch.float64)

    def run(*sizes: int, keys: Any = None) -> Tensor:
        state, ys = model.begin(BATCH), []
        for part in x.split(list(sizes), 1):
            torch.manual_seed(3)
            ys.append(model.step(part, state, keys=keys))
        return torch.cat(ys, 1)

    torch.manual_seed(3)
    expected = model(x, causal=True)
    close(run(4), expected, TRANSFORMER)
    close(run(1, 2, 1), expected, TRANSFORMER)
    assert not torch.equal(run(4, keys=[3, 4, 5]), run(4))


def test_wrong_steps() -> None:
    model = build(unrolled.nn, "TransformerEncoder", batch_first=True)
    state = model.begin(2)
    x = torch.randn(3, 1, WIDTH, dtype=torch.float64)
    for wrong in (x, x[:, 0], x[:1]):
        with pytest.raises(ValueError, match="this state holds 2 sequences, found"):
            model.step(wrong, state)
    with pytest.raises(ValueError, match="reads 8 features"):
        model.step(x[:2, :, 1:], state)
    assert state.lengths.tolist() == [0, 0]
    for sequences, capacity in ((-1, 64), (2, 0)):
        with pytest.raises(ValueError, match=f"found {sequences} and {capacity}"):
            model.begin(sequences, capacity=capacity)


@pytest.mark.parametrize("name", ["TransformerEncoder", "TransformerDecoder"])
@pytest.mark.parametrize("inside", range(4))
def test_a_state_goes_in_and_out_of_inference_mode(name: str, inside: int) -> None:
    """It begins, grows, is selected from or steps there."""
    model = build(unrolled.nn, name, batch_first=True)
    x, memory = torch.randn(2, BATCH, 3, WIDTH, dtype=torch.float64)
    order = torch.tensor([2, 0, 0])
    with torch.inference_mode(inside == 0):
        state = begin(model, name, memory, capacity=1)
    model.step(x[:, :1], state)
    with torch.inference_mode(inside == 1):
        model.step(x[:, 1:2], state)
    with torch.inference_mode(inside == 2):
        state.select(order)
    with torch.inference_mode(inside == 3):
        model.step(x[order, 2:2], state)
    found = model.step(x[order, 2:], state)
    close(found, whole(model, name, x[order], memory[order])[:, 2:], TRANSFORMER)


@pytest.mark.parametrize("option", ["add_bias_kv", "add_zero_attn"])
@pytest.mark.parametrize("name", ["TransformerEncoder", "TransformerDecoder"])
def test_what_cannot_be_kept_is_refused_where_a_state_begins(name: str, option: str) -> None:
    model = build(unrolled.nn, name, batch_first=True)
    x, state = torch.randn(BATCH, 1, WIDTH, dtype=torch.float64), model.begin(*begin_of(name))
    own = unrolled.nn.MultiheadAttention(WIDTH, 2, batch_first=True, dtype=torch.float64, **{option: True})
    model.layers[1].self_attn = own
    for call in (lambda: model.begin(*begin_of(name)), lambda: model.step(x, state)):
        with pytest.raises(ValueError, match="keeps no keys of a self-attention with add_bias_kv, add_zero_attn"):
            call()


def begin_of(name: str) -> tuple[Any]:
    return (BATCH,) if name == "TransformerEncoder" else (torch.randn(BATCH, 2, WIDTH, dtype=torch.float64),)


def test_a_state_of_another_dtype_is_named() -> None:
    model = build(unrolled.nn, "TransformerEncoder", batch_first=True)
    state = model.begin(BATCH)
    with pytest.raises(TypeError, match=r"the state holds torch\.float64, the model computes torch\.float32"):
        model.float().step(torch.randn(BATCH, 1, WIDTH), state)


def test_a_failed_step_can_be_taken_again(backend: str) -> None:
    model = build(unrolled.nn, "TransformerEncoder", batch_first=True)
    x = torch.randn(BATCH, 2, WIDTH, dtype=torch.float64)
    state = model.begin(BATCH, capacity=1)
    model.step(x[:, :1], state)
    linear = model.layers[1].linear2
    model.layers[1].linear2 = torch.nn.Linear(1, 1)
    with pytest.raises((ValueError, RuntimeError, TypeError)):
        model.step(x[:, 1:], state)
    model.layers[1].linear2 = linear
    close(model.step(x[:, 1:], state), model(x, causal=True)[:, 1:], TRANSFORMER)


def test_heads_and_half_precision(backend: str) -> None:
    model = build(unrolled.nn, "TransformerDecoder", batch_first=True, nhead=HEADS, dtype=torch.float32)
    x, memory = torch.randn(BATCH, 3, WIDTH), torch.randn(BATCH, 4, WIDTH)
    expected = model(x, memory, causal=True)
    with torch.autocast("cpu", torch.bfloat16):
        state = model.begin(memory)
        ys = [model.step(x[:, t : t + 1], state) for t in range(3)]
    close(torch.cat(ys, 1), expected, TRANSFORMER)
    same_bits(state.lengths, torch.full((BATCH,), 3))
