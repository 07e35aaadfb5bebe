"""What the mutation run (`python -m tests.mutate`) found untested; it asks these tests too, on every mutant."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cases import Case
from tolerances import close
from unrolled import use
from unrolled.equations.attention import attention_backward, attention_forward
from unrolled.equations.dropout import Dropping
from unrolled.ops import _backend
from unrolled.ops.activation import activation
from unrolled.ops.attention import attention
from unrolled.ops.cross_entropy import cross_entropy
from unrolled.ops.dropout import dropout
from unrolled.ops.embedding import embedding
from unrolled.ops.feed_forward import feed_forward
from unrolled.ops.linear_cross_entropy import linear_cross_entropy
from unrolled.ops.residual_norm import residual_norm
from unrolled.ragged import Rows
from unrolled.verify.formulations import philox, plain_dropout
from unrolled.verify.judges import autograd, bound, compare

WIDE: dict[str, Any] = {"lengths": [13, 0, 4] * 18, "input_size": 5, "hidden_size": 35, "directions": 2}
LONG: dict[str, Any] = {"lengths": [150, 0, 3], "input_size": 5, "hidden_size": 37}
ALONE: dict[str, Any] = {"lengths": [150], "input_size": 19, "hidden_size": 35}
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("rnn", {}),
    ("lstm", {}),
    ("gru", {}),
    ("gru", {"reset": "before"}),
    ("rnn", {"layer_norm": True, "recurrent_dropout": 0.3, "proj_size": 3}),
    ("lstm", {"layer_norm": True, "zoneout": (0.2, 0.1), "peephole": True, "proj_size": 3}),
    ("gru", {"layer_norm": True, "recurrent_dropout": 0.3}),
    ("gru", {"layer_norm": True, "zoneout": (0.2, 0.1), "reset": "before", "recurrent_dropout": 0.3}),
]
# Several tiles of sequences in a task, several blocks of tokens, one sequence for all threads, truncation.
THREADED = [
    Case(name, {**sizes, **more, **cut})
    for sizes, cut in ((WIDE, {}), (LONG, {"bptt": 7}), (LONG, {"layout": "time_major"}), (ALONE, {}))
    for name, more in OPTIONS
]
# Behind the last number of a row of scratch lies nothing.
THREADED.append(Case("linear", {"tokens": 1, "input_size": 0, "output_size": 152}))
# Rows that end within a vector, at its end, and where their cache lines do.
WIDTHS = [
    Case(name, {"lengths": [2, 1], "hidden_size": width, "input_size": 18 - width, **more})
    for name, more in OPTIONS
    for width in range(3, 18)
]


@pytest.mark.parametrize("case", [*THREADED, *WIDTHS], ids=str)
def test_core_against_the_equation(case: Case, backend: str) -> None:
    inputs = case.inputs()
    limit, floor = bound(torch.float64, case.operator.length(inputs)), case.operator.cancels(inputs)
    with use("equations"):
        expected = autograd(case.operator.operator, inputs)
    for threads in (1, 3) if case in THREADED and _backend.core is not None else (1,):
        torch.set_num_threads(threads)
        error = compare(autograd(case.operator.operator, inputs), expected, floor)
        assert error <= limit, f"{threads} threads"


def test_what_needs_no_gradient_changes_no_other(backend: str) -> None:
    for name, more in [*OPTIONS, ("linear", {})]:
        case = Case(name, more)
        inputs = case.inputs()
        _, expected = autograd(case.operator.operator, inputs)
        _, found = autograd(case.operator.operator, {**inputs, "x": inputs["x"].detach()})
        assert found.keys() == expected.keys() - {"x"}
        for weight, gradient in found.items():
            close(gradient, expected[weight], 1)


def test_the_gradients_of_nothing_are_exactly_0(backend: str) -> None:
    cases = [Case(name, {**more, "lengths": [0, 0]}) for name, more in OPTIONS]
    for case in [*cases, Case("linear", {"tokens": 0}), Case("embedding", {"tokens": 0})]:
        _, grads = autograd(case.operator.operator, case.inputs())
        assert all(bool((g == 0).all()) for name, g in grads.items() if name not in ("h0", "c0")), case


def test_many_threads_on_few_columns(backend: str) -> None:
    case = Case("linear", {"tokens": 1301, "input_size": 701, "output_size": 1})
    torch.set_num_threads(11)
    inputs = case.inputs()
    _, found = autograd(case.operator.operator, inputs)
    _, expected = autograd(case.operator.plain, inputs)
    for name, gradient in found.items():
        close(gradient, expected[name], 1301)


SEED, KEY, T, LAYER = torch.tensor(5), torch.tensor([3]), torch.tensor([2]), 1


def test_dropout_keeps_a_unit_whose_number_is_the_limit_itself(backend: str) -> None:
    word = philox((0, 2, 3, LAYER), 5)[0]
    x = torch.ones(1, 1, dtype=torch.float64)
    p = word / 2**32
    assert dropout(x, p, SEED, LAYER, KEY, T).item() == 1 / (1 - p)
    assert dropout(x, (word + 1) / 2**32, SEED, LAYER, KEY, T).item() == 0


def test_so_does_dropout_within_an_operator(backend: str) -> None:
    word, one = philox((0, 2, 3, LAYER), 5)[0], torch.ones(1, 1, dtype=torch.float64)
    rows = Rows(torch.tensor([0]), 1, torch.tensor([1]))
    for number, kept in ((word, 1 / (1 - word / 2**32)), (word + 1, 0)):
        dropping = Dropping(number / 2**32, SEED, LAYER, KEY, T)
        r, _ = residual_norm(0 * one, one, None, None, kind="rms", epsilon=1e-5, dropping=dropping)
        y = feed_forward(one, one, None, one, None, "relu", dropping=dropping)
        o = attention(one, one, one, heads=1, queries=rows, dropping=dropping)
        assert r.item() == y.item() == o.item() == kept


def test_dropout_of_many_features(backend: str) -> None:
    x = torch.ones(1, 1100, dtype=torch.float64)
    found, expected = (f(x, 0.5, SEED, LAYER, KEY, T) for f in (dropout, plain_dropout))
    assert torch.equal(found, expected)


def test_an_ignored_target_has_a_gradient_of_exactly_0(backend: str) -> None:
    logits = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    cross_entropy(logits, torch.tensor([1, -100, 2]), None, -100, 0.1).sum().backward()
    assert logits.grad is not None
    assert bool((logits.grad[1] == 0).all())


def test_a_token_outside_the_table_is_refused_wherever_it_stands(backend: str) -> None:
    """By the core's backward too, which no operator calls with a token that its forward refused."""
    weight, dy = torch.zeros(4, 2, dtype=torch.float64), torch.zeros(3, 2, dtype=torch.float64)
    for token in ([4, 0, 0], [0, 0, 4], [-1, 0, 0], [0, 0, -1]):
        with pytest.raises(IndexError):
            embedding(torch.tensor(token), weight, None)
        if _backend.core is not None:
            with pytest.raises(IndexError):
                _backend.core.embedding_backward(*_backend.arrays(dy, torch.tensor(token), weight), -1, 1)


