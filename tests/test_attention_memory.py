"""Memory of attention on the core, both passes: linear in the steps."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import resource, sys, threading, time
import torch
from unrolled import use
from unrolled.equations.dropout import Dropping
from unrolled.ops.attention import attention
from unrolled.ragged import Rows

torch.set_num_threads(2)
use(sys.argv[1])


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def watch():
    while not done.is_set():
        sizes.append(resident())
        time.sleep(0.0005)


def step(T):
    x, t = torch.zeros(T, 3 * 64, requires_grad=True), torch.arange(T)
    drop = Dropping(0.1, torch.tensor(1), 0, torch.zeros_like(t), t)
    attention(x, heads=2, queries=Rows(t[:1], 1, t[-1:] + 1), causal=True, dropping=drop).sum().backward()


step(8)
sizes, done = [resident()], threading.Event()
watcher = threading.Thread(target=watch)
watcher.start()
step(int(sys.argv[2]))
done.set()
watcher.join()
print(max(sizes) - sizes[0])
"""


def growth(backend: str, steps: int) -> float:
    """How many times as many bytes the resident set of a process grows by, for twice as many steps."""

    def grown(steps: int) -> int:
        arguments = [sys.executable, "-c", PROGRAM, backend, str(steps)]
        return int(subprocess.run(arguments, capture_output=True, text=True, check=True).stdout)

    return grown(2 * steps) / grown(steps)


def test_memory_is_linear_in_the_steps() -> None:
    assert growth("core", 4096) < 3  # linear is 2, a matrix of queries and keys 4


def test_a_matrix_of_queries_and_keys_would_be_seen() -> None:
    assert growth("equations", 512) > 3
