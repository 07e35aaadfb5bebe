"""The norms: modules against torch.nn's, the fused operator against its parts, accuracy, edges, refusals."""

from __future__ import annotations

import inspect
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import unrolled
from conftest import VARIANTS, on
from peers import DTYPES, agree, ids
from tolerances import AS_EXACT, ROUNDED, close, same_bits
from unrolled import Ragged
from unrolled.equations.dropout import Dropping
from unrolled.ops import _backend
from unrolled.ops.dropout import dropout
from unrolled.ops.layer_norm import layer_norm
from unrolled.ops.residual_norm import residual_norm
from unrolled.ops.rms_norm import rms_norm
from unrolled.verify import double
from unrolled.verify.judges import autograd

OPTIONS: list[dict[str, Any]] = [
    *({"kind": "LayerNorm", "elementwise_affine": affine, "bias": bias} for affine, bias in ((1, 1), (1, 0), (0, 1))),
    *({"kind": "RMSNorm", "elementwise_affine": affine} for affine in (1, 0)),
    {"kind": "LayerNorm", "eps": 0.3},
    {"kind": "RMSNorm", "eps": 0.3},
]
KINDS = ["LayerNorm", "RMSNorm"]
every_kind = pytest.mark.parametrize("kind", KINDS)


def make(library: Any, options: dict[str, Any], shape: Any, **more: Any) -> Any:
    """Gains and biases drawn anew: 1 and 0 would hide much."""
    given = dict(options)
    module = getattr(library, given.pop("kind"))(shape, **given, **more)
    torch.manual_seed(3)
    for p in module.parameters():
        nn.init.normal_(p)
    return module


def test_arguments_are_torchs() -> None:
    for name in KINDS:
        own, theirs = (inspect.signature(getattr(m, name)).parameters for m in (unrolled.nn, nn))
        assert {k: p.default for k, p in own.items()} == {k: p.default for k, p in theirs.items()}
        forwards = (inspect.signature(getattr(m, name).forward).parameters for m in (unrolled.nn, nn))
        assert len({tuple(f) for f in forwards}) == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=ids)
@pytest.mark.parametrize(
    ("lead", "shape"),
    [((), 5), ((4,), (5,)), ((2, 3), 3), ((0,), 3), ((2, 0), (3,)), ((3,), (2, 4)), ((2, 3), (2, 2, 3))],
    ids=str,
)
def test_module(lead: tuple[int, ...], shape: Any, options: dict[str, Any], dtype: torch.dtype, backend: str) -> None:
    ours, peer = (make(m, options, shape, dtype=dtype) for m in (unrolled.nn, nn))
    assert repr(ours) == repr(peer)
    peer.load_state_dict(ours.state_dict())
    x = 2 * torch.randn(*lead, *ours.normalized_shape, dtype=dtype)
    agree(ours, peer, lambda m, x: (m(x),), x, terms=int(1 / 0.3))


@every_kind
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_computed_in_float32_and_rounded_once(kind: str, dtype: torch.dtype, backend: str) -> None:
    module = make(unrolled.nn, {"kind": kind}, 33, dtype=dtype)
    x = (300 * torch.randn(7, 33)).to(dtype)  # squares of 300 are beyond float16
    with unrolled.use("equations"):
        exact = make(unrolled.nn, {"kind": kind}, 33, dtype=dtype).double()(x.double())
    y = module(x)
    assert y.dtype == dtype
    close(y, exact, 1)
    with torch.autocast("cpu", torch.bfloat16):
        found = make(unrolled.nn, {"kind": kind}, 33)(x)
    assert found.dtype == torch.float32


@every_kind
def test_ragged_in_ragged_out(kind: str, backend: str) -> None:
    batch = Ragged(torch.randn(5, 2, 3), [0, 2, 2, 5])
    for shape in (3, (2, 3)):
        module = make(unrolled.nn, {"kind": kind}, shape)
        found = module(batch)
        same_bits(found.values, module(batch.values))
        same_bits(found.offsets, batch.offsets)
        same_bits(found.values[2:], module(batch.values[2:].contiguous()))


@every_kind
def test_a_nested_tensor_is_torchs_own(kind: str) -> None:
    nested = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)], layout=torch.jagged)
    ours, peer = (make(m, {"kind": kind}, 3) for m in (unrolled.nn, nn))
    same_bits(ours(nested).values(), peer(nested).values())


