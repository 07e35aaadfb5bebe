"""Examples in batches for evaluation: memory is bounded by tokens, however long the sequences are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

TOKENS = 65536  # in a batch of several sequences

Example = TypeVar("Example")


def batches(
    examples: Sequence[Example], num_tokens: Callable[[Example], int], batch_size: int
) -> Iterator[Sequence[Example]]:
    """In their order, at most `batch_size` together and TOKENS tokens, but one at least, however long."""
    begin, tokens = 0, 0
    for end, example in enumerate(examples):
        length = num_tokens(example)
        if end > begin and (end - begin == batch_size or tokens + length > TOKENS):
            yield examples[begin:end]
            begin, tokens = end, 0
        tokens += length
    if begin < len(examples):
        yield examples[begin:]
