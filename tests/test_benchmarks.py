"""What the benchmarks make of their numbers. How fast anything is, is no matter of a test."""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

ROOT = str(Path(__file__).parents[1])
if ROOT not in sys.path:
    sys.path.append(ROOT)

from benchmarks import __main__ as command  # noqa: E402
from benchmarks import attention, harness, peers, recurrent, sides, table  # noqa: E402


def times(**medians: float) -> dict[str, dict[str, float]]:
    return {side.replace("_", " "): {"min_ms": 0.9 * ms, "median_ms": ms} for side, ms in medians.items()}


def row(group: str = "padded", cell: str = "GRU", shape: Any = (100, 32, 64, 64), **more: Any) -> dict[str, Any]:
    own = more.pop("times", None) or times(ours=2.0, torch_padded=6.5, torch_packed=123.4)
    goals = more.pop("goals", [harness.goal("torch padded / ours", 3.25, at_least=3)])
    return harness.measured(group, recurrent.name(cell, shape, group), "training", own, goals, **more)


def shown(rows: list[dict[str, Any]], **more: Any) -> str:
    out = io.StringIO()
    marked = [{"allocator": "default", **one} for one in rows]
    table.show({"machine": {"cpu": "a"}, "rows": marked, **more}, Console(file=out, width=table.WIDTH))
    return out.getvalue()


@pytest.mark.parametrize(
    ("asked", "reached", "text"),
    [
        ({"at_least": 3}, False, "2.81 < 3"),
        ({"at_least": 2.81}, True, "2.81 ≥ 2.81"),
        ({"at_most": 2.5}, False, "2.81 > 2.5"),
        ({"at_most": 3}, True, "2.81 ≤ 3"),
        ({}, None, "2.81"),
    ],
)
def test_a_goal_says_the_relation_that_holds(asked: dict[str, float], reached: bool | None, text: str) -> None:
    goal = harness.goal("torch / ours", 2.81, **asked)
    assert goal["reached"] is reached
    assert str(table._goal(goal)) == text


def test_a_row_is_reached_if_all_of_its_goals_are() -> None:
    verdicts = {
        True: harness.goal("a", 1, at_most=1),
        False: harness.goal("b", 2, at_most=1),
        None: harness.goal("c", 1),
    }
    assert row(goals=[verdicts[True], verdicts[None]])["reached"] is True
    assert row(goals=[verdicts[True], verdicts[False]])["reached"] is False
    assert row(goals=[verdicts[None]])["reached"] is None


def test_ratios_are_of_medians_and_over_the_floor_of_minima() -> None:
    own = times(ours=2.0, torch_padded=6.5)
    assert recurrent.faster(own, "torch padded", 3)["value"] == pytest.approx(3.25)
    assert recurrent.above_floor(own, 1.5, 1.3)["value"] == pytest.approx(1.2)
    assert recurrent.no_more_memory({}, "torch padded") == []
    peaks = {"memory_mb": {"ours": 0.3, "torch padded": 0.0, "torch packed": 0.25}}
    assert recurrent.no_more_memory(peaks, "torch padded")[0]["reached"]  # both below what can be told apart


def test_the_tables_fit_their_width_and_hold_every_number() -> None:
    peaks = {"ours": 11.5, "torch padded": 1223.0, "torch packed": 21.3}
    missed = [harness.goal("torch packed / ours", 7.5, at_least=8), harness.goal("ours / floor", 1.7)]
    growing = [
        row("growth", shape=shape, us_per_step={"ours": 3.14, "torch padded": 9.0, "torch packed": 9.0})
        for shape in recurrent.GROWTH
    ]
    text = shown(
        [row(memory_mb=peaks, floor_ms=1.0), row("ragged", "LSTM", (500, 32, 64, 128), goals=missed), *growing],
        time_10000_over_1000_over_10={"default": {"GRU": {"ours": 1.04}}},
    )
    assert max(map(len, text.splitlines())) <= table.WIDTH
    wanted = ["GRU T100 B32 I64 H64", "1.80 / 2.00", "5.85 / 6.50", "111 / 123", "11.5 / 1223.0 / 21.3", "3.25 ≥ 3"]
    wanted += ["LSTM T500 B32 I64 H128", "7.50 < 8", "1.70", "3.1 / 9.0 / 9.0", "ours 1.04", "4 of 5 rows"]
    for words in wanted:
        assert words in text
    assert "MB" not in shown([row()])


