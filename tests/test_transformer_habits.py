"""What PyTorch's users do to a module works on attention and the Transformer too."""

from __future__ import annotations

import copy
import shutil
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint

import unrolled
from test_multihead_attention import additive
from test_transformer import BATCH, HEADS, NAMES, TIME, UNITS, WIDTH, build
from test_transformer_masks import MODELS, OPTIONS, call, gradients
from tolerances import HALF_REFUSED, TRANSFORMER, close, same_bits

from_torchs_compiler = pytest.mark.filterwarnings("ignore::DeprecationWarning")
from_torchs_encoder = pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
every_model = pytest.mark.parametrize("name", MODELS)
COMPILERS = ["aot_eager", *(["inductor"] if shutil.which("g++") else [])]


def example(batch: int = BATCH, steps: int = TIME, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """For batch_first: the tokens, and a memory."""
    return torch.randn(batch, steps, WIDTH, dtype=dtype), torch.randn(batch, steps + 1, WIDTH, dtype=dtype)


def masks(kind: str, batch: int, steps: int) -> dict[str, Any]:
    if kind == "lengths":
        lengths, memory = (torch.randint(0, n + 1, (batch,)) for n in (steps, steps + 1))
        return {"lengths": lengths, "memory_lengths": memory, "causal": True}
    padding = torch.rand(batch, steps) < 0.4
    if kind == "padding":
        return {"padding": padding}
    return {"padding": additive(padding, torch.float64)} if kind == "numbers" else {}


# torch.compile, torch.export, torch.func


@from_torchs_compiler
@pytest.mark.parametrize(
    ("name", "kind"),
    [(NAMES[0], "lengths"), (NAMES[0], "padding"), (NAMES[1], "numbers")],  # half a minute each: that is the compiler
)
def test_compile_without_a_break(name: str, kind: str) -> None:
    torch._dynamo.reset()
    options = OPTIONS[1] if kind == "lengths" else OPTIONS[2] if kind == "padding" else {}
    model = build(unrolled.nn, name, batch_first=True, **options)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    for batch, steps in ((3, 6), (5, 4)):
        x, memory = example(batch, steps)
        given = masks(kind, batch, steps)
        y, expected = (call(m, name, x, memory, **given) for m in (compiled, model))
        close(y, expected, TRANSFORMER)
        for found, reference in zip(gradients(model, y), gradients(model, expected), strict=True):
            close(found, reference, TRANSFORMER)


@from_torchs_compiler
@pytest.mark.parametrize("compiler", COMPILERS)
def test_a_training_step_compiles_and_draws_new_masks(compiler: str) -> None:
    torch._dynamo.reset()
    model = build(unrolled.nn, "TransformerEncoder", batch_first=True, dropout=0.5)
    compiled = torch.compile(model, fullgraph=True, backend=compiler)
    x, _ = example()
    first = compiled(x)
    assert all(bool(g.isfinite().all()) for g in gradients(model, first))
    assert not torch.equal(first, compiled(x))
    close(torch.compile(model.eval(), fullgraph=True, backend=compiler)(x), model(x), TRANSFORMER)


@from_torchs_compiler
def test_attention_compiles_with_its_weights() -> None:
    torch._dynamo.reset()
    attn = unrolled.nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, dtype=torch.float64)
    compiled = torch.compile(attn, fullgraph=True, backend="aot_eager", dynamic=True)
    for batch, steps in ((3, 6), (5, 4)):
        x, _ = example(batch, steps)
        for own, reference in zip(compiled(x, x, x), attn(x, x, x), strict=True):
            close(own, reference, TRANSFORMER)


@pytest.mark.parametrize("kind", ["nothing", "lengths", "padding"])
@pytest.mark.parametrize("name", ["TransformerEncoderLayer", "TransformerEncoder"])
def test_export_with_free_batch_and_time(name: str, kind: str) -> None:
    model = build(unrolled.nn, name, batch_first=True, **OPTIONS[1]).eval()
    words = {"padding": "src_key_padding_mask"}

    def options(batch: int, steps: int) -> dict[str, Any]:
        found = masks(kind, batch, steps)
        return {words.get(k, k): v for k, v in found.items() if k in ("lengths", "padding")}

    batch, time = torch.export.Dim("batch"), torch.export.Dim("time")
    given = options(3, 6)
    shapes = {k: {0: batch} if k == "lengths" else {0: batch, 1: time} for k in given}
    program = torch.export.export(
        model, (example(3, 6)[0],), given, dynamic_shapes={"src": {0: batch, 1: time}, **shapes}
    )
    for sizes in ((3, 6), (1, 1), (7, 13)):
        x, given = example(*sizes)[0], options(*sizes)
        close(program.module()(x, **given), model(x, **given), TRANSFORMER)


