"""A training step over T, as many tokens and as many weights in each layer; `docs/pictures.py` draws it."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch

from benchmarks.harness import machine, race
from unrolled import nn

TOKENS, WIDTH, HEADS = 8_192, 128, 4
LENGTHS = tuple(2**n for n in range(4, 14))  # 16 ... 8,192
REPEATS = 10


def layers() -> dict[str, Any]:
    """Each with 8 D^2 weights, and what a call of it needs besides the input."""

    def attention() -> Any:
        return nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.0)

    return {
        "rnn": (nn.RNN(WIDTH, WIDTH, num_layers=4), {}),
        "lstm": (nn.LSTM(WIDTH, WIDTH), {}),
        "attention": (attention(), {}),
        "causal attention": (attention(), {"causal": True}),
    }


def matrices(module: Any) -> int:
    return sum(p.numel() for p in module.parameters() if p.dim() == 2)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    modules = layers()
    if {matrices(module) for module, _ in modules.values()} != {8 * WIDTH**2}:
        raise ValueError("the layers are to have as many weights as each other")
    rows = []
    for length in LENGTHS:
        x = torch.randn(length, TOKENS // length, WIDTH, requires_grad=True)
        dy = torch.randn_like(x)

        def step(name: str, x: torch.Tensor = x, dy: torch.Tensor = dy) -> None:
            module, more = modules[name]
            y = module(x, **more)
            (y[0] if isinstance(y, tuple) else y).backward(dy)
            x.grad = None
            module.zero_grad()

        times = race({name: lambda name=name: step(name) for name in modules}, REPEATS)
        rows.append({"T": length, "times": times})
        print(length, {name: round(t["min_ms"], 1) for name, t in times.items()}, file=sys.stderr)
    return {
        "machine": machine(options.threads),
        "meaning": "milliseconds of a training step, forward and backward, float32, malloc keeping its pages",
        **{"tokens": TOKENS, "width": WIDTH, "heads": HEADS, "weights": 8 * WIDTH**2, "rows": rows},
    }
