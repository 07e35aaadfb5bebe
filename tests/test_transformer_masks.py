"""What is padding, what may be attended to, and that neither reaches anything else; what torch gets wrong is right."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

import unrolled
from test_multihead_attention import additive
from test_transformer import BATCH, HEADS, NAMES, TIME, WIDTH, build
from tolerances import TRANSFORMER, close, same_bits
from unrolled import Ragged

MODELS = [*NAMES, "TransformerEncoder", "TransformerDecoder", "Transformer"]
NAN = float("nan")


def call(model: Any, name: str, x: Any, memory: Any, **options: Any) -> Any:
    """`options` under the names of a decoder, for each of the modules."""
    if "Encoder" in name:
        options = {k: v for k, v in options.items() if not k.startswith("memory")}
        names = {"padding": "src_key_padding_mask"}
        return model(x, **{names.get(k, k): v for k, v in options.items()})
    own = {"padding": "tgt_key_padding_mask", "memory_padding": "memory_key_padding_mask"}
    if name != "Transformer":
        return model(x, memory, **{own.get(k, k): v for k, v in options.items()})
    own |= {"memory_padding": "src_key_padding_mask", "memory_lengths": "src_lengths"}
    return model(memory, x, **{own.get(k, k): v for k, v in options.items()})


def gradients(model: Any, y: Tensor) -> list[Tensor]:
    """Of the cubes: the squares of what a norm gives sum up to the same for any parameters."""
    return list(torch.autograd.grad(y.pow(3).sum(), list(model.parameters())))


OPTIONS: list[dict[str, Any]] = [
    {},
    {"norm_first": True, "positions": "rotary"},
    {"gated": True, "norm": "rms", "activation": "silu", "positions": "alibi"},
]


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("name", MODELS)
@given(data=st.data())
def test_a_batch_equals_its_sequences_alone_in_any_order(name: str, dropout: float, data: st.DataObject) -> None:
    pairs = data.draw(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=4))
    order = data.draw(st.permutations(range(len(pairs))))
    causal = data.draw(st.booleans())
    model = build(unrolled.nn, name, dropout=dropout, **data.draw(st.sampled_from(OPTIONS)))
    x, memory = ([torch.randn(p[n], WIDTH, dtype=torch.float64) for p in pairs] for n in (0, 1))
    keys = torch.randint(2**40, (len(pairs),))

    def run(which: list[int]) -> tuple[Ragged, list[Tensor]]:
        torch.manual_seed(1)  # every call draws the same seeds
        given = Ragged.from_list([x[b] for b in which]), Ragged.from_list([memory[b] for b in which])
        y = call(model, name, *given, causal=causal, keys=keys[which])
        return y, gradients(model, y.values)

    together, whole = run(list(range(len(pairs))))
    shuffled, again = run(order)
    for place, b in enumerate(order):
        close(shuffled[place], together[b], TRANSFORMER)
    alone = [run([b]) for b in range(len(pairs))]
    for b, (y, _) in enumerate(alone):
        close(y[0], together[b], TRANSFORMER)
    for found, reference, *parts in zip(again, whole, *(grads for _, grads in alone), strict=True):
        close(found, reference, TRANSFORMER)
        close(sum(parts), reference, TRANSFORMER)


FORMS = ["lengths", "padding", "numbers", "ragged", "nested", "packed", "holes"]


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", MODELS)
def test_every_form_of_a_batch_is_the_same_batch(name: str, form: str, batch_first: bool, backend: str) -> None:
    model = build(unrolled.nn, name, batch_first=batch_first)
    lengths, memory_lengths = [4, 1, 3], [2, 5, 1]
    x, memory = ([torch.randn(n, WIDTH, dtype=torch.float64) for n in own] for own in (lengths, memory_lengths))
    expected = call(model, name, Ragged.from_list(x), Ragged.from_list(memory), causal=True)
    options: dict[str, Any] = {"causal": True}
    if form == "ragged":
        given = [Ragged.from_list(x), Ragged.from_list(memory).to_padded(batch_first, 7, NAN)]
        options["memory_lengths"] = memory_lengths
    elif form == "nested":
        given = [torch.nested.as_nested_tensor(parts, layout=torch.jagged) for parts in (x, memory)]
    elif form == "packed":
        given = [pack_sequence(parts, enforce_sorted=False) for parts in (x, memory)]
    else:
        at = [[1, 2, 4, 5], [0], [0, 1, 5]] if form == "holes" else [[0, 1, 2, 3], [0], [0, 1, 2]]
        given = [torch.full((3, 6, WIDTH), NAN, dtype=torch.float64), Ragged.from_list(memory).to_padded(True, 5, NAN)]
        live = torch.zeros(3, 6, dtype=torch.bool)
        for b, own in enumerate(at):
            given[0][b, own], live[b, own] = x[b], True
        dead = [~live, torch.arange(5) >= torch.tensor(memory_lengths)[:, None]]
        if form == "lengths":
            options |= {"lengths": lengths, "memory_lengths": torch.tensor(memory_lengths)}
        elif form == "numbers":
            options |= {k: additive(m, torch.float64) for k, m in zip(("padding", "memory_padding"), dead, strict=True)}
        else:
            options |= dict(zip(("padding", "memory_padding"), dead, strict=True))
        given = given if batch_first else [g.transpose(0, 1) for g in given]
    y = call(model, name, *given, **options)
    if form in ("ragged", "packed"):
        y = y if form == "ragged" else Ragged.from_packed(y)
        same_bits(y.values, expected.values)
    elif form == "nested":
        same_bits(y.values(), expected.values)
    else:
        y = y if batch_first else y.transpose(0, 1)
        assert y.shape == (3, 6, WIDTH), "the output keeps the length of the input"
        assert not bool(y[~live].any())
        close(y[live], expected.values, TRANSFORMER)
        if form != "holes":
            same_bits(y[live], expected.values)


def test_a_narrowed_nested_tensor_has_holes_that_are_not_read(backend: str) -> None:
    model = build(unrolled.nn, "TransformerEncoder", batch_first=True)
    x = torch.randn(3, 9, WIDTH, dtype=torch.float64)
    start, length = torch.tensor([1, 0, 2]), torch.tensor([4, 2, 7])
    parts = [x[b, s : s + n] for b, (s, n) in enumerate(zip(start, length, strict=True))]
    expected = model(Ragged.from_list(parts))
    padded = torch.full_like(x, NAN)
    for b, (s, n) in enumerate(zip(start, length, strict=True)):
        padded[b, s : s + n] = parts[b]
    y = model(torch.nested.narrow(padded, 1, start, length, layout=torch.jagged))
    assert y.is_nested
    same_bits(Ragged.from_nested(y).values, expected.values)
    grads = gradients(model, Ragged.from_nested(y).values)
    assert all(bool(g.isfinite().all()) for g in grads)


@pytest.mark.parametrize("name", MODELS)
def test_train_eval_and_no_grad_agree_to_the_bit(name: str, backend: str) -> None:
    model = build(unrolled.nn, name, batch_first=True, dtype=torch.float32)
    dropping = build(unrolled.nn, name, batch_first=True, dropout=0.5, dtype=torch.float32).eval()
    dropping.load_state_dict(model.state_dict())
    x, memory = torch.randn(BATCH, TIME, WIDTH), torch.randn(BATCH, 6, WIDTH)
    padding = torch.tensor([[0, 0, 0, 1], [0, 1, 1, 1], [0, 0, 1, 1]]).bool()
    for mask in (None, padding, additive(padding, torch.float32), padding.flip(1)):
        expected = call(model.train(), name, x, memory, padding=mask)
        assert mask is None or not torch.equal(expected, call(model, name, x, memory)), "the mask is heeded"
        for context in (torch.enable_grad(), torch.no_grad(), torch.inference_mode()):
            with context:
                for other in (model.eval(), model.train(), dropping):
                    same_bits(call(other, name, x, memory, padding=mask), expected)
    y = call(model.eval(), name, x, memory)
    assert all(bool(g.isfinite().all()) for g in gradients(model, y)), "backward works in eval"


@pytest.mark.parametrize("name", MODELS)
def test_causal_is_a_command_with_a_mask_and_without(name: str, backend: str) -> None:
    model = build(unrolled.nn, name, batch_first=True)
    x, memory = (torch.randn(BATCH, n, WIDTH, dtype=torch.float64) for n in (TIME, 6))
    later = torch.ones(TIME, TIME, dtype=torch.bool).triu(1)
    names = {"Encoder": ("mask", "is_causal"), "EncoderLayer": ("src_mask", "is_causal")}
    mask, hint = names.get(name.removeprefix("Transformer"), ("tgt_mask", "tgt_is_causal"))
    expected = call(model, name, x, memory, **{mask: later})
    for more in ({"causal": True}, {hint: True}, {mask: additive(later, torch.float64), hint: True}):
        same_bits(call(model, name, x, memory, **more), expected)
    changed = x.clone()
    changed[:, -1] += 1
    for more in ({"causal": True}, {hint: True}, {mask: later}, {mask: torch.zeros_like(later), hint: True}):
        close(call(model, name, changed, memory, **more)[:, :-1], expected[:, :-1], TRANSFORMER)
    wide = later.expand(BATCH * HEADS, -1, -1)
    close(call(model, name, x, memory, **{mask: wide}), expected, TRANSFORMER)


@pytest.mark.parametrize("dead", ["padding", "lengths", "holes"])
@pytest.mark.parametrize("name", MODELS)
def test_a_sequence_without_a_token_is_zero_and_changes_nothing(name: str, dead: str, backend: str) -> None:
    model = build(unrolled.nn, name, batch_first=True)
    x, memory = (torch.randn(BATCH, n, WIDTH, dtype=torch.float64) for n in (TIME, 6))
    padding = torch.zeros(BATCH, TIME, dtype=torch.bool)
    padding[1] = True
    if dead == "holes":
        padding[0, 1] = True
    memory_padding = torch.zeros(BATCH, 6, dtype=torch.bool)
    memory_padding[2] = True
    given: dict[str, Any] = {"padding": padding, "memory_padding": memory_padding}
    if dead == "lengths":
        given = {"lengths": [TIME, 0, TIME], "memory_lengths": [6, 6, 0]}
    x.requires_grad_()
    y = call(model, name, x, memory, **given)
    assert bool(y.isfinite().all())
    assert not bool(y[1].any())
    grads = torch.autograd.grad(y.pow(3).sum(), [x, *model.parameters()])
    assert all(bool(g.isfinite().all()) for g in grads)
    assert not bool(grads[0][1].any())
    own = {k: v[:1] for k, v in given.items()}
    close(y[:1], call(model, name, x[:1], memory[:1], **own), TRANSFORMER)
    empty = call(model, name, x[:0], memory[:0])
    assert empty.shape == (0, TIME, WIDTH)
    nothing = call(model, name, x[:, :0], memory)
    assert nothing.shape == (BATCH, 0, WIDTH)


def test_a_decoder_that_reads_nothing_reads_zero(backend: str) -> None:
    layer = build(unrolled.nn, "TransformerDecoderLayer", batch_first=True)
    x = torch.randn(BATCH, TIME, WIDTH, dtype=torch.float64)
    silent = copy.deepcopy(layer)
    with torch.no_grad():
        silent.multihead_attn.out_proj.weight.zero_()
    memory = torch.full((BATCH, 6, WIDTH), NAN, dtype=torch.float64)
    close(layer(x, memory, memory_lengths=[0] * BATCH), silent(x, torch.zeros_like(memory)), TRANSFORMER)


def test_numbers_in_a_padding_mask_are_added_and_minus_infinity_is_padding(backend: str) -> None:
    model = build(unrolled.nn, "TransformerEncoder", batch_first=True)
    x = torch.randn(BATCH, TIME, WIDTH, dtype=torch.float64)
    numbers = torch.randn(BATCH, TIME, dtype=torch.float64)
    mask = numbers[:, None, None].expand(-1, HEADS, TIME, -1).flatten(0, 1)
    close(model(x, src_key_padding_mask=numbers), model(x, mask), TRANSFORMER)
    for live in ([True, True, False, False], [True, False, True, False]):
        numbers = torch.where(torch.tensor(live), numbers, -float("inf"))
        y = model(x, src_key_padding_mask=numbers)
        assert not bool(y[:, ~torch.tensor(live)].any())
        rest = model(x[:, live], src_key_padding_mask=numbers[:, live])
        close(y[:, live], rest, TRANSFORMER)


def test_the_memory_is_padded_as_its_source(backend: str) -> None:
    model = build(unrolled.nn, "Transformer", batch_first=True)
    src, tgt = (torch.randn(BATCH, n, WIDTH, dtype=torch.float64) for n in (6, TIME))
    padding = torch.arange(6) >= torch.tensor([3, 6, 1])[:, None]
    expected = model(src, tgt, src_key_padding_mask=padding, memory_key_padding_mask=padding)
    for more in ({"src_key_padding_mask": padding}, {"src_lengths": [3, 6, 1]}):
        close(model(src, tgt, **more), expected, TRANSFORMER)
    less = padding.clone()
    less[1, 2:] = True
    found = model(src, tgt, src_key_padding_mask=padding, memory_key_padding_mask=less)
    close(found[[0, 2]], expected[[0, 2]], TRANSFORMER)
    memory = model.encoder(src, src_key_padding_mask=padding)
    close(found, model.decoder(tgt, memory, memory_key_padding_mask=less), TRANSFORMER)


@pytest.mark.parametrize("name", MODELS)
def test_padding_and_neighbours_do_not_reach_a_dropout_mask(name: str, backend: str) -> None:
    model = build(unrolled.nn, name, batch_first=True, dropout=0.5)
    x, memory = (torch.randn(2, n, WIDTH, dtype=torch.float64) for n in (4, 6))
    results = []
    for padded, lengths in ((x, [4, 3]), (torch.cat([x, x], 1), [4, 3]), (torch.cat([x, x]), [4, 3, 1, 0])):
        torch.manual_seed(2)
        y = call(model, name, padded, memory.repeat(len(padded) // 2, 1, 1), lengths=lengths)
        results.append(y[:2, :4])
    torch.manual_seed(2)
    y = call(model, name, Ragged.from_padded(x, [4, 3], batch_first=True), memory)
    results.append(y.to_padded(batch_first=True))
    torch.manual_seed(2)
    results.append(call(model, name, x, memory, padding=torch.arange(4) >= torch.tensor([[4], [3]])))
    for other in results[1:]:
        close(other, results[0], TRANSFORMER)
    assert not torch.equal(call(model, name, x, memory), call(model, name, x, memory))


def test_each_dropout_has_its_own_rate_and_mode(backend: str) -> None:
    layer = build(unrolled.nn, "TransformerEncoderLayer", dropout=0.5, batch_first=True)
    x = torch.randn(BATCH, TIME, WIDTH, dtype=torch.float64)
    expected = layer.eval()(x)
    layer.train()
    for module in (layer.dropout, layer.dropout1, layer.dropout2):
        assert not torch.equal(layer(x), expected)
        module.p = 0.0
    assert not torch.equal(layer(x), expected)
    layer.self_attn.dropout = 0.0
    same_bits(layer(x), expected)
    layer.eval().dropout1.train().p = 0.5
    assert not torch.equal(layer(x), expected), "one module left in training, as for an estimate of the uncertainty"


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_parameter_receives_a_gradient(options: dict[str, Any], name: str, backend: str) -> None:
    model = build(unrolled.nn, name, batch_first=True, **options)
    x, memory = (torch.randn(BATCH, n, WIDTH, dtype=torch.float64) for n in (TIME, 6))
    y = call(model, name, x, memory)
    found = torch.autograd.grad((y * torch.randn_like(y)).sum(), list(model.parameters()))
    for (parameter, _), grad in zip(model.named_parameters(), found, strict=True):
        assert bool(grad.any()), parameter


def test_wrong_inputs() -> None:
    encoder, model = build(unrolled.nn, "TransformerEncoder"), build(unrolled.nn, "Transformer")
    x = torch.randn(TIME, BATCH, WIDTH, dtype=torch.float64)
    ragged = Ragged(x[0], [0, 1, BATCH])
    padding = torch.zeros(BATCH, TIME, dtype=torch.bool)
    for arguments, options, message in [
        ((x[..., 1:],), {}, "reads 8 features, the input has 7"),
        ((x,), {"lengths": [5, 1, 1]}, r"lie in \[0, 4\]"),
        ((x,), {"lengths": [1, 1, 1], "src_key_padding_mask": padding}, "give one of them"),
        ((ragged,), {"src_key_padding_mask": padding}, "belongs to a padded batch"),
        ((x,), {"src_key_padding_mask": padding.T}, r"\(3, 4\), found \(4, 3\)"),
        ((x, padding), {}, r"\(4, 4\) or \(6, 4, 4\), found \(3, 4\)"),
        ((x,), {"keys": [1]}, "one number for each of 3"),
    ]:
        with pytest.raises(ValueError, match=message):
            encoder(*arguments, **options)
    with pytest.raises(TypeError, match=r"found torch\.int64"):
        encoder(x, torch.zeros(TIME, TIME, dtype=torch.int64))
    with pytest.raises(ValueError, match="3 sequences of queries cannot read 2"):
        model(x[:, :2], x)
    with pytest.raises(TypeError, match=r"one dtype and device, found torch\.float32"):
        encoder(x.float())
