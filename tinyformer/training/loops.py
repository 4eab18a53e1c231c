"""Lightning's training loops, in which a run ends in one way, and a step takes as many batches as was asked for."""

import math
from collections import OrderedDict
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loops.fetchers import _DataFetcher
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.optimization import _AutomaticOptimization
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.loops.utilities import _parse_loop_limits

from tinyformer.data.loader import EpochLoader


class FitLoop(_FitLoop):
    """The loop over epochs.

    - However a run ends (steps, epochs, time, a callback that sets `trainer.should_stop`), it ends with a whole
      optimizer step and with a validation, at which checkpoints are written.
    - Limits in epochs are counted in optimizer steps once the loader is known, so that `trainer.max_steps` is the
      length of the run; -1 if nothing but a time or a callback ends it.
    """

    epoch_loop: "EpochLoop"

    def __init__(self, trainer: L.Trainer) -> None:
        super().__init__(trainer, min_epochs=0, max_epochs=-1)
        limits = trainer.min_steps, trainer.max_steps, trainer.min_epochs, trainer.max_epochs
        self.epoch_limits = _parse_loop_limits(*limits, trainer)
        self.epoch_loop = EpochLoop(trainer, trainer.min_steps, trainer.max_steps)

    def setup_data(self) -> None:
        """Make the loader, and count the limits in steps; Lightning calls this again in each epoch."""
        is_first = self._combined_loader is None
        super().setup_data()
        if is_first and self._combined_loader is not None:
            (loader,) = self._combined_loader.flattened
            self.epoch_loop.count_epochs(*self.epoch_limits, loader)

    def run(self) -> None:
        """Train; a run that is resumed after its last step only ends."""
        self.setup_data()
        if not self.done or not self.is_resuming:
            return super().run()
        self.on_run_start()
        self.on_run_end()

    def on_run_start(self) -> None:
        """Make up for the validation that an interruption has prevented."""
        super().on_run_start()
        if self.is_resuming and (self.done or self.epoch_loop.is_due):
            self.validate()

    def on_advance_end(self) -> None:
        """Validate the last weights if the run is ended by a hook at the end of an epoch, after its validation."""
        was_done = self.done
        super().on_advance_end()
        if self.done and not was_done:
            self.validate()

    def validate(self) -> None:
        """Validate outside of the loop over batches."""
        self.trainer.validating = True
        self.epoch_loop.val_loop.restarting = False
        self.epoch_loop.val_loop.run()
        self.trainer.training = True

    @property
    def _can_stop_early(self) -> bool:
        return super()._can_stop_early and not self._should_accumulate()

    def _iteration_based_training(self) -> bool:
        """Always, so that a resumed run continues within its epoch, whatever limits it."""
        return True


class EpochLoop(_TrainingEpochLoop):
    """The loop over the batches of an epoch; gradients are accumulated across its end."""

    def __init__(self, trainer: L.Trainer, min_steps: int | None, max_steps: int) -> None:
        super().__init__(trainer, min_steps, max_steps)
        self.automatic_optimization = Optimization(trainer)
        self.num_resumed = 0  # batches of the run that is resumed; checkpoints are written between steps
        self.last_batch: int | None = None
        self.is_due = False  # whether a validation follows the step of the checkpoint

    @property
    def num_batches(self) -> int:
        """Batches begun since the start or the resumption of the run."""
        return self.batch_progress.total.ready - self.num_resumed

    def on_save_checkpoint(self) -> dict:
        """Note whether the step is still to be validated."""
        fetcher = self.trainer.fit_loop._data_fetcher
        is_due = self.trainer.training and fetcher is not None and self._should_check_val_fx(fetcher)
        return {**super().on_save_checkpoint(), "is_due": is_due}

    def on_load_checkpoint(self, state_dict: dict) -> None:
        """Count batches from here on."""
        super().on_load_checkpoint(state_dict)
        self.num_resumed, self.is_due = self.batch_progress.total.ready, bool(state_dict.get("is_due"))

    def count_epochs(self, min_epochs: int, max_epochs: int, loader: EpochLoader) -> None:
        """Turn limits in epochs into limits in steps; the last step of the last epoch may have fewer batches."""
        begun, per_step = self.global_step, self.trainer.accumulate_grad_batches

        def left(epochs: int) -> int:
            return max(0, epochs * len(loader) - loader.position)

        if min_epochs:
            self.min_steps = max(self.min_steps or 0, begun + math.ceil(left(min_epochs) / per_step))
        if max_epochs >= 0:
            self.last_batch = left(max_epochs)
            steps = begun + math.ceil(self.last_batch / per_step)
            self.max_steps = steps if self.max_steps < 0 else min(steps, self.max_steps)

    def _should_accumulate(self) -> bool:
        return self.num_batches % self.trainer.accumulate_grad_batches > 0 and self.num_batches != self.last_batch

    def _should_check_val_fx(self, data_fetcher: _DataFetcher) -> bool:
        is_end = self.trainer.enable_validation and self.trainer.fit_loop.done
        return is_end or super()._should_check_val_fx(data_fetcher)


class Optimization(_AutomaticOptimization):
    """The optimization of a batch, whose index is counted across epochs, as gradients are accumulated."""

    def run(self, optimizer: torch.optim.Optimizer, batch_idx: int, kwargs: OrderedDict) -> Any:
        """Compute gradients, and make a step if enough batches have been accumulated."""
        loop = self.trainer.fit_loop.epoch_loop
        assert isinstance(loop, EpochLoop)
        return super().run(optimizer, loop.num_batches - 1, kwargs)


def num_steps(trainer: L.Trainer) -> int | None:
    """The length of a run in optimizer steps; None if it is not known."""
    return trainer.max_steps if trainer.max_steps >= 0 else None
