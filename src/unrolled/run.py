"""Runs, from outside: train one, load one. What the command line does, anybody can call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unrolled.config import Config, parse_config, read_yaml
from unrolled.tasks import task_class

if TYPE_CHECKING:
    from torch import nn

    from unrolled.tasks.classify import ClassifyTask
    from unrolled.tasks.memory import MemoryTask
    from unrolled.training import Progress, RunResult


def train(
    config: Config | Mapping[str, Any],
    *,
    resume: bool = False,
    overwrite: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> RunResult:
    """Train what `config` says and leave a run folder: `output_dir`, else runs/TASK-DATE-TIME.

    `resume` goes on from the last checkpoint in the folder, to the bits of a run that was never interrupted; where
    there is none yet, the run begins. `overwrite` replaces the run in the folder. `progress` is called after each step.
    Under torchrun every process calls this and the first one writes. Random state and threads are left as found.
    Errors: ValueError for options and data that cannot be used, and for a folder that is not empty; NonFiniteError
    before NaN or infinity reach the weights; Interrupted, a KeyboardInterrupt, after Ctrl-C with a checkpoint saved.
    """
    from unrolled.training import fit

    config = config if isinstance(config, Config) else parse_config(config)
    return fit(config, task_class(config.task).prepare, resume=resume, overwrite=overwrite, progress=progress)


class TrainedModel:
    """A trained model: `model` is a plain nn.Module in evaluation mode, `task` what surrounds it."""

    def __init__(self, folder: Path) -> None:
        import torch
        from safetensors import SafetensorError
        from safetensors.torch import load_model

        self.folder = folder
        self.config = read_config(folder / "config.json")
        self.task: ClassifyTask | MemoryTask = task_class(self.config.task).load(folder)
        dtype = torch.float64 if self.config.training.precision == "float64" else torch.float32
        with torch.random.fork_rng(devices=[]):
            self.model: nn.Module = self.task.build_model().to(dtype)
        weights = folder / "model.safetensors"
        try:
            load_model(self.model, weights)
        except (OSError, RuntimeError, SafetensorError) as error:
            raise ValueError(f"{weights}: not the weights of this model ({error})") from None
        self.model.eval()

    def predict(self, inputs: Sequence[Any], probabilities: bool = False) -> list[dict[str, Any]]:
        """For each input its label and that label's probability; with `probabilities`, those of all labels.

        Errors: DataError, a ValueError, for an input of another kind than the training data; ValueError for a task that
        predicts nothing.
        """
        return self.task.predictions(self.model, inputs, probabilities)

    def evaluate(self, source: str | Path) -> dict[str, Any]:
        """The task's metrics on a file of labelled examples; for the task memory on fresh sequences, `source` a length.

        Errors: DataError, a ValueError, names file and line.
        """
        examples: Any = self.task.examples(str(source))
        return self.task.metrics(self.model, examples)


def load(run: str | Path) -> TrainedModel:
    """The best model of a run folder, or the one in a model folder such as RUN/model-last.

    Errors: ValueError where there is none.
    """
    return TrainedModel(model_folder(Path(run)))


def model_folder(run: Path) -> Path:
    """Where the weights that `load(run)` takes lie; also while a training process replaces them."""
    if not run.is_dir():
        raise ValueError(f"{run}: no such folder, expected a run such as runs/NAME")
    places = [run, *(run / name for name in ("model-best", ".model-best.new", "model-last", ".model-last.new"))]
    for place in places:
        if (place / "model.safetensors").exists():
            return place
    raise ValueError(f"{run}: no model in this folder, expected model-best/ or model.safetensors")


def read_config(path: Path) -> Config:
    """The configuration in a config.json or config.yaml."""
    return parse_config(read_yaml(path), str(path))
