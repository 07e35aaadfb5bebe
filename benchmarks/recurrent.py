"""RNN, GRU and LSTM against torch.nn, float32: padded, ragged, growing in T, and what each option costs.

Training is forward plus backward with all gradients. Each case is checked against torch, or against the equations
where torch has no such layer, before it is timed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.utils.rnn import pack_padded_sequence

import unrolled
from benchmarks.harness import (
    Call,
    Job,
    Row,
    Run,
    ceiling_once,
    faster,
    goal,
    measured,
    no_more_memory,
    over,
    race,
    recurrent_floor,
)
from benchmarks.sides import CELLS, GATES, Training, check, inference, memory, pair

Shape = tuple[int, int, int, int]  # T, B, I, H

# Of (RNN, GRU, LSTM): torch's time over ours in training, ours over the GEMM floor, torch's over ours in inference
PADDED: tuple[tuple[Shape, Any, Any, Any], ...] = (
    ((100, 32, 64, 64), (3, 3, 1.5), None, (3, 1, 1)),
    ((100, 32, 128, 256), (1.7, 2.4, 1.15), (1.3, 1.35, 1.35), (1.5, 1, 1)),
    ((35, 20, 650, 650), (1.25, 1.35, 1), (1.3, 1.35, 1.35), (1, 1, 1)),
    ((50, 64, 512, 512), (1.25, 1.35, 1), (1.3, 1.35, 1.35), (1.5, 1, 1)),
    ((784, 64, 1, 128), (3, 3, 1.5), None, (3, 1, 1)),
    ((200, 1, 64, 128), (12, 12, 2), None, (3, 1, 1)),
)
# Lengths uniform in [1, T], bidirectional: packed torch's time over ours; for the RNN ours over (ours padded x share)
RAGGED: tuple[tuple[Shape, Any, float | None], ...] = (
    ((100, 32, 64, 64), (10, 8, 8), None),
    ((200, 64, 100, 128), (10, 8, 8), None),
    ((500, 32, 64, 128), (20, 15, 18), 1.15),
)
GROWTH: tuple[Shape, ...] = ((100, 8, 64, 64), (1_000, 8, 64, 64), (10_000, 8, 64, 64))
# Our layer with the option over the same without it, at most; no goal for the last three
OPTION_SHAPES: tuple[Shape, ...] = ((100, 32, 64, 64), (100, 32, 128, 256))
OPTIONS: tuple[tuple[dict[str, Any], Sequence[str], float | None], ...] = (
    ({"layer_norm": True}, CELLS, 1.5),
    ({"zoneout": 0.1}, CELLS, 1.5),
    ({"recurrent_dropout": 0.3}, CELLS, 1.5),
    ({"peephole": True}, ("LSTM",), None),
    ({"proj_size": 2}, ("RNN", "LSTM"), None),  # H / 2
    ({"reset": "before"}, ("GRU",), None),
)
# Steps of full length: the backward of torch's packed RNN and GRU grows with their square, to a minute at 784.
LONGEST_PACKED = 500


def jobs(run: Run) -> list[Job]:
    """Everything that can be measured, in the order of the table."""
    found = []
    for cell in CELLS:
        for shape, *_ in PADDED:
            found.append(Job(name(cell, shape, "padded"), partial(padded, cell, shape, run)))
        for shape, *_ in RAGGED:
            found.append(Job(name(cell, shape, "ragged"), partial(ragged, cell, shape, run)))
    for cell in CELLS:
        found += [Job(name(cell, shape, "growth"), partial(growth, cell, shape, run)) for shape in GROWTH]
    for cell in CELLS:
        found += [Job(name(cell, shape, "options"), partial(options, cell, shape, run)) for shape in OPTION_SHAPES]
    return found


def name(cell: str, shape: Shape, kind: str) -> str:
    return "{} T{} B{} I{} H{} {}".format(cell, *shape, kind)


def of(cell: str, goals: Any) -> Any:
    return goals[CELLS.index(cell)] if goals else None


def above_floor(times: dict[str, Any], floor: float, at_most: float | None) -> Row:
    return goal("ours / floor", times["ours"]["min_ms"] / floor, at_most=at_most)


def padded(cell: str, shape: Shape, run: Run) -> list[Row]:
    t, b, i, h = shape
    _, training_goals, floor_goals, inference_goals = next(case for case in PADDED if case[0] == shape)
    ours, theirs = pair(cell, i, h)
    x, dy = torch.randn(t, b, i), torch.randn(t, b, h)
    packed, dy_packed = pack_padded_sequence(x, torch.full((b,), t)), dy.flatten(0, 1)
    step: dict[str, Call] = {
        "ours": Training(ours, x, dy),
        "torch padded": Training(theirs, x, dy),
        "torch packed": Training(theirs, packed, dy_packed),
    }
    call = {"ours": inference(ours, x), "torch padded": inference(theirs, x), "torch packed": inference(theirs, packed)}
    if t > LONGEST_PACKED:
        del step["torch packed"], call["torch packed"]
    check(step["ours"](), step["torch padded"]())
    if "torch packed" in step:  # its dx lies elsewhere
        check(step["ours"]()[1:], step["torch packed"]()[1:])
    check(call["ours"](), call["torch padded"]())
    training_floor, inference_floor = recurrent_floor(t * b, i, h, 1, ceiling_once(), GATES[cell])
    rows = []
    for what, sides, floor, at_least, at_most in (
        ("training", step, training_floor, of(cell, training_goals), of(cell, floor_goals)),
        ("inference", call, inference_floor, of(cell, inference_goals), None),
    ):
        peaks, times = memory(sides, run.memory), race(sides, run.repeats)
        goals = [faster(times, "torch padded", at_least), above_floor(times, floor, at_most)]
        goals += no_more_memory(peaks, "torch padded")
        rows.append(measured("padded", name(cell, shape, "padded"), what, times, goals, floor_ms=floor, **peaks))
    return rows


def ragged(cell: str, shape: Shape, run: Run) -> list[Row]:
    t, b, i, h = shape
    _, training_goals, share_goal = next(case for case in RAGGED if case[0] == shape)
    ours, theirs = pair(cell, i, h, bidirectional=True)
    lengths = torch.randint(1, t + 1, (b,))
    real = unrolled.Ragged.from_padded(torch.randn(t, b, i), lengths)
    dy = real.with_values(torch.randn(len(real.values), 2 * h))
    x = real.to_padded(total_length=t)
    packed, dy_packed, dy_padded = real.to_packed(), dy.to_packed().data, dy.to_padded(total_length=t)
    step: dict[str, Training] = {
        "ours": Training(ours, real, dy.values),
        "torch padded": Training(theirs, x, dy_padded),
        "torch packed": Training(theirs, packed, dy_packed),
        "ours padded": Training(ours, x, dy_padded),
    }
    call = {
        "ours": inference(ours, real),
        "torch padded": inference(theirs, x),
        "torch packed": inference(theirs, packed),
    }
    dx, *gradients = step["ours"]()
    dx_packed, *expected = step["torch packed"]()
    check([dx, *gradients], [unrolled.Ragged.from_packed(packed._replace(data=dx_packed)).values, *expected])
    y_packed = packed._replace(data=call["torch packed"]()[0])
    check(call["ours"](), [unrolled.Ragged.from_packed(y_packed).values])
    tokens, case = len(real.values), name(cell, shape, "ragged")
    share = tokens / (t * b)
    training_floor, inference_floor = recurrent_floor(tokens, i, h, 2, ceiling_once(), GATES[cell])
    rows = []
    for what, sides, floor, at_least in (
        ("training", step, training_floor, of(cell, training_goals)),
        ("inference", call, inference_floor, 1),
    ):
        peaks = memory({side: sides[side] for side in call}, run.memory)
        times = race(sides, run.repeats)
        goals = [faster(times, "torch packed", at_least), above_floor(times, floor, None)]
        goals += no_more_memory(peaks, "torch packed")
        if "ours padded" in times:
            at_most = share_goal if cell == "RNN" else None
            goals.append(
                goal("ours / (ours padded x share)", over(times, "ours", "ours padded") / share, at_most=at_most)
            )
        rows.append(measured("ragged", case, what, times, goals, floor_ms=floor, share=share, **peaks))
    return rows


def growth(cell: str, shape: Shape, run: Run) -> list[Row]:
    t, b, i, h = shape
    ours, theirs = pair(cell, i, h)
    x, dy = torch.randn(t, b, i), torch.randn(t, b, h)
    sides: dict[str, Call] = {"ours": Training(ours, x, dy), "torch padded": Training(theirs, x, dy)}
    check(sides["ours"](), sides["torch padded"]())
    peaks, times = memory(sides, run.memory), race(sides, run.repeats)
    each = {side: taken["median_ms"] * 1e3 / t for side, taken in times.items()}
    goals = [goal("torch padded / ours", over(times, "torch padded", "ours")), *no_more_memory(peaks, "torch padded")]
    return [measured("growth", name(cell, shape, "growth"), "training", times, goals, us_per_step=each, **peaks)]


def linear(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """By cell and side: time(T = 10,000) / time(T = 1,000) / 10, where both were measured."""
    times = {row["case"]: row["times"] for row in rows if row["group"] == "growth"}
    found: dict[str, dict[str, float]] = {}
    for cell in CELLS:
        _, short, long = (times.get(name(cell, shape, "growth")) for shape in GROWTH)
        if short and long:
            found[cell] = {side: long[side]["median_ms"] / short[side]["median_ms"] / 10 for side in long}
    return found


def options(cell: str, shape: Shape, run: Run) -> list[Row]:
    t, b, i, h = shape
    layer = getattr(unrolled.nn, cell)
    x = torch.randn(t, b, i)
    sides, limits = {"plain": Training(layer(i, h), x, torch.randn(t, b, h))}, {}
    for option, cells, limit in OPTIONS:
        if cell in cells:
            (key, value), *_ = option.items()
            value = h // value if key == "proj_size" else value
            label = f"{key}={value}"
            model = layer(i, h, **{key: value})
            sides[label] = Training(model, x, torch.randn(t, b, value if key == "proj_size" else h))
            limits[label] = limit
    for side in sides.values():
        torch.manual_seed(1)  # the same masks twice
        fast = side()
        with unrolled.use("equations"):
            torch.manual_seed(1)
            check(fast, side())
    peaks, times = memory(sides, run.memory).get("memory_mb"), race(sides, run.repeats)
    rows = []
    for label, limit in limits.items():
        mine = {"plain": times["plain"], "ours": times[label]}
        more = {"memory_mb": {"plain": peaks["plain"], "ours": peaks[label]}} if peaks else {}
        cost = goal("ours / plain", over(mine, "ours", "plain"), at_most=limit)
        rows.append(measured("options", name(cell, shape, "options"), label, mine, [cost], **more))
    return rows
