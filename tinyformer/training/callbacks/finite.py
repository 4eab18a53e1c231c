"""A check that leaves out steps whose loss or gradient norm is NaN or infinite."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from tinyformer.errors import require_choice
from tinyformer.measures import first_non_finite
from tinyformer.tasks import Batch
from tinyformer.training.module import TrainingModule
from tinyformer.training.optimizers import StackedMuon
from tinyformer.training.step import is_nan_or_inf, max_over_processes, sum_over_processes

MAX_UNREAD = 50
"""Largest number of steps whose batches are kept on the device, so that they can be run again."""


class NonFiniteStep(Exception):  # noqa: N818 - what a run does about it is the caller's decision
    """A run cannot continue, since its loss, gradient norm or weights are NaN or infinite.

    Steps are counted from 1. `loss` is None if weights that are not finite were found before a checkpoint was saved.
    `origin` is the result of `first_non_finite`; None if all values were finite when the batch was run again.
    """

    def __init__(self, step: int, loss: float | None, last_loss: float | None, origin: str | None) -> None:
        problem = "left weights that are not finite" if loss is None else f"has a loss of {loss:g}"
        if loss is not None and math.isfinite(loss):
            problem += " and a gradient that is not finite"
        before = "no loss before it was finite" if last_loss is None else f"the last finite loss was {last_loss:.4f}"
        place = f"first not finite: {origin}" if origin else "when the batch was run again, all was finite"
        self.step, self.origin = step, origin
        super().__init__(f"step {step} {problem}; {before}; {place}.")


class _Step(NamedTuple):
    number: int
    batches: list[Batch]
    loss: Tensor  # the mean of the batches
    is_masked: Tensor


class FiniteCheck(L.Callback):
    """Applies no update from a step whose loss or gradient norm is NaN or infinite.

    The update is masked on the device. The host reads whether a step was masked only when it reads the loss anyway:
    every `log_every_n_steps` steps and before each validation and checkpoint. With an optimizer that is neither ours
    nor fused, the host waits at each step. Neither weights nor the optimizer's state change in a masked step; the
    learning-rate schedule advances. Under fp16 the gradient norm is not checked, since the gradient scaler itself skips
    such a step and lowers its scale.

    Args:
        action: "stop" ends the run, and masks all steps until it has ended; "skip" continues with the next batch.
        max_skipped: the number of consecutive masked steps at which "skip" ends the run after all. Both actions end a
            run by raising `NonFiniteStep`, and no checkpoint is saved after the masked step.
    """

    def __init__(self, action: Literal["stop", "skip"] = "stop", max_skipped: int = 10) -> None:
        require_choice("action", action, ("stop", "skip"))
        self.action, self.max_skipped = action, max_skipped
        self.skipped: list[int] = []  # the steps that were left out
        self._last_loss: float | None = None
        self._consecutive = 0
        self._set_masks: list[Callable[[Tensor], None]] = []
        self._unread: list[_Step] = []  # the steps whose flags are only on the device
        self._batches: list[Batch] = []
        self._loss: Tensor | None = None
        self._sum: Tensor | None = None
        self._is_masked: Tensor | None = None

    def state_dict(self) -> dict[str, Any]:
        # The list itself: Lightning collects states before `on_save_checkpoint`, which may add to it.
        return {"skipped": self.skipped, "last_loss": self._last_loss, "consecutive": self._consecutive}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.skipped = [int(step) for step in state_dict["skipped"]]
        self._last_loss = None if state_dict["last_loss"] is None else float(state_dict["last_loss"])
        self._consecutive = int(state_dict["consecutive"])

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        parts = [part for each in trainer.optimizers for part in getattr(each, "optimizers", [each])]
        self._set_masks = [_mask_of(part) for part in parts]

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Keep the batch in case it has to be run again."""
        self._batches.append(batch)

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        """Add up the losses of a step: the sum is finite only if all of them are."""
        self._sum = loss.detach().float() if self._sum is None else self._sum + loss.detach()

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Add the gradient norm to the losses, and mask the step if the sum is not finite."""
        assert self._sum is not None
        total, self._sum = self._sum, None
        if getattr(trainer.precision_plugin, "scaler", None) is None:
            total = total + cast(TrainingModule, pl_module).gradient_norm()
        is_bad = is_nan_or_inf(total)
        if trainer.world_size > 1:  # processes share gradients, but not losses
            is_bad = max_over_processes(is_bad.float()) > 0
        if self.action == "stop" and self._is_masked is not None:
            is_bad = is_bad | self._is_masked
        self._is_masked = is_bad
        found_inf = is_bad.float()
        for set_mask in self._set_masks:
            set_mask(found_inf)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the step; when the loss is reported, or after `MAX_UNREAD` steps, read which steps were masked."""
        loss = outputs["loss"].detach().clone()  # CUDA graphs write the next one into the same memory
        self._loss = loss if self._loss is None else self._loss + loss
        if self._sum is not None:
            return  # gradients are accumulated
        assert self._is_masked is not None
        factor = cast(TrainingModule, pl_module).factor
        mean = self._loss if isinstance(factor, float) else self._loss * factor
        self._unread.append(_Step(trainer.global_step, self._batches, mean, self._is_masked))
        self._batches, self._loss = [], None
        is_report = trainer.global_step % trainer.log_every_n_steps == 0  # type: ignore[attr-defined]
        if is_report or len(self._unread) >= MAX_UNREAD:
            self._read(trainer, pl_module)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Read which steps were not finite, so that a run that has to end is not validated first."""
        if trainer.state.fn == TrainerFn.FITTING:
            self._read(trainer, pl_module)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self._read(trainer, pl_module)
        for name, weight in pl_module.named_parameters():
            if not weight.isfinite().all():
                raise NonFiniteStep(trainer.global_step, None, self._last_loss, f"the weight {name}")

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._read(trainer, pl_module)

    def _read(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Read which steps since the last call were masked, and end the run if it cannot continue."""
        steps, self._unread = self._unread, []
        if not steps:
            return
        means = sum_over_processes(torch.stack([step.loss for step in steps])) / trainer.world_size
        flags = torch.stack([step.is_masked for step in steps])
        losses, flags = torch.stack((means, flags.to(means.dtype))).tolist()  # the host waits once
        for step, loss, is_masked in zip(steps, losses, flags, strict=True):
            self._consecutive = self._consecutive + 1 if is_masked else 0
            if not is_masked:
                self._last_loss = loss
            elif self.action == "skip" and self._consecutive < self.max_skipped:
                self.skipped.append(step.number)
            else:
                origin = _origin(trainer, cast(TrainingModule, pl_module), step)
                raise NonFiniteStep(step.number, loss, self._last_loss, origin)


def _mask_of(optimizer: torch.optim.Optimizer) -> Callable[[Tensor], None]:
    """A function of a number, which masks the optimizer's next step if the number is 1.0, and does not if it is 0.0."""
    # Torch's fused optimizers, too, skip a step if gradient scalers set this flag.
    if optimizer.defaults.get("fused") or isinstance(optimizer, StackedMuon):
        return partial(setattr, optimizer, "found_inf")

    def remove_gradients(found_inf: Tensor) -> None:
        if found_inf:  # the host waits; optimizers leave out what has no gradient
            for group in optimizer.param_groups:
                for weight in group["params"]:
                    weight.grad = None

    return remove_gradients


def _origin(trainer: L.Trainer, module: TrainingModule, step: _Step) -> str | None:
    origin = None
    with module.whole_network(everywhere=True), trainer.precision_plugin.train_step_context():
        for batch in step.batches:
            origin = origin or first_non_finite(module.network, partial(module.training_step, batch, 0))
    if trainer.world_size == 1:
        return origin
    origins: list[str | None] = [None] * trainer.world_size
    torch.distributed.all_gather_object(origins, origin)
    return next((each for each in origins if each is not None), None)
