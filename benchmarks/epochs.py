"""`python -m benchmarks epochs FILE...`: time per epoch of a classifier, beside the same on torch.nn's layer.

The recurrent layers of torch get packed sequences, its Transformer a padded batch with its padding mask.
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

from benchmarks.harness import machine, same
from unrolled import Ragged
from unrolled.config import parse_config
from unrolled.tasks.classify import ClassifyTask, Example

MODELS: dict[str, dict[str, Any]] = {
    **{cell: {"model": cell} for cell in ("rnn", "lstm", "gru")},
    "transformer": {"model": "transformer", "num_layers": 2, "feed_forward_size": 256},
}


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


class Padded(nn.Module):
    """torch.nn's Transformer encoder, fed as it has to be for sequences of different lengths."""

    def __init__(self, ours: nn.Module) -> None:
        super().__init__()
        first = ours.layers[0]
        layer = nn.TransformerEncoderLayer(
            *(first.linear1.in_features, first.self_attn.num_heads, first.linear1.out_features, first.dropout.p),
            batch_first=True,
            norm_first=first.norm_first,
        )
        norm = nn.LayerNorm(first.linear1.in_features) if ours.norm is not None else None
        self.encoder = nn.TransformerEncoder(layer, len(ours.layers), norm, enable_nested_tensor=False)
        self.encoder.load_state_dict(ours.state_dict())

    def forward(self, inputs: Ragged) -> Ragged:
        lengths = inputs.lengths.clamp(min=1)  # of length 0 torch makes NaN
        padded = inputs.to_padded(batch_first=True, total_length=int(lengths.max()))
        step = torch.arange(padded.shape[1])
        states = self.encoder(padded, src_key_padding_mask=step >= lengths[:, None])
        return inputs.with_values(states[step < inputs.lengths[:, None]])


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


def compare(file: Path, name: str, epochs: int, threads: int) -> dict[str, Any]:
    values = {
        "data": {"train": str(file), "tokens": "words", "lowercase": True},
        "model": {**MODELS[name], "dropout": 0.2},
    }
    task = ClassifyTask.prepare(parse_config(values))
    torch.set_num_threads(threads)
    torch.manual_seed(42)
    ours, theirs = task.build_model(), task.build_model()
    theirs.load_state_dict(ours.state_dict())
    recurrent = name != "transformer"
    if recurrent:
        theirs.rnn = Packed(ours.rnn)
    else:
        theirs.encoder = Padded(ours.encoder)
    sides = {"ours": ours, "torch packed" if recurrent else "torch padded": theirs}
    _same_scores(task, sides)
    rate = 2e-3 if recurrent else 5e-4
    optimizers = {side: torch.optim.AdamW(model.parameters(), lr=rate) for side, model in sides.items()}
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(epochs):
        order = random.Random(number).sample(task.splits["train"], len(task.splits["train"]))
        batches = [order[i : i + 32] for i in range(0, len(order), 32)]
        for side, model in sides.items():
            torch.manual_seed(number)
            seconds[side].append(epoch(task, model, optimizers[side], batches))
    accuracy = {side: task.metrics(model, task.splits["test"])["accuracy"] for side, model in sides.items()}
    tokens = sum(len(example.input) for example in task.splits["train"])
    row = {"file": file.name, "cell": name, "train_examples": len(task.splits["train"]), "train_tokens": tokens}
    ratios = [b / a for a, b in zip(*seconds.values(), strict=True)]
    return row | {"seconds": seconds, "ratio_median": sorted(ratios)[len(ratios) // 2], "test_accuracy": accuracy}


def _same_scores(task: ClassifyTask, sides: dict[str, nn.Module]) -> None:
    """Before they have learned anything, the two sides say the same of some examples."""
    examples = [example for example in task.splits["train"] if len(example.input)][:32]
    batch = task.collate(examples)
    with torch.no_grad():
        same(*(model.eval()(batch.inputs) for model in sides.values()))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    rows = []
    for file in options.files:
        for model in MODELS:
            row = compare(file, model, options.epochs, options.threads)
            times = "  ".join(
                f"{name} {min(s):.2f} / {sorted(s)[len(s) // 2]:.2f} s" for name, s in row["seconds"].items()
            )
            scores = ", ".join(f"{name} {score:.3f}" for name, score in row["test_accuracy"].items())
            print(f"{row['file']:>22} {model:>11}: {times}, {row['ratio_median']:.2f}x, accuracy {scores}", flush=True)
            rows.append(row)
    return {"benchmark": options.name, "machine": machine(options.threads), "rows": rows}
