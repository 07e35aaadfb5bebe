"""The output projection with its loss: what the cases of its gradient do not ask."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tolerances import AS_EXACT, close, same_bits
from unrolled import Ragged, nn, use
from unrolled.ops._backend import core
from unrolled.ops.linear_cross_entropy import linear_cross_entropy

N, D, V = 7, 5, 11
TERMS = N + D + V


def inputs(dtype: torch.dtype = torch.float64, n: int = N, v: int = V) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, weight, bias = (torch.randn(shape, dtype=dtype, requires_grad=True) for shape in ((n, D), (v, D), (v,)))
    return x, weight, bias, torch.randint(v, (n,))


def gradients(loss: Tensor, *leaves: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, leaves))


def test_no_target_no_loss(backend: str) -> None:
    x, weight, bias, target = inputs()
    for given in ((x, target.fill_(-100)), (x[:0], target[:0])):
        loss = linear_cross_entropy(given[0], weight, bias, given[1])
        assert loss == 0
        for gradient in gradients(loss, x, weight, bias):
            assert gradient.abs().sum() == 0


def test_targets_of_weight_0_and_of_one_class(backend: str) -> None:
    x, weight, bias, target = inputs(v=1)
    assert linear_cross_entropy(x, weight, bias, target) == 0
    nothing = linear_cross_entropy(x, weight, bias, target, class_weight=torch.zeros(1, dtype=x.dtype))
    assert nothing == 0
    assert gradients(nothing, x)[0].abs().sum() == 0


@pytest.mark.parametrize("wrong", [-1, V, 2**40, -(2**62)])
def test_a_target_outside_the_classes_is_refused(wrong: int, backend: str) -> None:
    x, weight, bias, target = inputs()
    target[3] = wrong
    with pytest.raises(IndexError, match=rf"target {wrong} .*lies outside \[0, {V}\)"):
        linear_cross_entropy(x, weight, bias, target)


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"label_smoothing": 1.5}, ValueError, r"must lie in \[0, 1\], found 1.5"),
    ({"reduction": "none"}, ValueError, 'must be "mean" or "sum", found \'none\''),
    ({"x": torch.zeros(N, D + 1)}, ValueError, r"x \(N, D\), weight \(V, D\) and target \(N,\), found \(7, 6\)"),
    ({"x": torch.zeros(N, 1, D)}, ValueError, "found"),
    ({"target": torch.zeros(N + 1, dtype=torch.int64)}, ValueError, "found"),
    ({"target": torch.zeros(N)}, TypeError, "whole numbers, found torch.float32"),
    ({"bias": torch.zeros(V + 1)}, ValueError, r"expected bias \(11,\), found \(12,\)"),
    ({"class_weight": torch.zeros(1)}, ValueError, r"expected class_weight \(11,\), found \(1,\)"),
    ({"class_weight": torch.zeros(V, dtype=torch.float64)}, TypeError, "one dtype and device"),
]


@pytest.mark.parametrize(("changed", "error", "message"), REFUSED)
def test_what_it_refuses(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    x, weight, bias, target = inputs(torch.float32)
    given = {"x": x, "weight": weight, "bias": bias, "target": target}
    linear_cross_entropy(**given)
    with pytest.raises(error, match=message):
        linear_cross_entropy(**{**given, **changed})


def test_a_class_that_the_bias_rules_out(backend: str) -> None:
    """A logit -inf has probability 0 and no gradient, also where a whole vector of classes is ruled out."""
    x, weight, bias, target = inputs(v=300)
    target = target % 7 + 290
    with torch.no_grad():
        bias[:290] = -torch.inf
    found = gradients(linear_cross_entropy(x, weight, bias, target), x, weight, bias)
    own = weight[290:].detach().requires_grad_(), bias[290:].detach().requires_grad_()
    expected = gradients(linear_cross_entropy(x, *own, target - 290), x, *own)
    for a, b in zip(found, expected, strict=True):
        if a.shape != b.shape:
            assert a[:290].abs().sum() == 0
            a = a[290:]
        close(a, b, TERMS)


def test_what_is_not_a_number_stays_one(backend: str) -> None:
    x, weight, bias, target = inputs()
    with torch.no_grad():
        x[2, 1] = torch.nan
    loss = linear_cross_entropy(x, weight, bias, target)
    assert loss.isnan()
    dx, dweight, _ = gradients(loss, x, weight, bias)
    assert dx[2].isnan().all()
    assert dweight.isnan().all()
    assert dx[torch.arange(N) != 2].isfinite().all()


def test_large_logits_do_not_overflow(backend: str) -> None:
    for dtype in (torch.float32, torch.float64):
        x, weight, bias, target = inputs(dtype)
        loss = linear_cross_entropy(x * 1e4, weight, bias, target)
        expected = F.cross_entropy(F.linear(x.double() * 1e4, weight.double(), bias.double()), target)
        close(loss, expected, TERMS, dtype)
        assert gradients(loss, weight)[0].isfinite().all()


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2), (1, 2)])
def test_only_the_gradients_that_are_wanted(wanted: tuple[int, ...], backend: str) -> None:
    *leaves, target = inputs()
    every = gradients(linear_cross_entropy(*leaves, target), *leaves)
    some = [leaf.detach().requires_grad_(i in wanted) for i, leaf in enumerate(leaves)]
    loss = linear_cross_entropy(*some, target)
    for i, gradient in zip(wanted, gradients(loss, *(some[i] for i in wanted)), strict=True):
        same_bits(gradient, every[i])
    with torch.no_grad():
        same_bits(linear_cross_entropy(*leaves, target), loss.detach())


def test_the_loss_multiplies_what_the_forward_formed(backend: str) -> None:
    """The graph may be walked twice, by any derivative of a loss."""
    *leaves, target = inputs()
    loss = linear_cross_entropy(*leaves, target)
    once = torch.autograd.grad(loss, leaves, retain_graph=True)
    thrice = torch.autograd.grad(-3 * loss, leaves, retain_graph=True)
    again = torch.autograd.grad(loss, leaves)
    for a, b, c in zip(once, thrice, again, strict=True):
        same_bits(a, c)
        close(b, -3 * a, 1)


def test_a_second_derivative_is_refused() -> None:
    *leaves, target = inputs()
    (dx,) = torch.autograd.grad(linear_cross_entropy(*leaves, target), leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match="linear_cross_entropy: its backward is a closed form"):
        dx.sum().backward()
    with use("equations"):
        (dx,) = torch.autograd.grad(linear_cross_entropy(*leaves, target), leaves[0], create_graph=True)
        dx.pow(2).sum().backward()


def test_under_vmap_and_grad() -> None:
    x, weight, bias, _ = (t.detach() for t in inputs())
    targets = torch.randint(V, (3, N))
    found = torch.vmap(torch.func.grad(lambda w, t: linear_cross_entropy(x, w, bias, t)), (None, 0))(weight, targets)
    for gradient, target in zip(found, targets, strict=True):
        w = weight.clone().requires_grad_()
        close(gradient, gradients(linear_cross_entropy(x, w, bias, target), w)[0], TERMS)


def test_under_autocast_the_arithmetic_is_float32(backend: str) -> None:
    x, weight, bias, target = inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(x.bfloat16(), weight, bias, target)
    assert loss.dtype == torch.float32
    same_bits(loss, linear_cross_entropy(x.bfloat16().float(), weight, bias, target))


def test_half_precision_sums_in_float32() -> None:
    """On the equation, in chunks of tokens: a sum over many chunks in bfloat16 would stop growing."""
    x, weight, bias, target = (t.detach() for t in inputs(torch.bfloat16, 4096))
    weight.requires_grad_()
    whole = linear_cross_entropy(x, weight, bias, target, reduction="sum")
    exact = linear_cross_entropy(x.double(), weight.double(), bias.double(), target, reduction="sum")
    close(whole, exact, 1)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_chunks_of_tokens_and_blocks_of_classes(threads: int) -> None:
    """Every token of several chunks has its own dx, in any order, ignored ones between them."""
    torch.set_num_threads(threads)
    x, weight, bias, target = inputs(n=1100, v=301)
    target[torch.rand(1100) < 0.4] = -100
    found = gradients(linear_cross_entropy(x, weight, bias, target), x, weight, bias)
    expected = gradients(F.cross_entropy(F.linear(x, weight, bias), target), x, weight, bias)
    for a, b in zip(found, expected, strict=True):
        close(a, b, 1100)
    assert found[0][target == -100].abs().sum() == 0


def test_float32_is_as_exact_as_torch(backend: str) -> None:
    """Loss, dx and dweight, each against float64, by the root of the mean square."""
    errors = []
    for _ in range(3):
        x, weight, bias, target = inputs(torch.float32, 500, 2000)
        exact = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
        results = []
        for function, leaves in ((own_loss, (x, weight, bias)), (torch_loss, (x, weight, bias)), (torch_loss, exact)):
            loss = function(*leaves, target)
            results.append([loss.detach(), *gradients(loss, *leaves[:2])])
        ours, theirs, reference = results
        errors.append(
            [[float((f - r).square().mean()) for f, r in zip(g, reference, strict=True)] for g in (ours, theirs)]
        )
    ours_error, theirs_error = torch.tensor(errors).sum(0).sqrt()
    assert (ours_error <= AS_EXACT * theirs_error).all(), (ours_error, theirs_error)


def own_loss(x: Tensor, weight: Tensor, bias: Tensor, target: Tensor) -> Tensor:
    return linear_cross_entropy(x, weight, bias, target)


def torch_loss(x: Tensor, weight: Tensor, bias: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight, bias), target)


PROGRAM = """
import resource, sys, threading, time
import torch
from torch.nn import functional as F
from unrolled.ops.linear_cross_entropy import linear_cross_entropy

