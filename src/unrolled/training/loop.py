"""The training loop: steps, evaluations, checkpoints; the same bits again after a restart."""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import torch
from lightning_fabric import Fabric
from safetensors import SafetensorError
from safetensors.torch import load_model, save_file, save_model
from torch import Tensor

from unrolled.config import Config
from unrolled.data.batches import BatchSampler
from unrolled.files import read_json, write_json
from unrolled.training import checkpoint
from unrolled.training.folder import RunFolder, digests
from unrolled.training.guard import NonFiniteError, explain, find_nonfinite
from unrolled.training.optimizer import clip_gradient, gradient_norm, load_optimizer, make_optimizer, save_optimizer
from unrolled.training.schedule import Schedule
from unrolled.training.session import Signals, on_first, seed_step
from unrolled.training.task import Interrupted, Progress, RunResult, Task

log = logging.getLogger("unrolled")


class Trainer:
    """One run of `task` under `config`, written to `folder`, on the devices and processes of `fabric`.

    What the next step depends on is all in a checkpoint: weights, optimizer, sampler, schedule and counters. The random
    numbers of a step are a function of (seed, step, process), so `seed` and `step` are the random state.
    """

    def __init__(
        self,
        task: Task,
        config: Config,
        folder: RunFolder,
        fabric: Fabric,
        signals: Signals,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self.task, self.config, self.folder, self.fabric = task, config, folder, fabric
        self.training, self.signals, self.progress = config.training, signals, progress
        self.examples, self.valid = task.splits["train"], task.splits.get("valid", [])
        if not self.valid and (self.training.patience or self.training.scheduler == "plateau"):
            raise ValueError("training.patience and scheduler = 'plateau' need validation examples, there are none")
        torch.manual_seed(self.training.seed)
        self.module = task.build_model()
        self.model, self.optimizer = fabric.setup(self.module, make_optimizer(self.module, self.training))
        self.sampler = BatchSampler(
            [task.num_tokens(example) for example in self.examples],
            batch_size=self.training.batch_size,
            batch_tokens=self.training.batch_tokens,
            seed=self.training.seed,
            rank=fabric.global_rank,
            world_size=fabric.world_size,
        )
        self.schedule = Schedule()
        self.step = self.evaluated_at = self.saved_at = 0
        self.loss_sum = self.loss_count = 0.0  # since the last evaluation
        self.interrupted = False

    def begin(self, resume: bool) -> Path | None:
        """Prepare the folder; the checkpoint to go on from, if there is one."""
        last = checkpoint.committed(self.folder.last) if resume else None
        self.folder.begin(self.config, self.fabric, resumed=last is not None)
        if last:
            self.folder.check_same_data(self.task)
        return self.folder.last if last else None

    def describe(self) -> None:
        if self.fabric.is_global_zero:
            sizes = ", ".join(f"{len(part)} {name}" for name, part in self.task.splits.items())
            log.info("examples: %s; parameters: %d", sizes, sum(p.numel() for p in self.module.parameters()))
            for note in self.task.notes:
                log.warning(note)

    def restore(self, last: Path) -> None:
        try:
            load_model(self.module, last / "model.safetensors")
            load_optimizer(self.optimizer.optimizer, self.module, last / "optimizer.safetensors")
            state = read_json(last / "trainer_state.json")
            self.step = self.saved_at = state["step"]
            self.evaluated_at, self.loss_sum, self.loss_count = (
                state[key] for key in ("evaluated_at", "loss_sum", "loss_count")
            )
            self.sampler.load_state_dict(state["sampler"])
            self.schedule = Schedule(**state["schedule"])
        except (OSError, RuntimeError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise ValueError(f"{last}: this checkpoint is damaged ({error}); begin again with --overwrite") from None
        if self.fabric.is_global_zero:
            self.folder.forget_metrics_after(self.step)
            log.info("resumed after step %d", self.step)

    def run(self) -> RunResult:
        every = self.training.eval_every, self.training.checkpoint_every
        self.count_batches()
        self.began, self.began_at, self.tokens = time.monotonic(), self.done, 0.0
        while not self.stopped:
            self.count_batches()
            for share in self.sampler:
                self.make_step(share)
                if self.step % every[0] == 0 if every[0] else self.sampler.position == self.batches:
                    self.evaluate()
                if self.step % every[1] == 0 if every[1] else self.evaluated_at == self.step:
                    self.save()
                if self.interrupted:
                    self.save()
                    self.fabric.barrier()
                    raise Interrupted(self.folder.path, self.step, self.signals.received)
                if self.stopped:
                    break
        if self.evaluated_at < self.step:
            self.evaluate()
        self.save()
        return self.finish()

    @property
    def stopped(self) -> str:
        """Why there is no next step; "" where there is one."""
        if self.schedule.exhausted(self.training):
            return "patience"
        if 0 < self.training.max_steps <= self.step:
            return "max_steps"
        return "epochs" if self.sampler.epoch >= self.training.epochs else ""

    def count_batches(self) -> None:
        self.batches = self.sampler.num_batches(self.sampler.epoch)

    @property
    def done(self) -> float:
        return self.share(self.sampler.position)

    def share(self, batches: int) -> float:
        """Of all training, when so many batches of this epoch lie behind."""
        epochs = (self.sampler.epoch + batches / self.batches) / self.training.epochs
        return max(epochs, self.step / self.training.max_steps if self.training.max_steps else 0.0)

    def make_step(self, share: Sequence[int]) -> None:
        training, fabric = self.training, self.fabric
        seed_step(training.seed, self.step, fabric)
        self.model.train()
        batch = fabric.to_device(self.task.collate([self.examples[i] for i in share]))
        self.optimizer.zero_grad()
        loss_sum, count = self.task.loss_sum(self.model, batch)
        total_loss, total_count, tokens, interrupted = self.total(
            loss_sum.detach(), count, self.sampler.num_tokens[share].sum(), self.signals.received > 0
        )
        if not math.isfinite(total_loss):
            self.refuse("loss", batch, total_count)
        # DDP averages the gradients of the processes: times world_size that is their sum.
        fabric.backward(loss_sum * (fabric.world_size / (total_count or 1.0)))
        norm = gradient_norm(self.module)
        if not math.isfinite(norm):
            self.refuse("gradient", batch, total_count)
        clip_gradient(self.module, norm, training.max_grad_norm)
        behind = self.share(self.sampler.position - 1)  # the sampler counts the batch in hand
        for group in self.optimizer.param_groups:
            group["lr"] = self.schedule.rate(training, self.step, behind)
        self.optimizer.step()
        self.step += 1
        self.loss_sum, self.loss_count = self.loss_sum + total_loss, self.loss_count + total_count
        self.tokens += tokens
        self.interrupted = interrupted > 0
        if self.progress and fabric.is_global_zero:
            self.report(total_loss / (total_count or 1.0))

    def total(self, *numbers: Any) -> list[float]:
        """Each number summed over the processes."""
        mine = torch.tensor([float(number) for number in numbers], dtype=torch.float64, device=self.fabric.device)
        summed = self.fabric.all_reduce(mine, reduce_op="sum")
        assert isinstance(summed, Tensor)
        return [float(number) for number in summed]

    def report(self, loss: float) -> None:
        assert self.progress
        seconds, share = time.monotonic() - self.began, self.done - self.began_at
        left = seconds * (1 - self.done) / share if share > 0 else math.inf
        epoch = min(self.sampler.epoch + 1, self.training.epochs)
        self.progress(Progress(self.step, epoch, self.done, loss, self.tokens / max(seconds, 1e-9), left))

    def evaluate(self) -> None:
        """Score the validation examples, keep the model if it is the best so far, and write a line of metrics."""
        self.check_weights()
        scores = on_first(self.fabric, lambda: self.score(self.valid)) if self.valid else {}
        line: dict[str, Any] = {
            "step": self.step,
            "epoch": round(self.sampler.epoch + self.sampler.position / self.batches, 6),
            "learning_rate": self.optimizer.param_groups[0]["lr"],
            "train_loss": self.loss_sum / (self.loss_count or 1.0),
        }
        line |= {f"valid_{name}": value for name, value in scores.items() if isinstance(value, int | float)}
        better = bool(self.valid) and self.schedule.observe(self.training, scores[self.training.metric], self.step)
        self.loss_sum = self.loss_count = 0.0
        self.evaluated_at = self.step
        if self.fabric.is_global_zero:
            if better:
                checkpoint.commit(self.folder.best, self.write_model)
            self.folder.add_metrics(line | {"best": better})
            names = dict.fromkeys(("train_loss", "valid_loss", f"valid_{self.training.metric}"))
            shown = "  ".join(f"{name} {line[name]:.4f}" for name in names if name in line)
            log.info("epoch %.2f  %s%s", line["epoch"], shown, "  best" if better else "")

    def check_weights(self) -> None:
        """A finite gradient times a huge learning rate can still spoil the weights: those are never kept."""
        for name, parameter in self.module.named_parameters():
            if not parameter.isfinite().all():
                raise NonFiniteError(
                    f"after step {self.step} the parameter {name} is not finite: the learning rate is too high. "
                    f"{self.folder.last} keeps the checkpoint of step {self.saved_at}"
                )

    def score(self, examples: Sequence[Any]) -> dict[str, Any]:
        return self.task.metrics(self.module, examples, self.training.batch_size)

    def write_model(self, folder: Path) -> None:
        self.task.save(folder)
        save_model(self.module, str(folder / "model.safetensors"))

    def save(self) -> None:
        """Commit a checkpoint of this step, unless there is one."""
        self.check_weights()
        if self.fabric.is_global_zero and self.saved_at < self.step:
            checkpoint.commit(self.folder.last, self.write_checkpoint)
        self.saved_at = self.step

    def write_checkpoint(self, folder: Path) -> None:
        self.write_model(folder)
        save_optimizer(self.optimizer.optimizer, self.module, folder / "optimizer.safetensors")
        state = {
            "step": self.step,
            "seed": self.training.seed,
            "data": digests(self.task),
            "sampler": self.sampler.state_dict(),
            "schedule": asdict(self.schedule),
            "evaluated_at": self.evaluated_at,
            "loss_sum": self.loss_sum,
            "loss_count": self.loss_count,
        }
        write_json(folder / "trainer_state.json", state)

    def finish(self) -> RunResult:
        """Score the best model on every split but "train"; without validation examples the last model is the best."""
        if self.fabric.is_global_zero:
            if not self.valid:
                checkpoint.commit(self.folder.best, self.write_model)
                self.schedule.best_step = self.step
            best = self.folder.best / "model.safetensors"
            try:
                load_model(self.module, best)
            except (OSError, RuntimeError, SafetensorError) as error:
                raise ValueError(f"{best}: damaged, {error}") from None
        parts = [name for name in self.task.splits if name != "train"]
        scores = on_first(self.fabric, lambda: {name: self.score(self.task.splits[name]) for name in parts})
        result = RunResult(self.folder.path, self.step, self.schedule.best_step, self.stopped, scores)
        if self.fabric.is_global_zero:
            summary = {"steps": result.steps, "best_step": result.best_step, "stopped": result.stopped, **scores}
            write_json(self.folder.metrics, summary)
            log.info("stopped by %s after step %d, best step %d", result.stopped, result.steps, result.best_step)
        return result

    def refuse(self, kind: str, batch: Any, count: float) -> NoReturn:
        """Every process looks for the cause in its share of the batch; the first saves the whole batch."""
        training, fabric = self.training, self.fabric
        seed_step(training.seed, self.step, fabric)
        model = copy.deepcopy(self.module).train()
        with fabric.autocast():
            finding = find_nonfinite(model, batch.inputs, lambda: self.task.loss_sum(model, batch)[0] / (count or 1.0))
        row = None if finding is None or finding.sequence is None else batch.rows[finding.sequence]
        found = [fabric.broadcast((finding, row), src=process) for process in range(fabric.world_size)]
        finding, row = next((pair for pair in found if pair[0] is not None), (None, None))
        folder = self.folder.path / f"nonfinite-{self.step}"
        message = explain(kind, self.step, finding, row, folder)
        if fabric.is_global_zero:
            indices = self.sampler.batches(self.sampler.epoch)[self.sampler.position - 1]
            whole = self.task.collate([self.examples[i] for i in indices])
            report = {"step": self.step, "kind": kind, "message": message, "rows": list(whole.rows)}
            report["finding"] = asdict(finding) if finding else None

            def write(draft: Path) -> None:
                tensors = {"values": whole.inputs.values, "offsets": whole.inputs.offsets, "targets": whole.targets}
                save_file(tensors, draft / "batch.safetensors")
                self.write_model(draft)
                write_json(draft / "report.json", report)

            checkpoint.commit(folder, write)
            log.error(message)
        fabric.barrier()  # torchrun ends the others as soon as one process has left
        raise NonFiniteError(message)
