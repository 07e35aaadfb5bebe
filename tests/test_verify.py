"""The certificate for our operators, and the check of anybody's layer: right ones pass, wrong ones do not."""

from __future__ import annotations

import json
import time
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import unrolled
from unrolled import Ragged, verify
from unrolled.equations.cross_entropy import cross_entropy_backward, cross_entropy_forward
from unrolled.ragged import Rows, live_rows
from unrolled.verify.judges import relative_error
from unrolled.verify.operators import OPERATORS
from unrolled.verify.recurrent import RecurrentGrads, recurrent_backward, recurrent_forward

FIELDS = ["operator", "judge", "dtype", "max_relative_error", "bound", "passed"]


def failed(rows: list[dict[str, Any]]) -> set[str]:
    return {row["operator"] for row in rows if not row["passed"]}


def test_every_operator_has_its_certificate_in_time() -> None:
    start = time.monotonic()
    rows = verify.run()
    assert time.monotonic() - start < 60
    assert [row for row in rows if not row["passed"]] == []
    assert list(dict.fromkeys(row["operator"] for row in rows)) == list(OPERATORS)
    core = unrolled.backends()["core"]
    for name, operator in OPERATORS.items():
        judges = {(row["judge"], row["dtype"]) for row in rows if row["operator"] == name}
        expected = {("finite differences", "float64"), ("autograd", "float64")}
        for judge in (["torch.nn"] if operator.peer else []) + ([f"core {core}"] if core else []):
            expected |= {(judge, "float64"), (judge, "float32")}
        assert judges == expected
    assert all(list(row) == FIELDS for row in json.loads(json.dumps(rows)))


def test_only_the_operators_named() -> None:
    assert {row["operator"] for row in verify.run(["linear", "dropout"])} == {"linear", "dropout"}
    with pytest.raises(ValueError, match=r"'liner' \(did you mean 'linear'\?\); there are rnn, lstm, gru, linear"):
        verify.run(["liner"])
    with pytest.raises(ValueError, match="'xyz'; there are rnn"):
        verify.run(["xyz"])