torch.set_num_threads(2)
N, D, V = 4096, 32, 10000
x, weight = torch.randn(N, D, requires_grad=True), torch.randn(V, D, requires_grad=True)
target = torch.randint(V, (N,))


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def watch():
    while not done.is_set():
        sizes.append(resident())
        time.sleep(0.0005)


def step(x, target):
    if "torch" in sys.argv:
        return F.cross_entropy(F.linear(x, weight), target)
    return linear_cross_entropy(x, weight, None, target)


step(x[:8], target[:8]).backward()
weight.grad = None
sizes, done = [resident()], threading.Event()
watcher = threading.Thread(target=watch)
watcher.start()
step(x, target).backward()
done.set()
watcher.join()
print(max(sizes) - sizes[0])
"""
LOGITS = 4096 * 10000 * 4  # bytes


def grown(*arguments: str) -> int:
    """By how many bytes the resident set of a process grows within a step."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, check=True)
    return int(done.stdout)


def test_the_logits_of_the_batch_are_never_stored() -> None:
    ours = grown()
    assert ours < LOGITS / 5
    assert ours * 10 < grown("torch")


ARGUMENTS: dict[str, Any] = {
    **{"x": np.zeros((4, 3)), "weight": np.zeros((5, 3)), "bias": np.zeros(5), "target": np.zeros(4, np.int64)},
    **{"class_weight": np.zeros(5), "loss": np.array(0.0), "dx": np.zeros((4, 3)), "dweight": np.zeros((5, 3))},
    **{"dbias": np.zeros(5), "ignore_index": -100, "label_smoothing": 0.0, "mean": True, "threads": 1},
}


