"""Callbacks that log the loss and speed of a run, score rows of the training split, and show progress."""

import html
import math
import sys
import time
from collections import Counter
from dataclasses import asdict, astuple, dataclass
from typing import Any, TextIO, cast

import lightning as L
import numpy as np
import torch
from jaxtyping import Float
from lightning.pytorch.callbacks import ProgressBar, Timer
from lightning.pytorch.trainer.states import TrainerFn
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tinyformer.costs.network import TrainingFlops, batch_sizes
from tinyformer.data.batches.loader import EpochLoader
from tinyformer.data.module import count
from tinyformer.hardware import Peak, compute_dtype, matmul_peak, peak_memory
from tinyformer.training.module import TrainingModule, num_steps
from tinyformer.training.step import sum_over_processes

NOTEBOOK_INTERVAL = 0.5
"""Seconds between two updates of the bar in a notebook, each of which sends a message to the browser."""


@dataclass
class Work:
    """Work done over a period of training."""

    seconds: float = 0.0
    tokens: int = 0  # tokens of all processes, including padding, which costs as much
    flops: float = 0.0  # FLOPs of the model on one device
    waiting: float = 0.0  # the part of `seconds` in which the loop waited for batches

    def __add__(self, other: "Work") -> "Work":
        return Work(*(value + more for value, more in zip(astuple(self), astuple(other), strict=True)))

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)

    @property
    def data_wait(self) -> float:
        return self.waiting / max(self.seconds, 1e-9)

    def mfu(self, peak: Peak) -> float:
        """Model FLOPs utilisation: the fraction of the peak speed (Chowdhery et al. 2022, PaLM, arXiv 2204.02311)."""
        return self.flops / max(self.seconds, 1e-9) / peak.flops


