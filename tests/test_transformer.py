"""The Transformer of unrolled.nn against torch.nn: its layers, its encoder, its decoder, the whole."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import unrolled
from covering import Option, covering
from peers import agree
from test_multihead_attention import additive, mask_of, padding_of
from tolerances import TRANSFORMER, close, same_bits

WIDTH, HEADS, UNITS, BATCH, TIME, MEMORY = 8, 2, 12, 3, 4, 5
NAMES = ["TransformerEncoderLayer", "TransformerDecoderLayer"]
CHOICES: dict[str, list[Option]] = {
    "layer": [{"name": name} for name in (*NAMES, "TransformerEncoder", "TransformerDecoder", "Transformer")],
    "norm_first": [{}, {"norm_first": True}],
    "batch_first": [{}, {"batch_first": True}],
    "bias": [{}, {"bias": False}],
    "heads": [{"nhead": heads} for heads in (1, 2, 4)],
    "activation": [{}, {"activation": "gelu"}, {"activation": torch.tanh}, {"activation": F.silu}],
    "mask": [{}, *({"mask": m} for m in ("bool2", "bool3", "float2", "causal"))],
    "padding": [{}, *({"padding": p} for p in ("suffix", "holes", "numbers"))],
    "memory": [{}, {"memory_padding": "suffix"}, {"memory_padding": "holes", "memory_mask": "float2"}],
    "eps": [{}, {"layer_norm_eps": 1e-3}],
    "dtype": [{}, {"dtype": torch.float32}],
    "alone": [{}, {}, {"alone": True}],
}
ROWS = covering(CHOICES)
_OWN = ("name", "mask", "padding", "memory_padding", "memory_mask", "alone")


def build(module: Any, name: str, **options: Any) -> nn.Module:
    """Of torch.nn or of unrolled.nn, without dropout if nothing else is said."""
    options = {"nhead": HEADS, "dim_feedforward": UNITS, "dropout": 0.0, "dtype": torch.float64, **options}
    if name == "Transformer":
        return module.Transformer(WIDTH, num_encoder_layers=2, num_decoder_layers=2, **options)
    part = name.removesuffix("Layer")
    layer = getattr(module, f"{part}Layer")(WIDTH, **options)
    if part != name:
        return layer
    norm = nn.LayerNorm(WIDTH, dtype=options["dtype"]) if options.get("norm_first") else None
    more = {"enable_nested_tensor": False} if name == "TransformerEncoder" else {}
    return getattr(module, name)(layer, 2, norm, **more)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")  # torch, of its own encoder
def twins(name: str, **options: Any) -> tuple[Any, Any]:
    """Ours and torch's, with the same parameters, all of them at random."""
    ours, peer = build(unrolled.nn, name, **options), build(nn, name, **options)
    with torch.no_grad():
        for p in ours.parameters():
            p.copy_(torch.randn_like(p) / 2)
    peer.load_state_dict(ours.state_dict())
    return ours, peer