@pytest.mark.parametrize("name", list(ARGUMENTS)[:9])
def test_the_border_refuses_arrays_of_another_shape_or_type(name: str) -> None:
    core.linear_cross_entropy(*ARGUMENTS.values())
    value = ARGUMENTS[name]
    wrong = [value.astype(np.float32 if value.dtype == np.float64 else np.int32)]
    if value.ndim:
        wrong.append(np.zeros([n + 1 for n in value.shape], value.dtype))
    for other in wrong:
        with pytest.raises((TypeError, ValueError)):
            core.linear_cross_entropy(*{**ARGUMENTS, name: other}.values())


def test_the_border_wants_no_dbias_alone() -> None:
    with pytest.raises(ValueError, match="dbias must be None without dweight"):
        core.linear_cross_entropy(*{**ARGUMENTS, "dweight": None}.values())


# The module


def test_the_module_is_a_projection_and_its_loss(backend: str) -> None:
    ours = nn.LinearCrossEntropyLoss(D, V, class_weight=torch.rand(V), label_smoothing=0.1, ignore_index=2)
    assert {name: tuple(p.shape) for name, p in ours.state_dict().items()} == {
        **{"class_weight": (V,), "weight": (V, D), "bias": (V,)},
    }
    theirs = torch.nn.CrossEntropyLoss(ours.class_weight, ignore_index=2, label_smoothing=0.1)
    x, target = torch.randn(3, 4, D), torch.randint(V, (3, 4))
    loss = ours(x, target)
    close(loss, theirs(ours.logits(x).flatten(0, 1), target.flatten()), TERMS)
    close(ours.logits(x), F.linear(x, ours.weight, ours.bias), TERMS)
    loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in ours.parameters())


