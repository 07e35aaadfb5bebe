"""Memory does not grow: the resident set of a process over 1,000 training steps on batches of random shape."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import random, resource, sys
import torch
from unrolled import Ragged, nn

torch.set_num_threads(2)
torch.manual_seed(0)


def resident():
    try:  # not the highest so far: that a process inherits from the one that started it
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except FileNotFoundError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes, on a Mac


layers = [
    nn.RNN(8, 32, layer_norm=True, recurrent_dropout=0.2),
    nn.LSTM(8, 32, bidirectional=True),
    nn.LSTM(8, 32, proj_size=7, peephole=True, zoneout=0.1),
    nn.GRU(8, 32, 2, dropout=0.1, bptt=5),
    nn.GRU(8, 32, reset="before", layer_norm=True),
]
kept = []


def step(layer, lengths):
    batch = Ragged.from_list([torch.randn(length, 8) for length in lengths])
    y, _ = layer(batch)
    y.values.square().sum().backward()
    layer.zero_grad()
    if "leak" in sys.argv:
        kept.append(y.values.detach())


random.seed(0)
for number in range(1000):
    largest = number < 2 * len(layers)  # the first batches are as large as any
    sequences = 24 if largest else random.randint(1, 24)
    step(layers[number % len(layers)], [60 if largest else random.randint(0, 60) for _ in range(sequences)])
    if number in (199, 999):
        print(resident())
"""

# Bytes. What the steps of a leak keep is about 40 MB.
MOST = 16 * 2**20


def growth(*arguments: str) -> int:
    done = subprocess.run([sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, check=True)
    early, late = map(int, done.stdout.split())
    return late - early


def test_the_resident_set_is_flat_over_a_thousand_batches_of_random_shape() -> None:
    assert growth() <= MOST


def test_a_leak_would_be_seen() -> None:
    assert growth("leak") > MOST