@pytest.mark.parametrize("options", OPTIONS, ids=ids)
def test_convert(options: dict[str, Any], backend: str) -> None:
    model = nn.Sequential(nn.Linear(3, 5), make(nn, options, 5))
    peer, parameters = model[1], list(model[1].parameters())
    unrolled.nn.convert(model)
    assert type(model[1]) is getattr(unrolled.nn, options["kind"])
    assert repr(model[1]) == repr(peer)
    assert all(a is b for a, b in zip(model[1].parameters(), parameters, strict=True))
    x = torch.randn(4, 5)
    close(model[1](x), peer.double()(x.double()), 5)


@every_kind
def test_refusals_of_the_modules(kind: str) -> None:
    module = make(unrolled.nn, {"kind": kind}, (2, 3))
    for shape in ((3,), (3, 2), ()):
        with pytest.raises(ValueError, match=r"normalises \(2, 3\) at the end of a shape, the input has"):
            module(torch.zeros(shape))
    with pytest.raises(TypeError, match="one dtype and device"):
        module(torch.zeros(2, 3, dtype=torch.float64))


def test_refusals_of_the_operators() -> None:
    x = torch.zeros(4, 3)
    for norm in (layer_norm, rms_norm):
        with pytest.raises(ValueError, match="found a scalar"):
            norm(torch.tensor(1.0))
        with pytest.raises(ValueError, match=r"gain must be \(3,\) for rows of 3, found \(2,\)"):
            norm(x, torch.ones(2))
    with pytest.raises(ValueError, match=r"bias must be \(3,\)"):
        layer_norm(x, None, torch.ones(3, 1))
    options: dict[str, Any] = {"kind": "layer", "epsilon": 1e-5}
    with pytest.raises(ValueError, match=r"\(4, 3\) and \(4, 2\)"):
        residual_norm(x, x[:, :2], **options)
    with pytest.raises(ValueError, match='"layer" or "rms", found \'batch\''):
        residual_norm(x, x, **{**options, "kind": "batch"})
    with pytest.raises(ValueError, match="has no bias"):
        residual_norm(x, x, None, torch.zeros(3), kind="rms", epsilon=1e-5)
    with pytest.raises(ValueError, match=r"\[0, 1\], found 1.5"):
        residual_norm(x, x, **options, dropping=dropping(4, 1.5))
    with pytest.raises(TypeError, match="one dtype and device"):
        residual_norm(x, x.double(), **options)


