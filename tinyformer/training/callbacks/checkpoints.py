"""Checkpoints at each validation and when a signal stops the run, and snapshots of the weights during training."""

import contextlib
import math
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Literal, cast

import lightning as L
import safetensors.torch
import torch
from lightning.pytorch.callbacks import Checkpoint, WeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_only

from tinyformer.checkpoint.file import (
    NETWORK_PREFIX,
    SNAPSHOTS,
    load_raw,
    random_state,
    restore_random_state,
    snapshot_path,
    snapshots_of,
)
from tinyformer.checkpoint.format import KEY, encode, write_raw
from tinyformer.errors import ArgumentError, relative_path
from tinyformer.hardware import synchronize
from tinyformer.training.callbacks.metrics import Report
from tinyformer.training.module import TrainingModule, num_steps
from tinyformer.training.step import max_over_processes

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""The signals of Ctrl-C, a scheduler and a closed terminal."""

STEPS_OF_A_SIGNAL = 10
"""Largest number of optimizer steps between two exchanges of received signals among the processes of a run."""


class Interrupted(Exception):  # noqa: N818 - it is not an error
    """A signal stopped the run, after its state was saved."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal.Signals(signal_number).name)
        self.signal_number = signal_number


class Checkpoints(Checkpoint):
    """Writes `last.ckpt` at each validation and `best.ckpt` when a metric is the best so far.

    `best.ckpt` is written before `last.ckpt` and contains the best value, which a resumed run reads there, since the
    run may have been killed in between. On one of `SIGNALS` (but not on a SIGHUP that the process ignores, as under
    `nohup`), the callback finishes the optimizer step and writes `last.ckpt` before the run ends, so that a resumed run
    continues from there. A second signal ends the process at once. Several processes end together, at the next
    report or after `STEPS_OF_A_SIGNAL` steps.

    Args:
        directory: the folder of the files.
        contents: entries of the files in addition to Lightning's own keys.
        monitor: the metric that decides which checkpoint is the best.
        higher_is_better: whether the highest value of the metric is the best, rather than the lowest.
        accept: a function that is called once, before the first file is written.
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
        self.num_begun = 0  # batches; restored state that does not fit fails in the first

    def state_dict(self) -> dict[str, Any]:
        return {"best_value": self.best_value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the best value from `best.ckpt`, which may be newer than `last.ckpt`, or missing, after a kill."""
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
        """Keep the saved random state until the first batch: restored now, it would change as data loaders are made."""
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
        """Install the signal handlers in the main thread; refuse processes that begin at different steps."""
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
        if trainer.received_sigterm:  # received by Lightning before; it would end the run within a step
            trainer._signal_connector.received_sigterm = False
            self._receive(signal.SIGTERM, None)

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        """Restore the random state of the saved run before the first batch."""
        self.num_begun += 1
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
        """Restore the signal handlers, except after a signal: the next signal must still end the process at once."""
        if self.signal_number is None:
            self._restore_handlers()

    def _save(self, trainer: L.Trainer, path: Path) -> None:
        """Save the metrics, which a resumed run needs, and then a checkpoint."""
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
        """Return True if a value is better than all previous values; an equal value is not better."""
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


