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


class NotebookBar:
    """A progress bar in a notebook: a single output in plain HTML, which is replaced and needs no widgets."""

    def __init__(self) -> None:
        self.handle: Any = None

    def show(self, step: int, total: int | None, line: str) -> None:
        """Show the progress in place of the previous output.

        Args:
            step: number of steps done.
            total: number of steps in all, if that is known.
            line: the text beside the bar.
        """
        from IPython.display import display  # noqa: PLC0415 - it exists in notebooks only

        share = f'value="{step}" max="{total}"' if total else ""
        bar = f'<progress {share} style="width: 16em; vertical-align: middle"></progress>'
        text = f'<span style="font-family: monospace; white-space: pre">  {html.escape(line)}</span>'
        bundle = {"text/html": bar + text, "text/plain": line}
        if self.handle is None:
            self.handle = display(bundle, raw=True, display_id=True)
        else:
            self.handle.update(bundle, raw=True)


class StepProgress(ProgressBar):
    """Progress over all optimizer steps, with loss, tokens/s and time left.

    Lightning's own bars count the batches of an epoch, but the length of a run is a number of steps.

    Args:
        report: provides loss and speed.
        interval: seconds between two lines if the output is neither a terminal nor a notebook.
        stream: the output; stdout unless given.
    """

    def __init__(self, report: Report, interval: float = 10.0, stream: TextIO | None = None) -> None:
        super().__init__()
        self.report, self.interval = report, interval
        self.stream = stream or sys.stdout
        self.console = Console(file=self.stream)
        self.animated = self.console.is_terminal
        self.notebook = NotebookBar() if self.console.is_jupyter else None
        self.progress: Progress | None = None
        self.started = self.shown = 0.0
        self.first_step = 0

    def disable(self) -> None:
        """Show nothing; Lightning calls this in all processes but the first."""
        self.animated, self.notebook, self.interval = False, None, float("inf")

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the bar."""
        self.started = self.shown = time.monotonic()
        self.first_step = trainer.global_step
        if self.notebook is not None:
            self.notebook.show(trainer.global_step, num_steps(trainer), "")
        elif self.animated:
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

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Update the bar, or print a line."""
        if self.notebook is not None:
            if time.monotonic() - self.shown >= NOTEBOOK_INTERVAL:
                self._update_notebook(trainer)
        elif self.progress is not None:
            self.progress.update(self.task, completed=trainer.global_step, status=self._status(trainer))
        elif time.monotonic() - self.shown >= self.interval and self.report.latest:
            self._print(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop the bar, or print the last line."""
        if self.notebook is not None:
            self._update_notebook(trainer)
        elif self.progress is not None:
            self.progress.stop()
        elif self.interval != float("inf"):
            self._print(trainer)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Stop the bar, so that the terminal stays usable."""
        if self.notebook is not None:
            self._update_notebook(trainer)
        elif self.progress is not None:
            self.progress.stop()

    def _print(self, trainer: L.Trainer) -> None:
        self.shown = time.monotonic()
        print(self._line(trainer), file=self.stream, flush=True)

    def _update_notebook(self, trainer: L.Trainer) -> None:
        assert self.notebook is not None
        self.shown = time.monotonic()
        self.notebook.show(trainer.global_step, num_steps(trainer), self._line(trainer))

    def _line(self, trainer: L.Trainer) -> str:
        total = num_steps(trainer)
        done = trainer.global_step - self.first_step
        left = ""
        if total and done:
            seconds = (self.shown - self.started) / done * (total - trainer.global_step)
            left = f"  {int(seconds) // 60}:{int(seconds) % 60:02d} left"
        of = f"/{total}" if total else ""
        return f"step {trainer.global_step}{of}  {self._status(trainer)}{left}"

    def _status(self, trainer: L.Trainer) -> str:
        latest, val_loss = self.report.latest, trainer.callback_metrics.get("val/loss")
        if not latest:
            return ""
        parts = [f"loss {latest['train/loss']:.3f}"]
        if val_loss is not None:
            parts.append(f"val {float(val_loss):.3f}")
        parts.append(f"{latest['throughput/tokens_per_second']:,.0f} tokens/s")
        return "  ".join(parts)
