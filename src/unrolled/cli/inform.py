"""unrolled verify, unrolled info"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from unrolled.cli import tables
from unrolled.cli.options import recipe_files
from unrolled.tasks import TASKS


def verify(*names: str, json: bool = False) -> int:
    """Prove the gradients right on this machine: every operator before independent judges. Exit code 1 if one objects.

    Parameters
    ----------
    names
        Operators to verify; without any, all.
    json
        Print the certificate as JSON.
    """
    from unrolled import verify as certificates

    rows = certificates.run(list(names))
    passed = all(row["passed"] for row in rows)
    if json:
        tables.print_json(rows)
    else:
        keys = ("operator", "judge", "dtype", "max_relative_error", "bound")
        cells = [[*(tables.number(row[key]) for key in keys), "ok" if row["passed"] else "FAILED"] for row in rows]
        tables.table(["operator", "judge", "dtype", "max relative error", "bound", "verdict"], cells)
        failed = sum(not row["passed"] for row in rows)
        print(f"{len(rows)} checks, {'all passed' if passed else f'{failed} FAILED'}")
    return 0 if passed else 1


def info(run: Path | None = None, /, *, json: bool = False) -> int:
    """Say what this installation can do, or what is in a run folder.

    Parameters
    ----------
    run
        Run folder.
    json
        Print it as JSON.
    """
    facts = describe_installation() if run is None else describe_run(run)
    if json:
        tables.print_json(facts)
    else:
        metrics = facts.pop("metrics", None)
        for name, value in facts.items():
            tables.utf8(f"{name.replace('_', ' '):<12}{_plain(value)}\n")
        if metrics:
            tables.scores(metrics)
    return 0


def describe_installation() -> dict[str, Any]:
    import torch

    from unrolled import __version__, backends

    cuda = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "version": __version__,
        "torch": torch.__version__,
        "backends": backends(),
        "threads": torch.get_num_threads(),
        "devices": ["cpu", *cuda],
        "tasks": list(TASKS),
        "recipes": list(recipe_files()),
    }


def describe_run(run: Path) -> dict[str, Any]:
    """Read from the files of the run alone: without PyTorch."""
    from safetensors import SafetensorError, safe_open

    from unrolled.files import read_json
    from unrolled.run import model_folder, read_config

    folder = model_folder(run)
    config = read_config(folder / "config.json")
    weights = folder / "model.safetensors"
    try:
        with safe_open(weights, framework="numpy") as file:
            sizes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{weights}: damaged, {error}") from None
    facts: dict[str, Any] = {
        "model": str(folder),
        "task": config.task,
        **({"sequences": config.memory.model_dump()} if config.task == "memory" else {}),
        "network": config.model.arguments(),
        "parameters": sum(_product(shape) for shape in sizes),
    }
    finished = run / "metrics.json"
    if finished.exists():
        summary = read_json(finished)
        numbers = ("steps", "best_step", "stopped")
        if not isinstance(summary, dict) or not summary.keys() >= set(numbers):
            raise ValueError(f"{finished}: damaged, expected {', '.join(numbers)}")
        facts |= {key: summary.pop(key) for key in numbers}
        if not all(isinstance(part, dict) for part in summary.values()):
            raise ValueError(f"{finished}: damaged, expected the scores of each part of the data")
        facts["metrics"] = summary
    return facts


def _product(shape: list[int]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {'-' if part is None else part}" for key, part in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
