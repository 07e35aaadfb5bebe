"""What stands in the place of a part, or hangs on it, is called; what a model is given wrongly, it says."""

from __future__ import annotations

import pytest
import torch

import unrolled.nn
from test_transformer import BATCH, WIDTH, build
from tolerances import same_bits
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
