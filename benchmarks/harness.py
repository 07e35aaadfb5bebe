"""What every benchmark shares: the machine, interleaved timing, peak memory, the floor, a row and its goals."""

from __future__ import annotations

import ctypes
import gc
import platform
import subprocess
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import unrolled

Call = Callable[[], Any]
Times = dict[str, float]
Row = dict[str, Any]

GRAIN = 0.5  # megabytes; the kernel counts resident pages in batches per CPU
SLOW = 5.0  # seconds: the backward of torch's packed RNN and GRU grows with the square of T


class Job(NamedTuple):
    case: str
    run: Callable[[], list[Row]]


class Run(NamedTuple):
    repeats: int
    threads: int
    memory: bool  # measure the peak memory too
    compile: bool = False  # and torch's side under torch.compile


# What a reader of the JSON has to know; it is stored with the rows.
MEANING = {
    "allocator": "default, or with malloc keeping its pages (no page fault is paid twice)",
    "group": "padded, ragged, growth, options, peers, or the part of a Transformer: one table each",
    "times": "of each side: the fastest and the median of the interleaved repeats, milliseconds, each "
    "after an untimed call of the same side; one repeat "
    "where a call takes more than 5 s",
    "memory_mb": "of each side: peak resident set during one warm step less that before it, 1e6 bytes; default "
    "allocator only, absent where /proc does not tell",
    "floor_ms": "GEMM floor: the measured token products plus the recurrent operations at the ceiling",
    "goals": "value compared with at_least or at_most; times by medians, over the floor by minima",
    "torch padded": "in ragged rows the same batch padded: not the same result, but the comparison people make",
    "torch packed": "PackedSequence; in padded rows all lengths are full",
    "share": "real tokens of the padded batch's",
    "us_per_step": "growth: median of a training step over T",
    "ceiling_share": "of each side: the operations of the matrix products that the real tokens need (causal: half of "
    "the scores; decoding: with a cache), over the fastest time, as a share of the ceiling",
    "tokens_per_second": "of each side, by the median",
    "torch compiled": "torch's side under torch.compile; not_compiled says why there is none",
    "time_10000_over_1000_over_10": "growth: 1 where the time grows linearly in T; medians",
}


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


def race(sides: dict[str, Call], repeats: int, rest: float = 0.0) -> dict[str, Times]:
    """Each side in turn, `repeats` times over, after two rounds to warm up: the machine's moods fall on all.

    A turn is two calls, of which the second counts: as in training, a step finds the caches as another of its kind left
    them, and not as another library did. `rest`: seconds before each, in which the spinning threads of another side's
    pool come to a halt. A side whose first call takes more than `SLOW` seconds is not called again.
    """
    taken: dict[str, list[float]] = {name: [] for name in sides}
    slow: set[str] = set()
    for turn in range(repeats + 2):
        for name, side in sides.items():
            if name in slow:
                continue
            if rest:
                time.sleep(rest)
            if turn >= 2:
                side()
            begin = time.perf_counter()
            side()
            milliseconds = (time.perf_counter() - begin) * 1e3
            if turn == 0 and milliseconds > SLOW * 1e3:
                slow.add(name)
            if turn >= 2 or name in slow:
                taken[name].append(milliseconds)
    return {
        name: {"min_ms": min(t), "median_ms": sorted(t)[len(t) // 2], "repeats": len(t)} for name, t in taken.items()
    }


def fastest(call: Call, repeats: int = 15) -> float:
    """Milliseconds."""
    return race({"it": call}, repeats)["it"]["min_ms"]


def peak_memory(step: Call) -> float | None:
    """Megabytes by which the resident set rises during a warm step at most; None where the system does not tell."""

    def kilobytes(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(field + ":"))

    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
        before = kilobytes("VmRSS")
        step()
        return max(0, kilobytes("VmHWM") - before) * 1024 / 1e6
    except (OSError, AttributeError, StopIteration, TypeError):
        return None


def ceiling() -> float:
    """Operations a millisecond of a large square product in torch."""
    a, b = torch.randn(2048, 2048), torch.randn(2048, 2048)
    return 2 * 2048**3 / fastest(lambda: a @ b)


ceiling_once = cache(ceiling)


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


def goal(name: str, value: float, *, at_least: float | None = None, at_most: float | None = None) -> Row:
    """A measured number and what it should be; `reached` is None where nothing is asked of it."""
    if at_least is None and at_most is None:
        return {"name": name, "value": value, "reached": None}
    if at_least is not None:
        return {"name": name, "value": value, "at_least": at_least, "reached": value >= at_least}
    return {"name": name, "value": value, "at_most": at_most, "reached": value <= at_most}


def over(times: dict[str, Times], side: str, other: str, statistic: str = "median_ms") -> float:
    """The time of `side` in units of that of `other`."""
    return times[side][statistic] / times[other][statistic]


def faster(times: dict[str, Times], peer: str, at_least: float | None) -> Row:
    return goal(f"{peer} / ours", over(times, peer, "ours"), at_least=at_least)


def no_more_memory(peaks: Row, peer: str, at_most: float = 1) -> list[Row]:
    """Of what `sides.memory` gives: ours over the peer's, at most this."""
    if "memory_mb" not in peaks:
        return []
    ours, theirs = (max(peaks["memory_mb"][side], GRAIN) for side in ("ours", peer))
    return [goal(f"MB ours / {peer}", ours / theirs, at_most=at_most)]


def measured(group: str, case: str, what: str, times: dict[str, Times], goals: Sequence[Row] = (), **more: Any) -> Row:
    """One row of the table; reached if all of its goals are."""
    verdicts = [g["reached"] for g in goals if g["reached"] is not None]
    reached = all(verdicts) if verdicts else None
    return {
        "group": group,
        "case": case,
        "what": what,
        "times": times,
        **more,
        "goals": list(goals),
        "reached": reached,
    }


def same(ours: Tensor, theirs: Tensor) -> None:
    """Nothing is timed that is not right."""
    largest = float(theirs.detach().abs().max()) if theirs.numel() else 0.0
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3 * largest)


def same_norm(ours: Tensor, theirs: Tensor) -> None:
    """As `same`, but by the norm of the difference: rounding may put a number on the other side of the kink of relu."""
    error = float((ours - theirs).detach().norm())
    allowed = 1e-3 * float(theirs.detach().norm())
    if not error <= allowed:
        raise AssertionError(f"the norm of the difference is {error:.3g}, of at most {allowed:.3g}")
