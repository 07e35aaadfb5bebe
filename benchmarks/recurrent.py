"""RNN, GRU and LSTM against torch.nn: padded, packed and inference; float32, training with all gradients."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.harness import ceiling
from benchmarks.rnn import padded, ragged

# T, B, I, H and the goals of (RNN, GRU, LSTM) against torch in training, of all over the floor, of all in inference
PADDED = (
    ((100, 32, 64, 64), (3, 3, 1.5), None),
    ((100, 32, 128, 256), (1.7, 2.4, 1.15), (1.3, 1.35, 1.35)),
    ((35, 20, 650, 650), (1.25, 1.35, 1), (1.3, 1.35, 1.35)),
    ((50, 64, 512, 512), (1.25, 1.35, 1), (1.3, 1.35, 1.35)),
    ((784, 64, 1, 128), (3, 3, 1.5), None),
    ((200, 1, 64, 128), (12, 12, 2), None),
)
# lengths uniform in [1, T], bidirectional; goals against packed
RAGGED = (
    ((100, 32, 64, 64), (10, 8, 8)),
    ((200, 64, 100, 128), (10, 8, 8)),
    ((500, 32, 64, 128), (20, 15, 18)),
)
CELLS = ("RNN", "GRU", "LSTM")


def measure(repeats: int, threads: int) -> list[dict[str, Any]]:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    peak = ceiling()
    rows = []
    for c, cell in enumerate(CELLS):
        for case, goals, floor_goals in PADDED:
            floor_goal = floor_goals[c] if floor_goals else None
            rows += padded(*case, goals[c], floor_goal, 1, peak, repeats, cell)
        for case, goals in RAGGED:
            rows += ragged(*case, goals[c], peak, repeats, cell)
    return rows
