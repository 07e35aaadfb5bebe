"""Additive attention, and the modules with which a decoder reads an encoder: what the cases do not ask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tolerances import AS_EXACT, close, same_bits
from unrolled import Ragged, nn, use
from unrolled.ops._backend import core
from unrolled.ops.additive_attention import additive_attention
from unrolled.ragged import Rows
from unrolled.verify import double
from unrolled.verify.judges import autograd
from unrolled.verify.outputs import make_additive_attention

H, D = 5, 3
TERMS = 40


def rows(*lengths: int) -> Rows:
    length = torch.tensor(lengths)
    return Rows(length.cumsum(0) - length, 1, length)


def inputs(queries: Rows, keys: Rows, **more: Any) -> dict[str, Any]:
    sizes = {"q": (int(queries.length.sum()), H), "k": (int(keys.length.sum()), H), "v": (H,)}
    tensors = {name: torch.randn(size, dtype=torch.float64, requires_grad=True) for name, size in sizes.items()}
    value = torch.randn(int(keys.length.sum()), D, dtype=torch.float64, requires_grad=True)
    return {**tensors, "value": value, "queries": queries, "keys": keys, **more}


def of_sequence(given: dict[str, Any], b: int) -> dict[str, Any]:
    """The sequence alone."""
    queries, keys = (slice(int(r.start[b]), int(r.start[b] + r.length[b])) for r in (given["queries"], given["keys"]))
    cut = {"q": given["q"][queries], "k": given["k"][keys], "value": given["value"][keys], "v": given["v"]}
    one = {name: rows(int(given[name].length[b])) for name in ("queries", "keys")}
    return {name: t.detach().requires_grad_() for name, t in cut.items()} | one


def test_a_batch_equals_its_sequences_alone(backend: str) -> None:
    given = inputs(rows(3, 0, 2, 4, 1), rows(2, 5, 0, 20, 17), need_weights=True)
    (o, weights), first = additive_attention(**given), given["queries"].start
    for b, n in enumerate(given["queries"].length.tolist()):
        alone, alone_weights = additive_attention(**of_sequence(given, b), need_weights=True)
        close(o[first[b] : first[b] + n], alone, TERMS)
        close(weights[b, :n, : alone_weights.shape[2]], alone_weights[0], TERMS)
        assert weights[b, n:].abs().sum() == weights[b, :, alone_weights.shape[2] :].abs().sum() == 0


@pytest.mark.parametrize("kind", ["no key", "boolean", "added"])
def test_a_query_that_may_attend_to_nothing(kind: str, backend: str) -> None:
    queries, keys = rows(2, 1), rows(0 if kind == "no key" else 3, 2)
    mask = None
    if kind != "no key":
        mask = torch.ones(2, 2, 3, dtype=torch.bool)
        mask[0] = False
        mask = mask if kind == "boolean" else torch.zeros(2, 2, 3, dtype=torch.float64).masked_fill(~mask, -torch.inf)
    given = inputs(queries, keys, mask=mask, need_weights=True)
    (o, weights), grads = autograd(additive_attention, given)[0].values(), autograd(additive_attention, given)[1]
    assert o[:2].abs().sum() == weights[0].abs().sum() == 0
    assert grads["q"][:2].abs().sum() == grads["k"][: int(keys.length[0])].abs().sum() == 0
    assert grads["value"][: int(keys.length[0])].abs().sum() == 0
    assert all(g.isfinite().all() for g in grads.values())


def test_rows_of_no_sequence_are_0(backend: str) -> None:
    given = inputs(Rows(torch.tensor([1]), 2, torch.tensor([2])), Rows(torch.tensor([3]), -1, torch.tensor([2])))
    for name, count in (("q", 5), ("k", 5), ("value", 5)):
        width = given[name].shape[1]
        given[name] = torch.randn(count, width, dtype=torch.float64, requires_grad=True)
    outputs, grads = autograd(additive_attention, given)
    for tensor, live in ((outputs["y0"], [1, 3]), (grads["q"], [1, 3]), (grads["k"], [2, 3]), (grads["value"], [2, 3])):
        assert (tensor.abs().sum(1) > 0).nonzero().squeeze(1).tolist() == live


def test_weights_sum_to_1_and_are_those_of_the_output(backend: str) -> None:
    given = inputs(rows(4, 2), rows(7, 33), need_weights=True)
    o, weights = additive_attention(**given)
    close(weights[0, :4, :7] @ given["value"][:7], o[:4], TERMS)
    close(weights[1, :2] @ given["value"][7:], o[4:], TERMS)
    close(weights.sum(2)[0], torch.ones(4, dtype=torch.float64), TERMS)
    same_bits(additive_attention(**{**given, "need_weights": False}), o)


def test_a_second_derivative_is_refused() -> None:
    given = inputs(rows(2), rows(3))
    (dq,) = torch.autograd.grad(additive_attention(**given).sum(), given["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="additive_attention: its backward is a closed form"):
        dq.sum().backward()
    with use("equations"):
        (dq,) = torch.autograd.grad(additive_attention(**given).pow(2).sum(), given["q"], create_graph=True)
        dq.pow(2).sum().backward()


def test_what_is_not_a_number_stays_one(backend: str) -> None:
    given = inputs(rows(2, 1), rows(3, 2))
    with torch.no_grad():
        given["q"][0, 1] = torch.nan
    o = additive_attention(**given)
    assert o[0].isnan().all()
    assert o[1:].isfinite().all()


def test_large_scores_do_not_overflow(backend: str) -> None:
    given = inputs(rows(2), rows(40))
    given["v"] = (1e5 * given["v"]).detach().requires_grad_()
    outputs, grads = autograd(additive_attention, given)
    assert all(t.isfinite().all() for t in (*outputs.values(), *grads.values()))


def test_float32_is_as_exact_as_torch(backend: str) -> None:
    """The same lines in torch's float32, against float64."""
    errors = []
    for seed in range(20):
        given = make_additive_attention(torch.Generator().manual_seed(seed), torch.float32, ((9, 41), (3, 17)), 33, 19)
        with use("equations"):
            exact, theirs = autograd(additive_attention, double(given)), autograd(additive_attention, given)
        ours = autograd(additive_attention, given)
        errors.append(
            [
                sum(float((f[n] - e[n]).pow(2).mean()) for f, e in zip(found, exact, strict=True) for n in f)
                for found in (ours, theirs)
            ]
        )
    ours, theirs = torch.tensor(errors).sum(0).sqrt()
    assert ours <= AS_EXACT * theirs


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"v": torch.zeros(H + 1, dtype=torch.float64)}, ValueError, r"v \(H,\), found"),
    ({"value": torch.zeros(1, D, dtype=torch.float64)}, ValueError, r"value \(M, D\)"),
    ({"keys": rows(3)}, ValueError, "queries have 2 sequences, keys 1"),
    ({"v": torch.zeros(H)}, TypeError, "one dtype and device"),
    ({"mask": torch.zeros(2, 2, 3)}, TypeError, "mask must be torch.bool or torch.float64, found torch.float32"),
    ({"mask": torch.zeros(3, 2, 3, dtype=torch.bool)}, ValueError, r"expected mask \(2 or 1, Tq or 1, Tk or 1\)"),
    ({"mask": torch.zeros(2, 3, dtype=torch.bool)}, ValueError, "found"),
]


