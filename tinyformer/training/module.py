"""The Lightning module: a training step, validation metrics, the optimizer and its schedule."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torchmetrics import Metric

from tinyformer.data import DataModule
from tinyformer.errors import ArgumentError
from tinyformer.nn import Network
from tinyformer.tasks import Batch, Task
from tinyformer.training.schedules import Schedule


class TrainingModule(L.LightningModule):
    """A network with its task, data, optimizer and schedule.

    Args:
        network: the model.
        task: computes the loss and the scores of a batch.
        data: the data module.
        optimizer: makes the optimizer for the network.
        schedule: the learning-rate schedule.
        evaluated: the split that validation evaluates.
        first_step: optimizer steps that the weights have already been trained for.
        checkpoint: the checkpoint that the weights come from, which pictures name; None to name the run instead.

    Attributes:
        metrics: the metrics of the last validation; None for one that is undefined.
    """

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
        self.sums = Sums(task.zeros())
        self.metrics: dict[str, float | None] = {}

    def training_step(self, batch: Batch, batch_index: int) -> Tensor:
        """The loss of a batch."""
        return self.task.loss(self.network, batch)

    def configure_optimizers(self) -> Any:
        """The optimizer and its schedule, which advances at every step."""
        assert self.make_optimizer is not None
        assert self.schedule is not None
        optimizer = self.make_optimizer(self.network)
        self.options = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        total_steps, factor = int(self.trainer.estimated_stepping_batches), self.schedule.factor
        # LambdaLR saves the fields of a callable object, but nothing of a lambda, so that a resumed run may be longer.
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factor(step, total_steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_train_start(self) -> None:
        """Set the optimizer's options and learning rate again, since a resumed run may have others, or another length.

        Raises:
            ArgumentError: the optimizer's state in a checkpoint does not fit the parameters.
        """
        for optimizer in self.trainer.optimizers:
            for each in getattr(optimizer, "optimizers", [optimizer]):
                _require_own_state(each)
        scheduler = self.lr_schedulers()
        assert isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR)
        scheduler.base_lrs = [options["lr"] for options in self.options]
        groups = zip(scheduler.optimizer.param_groups, self.options, scheduler.lr_lambdas, strict=True)
        for group, options, factor in groups:
            peak = options["lr"]
            group.update(options | {"initial_lr": peak, "lr": peak * factor(scheduler.last_epoch)})

    def on_validation_epoch_start(self) -> None:
        """Reset the sums."""
        self.sums.reset()
        # In fp32, with its 24-bit significand, the loss over 20 million tokens can be wrong by 1e-3; under bf16-true,
        # Lightning even makes the sums bf16.
        self.sums.set_dtype(torch.float32 if self.device.type == "mps" else torch.float64)

    def validation_step(self, batch: Batch, batch_index: int) -> None:
        """Add the scores of a batch to the sums."""
        self.sums.update(self.task.score(self.network, batch))

    def on_validation_epoch_end(self) -> None:
        """Compute and log the metrics."""
        self.metrics = self.task.metrics(self.sums.compute(), self.data.splits[self.evaluated])
        metrics = {f"val/{name}": value for name, value in self.metrics.items() if value is not None}
        for logger in self.loggers:
            logger.log_metrics(metrics, step=self.step)
        self.log_dict(metrics, logger=False)

    @property
    def step(self) -> int:
        """Optimizer steps that the weights have been trained for."""
        return max(self.first_step, self.global_step)


def _require_own_state(optimizer: torch.optim.Optimizer) -> None:
    """Refuse state whose shape is not its parameter's: a fused kernel would read and write past its end."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            is_own = isinstance(value, Tensor) and value.layout == torch.strided and value.is_floating_point()
            if not is_own or value.shape not in (parameter.shape, torch.Size([])):
                reason = f"its optimizer's {name} does not fit a parameter of shape {list(parameter.shape)}"
                raise ArgumentError("resume", "last.ckpt", reason)


class Sums(Metric):
    """Sums of scores over the batches of a validation and over all processes.

    Args:
        zeros: the initial value of each sum, by name.
    """

    full_state_update = False

    def __init__(self, zeros: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.names = list(zeros)
        for name, zero in zeros.items():
            self.add_state(name, zero, dist_reduce_fx="sum")

    def update(self, scores: Mapping[str, Tensor]) -> None:
        """Add the scores of a batch."""
        for name in self.names:
            setattr(self, name, getattr(self, name) + scores[name])

    def compute(self) -> dict[str, Tensor]:
        """The sums, by name."""
        return {name: getattr(self, name) for name in self.names}