class Report(L.Callback):
    """Logs loss, learning rate and throughput every `log_every_n_steps` steps.

    - `train/loss`: the mean over the targets of all processes since the last report, without batches whose loss is not
      finite; `train/learning_rate`: the learning rate of the step.
    - `throughput/tokens_per_second`, `throughput/mfu` and `throughput/data_wait`: see `Work`; `throughput/seconds`:
      the time of all training steps so far, without validation and telemetry.
    - `throughput/memory_gb`: peak memory so far in 10^9 bytes, see `peak_memory`.

    Losses are summed on the device, so that the host waits for the device only at reports. Validation and telemetry do
    not count as training time. At the end of training, the steps after the last report are measured, too.
    """

    def __init__(self) -> None:
        self.total = Work()  # up to the last report, or up to the end of training
        self.latest: dict[str, float] = {}  # the last report; at the end of a run without one, its loss and speed
        self.peak: Peak | None = None  # speed of the device; None before the first report
        self._sums: torch.Tensor | None = None  # nats and targets since the last report: a mean over processes
        self._resumed_targets = 0.0  # targets in `_sums` from before a resumption; their work is not measured
        self._sizes = Counter[str]()
        self._since = np.zeros(2)  # `_clock` at the last report, plus excluded time
        self._pause: np.ndarray | None = None  # `_clock` at the start of a pause of training
        self._learning_rate = math.nan
        self._earlier = 0.0
        self._started = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Wall time of the run so far, including validation, telemetry and the time before a resumption."""
        return self._earlier + time.perf_counter() - self._started

    def state_dict(self) -> dict[str, Any]:
        return {
            "seconds": self.seconds,
            "total": asdict(self.total),
            "unreported": [0.0, 0] if self._sums is None else self._sums.tolist(),
            "latest": self.latest,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._earlier = float(state_dict["seconds"])
        self.total = Work(**{name: type(getattr(Work(), name))(value) for name, value in state_dict["total"].items()})
        nats, targets = state_dict["unreported"]
        self._sums = torch.tensor([nats, targets], dtype=torch.float64) if targets else None
        self._resumed_targets = float(targets)
        self.latest = {str(name): float(value) for name, value in state_dict.get("latest", {}).items()}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Print how long the run will be, and start the clock."""
        assert isinstance(pl_module, TrainingModule)
        if trainer.is_global_zero:
            print(_describe_length(trainer, getattr(pl_module.schedule, "warmup_steps", 0)))
        self._costs = TrainingFlops.of(pl_module.network)
        self._started = time.perf_counter()
        self._since, self._pause = _clock(trainer), None

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._pause = _clock(trainer)

    def exclude(self, seconds: float) -> None:
        """Exclude the last `seconds` from the training time; if the clock is stopped, they are not in it anyway."""
        if self._pause is None:
            self._since[0] += seconds

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        """Restart the clock after a validation, now that other callbacks, such as telemetry, have finished as well."""
        if self._pause is not None:
            self._since += _clock(trainer) - self._pause
            self._pause = None

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Record the learning rate of the step, before the schedule changes it for the next step."""
        self._learning_rate = optimizer.param_groups[0]["lr"]

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, TrainingModule)
        nats = outputs["loss"].detach() * pl_module.unit
        if trainer.accumulate_grad_batches > 1:  # by which Lightning has divided the loss
            nats = nats * trainer.accumulate_grad_batches
        is_finite = nats - nats == 0  # `isfinite` launches four kernels
        added = torch.where(is_finite, torch.stack((nats, pl_module.targets)), 0.0)
        self._sums = added if self._sums is None else self._sums.to(added.dtype).to(added.device) + added
        self._sizes += batch_sizes(batch)
        if pl_module.step_targets:
            return  # gradients are accumulated
        if trainer.world_size > 1:
            self._sums = sum_over_processes(self._sums) / trainer.world_size
        if trainer.global_step % trainer.log_every_n_steps:  # type: ignore[attr-defined]
            return
        nats, targets = self._take_sums()  # waits for the device, so that the clock is read when its work is done
        work = self._take_work(trainer, targets, _clock(trainer))
        self.peak = matmul_peak(pl_module.device, compute_dtype(trainer.precision))
        self.latest = {
            "train/loss": nats / targets if targets else math.nan,
            "train/learning_rate": self._learning_rate,
            "throughput/tokens_per_second": work.tokens_per_second,
            "throughput/mfu": work.mfu(self.peak),
            "throughput/memory_gb": peak_memory(pl_module.device) / 1e9,
            "throughput/data_wait": work.data_wait,
            "throughput/seconds": self.total.seconds,
        }
        self._since = _clock(trainer)  # again, since the peak may just have been measured
        for logger in trainer.loggers:
            logger.log_metrics(self.latest, step=trainer.global_step)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Measure the steps since the last report; a short run may have had none."""
        if self._sums is None:
            return
        (nats, targets), work = self._take_sums(), self.total
        if self._sizes:  # empty in a run that was resumed after its last step
            work = self._take_work(trainer, targets, _clock(trainer) if self._pause is None else self._pause)
        if not self.latest:
            loss = nats / targets if targets else math.nan
            self.latest = {"train/loss": loss, "throughput/tokens_per_second": work.tokens_per_second}

    def _take_sums(self) -> tuple[float, float]:
        """The nats and the number of targets since the last report."""
        assert self._sums is not None
        (nats, targets), self._sums = self._sums.tolist(), None
        return nats, targets

    def _take_work(self, trainer: L.Trainer, targets: float, now: Float[np.ndarray, "2"]) -> Work:
        """Return the work since the last report and add it to `total`; FLOPs of logits are counted only at targets."""
        flops = self._costs.count(self._sizes, targets - self._resumed_targets)
        self._resumed_targets = 0.0
        tokens = self._sizes["tokens"] + self._sizes["source_tokens"]
        seconds, waiting = (now - self._since).tolist()
        work = Work(seconds, tokens * trainer.world_size, flops, waiting)
        self.total += work
        self._sizes = Counter()
        return work


def _clock(trainer: L.Trainer) -> Float[np.ndarray, "2"]:
    """The current time, and the time that the loop has waited for batches so far, both in seconds."""
    return np.array([time.perf_counter(), cast(EpochLoader, trainer.train_dataloader).seconds])


def _describe_length(trainer: L.Trainer, warmup_steps: int) -> str:
    """A line about the length of a run in optimizer steps and epochs, and about its effect on the learning rate."""
    steps = num_steps(trainer)
    timers = any(isinstance(callback, Timer) for callback in trainer.callbacks)  # type: ignore[attr-defined]
    ends = " or ".join(["trainer.max_time"] * timers + ["early stopping"] * bool(trainer.early_stopping_callbacks))
    if steps is None:
        return f"length: not known, and the learning rate does not decay{ends and f'; {ends} ends it'}"
    early = f"; {ends} may end it earlier, with a learning rate that has not decayed" if ends else ""
    length, batches = count(steps, "step"), int(trainer.num_training_batches)
    epochs = (steps - trainer.global_step) * trainer.accumulate_grad_batches / batches
    begun = f" from step {trainer.global_step:,} on" if trainer.global_step else ""
    late = f"\nschedule.warmup_steps={warmup_steps}: the run of {length} ends before its peak learning rate."
    described = f"length: {length},{begun} {count(epochs, 'epoch')} of {count(batches, 'batch')}{early}"
    return described + (late if warmup_steps >= steps else "")