def test_growth_compares_the_two_long_ones() -> None:
    rows = [row("growth", "RNN", s, times=times(ours=ms)) for s, ms in zip(recurrent.GROWTH, (1, 8, 100), strict=True)]
    assert recurrent.linear(rows) == {"RNN": {"ours": pytest.approx(1.25)}}
    assert recurrent.linear(rows[:2]) == {}


def test_only_chooses_cases_by_a_part_of_their_name() -> None:
    def cases(only: str, asked: list[str], name: str = "recurrent") -> list[str]:
        options = argparse.Namespace(name=name, only=only, repeats=10, threads=1, one_process=None)
        return list(command.plan(options, asked))

    assert len(cases("", [])) == 3 * (6 + 3 + 3 + 2)
    assert len(cases("", ["jax"])) == 3 * (6 + 3 + 3 + 2 + 6)
    assert cases("GRU T35 ", []) == ["GRU T35 B20 I650 H650 padded"]
    assert cases("no such case", []) == []
    assert len(cases("", [], "attention")) == 3 * 3 + 4
    assert cases("T32 D256 FF1024 A4 dropout 0.1", [], "attention") == [
        "B64 T32 D256 FF1024 A4 dropout 0.1 encoder layer",
        "B64 T32 D256 FF1024 A4 dropout 0.1 ragged encoder layer",
    ]


def test_epochs_are_stored_in_a_folder_made_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = tmp_path / "words.txt"
    words.write_text("".join(f"{label}\t{label} {i} words\n" for i in range(20) for label in ("good", "bad")))
    output = tmp_path / "a" / "b" / "epochs.json"
    line = ["benchmarks", "epochs", str(words), "--epochs", "1", "--threads", "1", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", line)
    assert command.main() == 0
    stored = json.loads(output.read_text())
    assert [r["cell"] for r in stored["rows"]] == ["rnn", "lstm", "gru", "transformer"]
    for one in stored["rows"]:
        assert {len(seconds) for seconds in one["seconds"].values()} == {1}
        if one["cell"] != "transformer":  # whose dropout torch draws otherwise
            assert len(set(one["test_accuracy"].values())) == 1, "the same model on both sides"


def test_a_missing_peer_is_named_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None if package != "jax" else object())
    assert peers.missing(["jax"]) is None
    assert str(peers.missing(["keras", "onnxruntime"])).endswith("pip install keras onnx onnxruntime")
    assert "found tensorflow" in str(peers.missing(["tensorflow"]))


