"""Attention and the Transformer against torch.nn, float32: encoder layers, attention alone, loss, decoding, a model.

Training is forward plus backward with all gradients. Each case is checked against torch, without dropout, before it is
timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import unrolled
from benchmarks.harness import (
    GRAIN,
    Call,
    Job,
    Row,
    Run,
    ceiling_once,
    faster,
    goal,
    measured,
    no_more_memory,
    race,
    same_norm,
)
from benchmarks.language import Decoding, language_models
from benchmarks.sides import Step, Training, check, memory
from unrolled.ops.attention import attention
from unrolled.ops.linear_cross_entropy import linear_cross_entropy
from unrolled.ragged import Ragged, Rows

DROPOUT = 0.1


class Layer(NamedTuple):
    """The sizes of an encoder layer: sequences, steps, width, width within the feed-forward, heads."""

    b: int
    t: int
    d: int
    ff: int
    heads: int

    def __str__(self) -> str:
        return f"B{self.b} T{self.t} D{self.d} FF{self.ff} A{self.heads}"


# torch's time over ours, at least: with dropout, without, with dropout and lengths uniform in [1, T]
LAYERS: tuple[tuple[Layer, tuple[float, float, float]], ...] = (
    (Layer(64, 32, 256, 1024, 4), (1.6, 1.15, 2.5)),
    (Layer(16, 128, 512, 2048, 8), (1.8, 1.0, 2.5)),
    (Layer(4, 1024, 256, 1024, 4), (2.5, 1.15, 2.5)),
)
HEADS, HEAD_SIZE = 4, 64
LENGTHS = (1_024, 2_048, 4_096, 8_192, 16_384)  # of the one sequence in attention alone
ASKED_LENGTH = 8_192
LINEAR = 1.15  # peak memory over twice that of half the length, at most
TOKENS, WIDTH, CLASSES = 4_096, 256, 10_000
STEPS, DECODING = 128, Layer(16, 32, 256, 1024, 4)  # t: steps of the memory
MODEL, LAYERS_OF_MODEL = Layer(16, 256, 256, 1024, 4), 4


def jobs(run: Run) -> list[Job]:
    """Everything that can be measured, in the order of the table."""
    found = []
    for layer, goals in LAYERS:
        for p, ragged, at_least in zip((DROPOUT, 0.0, DROPOUT), (False, False, True), goals, strict=True):
            case = f"{layer} dropout {p}{' ragged' if ragged else ''} encoder layer"
            found.append(Job(case, partial(encoder_layer, case, layer, p, ragged, at_least, run)))
    found.append(Job("one sequence attention", partial(attention_alone, run)))
    case = f"N{TOKENS} D{WIDTH} V{CLASSES} projection"
    found.append(Job(case, partial(projection, case, run)))
    case = f"{STEPS} tokens, 6 layers, {DECODING} decoding"
    found.append(Job(case, partial(decoding, case, run)))
    case = f"{LAYERS_OF_MODEL} layers, {MODEL} V{CLASSES} dropout {DROPOUT} model"
    found.append(Job(case, partial(whole_model, case, run)))
    return found


def products(layer: Layer, lengths: Sequence[int], *, causal: bool = False) -> float:
    """Operations in the matrix products of an encoder layer's forward; the backward has twice as many."""
    maps = 2 * sum(lengths) * (4 * layer.d**2 + 2 * layer.d * layer.ff)
    return maps + scores(layer.d, lengths, causal=causal)


def scores(width: int, lengths: Sequence[int], *, causal: bool = False) -> float:
    """Of q k^T and p v; with `causal` half of them."""
    return 4 * width * sum(t**2 for t in lengths) / (2 if causal else 1)


