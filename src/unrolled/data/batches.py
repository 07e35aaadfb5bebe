"""Which examples form a batch: a function of seed and epoch alone, resumable at any batch, shared over processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np


class BatchSampler:
    """Batches of indices of one epoch after another, in random order.

    A batch holds `batch_size` sequences or, with `batch_tokens`, as many as fit (a longer one stands alone; an empty
    one counts as one token). The last batch of an epoch may be smaller. With several processes, all form the same
    global batch and `rank` takes each `world_size`-th of its sequences, none at all where the batch is that small.

    Iterating gives the rest of the current epoch and then moves on to the next. `state_dict` counts the batches already
    given out, so a state saved after a step continues with the next one.
    """

    def __init__(
        self,
        num_tokens: Sequence[int],
        *,
        batch_size: int = 32,
        batch_tokens: int = 0,
        seed: int = 42,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must lie in [0, {world_size - 1}], found {rank}")
        if batch_size < 1 or batch_tokens < 0:
            raise ValueError(f"batch_size must be >= 1 and batch_tokens >= 0, found {batch_size} and {batch_tokens}")
        self.num_tokens = np.maximum(np.asarray(num_tokens, dtype=np.int64), 1)
        self.batch_size, self.batch_tokens = batch_size, batch_tokens
        self.seed, self.rank, self.world_size = seed, rank, world_size
        self.epoch = 0
        self.position = 0

    def batches(self, epoch: int) -> list[list[int]]:
        """The global batches of an epoch."""
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self.num_tokens))
        if not self.batch_tokens:
            starts = list(range(0, len(order), self.batch_size))
        else:
            starts, filled = [], self.batch_tokens + 1
            for i, tokens in enumerate(self.num_tokens[order].tolist()):
                filled += tokens
                if filled > self.batch_tokens:
                    starts.append(i)
                    filled = tokens
        return [order[i:j].tolist() for i, j in pairwise([*starts, len(order)])]

    def num_batches(self, epoch: int) -> int:
        """How many optimizer steps an epoch has: with `batch_tokens` epochs differ."""
        return len(self.batches(epoch))

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self.batches(self.epoch)[self.position :]:
            self.position += 1
            yield batch[self.rank :: self.world_size]
        self.epoch += 1
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]