def test_the_module_takes_ragged_batches_and_single_tokens(backend: str) -> None:
    loss = nn.LinearCrossEntropyLoss(D, V, bias=False, reduction="sum")
    x, target = torch.randn(N, D), torch.randint(V, (N,))
    ragged = Ragged(x, [0, 3, 3, N]), Ragged(target, [0, 3, 3, N])
    same_bits(loss(*ragged), loss(x, target))
    close(torch.stack([loss(a, b) for a, b in zip(x, target, strict=True)]).sum(), loss(x, target), TERMS)
    with pytest.raises(ValueError, match="other sequences"):
        loss(ragged[0], Ragged(target, [0, 2, 3, N]))
    with pytest.raises(TypeError, match="both be tensors, or both Ragged"):
        loss(ragged[0], target)


def test_a_weight_shared_with_the_embedding_has_both_gradients(backend: str) -> None:
    embedding = nn.Embedding(V, D)
    model = torch.nn.ModuleList([embedding, nn.LinearCrossEntropyLoss(D, V, weight=embedding.weight)])
    assert len(list(model.parameters())) == 2
    token, target = torch.randint(V, (N,)), torch.randint(V, (N,))
    model[1](embedding(token), target).backward()
    w, b = (p.detach().clone().requires_grad_() for p in (embedding.weight, model[1].bias))
    F.cross_entropy(F.linear(F.embedding(token, w), w, b), target).backward()
    close(embedding.weight.grad, w.grad, TERMS)


def test_the_module_starts_as_torch_s_linear() -> None:
    torch.manual_seed(3)
    ours = nn.LinearCrossEntropyLoss(D, V)
    torch.manual_seed(3)
    theirs = torch.nn.Linear(D, V)
    same_bits(ours.weight, theirs.weight)
    same_bits(ours.bias, theirs.bias)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.LinearCrossEntropyLoss(0, V), "in_features must be at least 1, found 0"),
        (lambda: nn.LinearCrossEntropyLoss(D, V, reduction="none"), 'must be "mean" or "sum"'),
        (lambda: nn.LinearCrossEntropyLoss(D, V, weight=nn.Embedding(V, D + 1).weight), r"must be \(11, 5\)"),
        (lambda: nn.LinearCrossEntropyLoss(D, V)(torch.zeros(2, V), torch.zeros(2)), r"expected input \(..., 5\)"),
    ],
)
def test_what_the_module_refuses(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
