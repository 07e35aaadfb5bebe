"""What every benchmark shares: the machine, interleaved timing, the floor."""

from __future__ import annotations

import platform
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import unrolled

Times = dict[str, float]


def machine(threads: int) -> dict[str, Any]:
    def git(*command: str) -> str:
        done = subprocess.run(["git", *command], capture_output=True, text=True, cwd=Path(__file__).parent, check=False)
        return done.stdout.strip()

    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = models[0] if models else cpu
    return {
        "commit": git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else ""),
        "date": time.strftime("%Y-%m-%d"),
        "cpu": cpu,
        "threads": threads,
        "core": unrolled.backends()["core"],
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def race(sides: dict[str, Callable[[], object]], repeats: int) -> dict[str, Times]:
    """Each side once in turn, `repeats` times over, after two rounds to warm up: the machine's moods fall on all."""
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(repeats + 2):
        for name, side in sides.items():
            begin = time.perf_counter()
            side()
            if turn >= 2:
                taken[name].append((time.perf_counter() - begin) * 1e3)
    return {name: {"min_ms": min(t), "median_ms": sorted(t)[len(t) // 2]} for name, t in taken.items()}


def fastest(call: Callable[[], object], repeats: int = 15) -> float:
    """Milliseconds."""
    return race({"it": call}, repeats)["it"]["min_ms"]


def ceiling() -> float:
    """Operations a millisecond of a large square product in torch."""
    a, b = torch.randn(2048, 2048), torch.randn(2048, 2048)
    return 2 * 2048**3 / fastest(lambda: a @ b)


def recurrent_floor(
    tokens: int, inputs: int, hidden: int, directions: int, peak: float, gates: int = 1
) -> tuple[float, float]:
    """Milliseconds (training step, inference): the token products as measured, the recurrent operations at the ceiling.

    In training: x W_ih^T, da W_ih, da^T x, da^T h, and h W_hh^T, da W_hh. In inference: x W_ih^T and h W_hh^T.
    """
    x, h, da = torch.randn(tokens, inputs), torch.randn(tokens, hidden), torch.randn(tokens, gates * hidden)
    weight = torch.randn(gates * hidden, inputs)
    recurrent = 2 * tokens * gates * hidden * hidden / peak
    projection = fastest(lambda: x @ weight.T)
    rest = sum(fastest(product) for product in (lambda: da @ weight, lambda: da.T @ x, lambda: da.T @ h))
    return directions * (projection + rest + 2 * recurrent), directions * (projection + recurrent)


def compare(ours: Times, theirs: Times, **row: Any) -> dict[str, Any]:
    """One row: the peer's time over ours, and whether the goals were reached (medians; over the floor: minima)."""
    row |= {"ours": ours, "theirs": theirs}
    row |= {f"ratio_{m}": theirs[f"{m}_ms"] / ours[f"{m}_ms"] for m in ("min", "median")}
    reached = [row["ratio_median"] >= row["goal"]] if row.get("goal") else []
    if row.get("floor_ms"):
        row["over_floor"] = ours["min_ms"] / row["floor_ms"]
        reached += [row["over_floor"] <= row["floor_goal"]] if row.get("floor_goal") else []
    return row | {"reached": all(reached) if reached else None}


def same(ours: Tensor, theirs: Tensor) -> None:
    """Nothing is timed that is not right."""
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3 * float(theirs.abs().max()))
