"""A small task that can be learned in a second: does a word hold more a than b? And runs that train it."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

from unrolled.config import Config, parse_config


def write_words(path: Path, number: int = 240, seed: int = 0) -> Path:
    """A CSV of different words over a, b, c, d, length 1 to 12, and their label."""
    draw = random.Random(seed)
    words: dict[str, None] = {}
    while len(words) < number:
        words["".join(draw.choice("abcd") for _ in range(draw.randint(1, 12)))] = None
    rows = [f"{word},{'more' if word.count('a') > word.count('b') else 'less'}" for word in words]
    path.write_text("text,label\n" + "\n".join(rows) + "\n", encoding="utf-8")
    return path


def toy_config(folder: Path, run: str = "run", **training: Any) -> Config:
    """Two layers in two directions with dropout, in one thread, on the words of `folder`/words.csv."""
    words = folder / "words.csv"
    if not words.exists():
        write_words(words)
    model = {"embedding_size": 6, "hidden_size": 8, "num_layers": 2, "bidirectional": True, "dropout": 0.2}
    options = {"epochs": 2, "batch_size": 16, "learning_rate": 0.01, "threads": 1, **training}
    values = {"data": {"train": str(words)}, "model": model, "training": options, "output_dir": str(folder / run)}
    return parse_config(values)


def python(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """This Python in a process of its own, warnings being errors as in the tests."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **options.pop("env", {})}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environment, timeout=120, **options
    )


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