@pytest.mark.parametrize(("changed", "error", "message"), REFUSED)
def test_what_it_refuses(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    given = inputs(rows(2, 1), rows(3, 2))
    additive_attention(**given)
    with pytest.raises(error, match=message):
        additive_attention(**{**given, **changed})


def border(**changed: Any) -> list[Any]:
    """The arrays of a backward; N 3 queries and M 4 keys of B 2 sequences, H 2, D 3."""
    numbers = {"query_start": [0, 2], "query_length": [2, 1], "key_start": [0, 3], "key_length": [3, 1]}
    shapes = {"d_o": (3, 3), "q": (3, 2), "k": (4, 2), "value": (4, 3), "v": (2,), "mask": (1, 2, 3)}
    after = {"o": (3, 3), "log_sum": (3,), "dq": (3, 2), "dk": (4, 2), "dvalue": (4, 3), "dv": (2,)}
    return list(
        {
            **{name: np.zeros(shape) for name, shape in shapes.items()},
            **{name: np.array(value) for name, value in numbers.items()},
            **{name: np.zeros(shape) for name, shape in after.items()},
            **{"query_step": 1, "key_step": 1, "threads": 1},
            **changed,
        }.values()
    )


def test_the_border_refuses_what_does_not_fit() -> None:
    core.additive_attention_backward(*border())
    wrong: dict[str, Any] = {
        **{name: np.zeros((5, 4)) for name in ("d_o", "q", "k", "value", "o", "dq", "dk", "dvalue")},
        **{name: np.zeros(7) for name in ("v", "log_sum", "dv")},
        **{"mask": np.zeros((1, 2, 2)), "query_start": np.array([0, 3]), "key_length": np.array([3, 2])},
    }
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=r"must (be|have)|leaves"):
            core.additive_attention_backward(*border(**{name: value}))
    with pytest.raises(TypeError):
        core.additive_attention_backward(*border(q=np.zeros((3, 2), np.float32)))


# The modules

Q, M = 4, 3


def additive(**more: Any) -> nn.AdditiveAttention:
    return nn.AdditiveAttention(Q, M, H, dtype=torch.float64, **more)


def general(**more: Any) -> nn.MultiplicativeAttention:
    return nn.MultiplicativeAttention(Q, M, dtype=torch.float64, **more)


def dot(**more: Any) -> nn.MultiplicativeAttention:
    return nn.MultiplicativeAttention(M, M, "dot", dtype=torch.float64, **more)


every_module = pytest.mark.parametrize("make", [additive, general, dot])


