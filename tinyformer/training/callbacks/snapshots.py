"""Snapshots of the weights during training."""

import time
from pathlib import Path
from typing import Any, Literal, cast

import lightning as L
import safetensors.torch
import torch
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.utilities import rank_zero_only

from tinyformer.checkpoint.file import NETWORK_PREFIX, SNAPSHOTS
from tinyformer.checkpoint.format import KEY, encode, write_raw
from tinyformer.checkpoint.snapshots import snapshot_path, snapshots_of
from tinyformer.errors import ArgumentError, require_at_least, require_choice
from tinyformer.files import relative_path
from tinyformer.hardware import synchronize
from tinyformer.training.callbacks.checkpoints import Checkpoints
from tinyformer.training.callbacks.report import Report
from tinyformer.training.module import TrainingModule, num_steps
from tinyformer.training.processes import max_over_processes


class Snapshots(L.Callback):
    """Saves the weights at steps 0, 1, 2, 4, 8, … up to N, then at every multiple of N, and at the last step.

    The steps are those of Pythia (Biderman et al. 2023, arXiv 2304.01373). A snapshot, `snapshots/step_000128.ckpt`, is
    a checkpoint without the state of training. It has the weights that a checkpoint would have: under weight averaging
    the average, so this callback has to follow all others that change them. Training is unaffected.

    Nothing is written before the first step has ended. Then the snapshots of an earlier trajectory are removed: those
    after the step that a run resumes from, which it writes again.

    Args:
        every_n_steps: N, in optimizer steps; 0 for no snapshots.
        dtype: that of the saved weights; "bfloat16" halves their size, and keeps 8 significant bits.
        max_gb: the largest size of all snapshots of a run, in 10^9 bytes: more are refused, or, in a run whose length
            is not known, not written.
    """

    def __init__(
        self, every_n_steps: int = 0, dtype: Literal["float32", "bfloat16"] = "float32", max_gb: float = 10.0
    ) -> None:
        require_at_least(0, {"every_n_steps": 100}, every_n_steps=every_n_steps)
        require_choice("dtype", dtype, ("float32", "bfloat16"))
        self.every_n_steps, self.dtype, self.max_gb = every_n_steps, getattr(torch, dtype), max_gb
        self._most = 0  # number of snapshots that `max_gb` allows
        self._first: dict[str, Any] | None = None  # the snapshot of step 0 until it is written
        self._first_step: int | None = 0  # of this process; None once later snapshots have been removed

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Print how many snapshots there will be, or refuse too many, and keep the first."""
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
        """Save the last step, also where a run resumes after it."""
        self._remove_later(trainer)
        if self.every_n_steps and trainer.global_step and trainer.global_step not in snapshots_of(self.run):
            self._save(trainer, pl_module)

    def _raw(self, trainer: L.Trainer, module: L.LightningModule) -> dict[str, Any]:
        """The contents of a snapshot, on the CPU; every process has to call this, since strategies may gather."""
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
        """Print the number of snapshots, each of `size` bytes, of a run of some steps; refuse more than `max_gb`."""
        self._most = int(self.max_gb * 1e9 / size)
        each, folder = f"of {size / 1e6:,.2f} MB", relative_path(self.run / SNAPSHOTS)
        if steps is None:
            rank_zero_only(print)(f"snapshots: at most {self._most:,} {each}, in {folder}")
            return
        number = num_scheduled(steps, self.every_n_steps)
        each += f", {number * size / 1e6:,.1f} MB in all"
        if number > self._most:
            sparser = (self.every_n_steps << doubled for doubled in range(1, steps.bit_length() + 1))
            works = [{"every_n_steps": n} for n in sparser if num_scheduled(steps, n) <= self._most]
            reason = f"makes {number:,} snapshots {each}, and max_gb={self.max_gb:g}"
            more = {"max_gb": -(-number * size // 10**9)}
            raise ArgumentError("every_n_steps", self.every_n_steps, reason, [*works, more][0])
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
        """Remove snapshots after the first step of this process, all of them if it is 0, and what a kill has left."""
        first, self._first_step = self._first_step, None
        if first is not None and trainer.is_global_zero:
            later = [path for step, path in snapshots_of(self.run).items() if step > first or first == 0]
            for path in [*later, *(self.run / SNAPSHOTS).glob("step_*.ckpt.partial")]:
                path.unlink()


def is_scheduled(step: int, every_n_steps: int) -> bool:
    """Return True for 0, for powers of two below `every_n_steps`, and for its multiples unless it is 0."""
    return every_n_steps > 0 and (step % every_n_steps == 0 or (step < every_n_steps and step & (step - 1) == 0))


def num_scheduled(steps: int, every_n_steps: int) -> int:
    """The number of snapshots of a run of some steps: those of its schedule, and that of its last step."""
    powers = min(steps, every_n_steps - 1).bit_length()
    return 1 + powers + steps // every_n_steps + (not is_scheduled(steps, every_n_steps))