class TrainingScores(L.Callback):
    """Scores rows of the training split at each validation, to tell memorisation from generalisation.

    Logs `train/accuracy` and the task's other metrics except the loss, since `train/loss` is the loss of the
    training steps. The rows are drawn at random and stay the same throughout the run.

    Args:
        num_rows: number of training rows that are scored; 0 for none.
    """

    def __init__(self, num_rows: int = 0) -> None:
        self.num_rows = num_rows
        self.metrics: dict[str, float] = {}  # metrics of the last validation

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, TrainingModule)
        if not self.num_rows or trainer.state.fn != TrainerFn.FITTING:
            return
        sums: dict[str, torch.Tensor] = {}
        with pl_module.whole_network(), trainer.precision_plugin.forward_context():
            if not trainer.is_global_zero:
                return
            for batch in pl_module.data.sample("train", self.num_rows):
                pl_module.add_scores(sums, trainer.strategy.batch_to_device(batch))
        metrics = pl_module.task.metrics(sums, pl_module.data.splits["train"])
        given = {name: value for name, value in metrics.items() if name != "loss" and value is not None}
        self.metrics = {f"train/{name}": value for name, value in given.items()}
        for logger in trainer.loggers:
            logger.log_metrics(self.metrics, step=pl_module.step)


class StepProgress(ProgressBar):
    """Progress over all optimizer steps, with loss, tokens/s and time left.

    Lightning's own bars count the batches of an epoch, but the length of a run is a number of steps. In a notebook, the
    bar is one output in plain HTML, without widgets, which each update replaces; elsewhere there is a line every
    `interval` seconds. Loss and speed are those of the `report`.
    """

    def __init__(self, report: Report, interval: float = 10.0, stream: TextIO | None = None) -> None:
        super().__init__()
        self.report, self.stream = report, stream or sys.stdout
        self.console = Console(file=self.stream)
        self.animated, self.in_notebook = self.console.is_terminal, self.console.is_jupyter
        self.interval = NOTEBOOK_INTERVAL if self.in_notebook else interval
        self.is_silent = False
        self.progress: Progress | None = None
        self.output: Any = None  # output of a notebook
        self.started = self.shown = 0.0
        self.first_step = 0

    def disable(self) -> None:
        """Show nothing; Lightning calls this in all processes but the first."""
        self.is_silent = True

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.started = self.shown = time.monotonic()
        self.first_step = trainer.global_step
        if self.in_notebook:
            self._show(trainer)
        elif self.animated and not self.is_silent:
            self.progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[status]}"),
                TimeRemainingColumn(compact=True),
                TextColumn("left"),
                console=self.console,
                refresh_per_second=2,  # each takes 2 ms of CPU time
            )
            self.task = self.progress.add_task(
                "training", total=num_steps(trainer), completed=trainer.global_step, status=""
            )
            self.progress.start()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if self.progress is not None:
            self.progress.update(self.task, completed=trainer.global_step, status=self._status(trainer))
        elif time.monotonic() - self.shown >= self.interval and (self.in_notebook or self.report.latest):
            self._show(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.progress is not None:
            self.progress.stop()
        else:
            self._show(trainer)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Stop the bar, so that the terminal stays usable."""
        if self.progress is not None:
            self.progress.stop()
        elif self.in_notebook:
            self._show(trainer)

    def _show(self, trainer: L.Trainer) -> None:
        """Print the metrics as a line, or show them in place of a notebook cell's output."""
        if self.is_silent:
            return
        self.shown = time.monotonic()
        step, total, status = trainer.global_step, num_steps(trainer), self._status(trainer)
        line = f"step {step}{f'/{total}' if total else ''}  {status}"
        if total and step > self.first_step:
            seconds = int((self.shown - self.started) / (step - self.first_step) * (total - step))
            line += f"  {seconds // 60}:{seconds % 60:02d} left"
        if not self.in_notebook:
            print(line, file=self.stream, flush=True)
            return
        from IPython.display import display  # noqa: PLC0415 - it exists in notebooks only

        share = f'value="{step}" max="{total}"' if total else ""
        bar = f'<progress {share} style="width: 16em; vertical-align: middle"></progress>'
        text = f'<span style="font-family: monospace; white-space: pre">  {html.escape(line)}</span>'
        bundle = {"text/html": bar + text, "text/plain": line}
        if self.output is None:
            self.output = display(bundle, raw=True, display_id=True)
        else:
            self.output.update(bundle, raw=True)

    def _status(self, trainer: L.Trainer) -> str:
        latest, val_loss = self.report.latest, trainer.callback_metrics.get("val/loss")
        if not latest:
            return ""
        val = "" if val_loss is None else f"val {float(val_loss):.3f}  "
        return f"loss {latest['train/loss']:.3f}  {val}{latest['throughput/tokens_per_second']:,.0f} tokens/s"