def arguments(name: str, masks: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    """The masks under the names that this module has for them."""
    if "Encoder" in name:
        mask = "src_mask" if name.endswith("Layer") else "mask"
        return {mask: masks["mask"], "src_key_padding_mask": masks["padding"]}
    named = {
        "tgt_mask": masks["mask"],
        "tgt_key_padding_mask": masks["padding"],
        "memory_mask": masks["memory_mask"],
        "memory_key_padding_mask": masks["memory_padding"],
    }
    return named | ({"src_key_padding_mask": masks["memory_padding"]} if name == "Transformer" else {})


def one_kind(masks: dict[str, Tensor | None], dtype: torch.dtype) -> dict[str, Tensor | None]:
    """For torch, which warns where a mask of bool meets one of numbers."""
    masks = {k: m if m is None or m.dtype == torch.bool else m.to(dtype) for k, m in masks.items()}
    kinds = {m.dtype for m in masks.values() if m is not None}
    return {k: additive(m, dtype) for k, m in masks.items()} if len(kinds) > 1 else masks


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")  # torch, of its own encoder
@pytest.mark.parametrize("options", ROWS, ids=str)
def test_everything_that_torch_has(options: dict[str, Any], backend: str) -> None:
    options = dict(options)
    name, mask, padding, memory_padding, memory_mask, alone = (options.pop(own, None) for own in _OWN)
    dtype = options.get("dtype", torch.float64)
    ours, peer = twins(name, **options)
    batch, heads = 1 if alone else BATCH, options["nhead"]
    masks = {
        "mask": mask_of(mask, heads, TIME, TIME, batch, dtype),
        "padding": padding_of(padding, batch, TIME, dtype),
        "memory_mask": mask_of(memory_mask, heads, TIME, MEMORY, batch, dtype),
        "memory_padding": padding_of(memory_padding, batch, MEMORY, dtype),
    }
    tokens = live(masks["padding"], batch, TIME)

    def lead(steps: int) -> tuple[int, ...]:
        if alone:
            return (steps,)
        return (batch, steps) if options.get("batch_first") else (steps, batch)

    x = torch.randn(*lead(TIME), WIDTH, dtype=dtype)
    inputs = [x] if "Encoder" in name else [x, torch.randn(*lead(MEMORY), WIDTH, dtype=dtype)]

    def call(module: nn.Module, *x: Tensor, masks: dict[str, Tensor | None] = masks) -> tuple[Tensor]:
        x = x[::-1] if name == "Transformer" else x
        given = arguments(name, masks)
        if alone:
            given = {k: m if m is None or "padding" not in k else m[0] for k, m in given.items()}
        y = module(*x, **given)
        y = y[None] if alone else y if options.get("batch_first") else y.transpose(0, 1)
        return (y[tokens],)  # what stands in the padding is 0 with us, and anything with torch

    in_double = one_kind(masks, torch.float64)
    agree(ours, peer, call, *inputs, other=lambda m, *x: call(m, *x, masks=in_double), terms=TRANSFORMER)


def live(padding: Tensor | None, batch: int, steps: int) -> Tensor:
    if padding is None:
        return torch.ones(batch, steps, dtype=torch.bool)
    return ~padding if padding.dtype == torch.bool else padding != -float("inf")


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")  # torch, of its own encoder
@pytest.mark.parametrize("name", [*NAMES, "Transformer"])
def test_arguments_and_first_values_are_torchs(name: str) -> None:
    for method in ("__init__", "forward"):
        own, theirs = (
            list(inspect.signature(getattr(getattr(m, name), method)).parameters.values()) for m in (unrolled.nn, nn)
        )
        own = [p for p in own if p.kind != inspect.Parameter.KEYWORD_ONLY]
        assert [(p.name, p.default) for p in own] == [(p.name, p.default) for p in theirs]
    for options in ({}, {"norm_first": True, "batch_first": True, "bias": False}):
        pair = []
        for module in (unrolled.nn, nn):
            torch.manual_seed(3)
            pair.append(build(module, name, **options))
        ours, peer = pair
        assert list(ours.state_dict()) == list(peer.state_dict())
        for found, expected in zip(ours.parameters(), peer.parameters(), strict=True):
            same_bits(found, expected)
        assert repr(ours) == repr(peer)


@pytest.mark.parametrize("name", ["TransformerEncoder", "TransformerDecoder"])
def test_arguments_of_encoder_and_decoder_are_torchs(name: str) -> None:
    for method in ("__init__", "forward"):
        own, theirs = (
            list(inspect.signature(getattr(getattr(m, name), method)).parameters.values()) for m in (unrolled.nn, nn)
        )
        own = [p for p in own if p.kind != inspect.Parameter.KEYWORD_ONLY]
        assert [(p.name, p.default) for p in own] == [(p.name, p.default) for p in theirs]


def test_the_mask_of_later_positions() -> None:
    for given in ({}, {"dtype": torch.float64}):
        found = unrolled.nn.Transformer.generate_square_subsequent_mask(4, **given)
        same_bits(found, nn.Transformer.generate_square_subsequent_mask(4, **given))


# Activations, gates, norms


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda a: F.gelu(a, approximate="tanh"),
    "silu": F.silu,
}