@pytest.mark.parametrize("kind", ["nothing", "lengths", "padding"])
@every_model
def test_gradients_per_example_by_vmap(name: str, kind: str, backend: str) -> None:
    model = build(unrolled.nn, name, batch_first=True)
    x, memory = example()
    given = {k: v for k, v in masks(kind, BATCH, TIME).items() if isinstance(v, Tensor)}
    parameters = {n: p.detach() for n, p in model.named_parameters()}

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor, memory: Tensor, given: dict[str, Tensor]) -> Tensor:
            one = {k: v[None] for k, v in given.items()}
            y: Tensor = call(self.model, name, x[None], memory[None], **one)
            return y.pow(3).sum()

    loss = Loss()

    def of(p: dict[str, Tensor], *inputs: Any) -> Tensor:
        return torch.func.functional_call(loss, {f"model.{n}": v for n, v in p.items()}, inputs)  # type: ignore[no-any-return]

    found = torch.func.vmap(torch.func.grad(of), in_dims=(None, 0, 0, 0))(parameters, x, memory, given)
    for b in range(BATCH):
        value = loss(x[b], memory[b], {k: v[b] for k, v in given.items()})
        expected = torch.autograd.grad(value, list(model.parameters()))
        for n, reference in zip(parameters, expected, strict=True):
            close(found[n][b], reference, TRANSFORMER)


@every_model
def test_second_derivatives_under_equations_and_a_clear_error_elsewhere(name: str) -> None:
    model = build(unrolled.nn, name, batch_first=True, activation="gelu")
    x, memory = example(1, 2)
    x.requires_grad_()
    with unrolled.use("equations"):
        torch.autograd.gradgradcheck(lambda x: call(model, name, x, memory), (x,))
    (grad,) = torch.autograd.grad(call(model, name, x, memory).pow(3).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"closed form.*unrolled.use"):
        grad.sum().backward()


# Copies, dtypes, devices


@every_model
def test_copies_state_dicts_and_functional_call(name: str, backend: str) -> None:
    model = build(unrolled.nn, name, batch_first=True, **OPTIONS[2])
    x, memory = example()
    expected = call(model, name, x, memory)
    twin, other = copy.deepcopy(model), build(unrolled.nn, name, batch_first=True, **OPTIONS[2])
    other.load_state_dict(model.state_dict())
    for module in (twin, other):
        same_bits(call(module, name, x, memory), expected)
        assert repr(module) == repr(model)
    for p in twin.parameters():
        p.data.zero_()
    same_bits(call(model, name, x, memory), expected)


