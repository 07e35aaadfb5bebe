"""Processes and threads: forked workers, several Python threads, a fork after the pool was used."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from habits import KINDS, Classifier, example, gradients
from tolerances import close


class InAWorker(Dataset[list[Tensor]]):
    """Items that are losses and gradients, computed where the item is fetched."""

    def __init__(self, model: Classifier) -> None:
        self.model, self.batch = model, example()

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> list[Tensor]:
        loss = self.model.step(*self.batch)
        return [loss.detach(), *gradients(self.model, loss)]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_in_a_forked_worker(backend: str) -> None:
    torch.set_num_threads(2)
    data = InAWorker(Classifier(*KINDS))
    expected = data[0]
    workers = DataLoader(data, batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=60)
    for item in workers:
        for found, reference in zip(item, expected, strict=True):
            close(found, reference.double(), 36)


def test_several_python_threads_at_once(backend: str) -> None:
    torch.set_num_threads(2)
    data = InAWorker(Classifier(*KINDS))
    expected = data[0]
    with ThreadPoolExecutor(4) as pool:
        for item in pool.map(data.__getitem__, range(40)):
            for found, reference in zip(item, expected, strict=True):
                close(found, reference.double(), 36)


FORK = """
import os, signal, sys, time, torch, unrolled
torch.set_num_threads(2)
rnn, x = unrolled.nn.RNN(64, 128), torch.randn(20, 8, 64)
torch.randn(600, 600) @ torch.randn(600, 600)  # starts the threads that do not live on in a child
if sys.argv[1] == "used before":
    rnn(x)
child = os.fork()
if child == 0:
    rnn(x)[1].sum().backward()
    os._exit(7)
deadline = time.monotonic() + 30
while time.monotonic() < deadline:
    done, status = os.waitpid(child, os.WNOHANG)
    if done:
        sys.exit(os.waitstatus_to_exitcode(status))
    time.sleep(0.05)
os.kill(child, signal.SIGKILL)
"""


@pytest.mark.parametrize("when", ["used before", "not used before"])
def test_after_a_fork_the_core_does_not_wait_for_threads_that_are_gone(when: str) -> None:
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", FORK, when], timeout=60).returncode == 7
