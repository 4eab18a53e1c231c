"""Scores of training rows at each validation, to tell memorisation from generalisation."""

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from tinyformer.errors import require_at_least
from tinyformer.training.module import TrainingModule


class TrainingScores(L.Callback):
    """Scores rows of the training split at each validation, in the same way as those of the validation split.

    Logs `train/accuracy` and the task's other metrics except the loss, since `train/loss` is that of the training
    steps. The rows are drawn at random and stay the same throughout the run.

    Args:
        num_rows: number of training rows that are scored; 0 for none.

    Attributes:
        metrics: the metrics of the last validation, by name.

    Raises:
        ArgumentError: `num_rows` is negative.
    """

    def __init__(self, num_rows: int = 0) -> None:
        require_at_least(0, num_rows=num_rows)
        self.num_rows = num_rows
        self.metrics: dict[str, float] = {}

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Score the rows."""
        if not self.num_rows or trainer.state.fn != TrainerFn.FITTING or not trainer.is_global_zero:
            return
        assert isinstance(pl_module, TrainingModule)
        task = pl_module.task
        sums: dict[str, Tensor] = {}
        with trainer.precision_plugin.forward_context():
            for batch in pl_module.data.sample("train", self.num_rows):
                for name, score in task.score(pl_module.network, trainer.strategy.batch_to_device(batch)).items():
                    sums[name] = sums.get(name, 0.0) + score.to(pl_module.sum_dtype)
        metrics = task.metrics(sums, pl_module.data.splits["train"])
        self.metrics = {
            f"train/{name}": value for name, value in metrics.items() if name != "loss" and value is not None
        }
        for logger in trainer.loggers:
            logger.log_metrics(self.metrics, step=pl_module.step)
