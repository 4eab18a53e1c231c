"""Checkpoints at each validation and when a signal stops the run."""

import math
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer.states import TrainerFn

from tinyformer.checkpoint import KEY, random_state, restore_random_state

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(Exception):  # noqa: N818 - it is not an error
    """A signal stopped the run, after its state was saved.

    Args:
        signal_number: the number of the signal.
    """

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal.Signals(signal_number).name)
        self.signal_number = signal_number


class Checkpoints(Checkpoint):
    """Writes `last.ckpt` at each validation and `best.ckpt` when a metric is the best so far.

    On SIGINT (Ctrl-C) or SIGTERM (a scheduler's), it finishes the current optimizer step and writes `last.ckpt` before
    the run ends, so that a resumed run continues from exactly this point. A second signal ends the process at once.

    Args:
        directory: where to write the files.
        contents: what they contain besides Lightning's own keys.
        monitor: the metric that decides which checkpoint is the best.
        higher_is_better: whether the highest value is the best rather than the lowest.

    Attributes:
        num_begun: number of batches begun; during the first, Lightning uses all state that it has restored.
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
        self.signal_number: int | None = None
        self.random_state: dict[str, Any] | None = None
        self.handlers: dict[int, Callable[..., Any] | int | None] = {}
        self.step_before, self.is_due = -1, False
        self.num_begun = 0

    def state_dict(self) -> dict[str, Any]:
        """The best value so far."""
        return {"best_value": self.best_value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the best value so far."""
        best_value = state_dict["best_value"]
        self.best_value = None if best_value is None else float(best_value)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add the config, the tokenizer and the random states of all processes to Lightning's keys."""
        checkpoint[KEY] = {**self.contents, "random_state": random_state()}
        if trainer.world_size > 1:
            states: list[dict[str, Any]] = [{}] * trainer.world_size
            torch.distributed.all_gather_object(states, random_state())
            checkpoint[KEY]["other_random_states"] = states[1:]

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Keep the random state until the first step, since the construction of data loaders draws random numbers."""
        states = [checkpoint[KEY]["random_state"], *checkpoint[KEY].get("other_random_states", [])]
        if trainer.global_rank < len(states):  # a process that the saved run did not have starts from its seed
            self.random_state = states[trainer.global_rank]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Install the signal handlers; only the main thread can."""
        if threading.current_thread() is not threading.main_thread():
            return
        self.handlers = {number: signal.signal(number, self._receive) for number in SIGNALS}

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Restore the random state of the saved run before the first batch."""
        self.num_begun += 1
        self.step_before = trainer.global_step
        if self.random_state is not None:
            restore_random_state(self.random_state)
            self.random_state = None

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stop after a signal; make Lightning validate after the last step, whatever the interval.

        Nothing is saved for a resumption while gradients are accumulated, since a checkpoint does not contain them.
        """
        if trainer.global_step > self.step_before:
            signal_number = self._signal_of_any_process(trainer)
            if signal_number or self.is_due:
                self.is_due = False
                trainer.save_checkpoint(self.last)
            if signal_number:
                raise Interrupted(signal_number)
        if 0 <= trainer.max_steps <= trainer.global_step:
            trainer.should_stop = True

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save checkpoints."""
        if trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking:
            return
        for logger in trainer.loggers:
            logger.save()  # so that a run resumed from this checkpoint has its metrics
        is_best = self._is_best(value := float(trainer.callback_metrics[self.monitor]))
        if is_best:
            self.best_value = value
        self.is_due = trainer.global_step == self.step_before  # gradients have been accumulated since the last step
        if not self.is_due:
            trainer.save_checkpoint(self.last)
        if is_best:
            trainer.save_checkpoint(self.best)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Restore the signal handlers before Lightning restores its own, which it does before `teardown`."""
        self._restore_handlers()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Restore the signal handlers, except after a signal: the next one must still end the process at once."""
        if self.signal_number is None:
            self._restore_handlers()

    def _signal_of_any_process(self, trainer: L.Trainer) -> int:
        """The number of the signal that any process of the run has received; 0 if there was none."""
        number = self.signal_number or 0
        if trainer.world_size == 1:
            return number
        received = torch.tensor(number, device=trainer.strategy.root_device)
        return int(trainer.strategy.reduce(received, reduce_op="max"))

    def _is_best(self, value: float) -> bool:
        """Whether a value is better than all previous ones; an equal value is not."""
        if self.best_value is None or math.isnan(value):
            return not math.isnan(value)
        return value > self.best_value if self.higher_is_better else value < self.best_value

    def _restore_handlers(self) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        self.handlers = {}

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.signal_number = number
        # The next signal of either kind ends the process at once.
        for other in SIGNALS:
            signal.signal(other, signal.SIG_DFL)