def dropping(rows: int, p: float = 0.4, seed: int = 11) -> Dropping:
    return Dropping(p, torch.tensor(seed), 3, torch.arange(rows) // 2, torch.arange(rows) % 2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("p", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_the_fused_operator_is_its_parts(kind: Any, p: float, dtype: torch.dtype, backend: str) -> None:
    N, width = 6, 70
    x, s, gain, bias = (torch.randn(shape, dtype=dtype) for shape in ((N, width), (N, width), (width,), (width,)))
    inputs = {"x": x, "s": s, "gain": gain, "bias": bias if kind == "layer" else None}
    inputs = {k: v if v is None else v.requires_grad_() for k, v in inputs.items()}
    where = dropping(N, p)

    def parts(x: Tensor, s: Tensor, gain: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        r = x + dropout(s, p, where.seed, where.layer, where.key, where.t)
        return r, layer_norm(r, gain, bias, 0.1) if kind == "layer" else rms_norm(r, gain, 0.1)

    def fused(**given: Any) -> tuple[Tensor, Tensor]:
        return residual_norm(**given, kind=kind, epsilon=0.1, dropping=where)

    with unrolled.use("equations"):
        expected = autograd(parts, double(inputs))
    for found, reference in zip(autograd(fused, inputs), expected, strict=True):
        for name, value in reference.items():
            close(found[name], value, width)


@pytest.mark.parametrize("p", [0.0, 0.4])
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_only_one_output_of_the_fused_operator_used(kind: Any, p: float, backend: str) -> None:
    gain = torch.randn(9, dtype=torch.float64, requires_grad=True)
    x, s = (torch.randn(4, 9, dtype=torch.float64, requires_grad=True) for _ in range(2))
    for used, wanted in product((0, 1), ([x], [s], [gain], [x, s, gain])):
        if used == 0 and wanted[0] is gain:
            continue  # r does not depend on it
        y = residual_norm(x, s, gain, kind=kind, epsilon=0.1, dropping=dropping(4, p))[used]
        found = torch.autograd.grad(y.sin().sum(), wanted, materialize_grads=True)
        with unrolled.use("equations"):
            y = residual_norm(x, s, gain, kind=kind, epsilon=0.1, dropping=dropping(4, p))[used]
            expected = torch.autograd.grad(y.sin().sum(), wanted, materialize_grads=True)
        for own, reference in zip(found, expected, strict=True):
            close(own, reference, 9)


def test_the_same_seed_the_same_mask_another_another(backend: str) -> None:
    x, s = torch.zeros(20, 50), torch.ones(20, 50)
    first, same, other = (
        residual_norm(x, s, kind="rms", epsilon=0.1, dropping=dropping(20, 0.4, seed))[0] for seed in (1, 1, 2)
    )
    same_bits(first, same)
    assert not torch.equal(first, other)
    assert set(first.unique().tolist()) == {0.0, torch.tensor(1 / 0.6).item()}


@pytest.mark.parametrize("mean", [0.0, 30.0, 1e3])
@pytest.mark.parametrize(("width", "draws"), [(5, 10), (256, 1), (1023, 1), (4096, 1)])
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_float32_is_as_exact_as_torchs(variant: str, name: str, width: int, draws: int, mean: float) -> None:
    """Of outputs and gradients, the mean square of the differences to float64; a large mean is the hard part."""
    shape = (width,)
    function, peer, weights = {
        "layer_norm": (layer_norm, lambda x, *w: F.layer_norm(x, shape, *w), 2),
        "rms_norm": (lambda x, w: rms_norm(x, w, 1e-6), lambda x, w: F.rms_norm(x, shape, w, 1e-6), 1),
    }[name]

    def run(function: Any, *values: Tensor) -> tuple[Tensor, ...]:
        leaves = [v.detach().clone().requires_grad_() for v in values]
        y = function(*leaves)
        return y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))

    def errors(found: tuple[Tensor, ...]) -> Tensor:
        exact = run(peer, *(v.double() for v in given))
        return torch.stack([((f.double() - e).norm() / e.norm()) ** 2 for f, e in zip(found, exact, strict=True)])

    ours = theirs = torch.zeros(2 + weights, dtype=torch.float64)
    for _ in range(draws):
        given = [mean + torch.randn(200, width), *torch.randn(weights, width)]
        dy = torch.randn(200, width)
        with on(variant):
            ours = ours + errors(run(function, *given)) / draws
        theirs = theirs + errors(run(peer, *given)) / draws
    assert bool((ours.sqrt() <= (AS_EXACT * theirs.sqrt()).clamp(min=ROUNDED)).all()), (ours.sqrt(), theirs.sqrt())


def habits(kind: str) -> tuple[Any, list[Tensor]]:
    """An operator as a function of its tensors, and these."""
    leaves = [torch.randn(*n, dtype=torch.float64, requires_grad=True) for n in ((4, 5), (4, 5), (5,))]
    if kind == "residual_norm":
        options: dict[str, Any] = {"kind": "layer", "epsilon": 0.1, "dropping": dropping(4)}
        return lambda x, s, gain: residual_norm(x, s, gain, **options)[1], leaves
    function = layer_norm if kind == "layer_norm" else rms_norm
    return lambda x, _, gain: function(x, gain), leaves


@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm", "residual_norm"])
def test_vmap_and_second_derivatives(kind: str, backend: str) -> None:
    function, leaves = habits(kind)
    used = leaves if kind == "residual_norm" else leaves[::2]

    def loss(*values: Tensor) -> Tensor:
        total: Tensor = function(*values).sin().sum()
        return total

    expected = torch.autograd.grad(loss(*leaves), used)
    stacked = [torch.stack([v.detach(), v.detach().flip(0)]) for v in leaves]
    each = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(*stacked)
    for found, reference in zip(each if kind == "residual_norm" else each[::2], expected, strict=True):
        close(found[0], reference, 5)
    with unrolled.use("equations"):
        torch.autograd.gradgradcheck(loss, leaves)
    (grad,) = torch.autograd.grad(loss(*leaves), leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match=f"{kind}: .*closed form.*unrolled.use"):
        grad.sum().backward()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, from torch's own compiler