@every_model
def test_autocast_computes_in_float32(name: str, backend: str) -> None:
    model = build(unrolled.nn, name, batch_first=True, dtype=torch.float32)
    x, memory = example(dtype=torch.float32)
    padding = torch.tensor([[0, 0, 1, 1], [0, 1, 0, 0], [0, 0, 0, 0]]).float() * -1
    expected = call(model, name, x, memory, padding=padding)
    with torch.autocast("cpu", torch.bfloat16):
        same_bits(call(model, name, x, memory, padding=padding), expected)
        half = call(model, name, x.bfloat16(), memory.bfloat16())
    assert half.dtype == torch.float32
    same_bits(half, call(model, name, x.bfloat16().float(), memory.bfloat16().float()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@every_model
def test_half_precision_is_computed_as_such_by_the_equations(name: str, dtype: torch.dtype) -> None:
    model = build(unrolled.nn, name, batch_first=True, dtype=dtype, **OPTIONS[1])
    precise = copy.deepcopy(model).double()
    x, memory = example(dtype=dtype)
    y = call(model, name, x, memory)
    expected = call(precise, name, x.double(), memory.double())
    assert y.dtype == dtype
    close(y, expected, HALF_TERMS)
    with pytest.raises(AssertionError, match="relative error"):
        close(y * HALF_REFUSED, expected, HALF_TERMS)


HALF_TERMS = 4


@every_model
def test_the_meta_device_has_shapes(name: str) -> None:
    model = build(unrolled.nn, name, batch_first=True, device="meta")
    x, memory = (t.to("meta") for t in example())
    padding = torch.empty(BATCH, TIME, dtype=torch.bool, device="meta")
    for given in ({}, {"padding": padding}, {"causal": True}):
        assert call(model, name, x, memory, **given).shape == (BATCH, TIME, WIDTH)


# Hooks, other modules in the place of ours


@every_model
def test_hooks_of_a_layer_see_what_torchs_see(name: str, backend: str) -> None:
    model = build(unrolled.nn, name, batch_first=True)
    x, memory = example()
    padding = torch.tensor([[0, 0, 1, 1], [0, 0, 0, 1], [0, 0, 0, 0]]).bool()
    expected = call(model, name, x, memory, padding=padding)
    seen: list[Any] = []
    layers = [m for m in model.modules() if type(m).__name__ in NAMES]
    for module in layers:
        module.register_forward_hook(lambda module, args, y: seen.append(y))
    close(call(model, name, x, memory, padding=padding), expected, TRANSFORMER)
    assert len(seen) == len(layers)
    assert all(y.shape == (*x.shape[:2], WIDTH) or y.shape == memory.shape for y in seen)
    close(seen[-1][~padding], expected[~padding] if name != "Transformer" else seen[-1][~padding], TRANSFORMER)


@pytest.mark.parametrize("place", ["self_attn", "linear1", "linear2", "norm1", "norm2"])
@pytest.mark.parametrize("name", NAMES)
def test_hooks_within_a_layer(name: str, place: str, backend: str) -> None:
    layer = build(unrolled.nn, name, batch_first=True)
    x, memory = example()
    given = {"lengths": [4, 2, 0]}
    expected, calls = call(layer, name, x, memory, **given), []
    handle = getattr(layer, place).register_forward_hook(lambda *_: calls.append(place))
    close(call(layer, name, x, memory, **given), expected, TRANSFORMER)
    assert calls == [place]
    handle.remove()
    same_bits(call(layer, name, x, memory, **given), expected)


@pytest.mark.parametrize("name", NAMES)
def test_other_modules_in_the_place_of_ours(name: str, backend: str) -> None:
    layer = build(unrolled.nn, name, batch_first=True)
    x, memory = example()
    expected = call(layer, name, x, memory)

    class Doubled(nn.Module):
        def __init__(self, inside: nn.Module) -> None:
            super().__init__()
            self.inside = inside

        def forward(self, x: Tensor) -> Tensor:
            return 2 * self.inside(x) / 2  # type: ignore[no-any-return]

    for place in ("linear1", "linear2", "norm1", "norm2"):
        setattr(layer, place, Doubled(getattr(layer, place)))
        close(call(layer, name, x, memory), expected, TRANSFORMER)
    layer.self_attn.out_proj = Doubled(layer.self_attn.out_proj)
    close(call(layer, name, x, memory), expected, TRANSFORMER)
    layer.dropout1 = nn.Identity()
    close(call(layer, name, x, memory), expected, TRANSFORMER)
    same_bits(call(layer.eval(), name, x, memory), call(layer.train(), name, x, memory))


@pytest.mark.parametrize("name", NAMES)
def test_parametrizations(name: str, backend: str) -> None:
    layer = build(unrolled.nn, name, batch_first=True)
    x, memory = example()
    expected = call(layer, name, x, memory)
    parametrizations.weight_norm(layer.linear1)
    parametrizations.weight_norm(layer.self_attn, "in_proj_weight")
    close(call(layer, name, x, memory), expected, TRANSFORMER)
    names = {n for n, p in layer.named_parameters() if "parametrizations" in n}
    assert len(names) == 4
    assert all(bool(g.any()) for g in gradients(layer, call(layer, name, x, memory) * torch.rand(WIDTH).double()))
    parametrize.remove_parametrizations(layer.linear1, "weight")
    close(call(layer, name, x, memory), expected, TRANSFORMER)


@every_model
def test_activation_checkpointing_draws_the_same_mask_again(name: str, backend: str) -> None:
    model = build(unrolled.nn, name, batch_first=True, dropout=0.5)
    x, memory = example()

    def run(function: Any) -> list[Tensor]:
        torch.manual_seed(4)
        return gradients(model, function(x))

    def plain(x: Tensor) -> Tensor:
        return call(model, name, x, memory)  # type: ignore[no-any-return]

    for found, reference in zip(run(lambda x: checkpoint(plain, x, use_reentrant=False)), run(plain), strict=True):
        same_bits(found, reference)


# convert


@from_torchs_encoder
@pytest.mark.parametrize("options", [{}, {"norm_first": True, "bias": False, "activation": "gelu"}], ids=str)
@every_model
def test_convert(name: str, options: dict[str, Any], backend: str) -> None:
    model = nn.ModuleDict({"inside": build(nn, name, batch_first=True, dropout=0.3, **options)})
    twin = copy.deepcopy(model)
    calls: list[str] = []
    for module in model.modules():
        module.register_forward_hook(lambda module, *_: calls.append(type(module).__name__))
    before, state = dict(model.named_parameters()), {k: v.clone() for k, v in model.state_dict().items()}
    assert unrolled.nn.convert(model) is model
    ours = model["inside"]
    assert type(ours) is getattr(unrolled.nn, name)
    own = {type(m) for m in model.modules() if type(m).__name__ in (*MODELS, "MultiheadAttention", "LayerNorm")}
    assert own <= {getattr(unrolled.nn, kind) for kind in (*MODELS, "MultiheadAttention", "LayerNorm")}
    assert all(p is before[n] for n, p in model.named_parameters())
    assert list(state) == list(model.state_dict())
    assert repr(ours).replace("\n", "") == repr(twin["inside"]).replace("\n", "")
    x, memory = example()
    close(call(ours.eval(), name, x, memory), call(twin["inside"].eval(), name, x, memory), TRANSFORMER)
    assert name in calls, "hooks stay"
    again = build(nn, name, batch_first=True, **options)
    again.load_state_dict(ours.state_dict())
    close(call(again, name, x, memory), call(ours, name, x, memory), TRANSFORMER)
    assert type(unrolled.nn.convert(again)) is type(ours)
    assert not torch.equal(call(ours.train(), name, x, memory), call(ours, name, x, memory)), "dropout stays"


def test_convert_of_attention_alone(backend: str) -> None:
    for options in ({}, {"bias": False}, {"kdim": 5, "vdim": 7, "add_bias_kv": True}, {"add_zero_attn": True}):
        peer = nn.MultiheadAttention(WIDTH, HEADS, dtype=torch.float64, **options)
        ours = unrolled.nn.convert(copy.deepcopy(peer))
        assert type(ours) is unrolled.nn.MultiheadAttention
        assert repr(ours) == repr(peer)
        q, k, v = (torch.randn(4, 2, n, dtype=torch.float64) for n in (WIDTH, peer.kdim, peer.vdim))
        for own, reference in zip(ours(q, k, v), peer(q, k, v), strict=True):
            close(own, reference, TRANSFORMER)


@from_torchs_encoder
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # torch's encoder, which makes them
def test_convert_leaves_what_is_not_plainly_torchs(backend: str) -> None:
    class Layer(nn.TransformerEncoderLayer):
        pass

    class Encoder(nn.TransformerEncoder):
        pass

    def layer(kind: Any) -> Any:
        return kind(WIDTH, HEADS, UNITS, 0.0, batch_first=True, dtype=torch.float64)

    x, _ = example()
    padding = torch.tensor([[0, 0, 1, 1], [0, 0, 0, 1], [0, 0, 0, 0]]).bool()
    for model, kinds in (
        (nn.TransformerEncoder(layer(Layer), 2), (nn.TransformerEncoder, Layer)),
        (Encoder(layer(nn.TransformerEncoderLayer), 2), (Encoder, unrolled.nn.TransformerEncoderLayer)),
    ):
        expected = copy.deepcopy(model)(x, src_key_padding_mask=padding)
        unrolled.nn.convert(model)
        assert (type(model), type(model.layers[0])) == kinds
        assert type(model.layers[0].self_attn) is unrolled.nn.MultiheadAttention
        for training in (True, False):
            for context in (torch.enable_grad(), torch.no_grad()):
                with context:
                    y = model.train(training)(x, src_key_padding_mask=padding)
                close(y[~padding], expected[~padding], TRANSFORMER)
    pruned = nn.MultiheadAttention(WIDTH, HEADS)
    prune.random_unstructured(pruned, "in_proj_weight", 0.5)
    assert unrolled.nn.convert(pruned) is pruned
    foreign = layer(nn.TransformerEncoderLayer)
    foreign.self_attn = nn.Identity()
    assert unrolled.nn.convert(foreign) is foreign
    foreign = layer(nn.TransformerEncoderLayer)
    foreign.dropout1 = nn.Softmax(-1)
    expected = foreign(x)
    converted = unrolled.nn.convert(foreign)
    assert type(converted) is unrolled.nn.TransformerEncoderLayer
    close(converted(x), expected, TRANSFORMER)
