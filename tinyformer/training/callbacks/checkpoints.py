"""Checkpoints at each validation and when a signal stops the run."""

import contextlib
import math
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, cast

import lightning as L
import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer.states import TrainerFn

from tinyformer.checkpoint.file import load_raw, random_state, restore_random_state
from tinyformer.checkpoint.format import KEY
from tinyformer.data.batches.loader import LostWorker
from tinyformer.errors import ArgumentError
from tinyformer.training.module import TrainingModule
from tinyformer.training.processes import max_over_processes

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Ctrl-C, and what a scheduler or a closed terminal sends."""

STEPS_OF_A_SIGNAL = 10
"""Largest number of optimizer steps after which one of several processes tells the others of a signal."""


class Interrupted(Exception):  # noqa: N818 - it is not an error
    """A signal stopped the run, after its state was saved."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal.Signals(signal_number).name)
        self.signal_number = signal_number


class Checkpoints(Checkpoint):
    """Writes `last.ckpt` at each validation and `best.ckpt` when a metric is the best so far.

    `best.ckpt` comes first and holds its own value, from which a resumed run takes it: the two agree whenever a run is
    killed. On one of `SIGNALS` (SIGHUP unless the process ignores it, as under `nohup`), it finishes the current
    optimizer step and writes `last.ckpt` before the run ends, so that a resumed run continues from exactly this point.
    A second signal ends the process at once. Several processes end together, at the next report or after
    `STEPS_OF_A_SIGNAL` steps.

    Args:
        directory: where to write the files.
        contents: what they contain besides Lightning's own keys.
        monitor: the metric that decides which checkpoint is the best.
        higher_is_better: whether the highest value of the metric is the best, rather than the lowest.
        accept: is called before the first file is written: nothing has failed up to here.
    """

    def __init__(
        self,
        directory: str | Path,
        contents: dict[str, Any],
        monitor: str = "val/loss",
        higher_is_better: bool = False,
        accept: Callable[[], None] = lambda: None,
    ) -> None:
        self.accept: Callable[[], None] | None = accept
        self.last, self.best = Path(directory) / "last.ckpt", Path(directory) / "best.ckpt"
        self.contents = contents
        self.monitor, self.higher_is_better = monitor, higher_is_better
        self.best_value: float | None = None
        self.signal_number: int | None = None
        self.random_state: dict[str, Any] | None = None
        self.handlers: dict[int, Callable[..., Any] | int | None] = {}
        self.is_due = False
        self.num_begun = 0  # batches; during the first, Lightning uses all state that it has restored

    def state_dict(self) -> dict[str, Any]:
        return {"best_value": self.best_value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the best value so far: that of `best.ckpt`, which a killed run may have written last, or lost."""
        self.best_value = None
        if self.best.is_file():
            with contextlib.suppress(ArgumentError, KeyError, TypeError, ValueError):  # damaged: the next is the best
                self.best_value = float(load_raw(self.best)["callbacks"][self.state_key]["best_value"])

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add the config, the tokenizer and the random states of all processes to Lightning's keys."""
        if self.accept is not None:
            self.accept()
            self.accept = None
        state = self.random_state or random_state()  # a validation may precede the first step of a resumed run
        checkpoint[KEY] = {**self.contents, "random_state": state}
        if trainer.world_size > 1:
            states: list[dict[str, Any]] = [{}] * trainer.world_size
            torch.distributed.all_gather_object(states, state)
            checkpoint[KEY]["other_random_states"] = states[1:]

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Keep the random state until the first step, since the construction of data loaders draws random numbers."""
        for callback in trainer.early_stopping_callbacks:  # Lightning saves the patience, which the config may change
            if callback.state_key in checkpoint["callbacks"]:
                checkpoint["callbacks"][callback.state_key]["patience"] = callback.patience
        states = [checkpoint[KEY]["random_state"], *checkpoint[KEY].get("other_random_states", [])]
        if len(states) != trainer.world_size and trainer.is_global_zero:
            number = f"{trainer.world_size} instead of {len(states)}"
            print(f"processes: {number}; dropout masks will differ from those of an unbroken run")
        if trainer.global_rank < len(states):  # a process that the saved run did not have starts from its seed
            self.random_state = states[trainer.global_rank]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Install the signal handlers, which only the main thread can; refuse processes that begin at other steps."""
        steps = torch.tensor([trainer.global_step, -trainer.global_step], device=trainer.strategy.root_device)
        last, first = max_over_processes(steps).tolist()
        if last != -first:
            reason = f"its processes begin at steps {-first} to {last}; all nodes have to share the folder"
            raise ArgumentError("directory", str(self.last.parent.parent), reason)
        if threading.current_thread() is not threading.main_thread():
            return
        is_nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        numbers = [number for number in SIGNALS if number != signal.SIGHUP or not is_nohup]
        self.handlers = {number: signal.signal(number, self._receive) for number in numbers}
        if trainer.received_sigterm:  # by Lightning, before these handlers were set; it would end the run amid a step
            trainer._signal_connector.received_sigterm = False
            self._receive(signal.SIGTERM, None)

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        """Restore the random state of the saved run before the first batch."""
        self.num_begun += 1
        if self.num_begun == 1 and self.handlers:
            # Torch's raises an error amid a step where a data worker is killed; the next batch raises one anyway.
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if self.random_state is not None:
            restore_random_state(self.random_state)
            self.random_state = None

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        """Stop after a signal, but not while gradients are accumulated, since a checkpoint does not contain them."""
        if cast(TrainingModule, pl_module).step_targets:
            return
        # At a report the host waits for the device anyway.
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        steps = min(every, STEPS_OF_A_SIGNAL) if trainer.world_size > 1 else 1
        signal_number = 0 if trainer.global_step % steps else self._signal_of_any_process(trainer)
        if signal_number or self.is_due:
            self.is_due = False
            self._save(trainer, self.last)
        if signal_number:
            raise Interrupted(signal_number)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking:
            return
        if self._is_best(value := float(trainer.callback_metrics[self.monitor])):
            self.best_value = value
            self._save(trainer, self.best)
        self.is_due = bool(cast(TrainingModule, pl_module).step_targets)  # gradients are accumulated
        if not self.is_due:
            self._save(trainer, self.last)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Restore the signal handlers before Lightning restores its own, which it does before `teardown`."""
        self._restore_handlers()
        if signal_number := self._signal_of_any_process(trainer):  # after the last step, whose weights have been saved
            raise Interrupted(signal_number)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Restore the signal handlers, except after a signal: the next one must still end the process at once."""
        if self.signal_number is None:
            self._restore_handlers()
        is_between_steps = trainer.world_size == 1 and not cast(TrainingModule, pl_module).step_targets
        if isinstance(exception, LostWorker) and is_between_steps:
            self._save(trainer, self.last)

    def _save(self, trainer: L.Trainer, path: Path) -> None:
        """Write a checkpoint, and before it the metrics, which a run that is resumed from it must have."""
        for logger in trainer.loggers:
            logger.save()
        trainer.save_checkpoint(path)

    def _signal_of_any_process(self, trainer: L.Trainer) -> int:
        """The number of the signal that any process of the run has received; 0 if there was none."""
        number = self.signal_number or 0
        if trainer.world_size == 1:
            return number
        return int(max_over_processes(torch.tensor(number, device=trainer.strategy.root_device)))

    def _is_best(self, value: float) -> bool:
        """Return True if a value is better than all previous ones; an equal value is not."""
        if self.best_value is None or math.isnan(value):
            return not math.isnan(value)
        return value > self.best_value if self.higher_is_better else value < self.best_value

    def _restore_handlers(self) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        self.handlers = {}

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.signal_number = number
        for other in self.handlers:  # the next signal of any kind ends the process at once
            signal.signal(other, signal.SIG_DFL)
