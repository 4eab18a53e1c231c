"""Lightning's training loops, in which a run ends in one way, and a step takes as many batches as was asked for."""

import math
from typing import cast

import lightning as L
from lightning.pytorch.loops.fetchers import _DataFetcher
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop

from tinyformer.data.batches.loader import EpochLoader
from tinyformer.training.module import TrainingModule


class FitLoop(_FitLoop):
    """The loop over epochs.

    - However a run ends (steps, epochs, time, a callback that sets `trainer.should_stop`), it ends with a whole
      optimizer step and with a validation, at which checkpoints are written.
    - `trainer.max_epochs` is counted in optimizer steps once the loader is known, so that `trainer.max_steps` is the
      length of the run; -1 if nothing but a time or a callback ends it.
    """

    epoch_loop: "EpochLoop"

    def __init__(self, trainer: L.Trainer) -> None:
        super().__init__(trainer, trainer.min_epochs, trainer.max_epochs)
        self.epoch_loop = EpochLoop(trainer, trainer.min_steps, trainer.max_steps)

    @property
    def skip(self) -> bool:
        """Whether there is nothing to do; a run that is resumed after its last step is validated again."""
        return self.done and not self.is_resuming

    def on_run_start(self) -> None:
        """Count the epochs in steps, and make up for the validation that an interruption has prevented."""
        assert self.max_epochs is not None
        if self.max_epochs >= 0:
            self.epoch_loop.count_epochs(self.max_epochs)
            self.max_epochs = -1
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

    last_position = math.inf  # of the loader; the last step of the last epoch may have fewer batches
    is_due = False  # whether a validation follows the step of the checkpoint

    def on_save_checkpoint(self) -> dict:
        """Note whether the step is still to be validated."""
        fetcher = self.trainer.fit_loop._data_fetcher
        is_due = self.trainer.training and fetcher is not None and self._should_check_val_fx(fetcher)
        return {**super().on_save_checkpoint(), "is_due": is_due}

    def on_load_checkpoint(self, state_dict: dict) -> None:
        """Restore whether the step is still to be validated."""
        super().on_load_checkpoint(state_dict)
        self.is_due = bool(state_dict.get("is_due"))

    def count_epochs(self, max_epochs: int) -> None:
        """Turn a limit in epochs into one in steps."""
        self.last_position = max_epochs * len(self._loader)
        batches = max(0, self.last_position - self._loader.position)
        steps = self.global_step + math.ceil(batches / self.trainer.accumulate_grad_batches)
        self.max_steps = steps if self.max_steps < 0 else min(steps, self.max_steps)

    @property
    def _loader(self) -> EpochLoader:
        return cast(EpochLoader, self.trainer.train_dataloader)

    def _should_accumulate(self) -> bool:
        batches = len(cast(TrainingModule, self.trainer.lightning_module).step_targets)
        return 0 < batches < self.trainer.accumulate_grad_batches and self._loader.position != self.last_position

    def _should_check_val_fx(self, data_fetcher: _DataFetcher) -> bool:
        return self.trainer.fit_loop.done or super()._should_check_val_fx(data_fetcher)