def test_a_race_calls_its_sides_in_turn() -> None:
    calls: list[str] = []
    taken = harness.race({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 10)
    assert calls == ["a", "b"] * 2 + ["a", "a", "b", "b"] * 10  # two rounds to warm up; of two calls the second counts
    assert all(0 <= t["min_ms"] <= t["median_ms"] for t in taken.values())


def test_a_slow_side_is_called_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr(harness.time, "perf_counter", lambda: next(clock))  # every call takes a second
    monkeypatch.setattr(harness, "SLOW", 0.5)
    calls: list[str] = []
    taken = harness.race({"a": lambda: calls.append("a")}, 10)
    assert calls == ["a"]
    assert taken == {"a": {"min_ms": 1000, "median_ms": 1000, "repeats": 1}}


def test_peak_memory_sees_what_a_step_frees_again() -> None:
    peak = harness.peak_memory(lambda: torch.ones(10_000_000).sum())
    if peak is None:
        assert sys.platform != "linux"
    else:
        assert 39 < peak < 60


def test_what_is_wrong_is_not_timed() -> None:
    ours, theirs = sides.pair("GRU", 3, 4)
    x, dy = torch.randn(5, 2, 3), torch.randn(5, 2, 4)
    expected = sides.Training(theirs, x, dy)()
    sides.check(sides.Training(ours, x, dy)(), expected)
    with pytest.raises(AssertionError):
        sides.check(sides.Training(ours, x, 1.01 * dy)(), expected)
    one_off, all_off = expected[0].clone(), 1.01 * expected[0]
    one_off.view(-1)[0] += 1e-3 * float(one_off.norm())
    harness.same_norm(0.999 * one_off + 0.001 * expected[0], expected[0])
    for wrong in (all_off, all_off * torch.nan):
        with pytest.raises(AssertionError, match="the norm of the difference"):
            harness.same_norm(wrong, expected[0])


@pytest.mark.parametrize("cell", sides.CELLS)
def test_every_option_is_a_row_of_its_cell(cell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent, "race", lambda sides, repeats: {side: times(it=1.0)["it"] for side in sides})
    rows = recurrent.options(cell, (3, 2, 4, 4), recurrent.Run(10, 1, memory=False))
    own = {"RNN": ["proj_size=2"], "GRU": ["reset=before"], "LSTM": ["peephole=True", "proj_size=2"]}[cell]
    assert [r["what"] for r in rows] == ["layer_norm=True", "zoneout=0.1", "recurrent_dropout=0.3", *own]
    assert [r["reached"] for r in rows] == [True, True, True, *[None] * len(own)]


def test_every_part_of_a_transformer_is_compared_and_gives_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "race", lambda sides, repeats: {side: times(it=1.0)["it"] for side in sides})
    monkeypatch.setattr(attention, "ceiling_once", lambda: 1e6)
    monkeypatch.setattr(attention, "LAYERS", ((attention.Layer(3, 5, 8, 12, 2), (1.5, 1.0, 0.5)),))
    small = {"LENGTHS": (4, 8), "ASKED_LENGTH": 8, "HEADS": 2, "HEAD_SIZE": 4, "TOKENS": 7, "WIDTH": 4, "CLASSES": 9}
    small |= {"STEPS": 5, "LAYERS_OF_MODEL": 2}
    small |= dict.fromkeys(("DECODING", "MODEL"), attention.Layer(3, 4, 8, 12, 2))
    for name, value in small.items():
        monkeypatch.setattr(attention, name, value)
    torch.manual_seed(0)
    rows = [one for job in attention.jobs(harness.Run(10, 1, memory=True)) for one in job.run()]
    assert [r["group"] for r in rows] == [
        *["encoder layer"] * 3,
        *["attention"] * 2,
        *("projection", "decoding", "model"),
    ]
    assert [r["reached"] for r in rows[:3]] == [False, True, True]
    assert [r["what"] for r in rows].count("inference") == 1
    assert all(r["case"].endswith(r["group"]) for r in rows)
    assert all({"ours", "torch"} == set(r["ceiling_share"]) for r in rows)
    assert rows[-1]["tokens_per_second"]["ours"] == pytest.approx(3 * 4 * 1e3)
    assert max(map(len, shown(rows).splitlines())) <= table.WIDTH


def test_operations_by_hand() -> None:
    layer = attention.Layer(2, 3, 4, 5, 2)
    maps = 2 * 5 * (4 * 4 * 4 + 2 * 4 * 5)  # of five tokens: q, k, v, out; in and out of the feed-forward
    assert attention.products(layer, [3, 2]) == maps + 2 * 2 * 4 * (9 + 4)
    assert attention.scores(4, [3], causal=True) == 2 * 2 * 4 * 9 / 2


def test_what_cannot_be_compiled_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> Any:
        raise RuntimeError("no compiler\nand more")

    sides_: dict[str, Any] = {"torch": lambda: [torch.ones(2)]}
    run = harness.Run(10, 1, memory=False, compile=True)
    assert attention.compiled(sides_, fails, run) == {"not_compiled": "RuntimeError: no compiler"}
    assert attention.compiled(sides_, fails, run._replace(compile=False)) == {}
    assert list(sides_) == ["torch"]
    with pytest.raises(AssertionError, match="the norm of the difference"):
        attention.compiled(sides_, lambda: lambda: [torch.zeros(2)], run)
    assert attention.compiled(sides_, lambda: lambda: [torch.ones(2)], run) == {}
    assert list(sides_) == ["torch", "torch compiled"]
