"""unrolled.nn.RNN against torch.nn.RNN: float32; training is forward plus backward, all gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import unrolled
from benchmarks.harness import ceiling, compare, race, recurrent_floor, same

GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
Call = Callable[[], Sequence[Tensor]]

# T, B, I, H, goal against torch in training, goal over the floor, goal in inference
PADDED = (
    (100, 32, 64, 64, 3, None, 3),
    (784, 64, 1, 128, 3, None, 3),
    (200, 1, 64, 128, 12, None, 3),
    (100, 32, 128, 256, 1.7, 1.3, 1.5),
    (50, 64, 512, 512, 1.25, 1.3, 1.5),
)
# T, B, I, H, goal against packed; lengths uniform in [1, T], bidirectional. A second row of each case holds our time
# over (our padded time x the share of real tokens).
RAGGED = ((100, 32, 64, 64, None), (200, 64, 100, 128, None), (500, 32, 64, 128, 20))


def measure(repeats: int, threads: int) -> list[dict[str, Any]]:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    peak = ceiling()
    rows = []
    for case in PADDED:
        rows += padded(*case, peak, repeats)
    for case in RAGGED:
        rows += ragged(*case, peak, repeats)
    return rows


def pair(cell: str, inputs: int, hidden: int, bidirectional: bool) -> tuple[nn.Module, nn.Module]:
    theirs = getattr(nn, cell)(inputs, hidden, bidirectional=bidirectional)
    ours = getattr(unrolled.nn, cell)(inputs, hidden, bidirectional=bidirectional)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def training(model: nn.Module, x: Any, leaf: Tensor, dy: Tensor) -> Call:
    def step() -> Sequence[Tensor]:
        model.zero_grad()
        leaf.grad = None
        y, _ = model(x)
        y = y.data if isinstance(y, PackedSequence) else y.values if isinstance(y, unrolled.Ragged) else y
        y.backward(dy)
        return [leaf.grad, *(p.grad for p in model.parameters())]

    return step


def inference(model: nn.Module, x: Tensor) -> Call:
    def call() -> Sequence[Tensor]:
        with torch.no_grad():
            return [model(x)[0]]

    return call


def check(ours: Call, theirs: Call) -> None:
    for a, b in zip(ours(), theirs(), strict=True):
        same(a, b)


def padded(
    t: int,
    b: int,
    i: int,
    h: int,
    goal: float,
    floor_goal: float | None,
    inference_goal: float,
    peak: float,
    repeats: int,
    cell: str = "RNN",
) -> list[dict[str, Any]]:
    ours, theirs = pair(cell, i, h, bidirectional=False)
    x, dy = torch.randn(t, b, i), torch.randn(t, b, h)
    x_ours, x_theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    step = {"ours": training(ours, x_ours, x_ours, dy), "torch": training(theirs, x_theirs, x_theirs, dy)}
    infer = {"ours": inference(ours, x), "torch": inference(theirs, x)}
    check(step["ours"], step["torch"])
    check(infer["ours"], infer["torch"])
    floor, inference_floor = recurrent_floor(t * b, i, h, 1, peak, GATES[cell])
    case, peer = f"{cell} T{t} B{b} I{i} H{h}", f"torch.nn.{cell}"
    trained, inferred = race(step, repeats), race(infer, repeats)
    return [
        compare(
            *trained.values(), case=case, what="training", peer=peer, goal=goal, floor_ms=floor, floor_goal=floor_goal
        ),
        compare(
            *inferred.values(), case=case, what="inference", peer=peer, goal=inference_goal, floor_ms=inference_floor
        ),
    ]


def ragged(
    t: int, b: int, i: int, h: int, goal: float | None, peak: float, repeats: int, cell: str = "RNN"
) -> list[dict[str, Any]]:
    ours, theirs = pair(cell, i, h, bidirectional=True)
    lengths = torch.randint(1, t + 1, (b,))
    x = torch.randn(t, b, i)
    packed = pack_padded_sequence(x, lengths, enforce_sorted=False)
    leaf = packed.data.clone().requires_grad_()
    x_packed = packed._replace(data=leaf)
    real = unrolled.Ragged.from_padded(x, lengths)
    x_real = real.with_values(real.values.clone().requires_grad_())
    tokens = len(real.values)
    dy_packed = torch.randn(tokens, 2 * h)
    dy = unrolled.Ragged.from_packed(packed._replace(data=dy_packed))
    x_full, dy_full = x.clone().requires_grad_(), torch.randn(t, b, 2 * h)
    sides = {
        "ours": training(ours, x_real, x_real.values, dy.values),
        "packed": training(theirs, x_packed, leaf, dy_packed),
        "padded": training(ours, x_full, x_full, dy_full),
    }
    for ours_grad, theirs_grad in zip(sides["ours"]()[1:], sides["packed"]()[1:], strict=True):
        same(ours_grad, theirs_grad)
    same(x_real.values.grad, unrolled.Ragged.from_packed(packed._replace(data=leaf.grad)).values)
    floor, _ = recurrent_floor(tokens, i, h, 2, peak, GATES[cell])
    case, share = f"{cell} T{t} B{b} I{i} H{h} ragged, 2 directions", tokens / (t * b)
    times = race(sides, repeats)
    rows = [
        compare(
            times["ours"],
            times["packed"],
            case=case,
            what="training",
            peer=f"packed torch.nn.{cell}",
            goal=goal,
            floor_ms=floor,
        )
    ]
    row = compare(times["ours"], times["padded"], case=case, what="training", peer=f"our padded time x {share:.3f}")
    own = times["ours"]["median_ms"] / times["padded"]["median_ms"] / share
    row |= {"ratio_median": own, "ratio_min": times["ours"]["min_ms"] / times["padded"]["min_ms"] / share}
    if goal is not None:
        row |= {"goal": 1.15, "smaller_is_better": True, "reached": own <= 1.15}
    return [*rows, row]