class Snapshots(L.Callback):
    """Saves the weights at steps 0, 1, 2, 4, 8, … up to N, then at every multiple of N, and at the last step.

    The steps are those of Pythia (Biderman et al. 2023, arXiv 2304.01373). A snapshot, `snapshots/step_000128.ckpt`, is
    a checkpoint without the state of training. It has the weights that a checkpoint would have, such as the average
    under weight averaging, so this callback has to come after callbacks that change weights. Training is unaffected.

    Nothing is written before the end of the first step. At the end of its first step, a resumed run removes the
    snapshots of all steps after its starting checkpoint, since it writes them again.

    Args:
        every_n_steps: N, in optimizer steps; 0 for no snapshots.
        dtype: the dtype of the saved weights; "bfloat16" halves their size, and keeps 8 significant bits.
        max_gb: the largest size of all snapshots of a run, in 10^9 bytes. A longer run is refused; a run of unknown
            length writes no more snapshots after it has reached this size.
    """

    def __init__(
        self, every_n_steps: int = 0, dtype: Literal["float32", "bfloat16"] = "float32", max_gb: float = 10.0
    ) -> None:
        self.every_n_steps, self.dtype, self.max_gb = every_n_steps, getattr(torch, dtype), max_gb
        self._most = 0  # number of snapshots that `max_gb` allows
        self._first: dict[str, Any] | None = None  # the snapshot of step 0 until it is written
        self._first_step: int | None = 0  # first step of this process; None after its use

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Print the number of snapshots, or refuse too many, and keep the snapshot of step 0 in memory."""
        self.run, self._first_step = Path(trainer.default_root_dir), trainer.global_step
        if self.every_n_steps:
            raw = self._raw(trainer, pl_module)
            self._first = None if self._first_step else raw
            size = len(safetensors.torch.save(*encode(raw)))
            largest = max_over_processes(torch.tensor(size, device=trainer.strategy.root_device))
            self._plan(num_steps(trainer), int(largest))  # in every process, which a refusal ends

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if cast(TrainingModule, pl_module).step_targets:
            return  # gradients are accumulated
        self._remove_later(trainer)
        if self._first is not None:
            self._save(trainer, pl_module, self._first)
            self._first = None
        if is_scheduled(trainer.global_step, self.every_n_steps):
            self._save(trainer, pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save a snapshot of the last step if there is none, even if the run was resumed after that step."""
        self._remove_later(trainer)
        if self.every_n_steps and trainer.global_step and trainer.global_step not in snapshots_of(self.run):
            self._save(trainer, pl_module)

    def _raw(self, trainer: L.Trainer, module: L.LightningModule) -> dict[str, Any]:
        """The contents of a snapshot, on the CPU; every process has to call this, since weights may be gathered."""
        raw: dict[str, Any] = {"state_dict": trainer.strategy.lightning_module_state_dict()}
        contents: dict[str, Any] = {}
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, WeightAveraging):
                callback.on_save_checkpoint(trainer, module, raw)
            if isinstance(callback, Checkpoints):
                contents = callback.contents
        own = {name: weight for name, weight in raw["state_dict"].items() if name.startswith(NETWORK_PREFIX)}
        places = {name: (weight.data_ptr(), weight.shape) for name, weight in own.items()}
        copies = {place: own[name].to("cpu", self.dtype, copy=True) for name, place in places.items()}
        weights = {name: copies[place] for name, place in places.items()}  # tied weights are stored once
        return {"state_dict": weights, "global_step": trainer.global_step, KEY: contents}

    def _plan(self, steps: int | None, size: int) -> None:
        """Print the number of snapshots of `size` bytes in a run of `steps` steps; refuse more than `max_gb` in all."""
        self._most = int(self.max_gb * 1e9 / size)
        each, folder = f"of {size / 1e6:,.2f} MB", relative_path(self.run / SNAPSHOTS)
        if steps is None:
            rank_zero_only(print)(f"snapshots: at most {self._most:,} {each}, in {folder}")
            return
        number = num_scheduled(steps, self.every_n_steps)
        each += f", {number * size / 1e6:,.1f} MB in all"
        if number > self._most:
            reason = f"makes {number:,} snapshots {each}, and max_gb={self.max_gb:g}"
            works = {"max_gb": -(-number * size // 10**9)}
            raise ArgumentError("every_n_steps", self.every_n_steps, reason, works)
        rank_zero_only(print)(f"snapshots: {number:,} {each}, in {folder}")

    def _save(self, trainer: L.Trainer, module: L.LightningModule, raw: dict[str, Any] | None = None) -> None:
        """Write a snapshot, by default of the current step; the time does not count as training time."""
        synchronize(module.device)
        start = time.perf_counter()
        raw = raw or self._raw(trainer, module)
        if trainer.is_global_zero and len(snapshots_of(self.run)) < self._most:
            write_raw(snapshot_path(self.run, raw["global_step"]), raw)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, Report):
                callback.exclude(time.perf_counter() - start)

    def _remove_later(self, trainer: L.Trainer) -> None:
        """Remove snapshots of steps after this process's first step (at 0: all), and partial files of a killed run."""
        first, self._first_step = self._first_step, None
        if first is not None and trainer.is_global_zero:
            later = [path for step, path in snapshots_of(self.run).items() if step > first or first == 0]
            for path in [*later, *(self.run / SNAPSHOTS).glob("step_*.ckpt.partial")]:
                path.unlink()


def is_scheduled(step: int, every_n_steps: int) -> bool:
    """Return True at step 0, powers of two below N = `every_n_steps`, and multiples of N; always False if N is 0."""
    return every_n_steps > 0 and (step % every_n_steps == 0 or (step < every_n_steps and step & (step - 1) == 0))


def num_scheduled(steps: int, every_n_steps: int) -> int:
    """The number of snapshots of a run of `steps` steps, including the snapshot of its last step."""
    powers = min(steps, every_n_steps - 1).bit_length()
    return 1 + powers + steps // every_n_steps + (not is_scheduled(steps, every_n_steps))
