"""`python -m benchmarks epochs FILE...`: time per epoch of a classifier, beside the same on torch.nn's packed layer.

Each file holds lines label<TAB>text. Both sides begin with the same weights and see the same batches in the same order;
the accuracy is that on the test part after the last epoch. Epochs alternate between the sides.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from benchmarks.harness import machine
from unrolled import Ragged
from unrolled.config import parse_config
from unrolled.tasks.classify import ClassifyTask, Example

CELLS = ("rnn", "lstm", "gru")


class Packed(nn.Module):
    """torch.nn's recurrent layer, fed as it has to be for sequences of different lengths; gives only the last state."""

    def __init__(self, ours: nn.Module) -> None:
        super().__init__()
        kind = getattr(nn, type(ours).__name__)
        self.layer = kind(ours.input_size, ours.hidden_size, bidirectional=ours.bidirectional)
        self.layer.load_state_dict(ours.state_dict())
        self.bidirectional, self.num_directions = ours.bidirectional, ours.num_directions

    def forward(self, inputs: Ragged) -> tuple[None, Tensor]:
        lengths = inputs.lengths.clamp(min=1)  # torch knows no length 0
        padded = inputs.to_padded(total_length=int(lengths.max()))
        _, final = self.layer(pack_padded_sequence(padded, lengths.cpu(), enforce_sorted=False))
        return None, final


def epoch(
    task: ClassifyTask, model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[list[Example]]
) -> float:
    model.train()
    begin = time.perf_counter()
    for batch in batches:
        loss, count = task.loss_sum(model, task.collate(batch))
        optimizer.zero_grad()
        (loss / count).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return time.perf_counter() - begin


def compare(file: Path, cell: str, epochs: int, threads: int) -> dict[str, Any]:
    values = {
        "data": {"train": str(file), "tokens": "words", "lowercase": True},
        "model": {"model": cell, "dropout": 0.2},
    }
    task = ClassifyTask.prepare(parse_config(values))
    torch.set_num_threads(threads)
    torch.manual_seed(42)
    ours, theirs = task.build_model(), task.build_model()
    theirs.load_state_dict(ours.state_dict())
    theirs.rnn = Packed(ours.rnn)
    sides = {"ours": ours, "torch packed": theirs}
    optimizers = {name: torch.optim.AdamW(model.parameters(), lr=2e-3) for name, model in sides.items()}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(epochs):
        order = random.Random(number).sample(task.splits["train"], len(task.splits["train"]))
        batches = [order[i : i + 32] for i in range(0, len(order), 32)]
        for name, model in sides.items():
            torch.manual_seed(number)
            seconds[name].append(epoch(task, model, optimizers[name], batches))
    accuracy = {name: task.metrics(model, task.splits["test"])["accuracy"] for name, model in sides.items()}
    tokens = sum(len(example.input) for example in task.splits["train"])
    row = {"file": file.name, "cell": cell, "train_examples": len(task.splits["train"]), "train_tokens": tokens}
    ratios = [b / a for a, b in zip(*seconds.values(), strict=True)]
    return row | {"seconds": seconds, "ratio_median": sorted(ratios)[len(ratios) // 2], "test_accuracy": accuracy}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    rows = []
    for file in options.files:
        for cell in CELLS:
            row = compare(file, cell, options.epochs, options.threads)
            times = "  ".join(
                f"{name} {min(s):.2f} / {sorted(s)[len(s) // 2]:.2f} s" for name, s in row["seconds"].items()
            )
            scores = ", ".join(f"{name} {score:.3f}" for name, score in row["test_accuracy"].items())
            print(f"{row['file']:>22} {cell:>4}: {times}, {row['ratio_median']:.2f}x, accuracy {scores}", flush=True)
            rows.append(row)
    return {"benchmark": options.name, "machine": machine(options.threads), "rows": rows}
