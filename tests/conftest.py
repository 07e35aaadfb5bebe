"""The backends a test runs on, the hypothesis profile, and shapes checked at run time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import hypothesis
import jaxtyping
import pytest
import torch

jaxtyping.install_import_hook("unrolled.equations", "beartype.beartype")
jaxtyping.config.update("jaxtyping_disable", True)  # but where `checked`

import unrolled.nn  # noqa: E402, F401  all operators, before a test takes the core away
from unrolled.ops import _backend  # noqa: E402

VARIANTS: list[str] = _backend.core.variants() if _backend.core else []
BACKENDS = ["equation", *VARIANTS]

_always = {
    "deadline": None,
    "print_blob": True,
    "suppress_health_check": [hypothesis.HealthCheck.function_scoped_fixture],  # ours are the same for every example
}
hypothesis.settings.register_profile("ci", derandomize=True, database=None, max_examples=30, **_always)
hypothesis.settings.register_profile("deep", max_examples=2000, **_always)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_report_header() -> str:
    return f"unrolled core: {', '.join(VARIANTS) or 'not built, only the equations are tested'}"


@contextmanager
def on(backend: str) -> Iterator[None]:
    """Operators run on the closed form of the equation ("equation") or on a CPU variant of the core."""
    core = _backend.core
    if backend == "equation":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_backend, "core", None)
            yield
        return
    before = core.variant()
    core.set_variant(backend)
    try:
        with _backend.use("core"):
            yield
    finally:
        core.set_variant(before)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test once on the equation and once on every CPU variant of the core that this machine has."""
    with on(request.param):
        yield request.param


@pytest.fixture(autouse=True)
def _repeatable() -> Iterator[None]:
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def checked() -> Iterator[None]:
    """With the shapes in the signatures of equations checked at each call: where all cases are, for it takes long."""
    jaxtyping.config.update("jaxtyping_disable", False)
    yield
    jaxtyping.config.update("jaxtyping_disable", True)


@pytest.fixture
def file(tmp_path: Path) -> Callable[[str, str | bytes], Path]:
    """Writes a file of this name and content."""

    def write(name: str, content: str | bytes) -> Path:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write