def plain_layer(layer: Any, x: Tensor, name: str) -> Tensor:
    """The encoder layer line by line, for one sequence."""
    act = ACTIVATIONS[name]
    norms = [layer.norm1, layer.norm2]

    def norm(n: int, v: Tensor) -> Tensor:
        own = norms[n]
        if hasattr(own, "bias"):
            return F.layer_norm(v, (WIDTH,), own.weight, own.bias, own.eps)
        return v / (v.pow(2).mean(-1, keepdim=True) + own.eps).sqrt() * own.weight

    def attend(v: Tensor) -> Tensor:
        peer = nn.MultiheadAttention(WIDTH, HEADS, dtype=v.dtype)
        peer.load_state_dict(layer.self_attn.state_dict())
        return peer(v, v, v)[0]

    def feed_forward(v: Tensor) -> Tensor:
        a = v @ layer.linear1.weight.T + layer.linear1.bias
        h = act(a) if layer.gate is None else act(v @ layer.gate.weight.T + layer.gate.bias) * a
        return h @ layer.linear2.weight.T + layer.linear2.bias

    if layer.norm_first:
        x = x + attend(norm(0, x))
        return x + feed_forward(norm(1, x))
    x = norm(0, x + attend(x))
    return norm(1, x + feed_forward(x))


OPTIONS = covering(
    {
        "activation": [{"activation": name} for name in ACTIVATIONS],
        "gated": [{}, {"gated": True}],
        "norm": [{}, {"norm": "rms"}],
        "norm_first": [{}, {"norm_first": True}],
    }
)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_activations_gates_and_norms(options: dict[str, Any], backend: str) -> None:
    layer = build(unrolled.nn, "TransformerEncoderLayer", **options)
    x = torch.randn(TIME, WIDTH, dtype=torch.float64, requires_grad=True)
    y, expected = layer(x), plain_layer(layer, x, options["activation"])
    close(y, expected, TRANSFORMER)
    wanted = [p for n, p in layer.named_parameters() if "attn" not in n]
    direction = torch.randn_like(y)
    for found, reference in zip(
        torch.autograd.grad(y, wanted, direction), torch.autograd.grad(expected, wanted, direction), strict=True
    ):
        close(found, reference, TRANSFORMER)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_callable_does_what_the_name_says(name: str, gated: bool, backend: str) -> None:
    x = torch.randn(TIME, BATCH, WIDTH, dtype=torch.float64)
    inputs = [x] * (1 + ("Decoder" in name))
    for activation, own in ACTIVATIONS.items():
        layer = build(unrolled.nn, name, activation=activation, gated=gated)
        expected = layer(*inputs)
        layer.activation = lambda a, own=own: own(a)
        close(layer(*inputs), expected, TRANSFORMER)
    part = name.removesuffix("Layer")
    for module, activation in ((nn.ReLU(), "relu"), (nn.GELU("tanh"), "gelu_tanh"), (nn.SiLU(), "silu")):
        other = build(unrolled.nn, name, activation=module, gated=gated)
        layer = build(unrolled.nn, name, activation=activation, gated=gated)
        other.load_state_dict(layer.state_dict())
        same_bits(other(*inputs), layer(*inputs))
        # torch's decoder takes relu in the place of a module, without a word, when it copies its layer
        two, expected = (getattr(unrolled.nn, part)(one, 2) for one in (other, layer))
        same_bits(two(*inputs), expected(*inputs))


def test_positions_reach_the_self_attention(backend: str) -> None:
    x = torch.randn(BATCH, 6, WIDTH, dtype=torch.float64)
    for positions in ("rotary", "alibi"):
        model = build(unrolled.nn, "Transformer", positions=positions, batch_first=True)
        assert {m.positions for n, m in model.named_modules() if n.endswith("self_attn")} == {positions}
        assert {m.positions for n, m in model.named_modules() if n.endswith("multihead_attn")} == {None}
        plain = build(unrolled.nn, "Transformer", batch_first=True)
        plain.load_state_dict(model.state_dict())
        turned = x[:, [1, 0, 2, 3, 4, 5]]
        close(plain(turned, x), plain(x, x), TRANSFORMER)
        with pytest.raises(AssertionError, match="relative error"):
            close(model(turned, x), model(x, x), TRANSFORMER)


# The weights


