"""Training as Lightning sees it."""

import math
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torchmetrics import MetricCollection, SumMetric

from tinyformer.data import TokenDataModule, TokenSplit
from tinyformer.nn import Transformer
from tinyformer.tasks import Batch, CausalLM
from tinyformer.training.schedules import WarmupCosine, WarmupStableDecay


class TrainingModule(L.LightningModule):
    """A network, what it is trained for, and how.

    Args:
        network: the model.
        task: gives the loss and the scores of a batch.
        data: the tokens.
        optimizer: makes the optimizer for the network.
        schedule: the learning rate over the steps.
        evaluated: the split that validation scores.
        first_step: optimizer steps that the weights have behind them.
    """

    def __init__(
        self,
        network: Transformer,
        task: CausalLM,
        data: TokenDataModule,
        optimizer: Callable[[Transformer], torch.optim.Optimizer] | None = None,
        schedule: WarmupCosine | WarmupStableDecay | None = None,
        evaluated: str = "validation",
        first_step: int = 0,
    ) -> None:
        super().__init__()
        self.network, self.task = network, task
        self.make_optimizer, self.schedule = optimizer, schedule
        self.data, self.evaluated, self.first_step = data, evaluated, first_step
        self.sums = MetricCollection({name: SumMetric() for name in ("nats", "tokens", "top1", "top5")})

    def training_step(self, batch: Batch, batch_index: int) -> Tensor:
        """The loss of a batch."""
        return self.task.loss(self.network, batch)

    def configure_optimizers(self) -> Any:
        """The optimizer and its schedule, which moves with every step."""
        assert self.make_optimizer is not None
        assert self.schedule is not None
        optimizer = self.make_optimizer(self.network)
        total_steps, factor = int(self.trainer.estimated_stepping_batches), self.schedule.factor
        # A partial or a bound method would be saved with its fields, and a longer resumed run keep the old length.
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factor(step, total_steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_train_start(self) -> None:
        """Take the learning rate from the schedule: a checkpoint's is that of the length that its run had."""
        scheduler = self.lr_schedulers()
        assert isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR)
        groups = zip(scheduler.optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
        for group, highest, factor in groups:
            group["lr"] = highest * factor(scheduler.last_epoch)

    def on_validation_epoch_start(self) -> None:
        """Begin the sums anew."""
        self.sums.reset()
        for metric in self.sums.values():
            metric.set_dtype(torch.float32)  # trainer.precision=bf16-true takes sums down to eight bits, too

    def validation_step(self, batch: Batch, batch_index: int) -> None:
        """Add a batch to the sums."""
        for name, value in self.task.score(self.network, batch).items():
            self.sums[name].update(value)

    def on_validation_epoch_end(self) -> None:
        """Report what the sums come to."""
        sums = {name: float(metric.compute()) for name, metric in self.sums.items()}
        metrics = {
            f"val/{name}": value
            for name, value in language_metrics(sums, self.data.splits[self.evaluated]).items()
            if value is not None
        }
        for logger in self.loggers:
            logger.log_metrics(metrics, step=self.step)
        self.log_dict(metrics, logger=False)

    @property
    def step(self) -> int:
        """Optimizer steps that the weights have behind them."""
        return max(self.first_step, self.global_step)


def language_metrics(sums: dict[str, float], split: TokenSplit) -> dict[str, float | None]:
    """Loss and accuracy from sums over a split.

    Args:
        sums: `nats`, `tokens`, `top1` and `top5` as from `CausalLM.score`.
        split: the text that was scored.

    Returns:
        `loss` (nats per token), `perplexity`, `bits_per_byte` (of the raw UTF-8 text, so that tokenizers compare;
        None where characters were unknown or tokens are not scored, since their cost is not known), `accuracy` and
        `accuracy_top5`.
    """
    loss = sums["nats"] / sums["tokens"]
    # Dividing by what was scored and multiplying by what there is: the same, unless `limit_val_batches` cut it.
    bits = loss * split.num_tokens / math.log(2)
    cost_is_known = split.num_unknown == 0 and split.scored is None
    return {
        "loss": loss,
        "perplexity": math.exp(min(loss, 700.0)),
        "bits_per_byte": bits / split.num_bytes if cost_is_known else None,
        "accuracy": sums["top1"] / sums["tokens"],
        "accuracy_top5": sums["top5"] / sums["tokens"],
    }
