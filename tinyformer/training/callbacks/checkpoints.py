"""No run is ever lost: checkpoints at each validation, and when the run is told to stop."""

import math
import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer.states import TrainerFn

from tinyformer.checkpoint import KEY, random_state, restore_random_state

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(Exception):  # noqa: N818 - it reports no error
    """A signal ended the run after its last step was saved.

    Args:
        signal_number: which signal.
    """

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal.Signals(signal_number).name)
        self.signal_number = signal_number


class Checkpoints(Checkpoint):
    """Writes `last.ckpt` at each validation and `best.ckpt` when a metric is the best so far.

    On SIGINT (Ctrl-C) or SIGTERM (a scheduler's) the step under way is finished and `last.ckpt` written before the
    run ends, so that a resumed run goes on at exactly this point; a second signal ends it at once.

    Args:
        directory: where the files go.
        contents: what they hold beside Lightning's own keys.
        monitor: the metric.
        higher_is_better: whether the best is the highest, not the lowest.
    """

    def __init__(
        self,
        directory: str | Path,
        contents: dict[str, Any],
        monitor: str = "val/loss",
        higher_is_better: bool = False,
    ) -> None:
        self.last, self.best = Path(directory) / "last.ckpt", Path(directory) / "best.ckpt"
        self.contents = contents
        self.monitor, self.higher_is_better = monitor, higher_is_better
        self.best_value: float | None = None
        self.received: int | None = None
        self.random_state: dict[str, Any] | None = None
        self.handlers: dict[int, Callable[..., Any] | int | None] = {}

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run must know: the value to beat."""
        return {"best_value": self.best_value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the value to beat from a checkpoint."""
        self.best_value = state_dict["best_value"]

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add the config, the tokenizer and the random state to Lightning's keys."""
        checkpoint[KEY] = {**self.contents, "random_state": random_state()}

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Remember the random state until the first step: setting up the loaders draws numbers, too."""
        self.random_state = checkpoint[KEY]["random_state"]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Listen to signals."""
        self.handlers = {number: signal.signal(number, self._receive) for number in SIGNALS}

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Go on with the numbers that the saved run would have drawn."""
        if self.random_state is not None:
            restore_random_state(self.random_state)
            self.random_state = None

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stop where a signal asked for it; make Lightning validate after the last step, whatever the interval."""
        if self.received is not None:
            trainer.save_checkpoint(self.last)
            raise Interrupted(self.received)
        if 0 <= trainer.max_steps <= trainer.global_step:
            trainer.should_stop = True

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save."""
        if trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking:
            return
        for logger in trainer.loggers:
            logger.save()  # a run that goes on from this checkpoint finds its metrics, too
        is_best = self._beats(value := float(trainer.callback_metrics[self.monitor]))
        if is_best:
            self.best_value = value
        trainer.save_checkpoint(self.last)
        if is_best:
            trainer.save_checkpoint(self.best)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Give the signals back to Lightning, before it gives back its own (`teardown` comes after that)."""
        self._give_back()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """The same; but once a signal came, the next still ends the process at once."""
        if self.received is None:
            self._give_back()

    def _beats(self, value: float) -> bool:
        """Whether a value is better than the best so far; of equal ones, the first is."""
        if self.best_value is None or math.isnan(value):
            return not math.isnan(value)
        return value > self.best_value if self.higher_is_better else value < self.best_value

    def _give_back(self) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        self.handlers = {}

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        # The next signal of either kind ends the process at once.
        for other in SIGNALS:
            signal.signal(other, signal.SIG_DFL)
