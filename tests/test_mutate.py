"""The mutation run's own teeth: a planted mutant is killed, and what changes nothing survives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

PROGRAM = """
import importlib
from functools import partial
from tests.mutate.judge import Judge
from tests.mutate.questions import questions
from tests.mutate.run import all_mutants, asked, put
from tests.mutate.source import arithmetic

found, texts = all_mutants(["equations/zoneout"])
zoneout = importlib.import_module("unrolled.equations.zoneout")
judge = Judge(questions())
about = asked(found[0].file, judge.questions)
same = found[0]._replace(new=texts[found[0].file][found[0].start : found[0].end])
print(judge.kills(partial(put, zoneout, same, texts[same.file]), about))
print(all(judge.kills(partial(put, zoneout, m, texts[m.file]), about) for m in found))
print(arithmetic("  da = dc * f;  // (7)"), arithmetic("for (int64_t i = 0; i < n; ++i) s += load(x);"))
"""


def test_a_planted_mutant_is_killed_and_an_unchanged_line_survives() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "True", "True", "False"]