@pytest.mark.parametrize("norm_first", [False, True])
def test_attention_of_each_layer_and_head(norm_first: bool, backend: str) -> None:
    model = build(unrolled.nn, "Transformer", norm_first=norm_first, batch_first=True)
    src, tgt = (torch.randn(BATCH, n, WIDTH, dtype=torch.float64) for n in (MEMORY, TIME))
    given = {"src_lengths": [5, 2, 3], "lengths": [1, 4, 0], "causal": True}
    y, encoder, own, over = model(src, tgt, return_attention=True, **given)
    same_bits(y, model(src, tgt, **given))
    assert [w.shape for w in encoder] == [(BATCH, HEADS, MEMORY, MEMORY)] * 2
    assert [w.shape for w in own] == [(BATCH, HEADS, TIME, TIME)] * 2
    assert [w.shape for w in over] == [(BATCH, HEADS, TIME, MEMORY)] * 2
    sums = [torch.zeros(BATCH, n, dtype=torch.float64) for n in (MEMORY, TIME)]
    for b, (s, t) in enumerate(zip([5, 2, 3], [1, 4, 0], strict=True)):
        sums[0][b, :s], sums[1][b, :t] = 1, 1
    for weights, expected in ((encoder, sums[0]), (own, sums[1]), (over, sums[1])):
        for w in weights:
            close(w.sum(-1), expected[:, None].expand(-1, HEADS, -1), MEMORY)
    assert not any(bool(w.triu(1).any()) for w in own)
    assert not any(bool(w[1, :, :, 2:].any()) for w in (*encoder, *over))
    layer = model.encoder.layers[0]
    x = layer.norm1(src) if norm_first else src
    _, expected = layer.self_attn(x, x, x, lengths=[5, 2, 3], average_attn_weights=False)
    close(encoder[0], expected, TRANSFORMER)
    one, weights = layer(src[0], return_attention=True)
    assert weights.shape == (HEADS, MEMORY, MEMORY)
    same_bits(one, layer(src[0]))


def test_attention_of_a_decoder_layer(backend: str) -> None:
    layer = build(unrolled.nn, "TransformerDecoderLayer")
    x, memory = (torch.randn(n, BATCH, WIDTH, dtype=torch.float64) for n in (TIME, MEMORY))
    y, own, over = layer(x, memory, return_attention=True)
    same_bits(y, layer(x, memory))
    _, expected = layer.self_attn(x, x, x, average_attn_weights=False)
    close(own, expected, TRANSFORMER)
    assert over.shape == (BATCH, HEADS, TIME, MEMORY)


# What else is said


def test_a_transformer_calls_parts_that_are_not_ours_as_torch_does() -> None:
    peer = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, HEADS, UNITS, 0.0), 1, enable_nested_tensor=False)
    ours = unrolled.nn.Transformer(WIDTH, HEADS, 1, 1, UNITS, 0.0, custom_encoder=peer)
    src, tgt = torch.randn(MEMORY, BATCH, WIDTH), torch.randn(TIME, BATCH, WIDTH)
    same_bits(ours(src, tgt), ours.decoder(tgt, peer(src)))
    with pytest.raises(ValueError, match="want an encoder and a decoder of ours"):
        ours(src, tgt, lengths=[1, 2, 3])


def test_wrong_arguments() -> None:
    for options, message in [
        ({"norm": "batch"}, '"layer" or "rms", found \'batch\''),
        ({"activation": "tanh"}, "one of relu, gelu, gelu_tanh, silu or a function, found 'tanh'"),
        ({"positions": "sinus"}, "positions must be"),
        ({"nhead": 3}, "multiple of num_heads"),
        ({"dropout": 2.0}, "dropout must lie in"),
    ]:
        for name in (*NAMES, "Transformer"):
            with pytest.raises(ValueError, match=message):
                build(unrolled.nn, name, **options)
    layers = [build(unrolled.nn, name) for name in NAMES]
    with pytest.raises(TypeError, match=r"unrolled\.nn\.TransformerEncoderLayer, found TransformerDecoderLayer"):
        unrolled.nn.TransformerEncoder(layers[1], 1)
    with pytest.raises(TypeError, match=r"unrolled\.nn\.TransformerDecoderLayer, found TransformerEncoderLayer"):
        unrolled.nn.TransformerDecoder(layers[0], 1)
    with pytest.raises(ValueError, match="num_layers must be at least 1, found 0"):
        unrolled.nn.TransformerEncoder(layers[0], 0)


def test_copies_of_a_layer_are_its_own_parameters_with_the_same_values(backend: str) -> None:
    encoder = build(unrolled.nn, "TransformerEncoder")
    first, second = (dict(layer.named_parameters()) for layer in encoder.layers)
    assert all(first[name] is not second[name] for name in first)
    for name, p in first.items():
        same_bits(second[name], p)
