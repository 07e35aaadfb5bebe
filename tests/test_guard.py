"""The guard against NaN and infinity: the weights stay, and layer and time step are named."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import unrolled
from toy import toy_config
from unrolled import Ragged
from unrolled.training import NonFiniteError, fit
from unrolled.training.guard import find_nonfinite

# The guard against NaN and infinity


class Growth(nn.Module):
    """h_t = relu(w h_{t-1} + x_t): one unit that grows without bound."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.rnn = unrolled.nn.RNN(1, 1, nonlinearity="relu", bias=False)
        self.linear = unrolled.nn.Linear(1, 1)
        with torch.no_grad():
            self.rnn.weight_ih_l0.fill_(1.0)
            self.rnn.weight_hh_l0.fill_(weight)
            self.linear.weight.fill_(1.0)

    def forward(self, inputs: Ragged) -> Tensor:
        return self.linear(unrolled.nn.last(self.rnn(inputs)[1]))


class GrowthTask:
    """The mean of the final states of `sequences` is the loss."""

    notes: ClassVar[list[str]] = []

    def __init__(self, weight: float, sequences: list[list[float]]) -> None:
        self.weight, self.splits = weight, {"train": list(enumerate(sequences))}

    def build_model(self) -> nn.Module:
        return Growth(self.weight)

    def num_tokens(self, example: Any) -> int:
        return len(example[1])

    def collate(self, examples: Any) -> Any:
        from unrolled.tasks.classify import Batch

        inputs = Ragged.from_list([torch.tensor(values).reshape(-1, 1) for _, values in examples])
        return Batch(inputs, torch.zeros(len(examples), dtype=torch.int64), [row + 100 for row, _ in examples])

    def loss_sum(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        logits = model(batch.inputs)
        return logits.sum(), torch.tensor(float(len(logits)))

    def metrics(self, model: nn.Module, examples: Any, batch_size: int) -> dict[str, Any]:
        return {}

    def save(self, folder: Path) -> None:
        (folder / "config.json").write_text("{}")


@pytest.mark.parametrize(
    ("weight", "sequences", "kind", "finding"),
    [
        (1e20, [[1.0], [1.0, 1.0, 1.0, 1.0], []], "loss", ("state h_t", "rnn (layer 0, forward)", 2, 101)),
        (1e5, [[0.0, 1e-37] + [0.0] * 8, [1.0]], "gradient", ("gradient dh_t", "rnn (layer 0, forward)", 1, 100)),
        (1.0, [[1.0], [1.0, math.nan, 1.0]], "loss", ("input", None, 1, 101)),
        (math.inf, [[1.0]], "loss", ("parameter rnn.weight_hh_l0", None, None, None)),
    ],
)
def test_nonfinite_stops_before_the_weights_change_and_names_layer_and_step(
    weight: float, sequences: list[list[float]], kind: str, finding: tuple[Any, ...], tmp_path: Path
) -> None:
    task = GrowthTask(weight, sequences)
    config = toy_config(tmp_path, batch_size=8, max_grad_norm=1.0)
    with pytest.raises(NonFiniteError, match=f"step 0: the {kind} is not finite") as caught:
        fit(config, lambda _: task)
    folder = tmp_path / "run" / "nonfinite-0"
    report = json.loads((folder / "report.json").read_text())
    assert report["message"] == str(caught.value)
    quantity, layer, step, row = finding
    found = report["finding"]
    assert (found["quantity"], found["layer"], found["step"]) == (quantity, layer, step)
    assert found["sequence"] == (None if row is None else report["rows"].index(row))
    assert (f"line {row} " in report["message"]) == (row is not None)
    batch = load_file(folder / "batch.safetensors")
    expected = task.collate([task.splits["train"][row - 100] for row in report["rows"]])
    torch.testing.assert_close(batch["values"], expected.inputs.values, equal_nan=True)
    assert batch["offsets"].tolist() == expected.inputs.offsets.tolist()
    after = load_file(folder / "model.safetensors")
    before = Growth(weight).state_dict()
    assert all(torch.equal(after[name], before[name]) for name in ("rnn.weight_hh_l0", "linear.weight"))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("RNN", {}),
        ("LSTM", {}),
        ("GRU", {}),
        ("RNN", {"zoneout": 0.1, "recurrent_dropout": 0.1}),
        ("LSTM", {"peephole": True}),
        ("LSTM", {"proj_size": 1}),
        ("GRU", {"reset": "before"}),
    ],
)
@pytest.mark.parametrize("quantity", ["state h_t", "gradient dh_t"])
def test_nonfinite_is_found_in_every_cell(name: str, options: dict[str, Any], quantity: str) -> None:
    layer = getattr(unrolled.nn, name)(2, 2, num_layers=2, bidirectional=True, **options).eval()
    x, weights = torch.zeros(5, 2), torch.zeros(5, 2 * (options.get("proj_size") or 2))
    if quantity == "state h_t":
        layer.weight_ih_l0_reverse.data[:] = torch.tensor([1e30, -1e30])
        x[3] = 1e30  # infinity less infinity
    else:
        for parameter_name, parameter in layer.named_parameters():
            nn.init.constant_(parameter, "weight_hr" in parameter_name)
        layer.weight_hh_l1.data.fill_(1e4)
        weights[4] = 1e38  # reaches the step before through W_hh
    inputs = Ragged(x, [0, 2, 2, 5])
    found = find_nonfinite(layer, inputs, lambda: (layer(inputs)[0].values * weights).sum())
    direction = "layer 0, reverse" if quantity == "state h_t" else "layer 1, forward"
    assert (found.quantity, found.step, found.sequence) == (quantity, 1, 2)
    assert found.layer == f"{name} ({direction})"


def test_weights_that_are_not_finite_are_never_kept(tmp_path: Path) -> None:
    task = GrowthTask(0.5, [[1.0], [1.0]])
    config = toy_config(tmp_path, optimizer="sgd", learning_rate=1e39, batch_size=1, eval_every=1)
    with pytest.raises(NonFiniteError, match=r"after step 1 the parameter .* is not finite"):
        fit(config, lambda _: task)
    assert not (tmp_path / "run" / "model-last").exists()
    assert not (tmp_path / "run" / "model-best").exists()


def test_a_reverse_layer_above_is_named_with_the_step_of_the_sequence() -> None:
    model = unrolled.nn.RNN(1, 1, num_layers=2, nonlinearity="relu", bias=False, bidirectional=True)
    for name, parameter in model.named_parameters():
        nn.init.constant_(parameter, 1e25 if name == "weight_hh_l1_reverse" else 0.1)
    inputs = Ragged.from_list([torch.ones(2, 1), torch.ones(5, 1)])
    found = find_nonfinite(model, inputs, lambda: model(inputs)[0].values.sum())
    assert found is not None
    assert (found.quantity, found.layer, found.step) == ("state h_t", "RNN (layer 1, reverse)", 2)
    assert found.sequence == 1
    nn.init.constant_(model.weight_hh_l1_reverse, 0.1)
    assert find_nonfinite(model, inputs, lambda: model(inputs)[0].values.sum()) is None
