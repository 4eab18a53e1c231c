"""The Lightning module: a training step, validation metrics, the optimizer and its schedule."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import torch
from jaxtyping import Float
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor

from tinyformer.data import DataModule
from tinyformer.nn import Network
from tinyformer.tasks import Batch, Task
from tinyformer.training.optimizers import Schedule
from tinyformer.training.sharding import FullyShardedStrategy, shard, whole_copy, without_weights
from tinyformer.training.step import (
    clip_gradients,
    gradient_norm,
    max_over_processes,
    mean_factor,
    scale_gradients,
    sum_dtype,
    sum_over_processes,
    target_unit,
    weighted_loss,
)

PREFIXES = {"train": "train", "validation": "val", "test": "test", "all": "all"}
"""The prefix of the metrics of each split."""


class TrainingModule(L.LightningModule):
    """A network with its task, data, optimizer and schedule.

    An optimizer step uses the gradient of the mean loss over the targets of all its batches, in all processes.

    Args:
        evaluated: the split that validation evaluates.
        first_step: optimizer steps that the weights have already been trained for.
        checkpoint: the checkpoint of the weights, for the captions of pictures; if None, captions name the run.
    """

    targets: Tensor  # the number of targets of the last training batch
    unit: Tensor  # see `target_unit`
    _gradient_norm: Tensor | None  # the norm of the step; None until it is computed

    def __init__(
        self,
        network: Network,
        task: Task,
        data: DataModule,
        optimizer: Callable[[Network], torch.optim.Optimizer] | None = None,
        schedule: Schedule | None = None,
        evaluated: str = "validation",
        first_step: int = 0,
        checkpoint: Path | None = None,
    ) -> None:
        super().__init__()
        self.network, self.task = network, task
        self.make_optimizer, self.schedule = optimizer, schedule
        self.data, self.evaluated, self.first_step = data, evaluated, first_step
        self.checkpoint = checkpoint
        self._unsharded: tuple[Network, ...] = ()  # a copy without weights; in a tuple, so that it is no submodule
        self.metrics: dict[str, float | None] = {}  # metrics of the last validation; None if undefined
        self.step_targets: list[Tensor] = []  # targets of the batches of a step so far; empty between steps
        self.factor: Tensor | float = 1.0  # turns sums of the last step's losses and gradients into means over targets

    def configure_model(self) -> None:
        """Shard the network if the strategy is `FullyShardedStrategy`."""
        strategy = self.trainer.strategy
        if isinstance(strategy, FullyShardedStrategy) and not self.is_sharded:
            self._unsharded = (without_weights(self.network),)
            shard(self.network, strategy.device_mesh["data_parallel"], str(self.trainer.precision))

    @property
    def is_sharded(self) -> bool:
        """Return True if each process has a part of the weights."""
        return bool(self._unsharded)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Convert the module to the trainer's precision before weights are loaded, else fp64 is rounded to fp32."""
        self.trainer.precision_plugin.convert_module(self)

    @contextmanager
    def whole_network(self, everywhere: bool = False) -> Iterator[None]:
        """Give `network` all of its weights inside a `with` statement, in the first process or `everywhere`.

        All processes have to enter the statement together: each may have a part of the weights. None may train in it.
        """
        parts, is_kept = self.network, everywhere or self.trainer.is_global_zero
        if self.is_sharded:
            self.network = whole_copy(parts, self._unsharded[0], is_kept) or parts
        try:
            yield
        finally:
            self.network = parts

    def on_train_batch_start(self, batch: Batch, batch_index: int) -> None:
        """Count the targets of a batch; the first batch of a step clears the gradients of the step before."""
        self.targets = self.task.num_targets(batch).sum(dtype=sum_dtype(self.device))
        if not self.step_targets:
            for weight in self.weights:
                weight.grad = None
            self._gradient_norm = None
            self.unit = self.targets if self._is_alone else target_unit(self.targets)
        self.step_targets.append(self.targets)

    def training_step(self, batch: Batch, batch_index: int) -> Tensor:
        """The loss of a batch, weighted by the batch's number of targets unless the step has only this batch."""
        loss = self.task.loss(self.network, batch)
        return loss if self._is_alone else weighted_loss(loss, self.targets, self.unit)

    @property
    def _is_alone(self) -> bool:
        """Return True if a step has one batch in one process, so that its loss need not be weighted."""
        return self.trainer.accumulate_grad_batches == self.trainer.world_size == 1

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        """Do nothing: Lightning counts the batches of a step anew in each epoch; see `on_train_batch_start`."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        """Turn the accumulated gradients into a mean before clipping and callbacks use them, and take the step."""

        def compute_gradients() -> Any:
            loss, accumulated = optimizer_closure(), self.trainer.accumulate_grad_batches
            self.factor = 1.0
            if accumulated > 1:  # the number by which Lightning has divided each loss
                self.factor = accumulated * mean_factor(self.step_targets, self.unit)
                scale_gradients(self.weights, self.factor)
            self.step_targets = []
            return loss

        super().optimizer_step(epoch, batch_idx, optimizer, compute_gradients)
        self._start_averages()

    def _start_averages(self) -> None:
        """Set weight averages that have no update yet to the current weights, so that validation uses these."""
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, WeightAveraging) and not callback._latest_update_step:
                assert callback._average_model is not None
                is_empty = callback._average_model.n_averaged == 0  # on the device, so that the host does not wait
                for average, weight in zip(callback._average_model.parameters(), self.parameters(), strict=True):
                    average.data.copy_(torch.where(is_empty, weight.data, average.data))

    def gradient_norm(self) -> Float[Tensor, ""]:
        """The norm of the gradients of all weights that the optimizer updates, computed once a step."""
        if self._gradient_norm is None:
            self._gradient_norm = gradient_norm(self.updated)
        return self._gradient_norm

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip gradients by the norm that `FiniteCheck` has already computed; Lightning would compute it again."""
        max_norm, is_norm = gradient_clip_val or 0.0, gradient_clip_algorithm != "value"
        # With another strategy a process may have a part of the gradients; and Lightning refuses fused optimizers with
        # loss scaling.
        is_ours = isinstance(self.trainer.strategy, SingleDeviceStrategy | DDPStrategy | FullyShardedStrategy)
        if max_norm > 0.0 and is_norm and is_ours and not getattr(optimizer, "_step_supports_amp_scaling", False):
            clip_gradients(self.updated, max_norm, self.gradient_norm())
        else:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def configure_optimizers(self) -> Any:
        assert self.make_optimizer is not None
        assert self.schedule is not None
        optimizer = self.make_optimizer(self.network)
        self.options = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        factor = self.schedule.factor
        # LambdaLR saves the fields of a callable object, but nothing of a lambda, so that a resumed run may be longer.
        # The length is read at each step, since limits in epochs are counted in steps only when training starts.
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factor(step, num_steps(self.trainer)))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_train_start(self) -> None:
        """Set the optimizer's options and learning rate again: a resumed run may have other options or another length.

        All processes have drawn the same weights from the seed. Each process but the first continues with the seed plus
        its rank, so that dropout masks differ between processes.
        """
        self.weights = list(self.parameters())  # a walk through all modules takes a twentieth of a small model's step
        optimized = [group["params"] for optimizer in self.trainer.optimizers for group in optimizer.param_groups]
        self.updated = [weight for weights in optimized for weight in weights]
        if self.global_rank:
            L.seed_everything((torch.initial_seed() + self.global_rank) % 2**32, verbose=False)
        for optimizer in self.trainer.optimizers:
            for part in getattr(optimizer, "optimizers", [optimizer]):
                _require_fitting_state(part)
        scheduler = self.lr_schedulers()
        assert isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR)
        scheduler.base_lrs = [options["lr"] for options in self.options]
        groups = zip(scheduler.optimizer.param_groups, self.options, scheduler.lr_lambdas, strict=True)
        for group, options, factor in groups:
            peak = options["lr"]
            group.update(options | {"initial_lr": peak, "lr": peak * factor(scheduler.last_epoch)})

    def on_validation_epoch_start(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.last_batch = -1  # the index of the last batch if other processes have one more, else -1
        if self.is_sharded:
            own = int(self.trainer.num_val_batches[0])
            most = max_over_processes(torch.tensor(own, device=self.device))
            self.last_batch = own - 1 if int(most) > own else -1

    def validation_step(self, batch: Batch, batch_index: int) -> None:
        """Add the scores of a batch. A process with one batch fewer runs its last one again, to help gather weights."""
        self.add_scores(self.sums, batch)
        if batch_index == self.last_batch:
            self.task.score(self.network, batch)

    def add_scores(self, sums: dict[str, Tensor], batch: Batch) -> None:
        for name, score in self.task.score(self.network, batch).items():
            sums[name] = sums.get(name, 0.0) + score.to(sum_dtype(self.device))

    def on_validation_epoch_end(self) -> None:
        sums = {name: sum_over_processes(total) for name, total in self.sums.items()}
        self.metrics = self.task.metrics(sums, self.data.splits[self.evaluated])
        prefix = PREFIXES[self.evaluated]
        metrics = {f"{prefix}/{name}": value for name, value in self.metrics.items() if value is not None}
        for logger in self.loggers:
            logger.log_metrics(metrics, step=self.step)
        self.log_dict(metrics, logger=False)

    @property
    def step(self) -> int:
        """Optimizer steps that the weights have been trained for."""
        return max(self.first_step, self.global_step)


def num_steps(trainer: L.Trainer) -> int | None:
    """The length of a run in optimizer steps; None if it is not known."""
    return trainer.max_steps if trainer.max_steps >= 0 else None


def _require_fitting_state(optimizer: torch.optim.Optimizer) -> None:
    """Refuse state of another shape than its parameter: a fused kernel would read and write past the state's end."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            is_dense = isinstance(value, Tensor) and value.layout == torch.strided and value.is_floating_point()
            if not is_dense or value.shape not in (parameter.shape, torch.Size([])):
                raise ValueError(f"its optimizer's {name} does not fit a parameter of shape {list(parameter.shape)}")
