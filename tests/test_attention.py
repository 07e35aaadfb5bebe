"""Scaled dot-product attention at its edges, and what the judges do not ask: memory, bits, noise, refusals."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from cases import Case
from conftest import VARIANTS, on
from test_dropout import surprise
from tolerances import AS_EXACT, DEVIATIONS, ROUNDED, close, same_bits
from unrolled import use
from unrolled.equations import dropout as equation
from unrolled.equations.dropout import Dropping
from unrolled.ops._backend import core
from unrolled.ops.attention import attention
from unrolled.ragged import Rows
from unrolled.verify.judges import differentiable

INFINITY = float("inf")


def rows(*lengths: int) -> Rows:
    length = torch.tensor(lengths, dtype=torch.int64)
    return Rows(length.cumsum(0) - length, 1, length)


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype, requires_grad=True)


def test_a_batch_equals_its_sequences_alone_dropout_included(backend: str) -> None:
    queries, keys, x, kv, do = rows(3, 0, 5), rows(4, 2, 7), draw(8, 6), draw(13, 12), torch.randn(8, 6).double()
    key, t = torch.tensor([5] * 3 + [9] * 5), torch.tensor([*range(3), *range(5)])

    def run(q: Tensor, kv: Tensor, do: Tensor, queries: Rows, keys: Rows, key: Tensor, t: Tensor) -> list[Tensor]:
        drop = Dropping(0.4, torch.tensor(7), 0, key, t)
        o, w = attention(q, kv, heads=2, queries=queries, keys=keys, causal=True, dropping=drop, need_weights=True)
        return [o, w, *torch.autograd.grad(o, (q, kv), do)]

    o, weights, dq, dkv = run(x, kv, do, queries, keys, key, t)
    for b, (i, n, j, m) in enumerate(zip(*(x.tolist() for x in (*queries[::2], *keys[::2])), strict=True)):
        own, other = slice(i, i + n), slice(j, j + m)
        alone = run(x[own], kv[other], do[own], rows(n), rows(m), key[own], t[own])
        for found, reference in zip(alone, (o[own], weights[b : b + 1, :, :n, :m], dq[own], dkv[other]), strict=True):
            close(found, reference, 20)


def test_a_query_that_sees_nothing_gives_zero_and_passes_nothing_on(backend: str) -> None:
    q, k, v = draw(5, 4), draw(4, 4), draw(4, 4)
    seen = torch.ones(2, 1, 3, 4, dtype=torch.bool)
    seen[0, 0, 1] = False
    added = torch.where(seen, 0.0, -INFINITY).double()
    for mask in (seen, added):
        o, w = attention(q, k, v, heads=2, queries=rows(3, 2), keys=rows(4, 0), mask=mask, need_weights=True)
        for grads in (torch.autograd.grad(o.sum(), (q, k, v), retain_graph=True), torch.autograd.grad(w.sum(), (q, k))):
            assert all(bool(g.isfinite().all()) for g in grads)
            assert not bool(grads[0][[1, 3, 4]].any())
        assert not bool(o[[1, 3, 4]].any())
        assert bool(o[[0, 2]].all())
        assert not bool(w[0, :, 1].any())
        assert not bool(w[1].any())
        close(w[0, :, [0, 2]].sum(2), torch.ones(2, 2).double(), 4)


def test_more_queries_than_keys_the_last_of_both_stand_side_by_side(backend: str) -> None:
    _, w = attention(
        *(draw(n, 2) for n in (5, 3, 3)), heads=1, queries=rows(5), keys=rows(3), causal=True, need_weights=True
    )
    expected = torch.tensor([[0, 0, 0], [0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1]]).bool()
    assert torch.equal(w[0, 0] > 0, expected)


def test_what_lies_in_no_sequence_is_never_read(backend: str) -> None:
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    x[0, 3:], x[1, 1:] = float("nan"), INFINITY
    x = x.view(10, 12).requires_grad_()
    padded = Rows(torch.tensor([0, 5]), 1, torch.tensor([3, 1]))
    o = attention(x, heads=2, queries=padded, causal=True)
    (dx,) = torch.autograd.grad(o.sum(), x)
    empty = torch.tensor([3, 4, 6, 7, 8, 9])
    for values in (o, dx):
        assert bool(values.isfinite().all())
        assert not bool(values[empty].any())
    assert bool(o[[0, 1, 2, 5]].all())


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("size", [1.0, 30.0, 300.0])
def test_scores_of_any_size(variant: str, size: float) -> None:
    """Hundreds of powers of two apart, the largest of a row anywhere in it."""
    q, k, v = (torch.randn(n, 8) for n in (70, 600, 600))
    q, k = q * size, k.sort(0).values
    with on(variant):
        o = attention(q, k, v, heads=1, queries=rows(70), keys=rows(600))
    expected = F.scaled_dot_product_attention(*(x.double()[None] for x in (q, k, v)))[0]
    theirs = F.scaled_dot_product_attention(*(x[None] for x in (q, k, v)))[0]
    error, limit = ((x - expected).square().mean().sqrt() for x in (o, theirs))
    assert error <= max(AS_EXACT * float(limit), ROUNDED)


@pytest.mark.parametrize("value", [float("nan"), INFINITY])
def test_what_is_not_a_number_reaches_the_output(value: float, backend: str) -> None:
    for place in range(3):
        given = [torch.randn(70, 8) for _ in range(3)]
        given[place][37, 3] = value
        o = attention(*given, heads=1, queries=rows(70))
        assert bool((~o.isfinite()).any())
        rest = torch.arange(70) != 37
        assert place or bool(o[rest].isfinite().all())


@pytest.mark.parametrize("variant", VARIANTS)
def test_float32_errs_no_more_than_torch(variant: str) -> None:
    x, do = torch.randn(400, 3 * 64), torch.randn(400, 64)

    def parts(x: Tensor) -> list[Tensor]:
        return [part[None] for part in x.chunk(3, 1)]

    def ours(x: Tensor) -> Tensor:
        return attention(x, heads=1, queries=rows(400), causal=True)

    def theirs(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*(p[None] for p in parts(x)), is_causal=True)[0, 0]

    def run(function: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
        x = x.clone().requires_grad_()
        o = function(x)
        return [o.detach(), *torch.autograd.grad(o, x, do.to(x.dtype))]

    with on(variant):
        own = run(ours, x)
    for found, other, reference in zip(own, run(theirs, x), run(theirs, x.double()), strict=True):
        error, limit = ((y - reference).square().mean().sqrt() for y in (found, other))
        assert error <= AS_EXACT * limit


def kept_weights(n: int = 64, heads: int = 8, sequences: int = 8, seed: int = 11, p: float = 0.3) -> Tensor:
    """(B, A, n, n) which weights are kept, by their values: all scores are equal, and no weight is 0."""
    N = n * sequences
    q, queries = torch.zeros(N, 3 * heads), rows(*[n] * sequences)
    drop = Dropping(p, torch.tensor(seed), 0, torch.arange(N) // n, torch.arange(N) % n)
    _, w = attention(q, heads=heads, queries=queries, dropping=drop, need_weights=True)
    return w > 0


AXES = {"sequence": 0, "head": 1, "step": 2, "position": 3}


@pytest.mark.parametrize("axis", AXES)
def test_neighbouring_weights_are_dropped_independently(axis: str, backend: str) -> None:
    """Chi-square of the patterns of eight weights that lie next to each other."""
    assert abs(surprise(kept_weights().movedim(AXES[axis], 3).reshape(-1, 8), 0.3)) <= DEVIATIONS


@pytest.mark.parametrize("axis", AXES)
def test_two_rounds_of_philox_would_not_pass(axis: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equation, "_ROUNDS", 2)
    with on("equation"):
        assert surprise(kept_weights().movedim(AXES[axis], 3).reshape(-1, 8), 0.3) > DEVIATIONS


def test_the_dropped_weights_change_with_the_seed_and_with_nothing_else(backend: str) -> None:
    n, heads, p = 20, 3, 0.3
    base = kept_weights(n, heads, 2)
    same_bits(kept_weights(n, heads, 2), base)
    same_bits(kept_weights(n, heads, 1), base[:1])  # without its neighbour
    torch.set_num_threads(2)
    same_bits(kept_weights(n, heads, 2), base)
    drop = Dropping(p, torch.tensor(11), 0, torch.zeros(n).long(), torch.arange(n))
    q, k, v = (torch.randn(n, heads * width, requires_grad=True) for width in (2, 2, n))
    o, w = attention(q, k, v, heads=heads, queries=rows(n), dropping=drop, need_weights=True)
    same_bits(w > 0, base[:1])  # of other numbers
    for _ in range(2):
        (dv,) = torch.autograd.grad(o, v, torch.eye(n).repeat(1, heads), retain_graph=True)  # w transposed, by head
        same_bits(dv.view(n, heads, n).permute(1, 2, 0) > 0, base[0])
    for seed in (12, 11 + 2**32, -11):
        assert not torch.equal(kept_weights(n, heads, 2, seed=seed), base)


def test_dropout_has_its_rate_in_every_head_and_is_equal_in_the_backward(backend: str) -> None:
    n, heads, p = 200, 3, 0.3
    drop = Dropping(p, torch.tensor(11), 5, torch.arange(n) % 7, torch.arange(n) // 7)
    q, k = torch.zeros(n, heads), torch.zeros(n, heads)
    _, w = attention(q, k, torch.zeros(n, heads), heads=heads, queries=rows(n), dropping=drop, need_weights=True)
    kept = w[0] > 0
    rates = kept.double().mean((1, 2))
    assert bool(((rates - (1 - p)).abs() <= DEVIATIONS * (p * (1 - p)) ** 0.5 / n).all())
    for a in range(heads):
        same_bits(kept[a], drop.mask(n, a) > 0)
    close(w[0][kept], torch.full_like(w[0][kept], 1 / (n * (1 - p))), n)
    q, k, v = (torch.zeros(n, heads, requires_grad=True) for _ in range(3))
    o = attention(q, k, v, heads=heads, queries=rows(n), dropping=drop)
    (dv,) = torch.autograd.grad(o.sum(), v)
    close(dv.T, w[0].sum(1).detach(), n)


def test_p_of_zero_is_no_dropout_to_the_bit(backend: str) -> None:
    x = draw(9, 12, dtype=torch.float32)
    drop = Dropping(0.0, torch.tensor(1), 0, torch.arange(9), torch.arange(9))
    same_bits(attention(x, heads=2, queries=rows(9), dropping=drop), attention(x, heads=2, queries=rows(9)))


def test_weights_change_no_bit_of_the_output(backend: str) -> None:
    x = draw(70, 3 * 34, dtype=torch.float32)
    given: dict[str, Any] = {"heads": 2, "queries": rows(33, 37), "causal": True}
    same_bits(attention(x, **given, need_weights=True)[0], attention(x, **given))
    with torch.no_grad():
        same_bits(attention(x, **given), attention(x.detach(), **given))


@pytest.mark.parametrize("options", [{}, {"steps": ((300, 700), (50, 3)), "causal": True, "p": 0.1}], ids=str)
def test_the_same_call_gives_the_same_bits_and_a_second_backward_too(options: dict[str, Any], backend: str) -> None:
    torch.set_num_threads(2)
    inputs = Case("attention", options).inputs(torch.float32)
    leaves = list(differentiable(inputs).values())
    o = Case("attention", options).operator.operator(**inputs)
    do = torch.randn_like(o)
    first = torch.autograd.grad(o, leaves, do, retain_graph=True)
    kept = [g.clone() for g in first]
    for g in first:
        g.fill_(float("nan"))
    for found, expected in zip(torch.autograd.grad(o, leaves, do), kept, strict=True):
        same_bits(found, expected)
    same_bits(Case("attention", options).operator.operator(**inputs), o)


def test_keys_that_several_sequences_share(backend: str) -> None:
    """Read by all of them; the core does not write their gradient twice but says so."""
    q, kv = draw(4, 3), draw(5, 6)
    shared = Rows(torch.zeros(2, dtype=torch.int64), 1, torch.tensor([5, 5]))
    o = attention(q, kv, heads=1, queries=rows(2, 2), keys=shared)
    apart = attention(q, torch.cat([kv, kv]), heads=1, queries=rows(2, 2), keys=rows(5, 5))
    close(o, apart, 10)
    (expected,) = torch.autograd.grad(apart.sum(), kv)
    if backend == "equation":
        close(torch.autograd.grad(o.sum(), kv)[0], expected, 20)
    else:
        with pytest.raises(ValueError, match="a row must not belong to two sequences"):
            torch.autograd.grad(o.sum(), kv)


def test_second_derivatives_are_those_of_the_equation() -> None:
    x = draw(4, 6)
    o = attention(x, heads=1, queries=rows(4))
    (dx,) = torch.autograd.grad(o.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="attention: its backward is a closed form"):
        dx.sum().backward()
    with use("equations"):
        torch.autograd.gradgradcheck(lambda x: attention(x, heads=1, queries=rows(4)), (x,))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.func and torch.compile import torch.jit
def test_vmap_compile_and_autocast(backend: str) -> None:
    x, options = draw(3, 4, 12), {"heads": 2, "queries": rows(4), "causal": True}

    def loss(x: Tensor) -> Tensor:
        return attention(x, **options).square().sum()

    found = torch.func.vmap(torch.func.grad(loss))(x)
    close(found, torch.stack([torch.autograd.grad(loss(row), row)[0] for row in x.detach().requires_grad_()]), 30)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    one = x[0].detach().requires_grad_()
    (expected,), (dx,) = (torch.autograd.grad(f(one), one) for f in (loss, compiled))
    close(dx, expected, 30)
    with torch.autocast("cpu", torch.bfloat16):
        assert attention(x[0].bfloat16(), **options).dtype is torch.float32


Q = torch.randn(4, 6)
MASK = torch.ones(1, 1, 4, 4, dtype=torch.bool)


def dropped(**changed: Any) -> Any:
    dropping = Dropping(0.5, torch.tensor(1), 0, torch.arange(4), torch.arange(4))._replace(**changed)
    return attention(Q, heads=2, queries=rows(4), dropping=dropping)


REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: attention(Q[0], heads=2, queries=rows(4)), ValueError, "found (6,)"),
    (lambda: attention(Q, heads=4, queries=rows(4)), ValueError, "for A = 4 heads and F at least 1; found (4, 6)"),
    (lambda: attention(Q, Q, Q[1:], heads=2, queries=rows(4)), ValueError, "found (4, 6), (4, 6), (3, 6)"),
    (lambda: attention(Q, Q, heads=2, queries=rows(4)), ValueError, "k and v side by side"),
    (lambda: attention(Q, heads=2, queries=rows(4), keys=rows(4)), ValueError, "keys must be None"),
    (lambda: attention(Q, Q, Q, heads=2, queries=rows(4), keys=rows(2, 2)), ValueError, "1 sequences of queries and 2"),
    (lambda: attention(Q, Q, Q.double(), heads=2, queries=rows(4)), TypeError, "one dtype and device"),
    (lambda: attention(Q, heads=2, queries=rows(4), mask=MASK.int()), TypeError, "found torch.int32"),
    (lambda: attention(Q, heads=2, queries=rows(4), mask=MASK.double()), TypeError, "found torch.float64"),
    (lambda: attention(Q, heads=2, queries=rows(4), mask=MASK[0]), ValueError, "found shape (1, 4, 4)"),
    (lambda: attention(Q, heads=2, queries=rows(4), mask=MASK.expand(3, 1, 4, 4)), ValueError, "1 or 1, 1 or 2"),
    (lambda: attention(Q, heads=2, queries=rows(4), mask=MASK[:, :, :3]), ValueError, "found shape (1, 1, 3, 4)"),
    (lambda: attention(Q[:, :0], heads=1, queries=rows(4)), ValueError, "F at least 1; found (4, 0)"),
    (lambda: attention(Q.int(), heads=2, queries=rows(4)), TypeError, "a floating dtype, found torch.int32"),
    (lambda: attention(Q, heads=2, queries=rows(4), slopes=Q[0, :1]), ValueError, "must be (2,), one for each head"),
    (lambda: dropped(p=1.5), ValueError, "must lie in [0, 1], found 1.5"),
    (lambda: dropped(key=torch.arange(3)), ValueError, "key must be (4,), found (3,)"),
    (lambda: dropped(t=torch.arange(8).view(4, 2)), ValueError, "t must be (4,), found (4, 2)"),
    (lambda: dropped(t=torch.arange(4.0)), TypeError, "t must be torch.int64, found torch.float32"),
    (lambda: dropped(seed=torch.zeros(1).long()), ValueError, "seed must be (), found (1,)"),
]


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_a_mistake_is_named_with_what_was_found(case: int, backend: str) -> None:
    call, kind, message = REFUSED[case]
    with pytest.raises(kind, match=re.escape(message)):
        call()
    with use("equations"), pytest.raises(kind, match=re.escape(message)):
        call()


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


def arguments(call: str, **changed: object) -> list[object]:
    """4 queries and 5 keys of 1 sequence, 2 heads of 3 and 4 numbers."""
    given: dict[str, object] = {"do": zeros(4, 8)} if "backward" in call else {}
    given |= {"q": zeros(4, 6), "k": zeros(5, 6), "v": zeros(5, 8), "seen": None, "added": zeros(1, 2, 4, 5)}
    given |= {"slopes": zeros(2), "query_start": np.array([0]), "query_length": np.array([4])}
    given |= {"key_start": np.array([0]), "key_length": np.array([5]), "seed": np.array(3)}
    given |= {"key": np.arange(4), "t": np.arange(4), "o": zeros(4, 8), "log_sum": zeros(4, 2)}
    if "backward" in call:
        given |= {"dq": zeros(4, 6), "dk": zeros(5, 6), "dv": zeros(5, 8)}
    else:
        given |= {"weights": zeros(1, 2, 4, 5)}
    given |= {
        "heads": 2,
        "query_step": 1,
        "key_step": 1,
        "causal": True,
        "scale": 1.0,
        "p": 0.5,
        "layer": 0,
        "threads": 1,
    }
    assert changed.keys() <= given.keys()
    return list({**given, **changed}.values())


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("call", ["attention_forward", "attention_backward"])
def test_the_border_refuses_what_does_not_fit(call: str, variant: str) -> None:
    with on(variant):
        refuses_what_does_not_fit(call)


def refuses_what_does_not_fit(call: str) -> None:
    function = getattr(core, call)
    function(*arguments(call))
    names = [name for name in re.findall(r"(\w+): ", function.__doc__.splitlines()[0]) if name != "do_"]
    for name, value in zip(names, arguments(call), strict=False):
        if isinstance(value, np.ndarray):
            if value.ndim:
                with pytest.raises(ValueError, match=r"must|lies outside|leaves"):
                    function(*arguments(call, **{name: np.zeros([n + 1 for n in value.shape], value.dtype)}))
            with pytest.raises(TypeError):
                function(*arguments(call, **{name: value.astype(np.float64)}))
    for start, length in ((0, 6), (-1, 2), (3, 3), (0, -1), (5, 1), (2**62, 2)):
        for rows_of in ("query", "key"):
            with pytest.raises(ValueError, match=r"length|rows"):
                function(
                    *arguments(call, **{f"{rows_of}_start": np.array([start]), f"{rows_of}_length": np.array([length])})
                )
    for changed in (
        {"p": 1.5},
        {"key": None},
        {"seed": None},
        {"k": None},
        {"heads": 4},
        {"seen": np.ones((1, 1, 1, 1), bool)},
    ):
        with pytest.raises(ValueError, match=r"must|there is no v|one mask"):
            function(*arguments(call, **changed))