def compiled(sides: dict[str, Call], build: Callable[[], Call], run: Run, exact: bool = True) -> dict[str, str]:
    """One more side, where it is wanted and torch.compile can: else why not, for the row.

    `exact`: nothing in it is random, so its results are compared with torch's.
    """
    if not run.compile:
        return {}
    torch._dynamo.reset()
    try:
        side = build()
        result = side()
    except RuntimeError as error:  # of which those of the compiler are
        return {"not_compiled": f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"}
    if exact:
        check(result, sides["torch"](), same_norm)
    sides["torch compiled"] = side
    return {}


def row(
    group: str,
    case: str,
    sides: dict[str, Call],
    operations: float,
    at_least: float | None,
    run: Run,
    *,
    what: str = "training",
    less_memory: float | None = None,
    linear: dict[str, float] | None = None,
    tokens: int | None = None,
    **more: Any,
) -> Row:
    """Memory, times, torch's time over ours, the share of the ceiling.

    `less_memory`: ours over torch's, at most. `linear`: the memory at half the length, of which ours is to be twice.
    """
    peaks, times = memory(sides, run.memory), race(sides, run.repeats)
    goals = [faster(times, "torch", at_least)]
    if "torch compiled" in times:
        goals.append(faster(times, "torch compiled", None))
    if less_memory is not None:
        goals += no_more_memory(peaks, "torch", less_memory)
    if linear and "memory_mb" in peaks:
        growth = peaks["memory_mb"]["ours"] / max(2 * linear["ours"], GRAIN)
        goals.append(goal("MB / (2 x MB at T / 2)", growth, at_most=LINEAR))
    share = {side: operations / taken["min_ms"] / ceiling_once() for side, taken in times.items()}
    if tokens:
        more["tokens_per_second"] = {side: tokens / taken["median_ms"] * 1e3 for side, taken in times.items()}
    return measured(group, case, what, times, goals, ceiling_share=share, **peaks, **more)


def layer_pair(layer: Layer, p: float) -> tuple[nn.Module, nn.Module]:
    sizes: Any = (layer.d, layer.heads, layer.ff, p)
    theirs = nn.TransformerEncoderLayer(*sizes, batch_first=True)
    ours = unrolled.nn.TransformerEncoderLayer(*sizes, batch_first=True)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def encoder_layer(case: str, layer: Layer, p: float, ragged: bool, at_least: float, run: Run) -> list[Row]:
    lengths = torch.randint(1, layer.t + 1, (layer.b,)) if ragged else torch.full((layer.b,), layer.t)
    live = torch.arange(layer.t) < lengths[:, None]
    x, dy = torch.randn(2, layer.b, layer.t, layer.d) * live[..., None]
    options = {"src_key_padding_mask": ~live} if ragged else {}

    def steps(p: float) -> tuple[dict[str, Call], nn.Module]:
        ours, theirs = layer_pair(layer, p)
        batch = Ragged.from_padded(x, lengths, batch_first=True) if ragged else x
        return {
            "ours": Training(ours, batch, dy[live] if ragged else dy),
            "torch": Training(theirs, x, dy, **options),
        }, theirs

    exact, _ = steps(0.0)
    dx, *gradients = exact["torch"]()
    check(exact["ours"](), [dx[live] if ragged else dx, *gradients], same_norm)
    sides, theirs = steps(p)
    note = compiled(sides, lambda: Training(torch.compile(theirs), x, dy, **options), run, exact=p == 0)
    share = {"share": float(live.float().mean())} if ragged else {}
    operations = 3 * products(layer, lengths.tolist())
    return [row("encoder layer", case, sides, operations, at_least, run, **share, **note)]


def attention_alone(run: Run) -> list[Row]:
    """One sequence. Memory is linear if that of a length is twice that of half of it."""
    rows: list[Row] = []
    for t in LENGTHS:
        q, k, v, dy = torch.randn(4, 1, HEADS, t, HEAD_SIZE)
        rows.append(_one_sequence(t, (q, k, v), dy, rows[-1].get("memory_mb") if rows else None, run))
    return rows


def _one_sequence(t: int, leaves: Sequence[Tensor], dy: Tensor, half: dict[str, float] | None, run: Run) -> Row:
    queries = Rows(torch.tensor([0]), 1, torch.tensor([t]))

    def flat(x: Tensor) -> Tensor:
        return x.detach()[0].transpose(0, 1).reshape(t, HEADS * HEAD_SIZE)

    theirs = [leaf.clone().requires_grad_() for leaf in leaves]
    ours = [flat(leaf).requires_grad_() for leaf in leaves]
    sides: dict[str, Call] = {
        "ours": Step(lambda: attention(*ours, heads=HEADS, queries=queries, causal=True), ours, flat(dy)),
        "torch": Step(lambda: F.scaled_dot_product_attention(*theirs, is_causal=True), theirs, dy),
    }
    check(sides["ours"](), [flat(gradient) for gradient in sides["torch"]()])

    def build() -> Call:
        scaled = torch.compile(F.scaled_dot_product_attention)
        return Step(lambda: scaled(*theirs, is_causal=True), theirs, dy)

    note = compiled(sides, build, run)
    asked = t == ASKED_LENGTH
    run = run if asked else run._replace(repeats=min(run.repeats, 5))  # of the others the memory matters
    case = f"T{t} causal, {HEADS} heads of {HEAD_SIZE} attention"
    operations = 3 * scores(HEADS * HEAD_SIZE, [t], causal=True)
    return row("attention", case, sides, operations, 1 if asked else None, run, linear=half, **note)


def projection(case: str, run: Run) -> list[Row]:
    x, target = torch.randn(TOKENS, WIDTH), torch.randint(CLASSES, (TOKENS,))
    layer = nn.Linear(WIDTH, CLASSES)
    one = torch.ones(())
    leaves = [x.requires_grad_(), layer.weight, layer.bias]

    def theirs() -> Tensor:
        return F.cross_entropy(layer(x), target)

    sides: dict[str, Call] = {
        "ours": Step(lambda: linear_cross_entropy(x, layer.weight, layer.bias, target), leaves, one),
        "torch": Step(theirs, leaves, one),
    }
    check(sides["ours"](), sides["torch"]())
    note = compiled(sides, lambda: Step(torch.compile(theirs), leaves, one), run)
    operations = 3 * 2 * TOKENS * WIDTH * CLASSES
    return [row("projection", case, sides, operations, 1.4, run, less_memory=0.1, **note)]


def decoding(case: str, run: Run) -> list[Row]:
    decode = Decoding(DECODING.d, DECODING.heads, DECODING.ff, layers=6)
    tokens, encoded = torch.randn(DECODING.b, STEPS, DECODING.d), torch.randn(DECODING.b, DECODING.t, DECODING.d)
    sides: dict[str, Call] = {
        "ours": lambda: [decode.ours(tokens, encoded)],
        "torch": lambda: [decode.theirs(tokens, encoded)],
    }
    check(sides["ours"](), sides["torch"]())

    def build() -> Call:
        again = copy(decode)
        again.compile()
        return lambda: [again.theirs(tokens, encoded)]

    note = compiled(sides, build, run)
    d, ff, n = DECODING.d, DECODING.ff, DECODING.b * STEPS
    once = 4 * DECODING.b * DECODING.t * d**2  # keys and values of the memory
    maps = 2 * n * (6 * d**2 + 2 * d * ff)
    read = DECODING.b * scores(d, [STEPS], causal=True) + 4 * n * DECODING.t * d
    operations = 6 * (once + maps + read)
    return [row("decoding", case, sides, operations, 20, run, what="inference", tokens=n, **note)]


def whole_model(case: str, run: Run) -> list[Row]:
    tokens = torch.randint(CLASSES, (MODEL.b, MODEL.t + 1))

    def steps(p: float) -> tuple[dict[str, Call], nn.Module]:
        ours, theirs = language_models(CLASSES, MODEL, LAYERS_OF_MODEL, p)
        one = torch.ones(())
        return {"ours": Training(ours, tokens, one), "torch": Training(theirs, tokens, one)}, theirs

    exact, _ = steps(0.0)
    check(exact["ours"](), exact["torch"](), same_norm)
    sides, theirs = steps(DROPOUT)
    note = compiled(sides, lambda: Training(torch.compile(theirs), tokens, torch.ones(())), run, exact=False)
    n = MODEL.b * MODEL.t
    forward = LAYERS_OF_MODEL * products(MODEL, [MODEL.t] * MODEL.b, causal=True) + 2 * n * MODEL.d * CLASSES
    return [row("model", case, sides, 3 * forward, 1.8, run, tokens=n, **note)]
