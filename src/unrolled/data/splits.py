"""Divides examples into train, valid and test: by seed, stratified by label, equal inputs always together."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence


def split(
    keys: Sequence[Hashable], labels: Sequence[str], fractions: Mapping[str, float], seed: int
) -> dict[str, list[int]]:
    """Indices of each part in `fractions` and of "train", which takes the rest; a part may come out empty.

    Examples with the same key are one group and stay together, under the group's most frequent label. Within a label
    the groups are ordered by a hash of seed and key, so the order of the file does not matter. Each label stays in
    "train" at least once: a label seen once is trained on. What rounding takes from a label, the next one gives.
    """
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for index, key in enumerate(keys):
        groups[key].append(index)
    strata: dict[str, list[Hashable]] = defaultdict(list)
    for key, members in groups.items():
        counts = Counter(labels[i] for i in members)
        strata[min(counts, key=lambda label: (-counts[label], label))].append(key)

    parts: dict[str, list[int]] = {name: [] for name in ("train", *fractions)}
    kept = {keys[labels.index(label)] for label in set(labels) - set(strata)}
    wanted = dict.fromkeys(fractions, 0.0)
    for label in sorted(strata):
        size = sum(len(groups[key]) for key in strata[label])
        waiting = sorted(strata[label], key=lambda key: (key in kept, _rank(key, seed)))
        for part, fraction in fractions.items():
            wanted[part] += fraction * size
            later: list[Hashable] = []
            for position, key in enumerate(waiting):
                last = position == len(waiting) - 1 and not later
                if not last and key not in kept and len(parts[part]) + len(groups[key]) / 2 <= wanted[part]:
                    parts[part] += groups[key]
                else:
                    later.append(key)
            waiting = later
        parts["train"] += [i for key in waiting for i in groups[key]]
    return {name: sorted(indices) for name, indices in parts.items()}


def _rank(key: Hashable, seed: int) -> bytes:
    return hashlib.blake2b(f"{seed}:{key}".encode(), digest_size=16).digest()
