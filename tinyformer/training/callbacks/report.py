"""Loss and speed of training, read every `log_every_n_steps` steps."""

import time
from typing import Any

import lightning as L
import torch


class Report(L.Callback):
    """Logs `train/loss`, `train/learning_rate` and `throughput/tokens_per_second` every `log_every_n_steps` steps.

    Between two reports losses are added up where they are, so that no step waits for the device. Time spent on
    validation and telemetry is not counted as training; padding counts as tokens, since it is computed like them.
    """

    def __init__(self) -> None:
        self.training_seconds = 0.0
        self.training_tokens = 0
        self.latest: dict[str, float] = {}
        self._losses: torch.Tensor | None = None
        self._num_losses = self._timed_tokens = 0
        self._since = 0.0
        self._pause: float | None = None
        self._earlier = 0.0
        self._started = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Wall time of the run so far, validation and telemetry included; that before a resumption, too."""
        return self._earlier + time.perf_counter() - self._started

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run adds to."""
        return {
            "seconds": self.seconds,
            "training_seconds": self.training_seconds,
            "training_tokens": self.training_tokens,
            "unreported": [0.0 if self._losses is None else float(self._losses), self._num_losses],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved run."""
        self._earlier = state_dict["seconds"]
        self.training_seconds = state_dict["training_seconds"]
        self.training_tokens = state_dict["training_tokens"]
        losses, self._num_losses = state_dict["unreported"]
        self._losses = torch.tensor(losses) if self._num_losses else None

    @property
    def tokens_per_second(self) -> float:
        """Over the whole run, validation and telemetry not counted."""
        return self.training_tokens / max(self.training_seconds, 1e-9)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clock."""
        self._started = self._since = time.perf_counter()
        self._pause = None

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop the clock."""
        self._pause = time.perf_counter()

    def leave_out(self, seconds: float) -> None:
        """Do not count as training what has just been done beside it; while the clock stands, that is so anyhow."""
        if self._pause is None:
            self._since += seconds

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Let it go on: what other callbacks do when validation ends, such as telemetry, is over now."""
        if self._pause is not None:
            self._since += time.perf_counter() - self._pause
            self._pause = None

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Add the loss; report where it is time."""
        loss = outputs["loss"].detach().clone()  # CUDA graphs write the next one into the same memory
        self._losses = loss if self._losses is None else self._losses.to(loss.device) + loss
        self._num_losses += 1
        self._timed_tokens += batch["inputs"].numel() * trainer.world_size
        interval = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if (batch_idx + 1) % trainer.accumulate_grad_batches or trainer.global_step % interval:
            return
        mean_loss = float(self._losses) / self._num_losses  # waits for the device, so that the clock is right
        now = time.perf_counter()
        seconds = now - self._since
        self.training_seconds += seconds
        self.training_tokens += self._timed_tokens
        self.latest = {
            "train/loss": mean_loss,
            "train/learning_rate": trainer.optimizers[0].param_groups[0]["lr"],
            "throughput/tokens_per_second": self._timed_tokens / seconds,
        }
        for logger in trainer.loggers:
            logger.log_metrics(self.latest, step=trainer.global_step)
        self._losses, self._num_losses, self._timed_tokens, self._since = None, 0, 0, now
