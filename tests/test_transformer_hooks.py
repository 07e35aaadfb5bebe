"""What stands in the place of a part, or hangs on it, is called; what a model is given wrongly, it says."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import unrolled.nn
from test_transformer import BATCH, NAMES, TIME, WIDTH, build
from tolerances import TRANSFORMER, close, same_bits
from unrolled import Ragged
from unrolled.ops.residual_norm import residual_norm


def test_rms_norms_without_epsilon_agree_in_half_precision(backend: str) -> None:
    x = torch.randn(BATCH, WIDTH).half() / 100
    norm = unrolled.nn.RMSNorm(WIDTH, dtype=torch.float16)
    _, y = residual_norm(x, torch.zeros_like(x), norm.weight, kind="rms", epsilon=None)
    same_bits(y, norm(x))


def test_rms_norms_of_a_layer_agree_in_half_precision() -> None:
    x = torch.randn(BATCH, WIDTH).half() / 100
    layer = build(unrolled.nn, "TransformerEncoderLayer", norm="rms", dtype=torch.float16)
    layer.norm1.eps = layer.norm2.eps = None
    with torch.no_grad():
        for p in (*layer.linear2.parameters(), *layer.self_attn.out_proj.parameters()):
            p.zero_()
    same_bits(layer(x), layer.norm2(layer.norm1(x)))


@pytest.mark.parametrize("name", ["TransformerEncoder", "TransformerDecoder"])
def test_a_step_of_no_sequences(name: str, backend: str) -> None:
    model = build(unrolled.nn, name)
    none = Ragged(torch.zeros(0, WIDTH, dtype=torch.float64), [0])
    state = model.begin(0) if name == "TransformerEncoder" else model.begin(none)
    assert len(model.step(none, state)) == 0


def test_extended_attention_of_no_sequences(backend: str) -> None:
    none = Ragged(torch.zeros(0, WIDTH), [0])
    other = Ragged(torch.zeros(0, WIDTH), [0])
    for option in ({"add_zero_attn": True}, {"add_bias_kv": True}):
        y, weights = unrolled.nn.MultiheadAttention(WIDTH, 2, **option)(none, other, other)
        assert len(y) == 0
        assert len(weights) == 0


def test_a_state_goes_with_its_model() -> None:
    encoder, decoder = (build(unrolled.nn, name) for name in ("TransformerEncoder", "TransformerDecoder"))
    x = torch.randn(1, BATCH, WIDTH, dtype=torch.float64)
    states = encoder.begin(BATCH), decoder.begin(x), unrolled.nn.TransformerEncoder(encoder.layers[0], 3).begin(BATCH)
    assert all(isinstance(state, unrolled.nn.State) for state in states)
    for model, state, found in (
        (decoder, states[0], "2 layers, 2 of which read a memory; the state is of one with 2 and 0"),
        (encoder, states[1], "2 layers, 0 of which read a memory; the state is of one with 2 and 2"),
        (encoder, states[2], "2 layers, 0 of which read a memory; the state is of one with 3 and 0"),
    ):
        with pytest.raises(ValueError, match=found):
            model.step(x, state)


def test_sequences_to_go_on_with_are_indices() -> None:
    state = build(unrolled.nn, "TransformerEncoder").begin(3)
    for wrong in ([0.5], torch.tensor([True, False, True]), "1"):
        with pytest.raises(TypeError, match="sequences must be"):
            state.select(wrong)
    with pytest.raises(ValueError, match=r"in one dimension, found shape \(1, 1\)"):
        state.select([[0]])
    state.select([])
    assert len(state.lengths) == 0


def test_keys_and_values_of_two_shapes() -> None:
    x, key = torch.zeros(3, 5, WIDTH), torch.zeros(3, 4, WIDTH)
    attention = unrolled.nn.MultiheadAttention(WIDTH, 2, batch_first=True)
    with pytest.raises(ValueError, match=r"shapes \(3, 4, 8\) and \(2, 6, 8\)"):
        attention(x, key, key.reshape(2, 6, WIDTH))
    with pytest.raises(ValueError, match=r"shapes \(12, 8\) and \(2, 6, 8\)"):
        attention(x, Ragged.from_padded(key, [4] * 3, True), key.reshape(2, 6, WIDTH))


class Nothing(torch.nn.Dropout):
    """A dropout that is one by name alone."""

    calls = 0

    def forward(self, input: Tensor) -> Tensor:
        self.calls += 1
        return torch.zeros_like(input)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_another_dropout_is_called(name: str, norm_first: bool, backend: str) -> None:
    layer = build(unrolled.nn, name, norm_first=norm_first, dropout=0.5)
    peer = build(torch.nn, name, norm_first=norm_first)
    peer.load_state_dict(layer.state_dict())
    inputs = [torch.randn(TIME, BATCH, WIDTH, dtype=torch.float64) for _ in range(1 + ("Decoder" in name))]
    names = [n for n, _ in layer.named_children() if n.startswith("dropout")]
    for own in names:
        for module in (layer, peer):
            setattr(module, own, Nothing())
            for other in names:
                if other != own:
                    setattr(module, other, torch.nn.Identity())
                (module.self_attn.dropout, getattr(module, "multihead_attn", module.self_attn).dropout) = 0.0, 0.0
        close(layer(*inputs), peer(*inputs), TRANSFORMER)
        assert getattr(layer, own).calls == 1


@pytest.mark.parametrize("name", NAMES)
def test_hooks_on_parts_of_a_layer(name: str, backend: str) -> None:
    layer = build(unrolled.nn, name)
    inputs = [torch.randn(TIME, BATCH, WIDTH, dtype=torch.float64) for _ in range(1 + ("Decoder" in name))]
    expected = layer(*inputs)
    seen: list[str] = []
    parts = [n for n, m in layer.named_modules() if "dropout" in n or n.endswith("out_proj")]
    for part in parts:
        module = layer.get_submodule(part)
        module.register_forward_hook(lambda *_, part=part: seen.append(part))
        module.register_full_backward_hook(lambda *_, part=part: seen.append("d" + part))
    y = layer(*inputs)
    close(y, expected, TRANSFORMER)
    y.sum().backward()
    assert sorted(seen) == sorted([*parts, *("d" + part for part in parts)])


def test_hooks_on_the_encoder_and_the_decoder(backend: str) -> None:
    model = build(unrolled.nn, "Transformer", batch_first=True)
    src, tgt = (torch.randn(BATCH, TIME, WIDTH, dtype=torch.float64) for _ in range(2))
    lengths = {"src_lengths": [1, 4, 0], "lengths": [4, 2, 1], "return_attention": True}
    expected = model(src, tgt, **lengths)
    seen: list[str] = []
    for part in ("encoder", "decoder"):
        getattr(model, part).register_forward_hook(lambda *_, part=part: seen.append(part))
    for found, reference in zip(model(src, tgt, **lengths), expected, strict=True):
        for a, b in zip(found, reference, strict=True):
            same_bits(a, b)
    assert seen == ["encoder", "decoder"]
    model.decoder.register_forward_pre_hook(lambda _, args: (args[0] * 0, *args[1:]))
    close(model(src, tgt), model(src, tgt * 0), TRANSFORMER)
    model.begin(src)
    assert seen.count("encoder") == 4


@pytest.mark.parametrize("size", [2, 4, 9])
def test_a_mask_of_another_size_than_the_longest(size: int) -> None:
    encoder = build(unrolled.nn, "TransformerEncoder")
    decoder = build(unrolled.nn, "TransformerDecoder")
    x = Ragged(torch.randn(5, WIDTH, dtype=torch.float64), [0, 2, 5])
    wrong, right = torch.zeros(size, size), torch.zeros(3, 3)
    message = rf"shape \(3, 3\) or \(4, 3, 3\), found \({size}, {size}\)"
    for call in (
        lambda: encoder(x, wrong),
        lambda: decoder(x, x, wrong),
        lambda: decoder(x, x, right, wrong),
        lambda: encoder.layers[0].self_attn(x, x, x, attn_mask=wrong),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    close(encoder(x, right).values, encoder(x).values, TRANSFORMER)