def test_a_certificate_of_a_wrong_operator_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = OPERATORS["linear"]

    def too_large(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return linear.operator(x, weight, bias) * 1.0001

    def wrong_backward(dy: Tensor, saved: Any) -> Any:
        grads = linear.backward(dy, saved)
        return grads._replace(dweight=grads.dweight.flip(0))

    for change, refused in (
        ({"operator": too_large}, {"torch.nn"}),
        ({"backward": wrong_backward}, {"autograd"}),
    ):
        monkeypatch.setitem(verify.OPERATORS, "linear", linear._replace(**change))
        assert refused <= {row["judge"] for row in verify.run(["linear"]) if not row["passed"]}
        monkeypatch.undo()


MODULES = [
    (nn.Linear(3, 2), (torch.randn(4, 3),)),
    (nn.LSTM(2, 3, num_layers=2), (torch.randn(4, 2, 2), (torch.randn(2, 2, 3), torch.randn(2, 2, 3)))),
    (nn.Embedding(5, 3), (torch.tensor([0, 3, 3]),)),
    (nn.Sequential(nn.LayerNorm(3), nn.GELU()), (torch.randn(2, 3),)),
    (unrolled.nn.RNN(3, 4, 2, bidirectional=True), (torch.randn(5, 2, 3), torch.randn(4, 2, 4))),
    (unrolled.nn.LSTM(3, 2, 2, bidirectional=True), (torch.randn(3, 2, 3), (torch.randn(4, 2, 2),) * 2)),
    (unrolled.nn.GRU(3, 2, learn_initial_state=True), (Ragged(torch.randn(5, 3), [0, 2, 2, 5]),)),
    (unrolled.nn.LSTM(3, 4, proj_size=2, peephole=True, layer_norm=True).eval(), (torch.randn(3, 2, 3),)),
    (unrolled.nn.GRU(3, 4, reset="before", layer_norm=True, zoneout=0.3).eval(), (torch.randn(3, 2, 3),)),
    (unrolled.nn.LSTMCell(3, 2), (torch.randn(2, 3),)),
]


@pytest.mark.parametrize(("module", "inputs"), MODULES, ids=lambda value: type(value).__name__)
def test_right_modules_pass_and_stay_as_they_are(module: nn.Module, inputs: tuple[Any, ...]) -> None:
    rows = verify.check(module, inputs)
    assert failed(rows) == set()
    names = {row["operator"].partition(".")[2] for row in rows}
    assert names >= {name for name, _ in module.named_parameters()}
    assert len(names) > len(list(module.parameters())) or isinstance(module, nn.Embedding)
    assert {p.dtype for p in module.parameters()} == {torch.float32}
    assert all(p.grad is None for p in module.parameters())


class NoWeightGradient(torch.autograd.Function):
    """A linear map that hands the weight a gradient of 0, as an established library's LSTM does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.tanh(x @ weight.T)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        da = dy * (1 - torch.tanh(x @ weight.T) ** 2)
        return da @ weight, torch.zeros_like(weight)


class Wrong(nn.Module):
    def __init__(self, mistake: str) -> None:
        super().__init__()
        self.mistake, self.weight = mistake, nn.Parameter(torch.randn(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        if self.mistake == "no weight gradient":
            return NoWeightGradient.apply(x, self.weight)
        if self.mistake == "cut":
            return (x @ self.weight.T).detach()
        y = x @ self.weight.T
        if self.mistake == "one entry" and y.requires_grad:
            y.register_hook(lambda dy: dy + 1e-4 * torch.eye(*dy.shape, dtype=dy.dtype))
        return y


@pytest.mark.parametrize(
    ("mistake", "names"),
    [
        ("none", set()),
        ("no weight gradient", {"Wrong.weight"}),
        ("cut", {"Wrong.input0", "Wrong.weight"}),
        ("one entry", {"Wrong.input0", "Wrong.weight"}),
    ],
)
def test_wrong_modules_are_caught(mistake: str, names: set[str]) -> None:
    assert failed(verify.check(Wrong(mistake), (torch.randn(4, 3),))) == names


def lstm_forward(
    x: Tensor,
    h0: Tensor,
    c0: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    weight_hr: Tensor,
    peephole: Tensor,
    steps: list[Tensor],
) -> tuple[Any, ...]:
    weights = {"weight_ih": weight_ih, "weight_hh": weight_hh, "weight_hr": weight_hr, "peephole": peephole}
    return recurrent_forward("lstm_options", x, h0, steps, c0, **weights)


def lstm_inputs() -> tuple[Any, ...]:
    _, steps = live_rows(Rows(torch.tensor([0, 3, 5]), 1, torch.tensor([3, 2, 0])))
    shapes = (5, 2), (3, 2), (3, 4), (16, 2), (16, 2), (2, 4), (12,)
    return *(torch.randn(shape) for shape in shapes), steps


def test_our_equations_pass_and_a_wrong_term_is_caught() -> None:
    rows = verify.check(lstm_forward, recurrent_backward, lstm_inputs())
    assert failed(rows) == set()
    names = ("x", "h0", "c0", "weight_ih", "weight_hh", "weight_hr", "peephole")
    assert [(row["operator"], row["judge"]) for row in rows] == [
        (f"lstm.{name}", judge) for judge in ("finite differences", "autograd") for name in names
    ]

    def wrong(*args: Any) -> RecurrentGrads:
        grads = recurrent_backward(*args)
        return grads._replace(dc0=torch.zeros_like(grads.dc0), dweight_hr=grads.dweight_hr.flip(0))

    assert failed(verify.check(lstm_forward, wrong, lstm_inputs())) == {"lstm.c0", "lstm.weight_hr"}


class SquareGrads(NamedTuple):
    dscale: Tensor
    dx: Tensor


def square_forward(x: Tensor, scale: Tensor) -> tuple[Tensor, Any]:
    return scale * x * x, (x, scale)


def test_gradients_by_name_and_by_order() -> None:
    x, scale = torch.randn(5), torch.randn(())

    def by_name(dy: Tensor, saved: Any) -> SquareGrads:
        x, scale = saved
        return SquareGrads((dy * x * x).sum(), 2 * dy * x * scale)

    def by_order(dy: Tensor, saved: Any) -> tuple[Tensor, Tensor]:
        grads = by_name(dy, saved)
        return grads.dx, grads.dscale

    for backward in (by_name, by_order):
        assert failed(verify.check(square_forward, backward, (x, scale))) == set()
    wrong_order = lambda dy, saved: tuple(by_name(dy, saved))  # noqa: E731
    assert failed(verify.check(square_forward, wrong_order, (x, scale))) == {"square.x", "square.scale"}
    with pytest.raises(ValueError, match="gives 1 gradients for 2 inputs: x, scale"):
        verify.check(square_forward, lambda dy, saved: (by_order(dy, saved)[0],), (x, scale))


def test_only_inputs_that_require_grad_are_judged_where_any_does() -> None:
    logits, target, weight = torch.randn(4, 3, requires_grad=True), torch.tensor([0, 2, 1, 1]), torch.rand(3)
    rows = verify.check(cross_entropy_forward, cross_entropy_backward, (logits, target, weight))
    assert {row["operator"] for row in rows} == {"cross_entropy.logits"}
    assert failed(rows) == set()


def test_nan_gradients_and_wrong_shapes_are_caught() -> None:
    for wrong in (lambda dy, _: (dy * float("nan"),), lambda dy, _: (dy[:1],), lambda dy, _: (dy.repeat(2),)):
        assert failed(verify.check(lambda x: (x * 2, None), wrong, (torch.randn(3),))) == {"<lambda>.x"}


def test_wrong_use() -> None:
    with pytest.raises(ValueError, match=r"two results.*\.eval\(\)"):
        verify.check(nn.Dropout(0.5), (torch.ones(50),))
    with pytest.raises(TypeError, match="check takes"):
        verify.check(torch.tanh)
    with pytest.raises(ValueError, match="takes 2 inputs by name, 3 were given"):
        verify.check(square_forward, square_forward, (1, 2, 3))


def test_relative_error_of_gradients_that_track_gradients() -> None:
    x = torch.ones(3, requires_grad=True)
    assert relative_error(x * 2, x) == 1.0
