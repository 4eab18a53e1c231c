"""Progress of a run: a bar in terminals, plain lines in files."""

import sys
import time
from typing import Any, TextIO

import lightning as L
from lightning.pytorch.callbacks import ProgressBar
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tinyformer.training.callbacks.report import Report


class StepProgress(ProgressBar):
    """Progress over all optimizer steps, with loss, tokens/s and time left.

    Lightning's own bars count the batches of an epoch, but the length of a run is a number of steps.

    Args:
        report: provides loss and speed.
        interval: seconds between two lines if the output is not a terminal.
        stream: the output; stdout unless given.
    """

    def __init__(self, report: Report, interval: float = 10.0, stream: TextIO | None = None) -> None:
        super().__init__()
        self.report, self.interval = report, interval
        self.stream = stream or sys.stdout
        self.console = Console(file=self.stream)
        self.animated = self.console.is_terminal or self.console.is_jupyter
        self.progress: Progress | None = None
        self.started = self.shown = 0.0
        self.first_step = 0

    def disable(self) -> None:
        """Show nothing; Lightning calls this in all processes but the first."""
        self.animated, self.interval = False, float("inf")

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the bar."""
        self.started = self.shown = time.monotonic()
        self.first_step = trainer.global_step
        if self.animated:
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
                "training", total=self._total(trainer), completed=trainer.global_step, status=""
            )
            self.progress.start()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Update the bar, or print a line."""
        if self.progress is not None:
            self.progress.update(self.task, completed=trainer.global_step, status=self._status(trainer))
        elif time.monotonic() - self.shown >= self.interval and self.report.latest:
            self._print(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop the bar, or print the last line."""
        if self.progress is not None:
            self.progress.stop()
        elif self.interval != float("inf"):
            self._print(trainer)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Stop the bar, so that the terminal is usable."""
        if self.progress is not None:
            self.progress.stop()

    def _print(self, trainer: L.Trainer) -> None:
        self.shown = time.monotonic()
        total = self._total(trainer)
        done = trainer.global_step - self.first_step
        left = ""
        if total and done:
            seconds = (self.shown - self.started) / done * (total - trainer.global_step)
            left = f"  {int(seconds) // 60}:{int(seconds) % 60:02d} left"
        of = f"/{total}" if total else ""
        print(f"step {trainer.global_step}{of}  {self._status(trainer)}{left}", file=self.stream, flush=True)

    def _status(self, trainer: L.Trainer) -> str:
        latest, val_loss = self.report.latest, trainer.callback_metrics.get("val/loss")
        if not latest:
            return ""
        parts = [f"loss {latest['train/loss']:.3f}"]
        if val_loss is not None:
            parts.append(f"val {float(val_loss):.3f}")
        parts.append(f"{latest['throughput/tokens_per_second']:,.0f} tokens/s")
        return "  ".join(parts)

    def _total(self, trainer: L.Trainer) -> int | None:
        steps = trainer.estimated_stepping_batches
        return int(steps) if steps != float("inf") and steps >= 0 else None