@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm", "residual_norm"])
def test_compile_without_a_break(kind: str) -> None:
    torch._dynamo.reset()
    function, leaves = habits(kind)
    used = leaves if kind == "residual_norm" else leaves[::2]
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=True)
    expected = torch.autograd.grad(function(*leaves).sin().sum(), used)
    for found, reference in zip(torch.autograd.grad(compiled(*leaves).sin().sum(), used), expected, strict=True):
        close(found, reference, 5)


@pytest.mark.parametrize("norm", [layer_norm, rms_norm])
def test_special_values_stay_in_their_row(norm: Any, backend: str) -> None:
    x = torch.randn(4, 19)
    clean = norm(x)
    x[1, 3], x[2, 18] = torch.nan, torch.inf
    y = norm(x)
    assert bool(y[1].isnan().all())
    assert bool(y[2].isnan().any())
    same_bits(y[::3], clean[::3])


def test_a_row_of_equal_numbers_is_the_bias(backend: str) -> None:
    bias = torch.randn(37)
    same_bits(layer_norm(torch.full((3, 37), 0.5), torch.randn(37), bias), bias.expand(3, 37))
    same_bits(rms_norm(torch.zeros(3, 37), torch.randn(37)), torch.zeros(3, 37))
    same_bits(layer_norm(torch.randn(3, 1), torch.ones(1), bias[:1]), bias[:1].expand(3, 1))


def test_rows_without_a_number(backend: str) -> None:
    x = torch.zeros(3, 0, requires_grad=True)
    y = layer_norm(x, torch.ones(0), torch.ones(0))
    y.sum().backward()
    assert y.shape == x.grad.shape == (3, 0)


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


_WHERE = {"seed": np.array(3), "key": np.zeros(4, np.int64), "t": np.zeros(4, np.int64)}
_STATISTICS = {"mean": zeros(4), "scale": zeros(4)}
_END = {"layer": 0, "p": 0.5, "threads": 1}
# N 4 rows of F 3, with all that there may be
BORDER: dict[str, dict[str, Any]] = {
    "norm_forward": {
        **{"x": zeros(4, 3), "s": zeros(4, 3), "gain": zeros(3), "bias": zeros(3), **_WHERE},
        **{"r": zeros(4, 3), "y": zeros(4, 3), **_STATISTICS, "epsilon": 1e-5, **_END},
    },
    "norm_backward": {
        **{"dr": zeros(4, 3), "dy": zeros(4, 3), "r": zeros(4, 3), **_STATISTICS, "gain": zeros(3), **_WHERE},
        **{"dx": zeros(4, 3), "ds": zeros(4, 3), "dgain": zeros(3), "dbias": zeros(3), **_END},
    },
    "rotary": {
        **{"x": zeros(4, 9), "t": np.zeros(4, np.int64), "frequency": np.zeros(2), "y": zeros(4, 9)},
        **{"heads": 2, "columns": 8, "threads": 1},
    },
}


@pytest.mark.parametrize("call", BORDER)
def test_the_border_refuses_every_array_of_another_shape_or_type(call: str) -> None:
    function, arguments = getattr(_backend.core, call), BORDER[call]
    function(**arguments)
    arrays = {name: value for name, value in arguments.items() if isinstance(value, np.ndarray)}
    for name, value in arrays.items():
        other = np.float32 if value.dtype == np.float64 else np.float64
        with pytest.raises(TypeError):
            function(**{**arguments, name: value.astype(other)})
        if value.ndim:
            with pytest.raises(ValueError, match=r"must (be|have)"):
                function(**{**arguments, name: np.zeros([n + 1 for n in value.shape], value.dtype)})


@pytest.mark.parametrize(
    ("call", "changed"),
    [
        ("norm_forward", {"p": 1.5}),
        ("norm_forward", {"seed": None}),
        ("norm_forward", {"p": 0.0}),
        ("norm_forward", {"s": None}),
        ("norm_forward", {"s": None, "r": None}),
        ("norm_backward", {"ds": None}),
        ("norm_backward", {"key": None}),
        ("rotary", {"heads": 3}),
        ("rotary", {"heads": 0}),
        ("rotary", {"columns": 12}),
        ("rotary", {"columns": -4}),
    ],
)
def test_the_border_refuses_what_does_not_belong_together(call: str, changed: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must (be|have)"):
        getattr(_backend.core, call)(**{**BORDER[call], **changed})
