"""Progress of a run: a bar in terminals and notebooks, plain lines in files."""

import html
import sys
import time
from typing import Any, TextIO

import lightning as L
from lightning.pytorch.callbacks import ProgressBar
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tinyformer.training.callbacks.report import Report
from tinyformer.training.module import num_steps

NOTEBOOK_INTERVAL = 0.5
"""Seconds between two updates of the bar in a notebook, each of which sends a message to the browser."""


class StepProgress(ProgressBar):
    """Progress over all optimizer steps, with loss, tokens/s and time left.

    Lightning's own bars count the batches of an epoch, but the length of a run is a number of steps. In a notebook, the
    bar is a single output in plain HTML, which is replaced and needs no widgets; elsewhere there is a line every
    `interval` seconds. The report provides loss and speed.
    """

    def __init__(self, report: Report, interval: float = 10.0, stream: TextIO | None = None) -> None:
        super().__init__()
        self.report, self.stream = report, stream or sys.stdout
        self.console = Console(file=self.stream)
        self.animated, self.in_notebook = self.console.is_terminal, self.console.is_jupyter
        self.interval = NOTEBOOK_INTERVAL if self.in_notebook else interval
        self.is_silent = False
        self.progress: Progress | None = None
        self.output: Any = None  # of a notebook
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
        """Print a line, or replace the output of a notebook."""
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