def test_the_derivative_of_relu_at_0_is_0(backend: str) -> None:
    x = torch.zeros(5, dtype=torch.float64, requires_grad=True)
    activation(x, "relu").sum().backward()
    assert x.grad is not None
    assert bool((x.grad == 0).all())


def test_attention_without_a_mask_or_slopes_has_no_gradient_of_them(backend: str) -> None:
    x, rows = torch.randn(3, 2, dtype=torch.float64), Rows(torch.tensor([0]), 1, torch.tensor([3]))
    o, _, saved = attention_forward(x, x, x, 1, rows, rows)
    grads = attention_backward(o, None, saved)
    assert grads.dmask is None
    assert grads.dslopes is None


def test_a_loss_whose_targets_weigh_nothing_is_not_divided(backend: str) -> None:
    x, weight, target = torch.randn(3, 2).double(), torch.randn(4, 2).double(), torch.tensor([1, 1, -100])
    class_weight = torch.tensor([1.0, 0.0, 2.0, 0.5]).double()
    losses = [
        linear_cross_entropy(
            x, weight, None, target, class_weight=class_weight, label_smoothing=0.2, reduction=reduction
        )
        for reduction in ("mean", "sum")
    ]
    assert losses[0] == losses[1] > 0


def test_an_ignored_target_where_there_is_one_class(backend: str) -> None:
    x, weight = torch.randn(2, 3).double(), torch.randn(1, 3).double()
    loss = linear_cross_entropy(x, weight, None, torch.tensor([0, -100]), class_weight=torch.ones(1).double())
    assert loss == 0


def test_a_target_that_weighs_nothing_has_loss_0_whatever_its_logits(backend: str) -> None:
    x, weight, bias = torch.ones(1, 2).double(), torch.ones(2, 2).double(), torch.tensor([torch.inf, 0]).double()
    class_weight = torch.tensor([1.0, 0.0]).double()
    assert linear_cross_entropy(x, weight, bias, torch.tensor([1]), class_weight=class_weight) == 0


def test_the_logarithm_that_a_query_without_keys_keeps_for_the_backward_is_0(backend: str) -> None:
    x, keys = torch.randn(9, 2, dtype=torch.float64, requires_grad=True), Rows(torch.tensor([0]), 1, torch.tensor([2]))
    for count in (3, 9):
        queries = Rows(torch.tensor([0]), 1, torch.tensor([count]))
        _, _, saved = attention_forward(x, x[:2], x[:2], 1, queries, keys, True)
        found = attention(x[:count], x[:2], x[:2], heads=1, queries=queries, keys=keys, causal=True)
        kept = saved.log_sum if _backend.core is None else found.grad_fn.saved_tensors[-1]
        assert bool((kept[: count - 2] == 0).all())