def scores(layer: Any, s: Tensor, h: Tensor) -> Tensor:
    """(T, S), one pair after the other."""
    if isinstance(layer, nn.AdditiveAttention):
        bias = 0 if layer.bias is None else layer.bias
        pairs = [[layer.v @ (layer.weight_query @ a + layer.weight_key @ b + bias).tanh() for b in h] for a in s]
    else:
        pairs = [[a @ (b if layer.weight is None else layer.weight @ b) for b in h] for a in s]
    return torch.stack([torch.stack(row) for row in pairs])


@every_module
def test_a_query_reads_the_memory_by_the_softmax_of_its_scores(make: Callable[..., Any], backend: str) -> None:
    layer = make()
    s, h = torch.randn(5, layer.query_size, dtype=torch.float64), torch.randn(7, M, dtype=torch.float64)
    o, weights = layer(s, h, return_attention=True)
    expected = scores(layer, s, h).softmax(1)
    close(weights, expected, TERMS)
    close(o, expected @ h, TERMS)
    same_bits(layer(s, h), o)


@every_module
def test_every_form_of_a_batch_gives_the_same(make: Callable[..., Any], backend: str) -> None:
    layer, first = make(), make(batch_first=True)
    first.load_state_dict(layer.state_dict())
    asked, remembered = [3, 1, 0, 2], [2, 0, 4, 5]
    s = Ragged.from_list([torch.randn(n, layer.query_size, dtype=torch.float64) for n in asked])
    h = Ragged.from_list([torch.randn(n, M, dtype=torch.float64) for n in remembered])
    o, weights = layer(s, h, return_attention=True)
    assert isinstance(o, Ragged)
    assert o[1].abs().sum() == 0
    assert weights.shape == (4, 3, 5)
    for b, each in enumerate(o):
        close(each, layer(s[b], h[b]) if len(h[b]) else torch.zeros_like(each), TERMS)
    padded, padded_weights = first(
        s.to_padded(True, 6), h.to_padded(True, 8), lengths=asked, memory_lengths=remembered, return_attention=True
    )
    close(padded, o.to_padded(True, 6), TERMS)
    assert padded_weights.shape == (4, 6, 8)
    close(padded_weights[:, :3, :5], weights, TERMS)
    assert padded_weights[:, 3:].abs().sum() == padded_weights[:, :, 5:].abs().sum() == 0
    time_major = layer(s.to_padded(), h.to_padded(), lengths=asked, memory_lengths=remembered)
    close(time_major, o.to_padded(), TERMS)
    mixed = layer(s, h.to_padded(), memory_lengths=remembered)
    close(mixed.values, o.values, TERMS)


@every_module
def test_every_parameter_has_the_gradient_of_the_plain_scores(make: Callable[..., Any], backend: str) -> None:
    layer = make()
    s = torch.randn(2, layer.query_size, dtype=torch.float64, requires_grad=True)
    h = torch.randn(6, M, dtype=torch.float64, requires_grad=True)
    leaves = [s, h, *layer.parameters()]
    found = torch.autograd.grad(layer(s, h).pow(2).sum(), leaves)
    expected = torch.autograd.grad((scores(layer, s, h).softmax(1) @ h).pow(2).sum(), leaves)
    for a, b in zip(found, expected, strict=True):
        close(a, b, TERMS)


@every_module
def test_the_weights_can_be_differentiated(make: Callable[..., Any], backend: str) -> None:
    layer = make()
    s, h = torch.randn(2, layer.query_size, dtype=torch.float64), torch.randn(6, M, dtype=torch.float64)
    h.requires_grad_()
    (found,) = torch.autograd.grad(layer(s, h, return_attention=True)[1].pow(2).sum(), h)
    (expected,) = torch.autograd.grad(scores(layer, s, h).softmax(1).pow(2).sum(), h)
    close(found, expected, TERMS)


def test_the_names_and_first_values_of_the_parameters() -> None:
    layer = nn.AdditiveAttention(16, 25, 9)
    shapes = {name: tuple(p.shape) for name, p in layer.named_parameters()}
    assert shapes == {"weight_query": (9, 16), "weight_key": (9, 25), "v": (9,), "bias": (9,)}
    for parameter, bound in ((layer.weight_query, 1 / 4), (layer.weight_key, 1 / 5), (layer.v, 1 / 3)):
        assert bound / 2 < parameter.abs().max() <= bound
    assert nn.AdditiveAttention(16, 25, 9, bias=False).bias is None
    assert {name: tuple(p.shape) for name, p in general().named_parameters()} == {"weight": (Q, M)}
    assert not list(dot().parameters())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.AdditiveAttention(4, 3, 0), "hidden_size must be at least 1, found 0"),
        (lambda: nn.MultiplicativeAttention(4, 3, "cosine"), "form must be one of dot, general, found 'cosine'"),
        (lambda: nn.MultiplicativeAttention(4, 3, "dot"), "one size, found 4 and 3"),
        (lambda: general()(torch.zeros(2, Q), torch.zeros(2, 5, M)), "query has 1 sequences, memory 5"),
        (lambda: general()(torch.zeros(2, M), torch.zeros(2, M)), "reads 4 features, the input has 3"),
    ],
)
def test_what_the_modules_refuse(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
