"""Loss and speed of training, read every `log_every_n_steps` steps."""

import time
from dataclasses import asdict, dataclass, fields
from typing import Any

import lightning as L
import torch

from tinyformer.analysis.costs import TrainingFlops
from tinyformer.data import IGNORED
from tinyformer.data.loader import EpochLoader
from tinyformer.tasks import Batch
from tinyformer.training.hardware import compute_dtype, peak_memory
from tinyformer.training.module import TrainingModule
from tinyformer.training.peak import Peak, matmul_peak


@dataclass
class Work:
    """What was done in some time.

    Args:
        seconds: that training took.
        tokens: of all processes; padding counts, since it is computed like the others.
        flops: that the model needs, on one device.
        waiting: seconds of these in which the loop waited for batches.
    """

    seconds: float = 0.0
    tokens: int = 0
    flops: float = 0.0
    waiting: float = 0.0

    def add(self, other: "Work") -> None:
        """Add another's."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    @property
    def tokens_per_second(self) -> float:
        """Of all processes."""
        return self.tokens / max(self.seconds, 1e-9)

    @property
    def data_wait(self) -> float:
        """Share of the time."""
        return self.waiting / max(self.seconds, 1e-9)

    def mfu(self, peak: Peak) -> float:
        """Model FLOPs utilisation: its share of a device's peak (Chowdhery et al. 2022, PaLM, arXiv 2204.02311)."""
        return self.flops / max(self.seconds, 1e-9) / peak.flops


class Report(L.Callback):
    """Logs loss, learning rate and throughput every `log_every_n_steps` steps.

    - `train/loss`: the mean since the last report, `train/learning_rate`: the present one.
    - `throughput/tokens_per_second`, and `throughput/mfu`: see `Work`.
    - `throughput/memory_gb`: the most so far, in 10^9 bytes; see `peak_memory`.
    - `throughput/data_wait`: the share of training time in which the loop waited for batches.

    Between two reports losses are added up where they are, so that no step waits for the device. Time spent on
    validation and telemetry is not counted as training.

    Attributes:
        total: what was done so far, up to the last report.
        latest: what was logged last.
        peak: of the device; None before the first report.
    """

    def __init__(self) -> None:
        self.total = Work()
        self.latest: dict[str, float] = {}
        self.peak: Peak | None = None
        self._losses: torch.Tensor | None = None
        self._num_losses = self._tokens = self._pairs = 0
        self._since = self._waited = 0.0
        self._pause: tuple[float, float] | None = None
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
            "total": asdict(self.total),
            "unreported": [0.0 if self._losses is None else float(self._losses), self._num_losses],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved run."""
        self._earlier = state_dict["seconds"]
        self.total = Work(**state_dict["total"])
        losses, self._num_losses = state_dict["unreported"]
        self._losses = torch.tensor(losses) if self._num_losses else None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clock."""
        assert isinstance(pl_module, TrainingModule)
        self._costs = TrainingFlops.of(pl_module.network)
        self._started = self._since = time.perf_counter()
        self._waited = _seconds_waited(trainer)
        self._pause = None

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop the clock."""
        self._pause = time.perf_counter(), _seconds_waited(trainer)

    def leave_out(self, seconds: float) -> None:
        """Do not count as training what has just been done beside it; while the clock stands, that is so anyhow."""
        if self._pause is None:
            self._since += seconds

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Let it go on: what other callbacks do when validation ends, such as telemetry, is over now."""
        if self._pause is not None:
            paused, waited = self._pause
            self._since += time.perf_counter() - paused
            self._waited += _seconds_waited(trainer) - waited
            self._pause = None

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Add the loss; report where it is time."""
        loss = outputs["loss"].detach().clone()  # CUDA graphs write the next one into the same memory
        self._losses = loss if self._losses is None else self._losses.to(loss.device) + loss
        self._num_losses += 1
        rows, seq = batch["inputs"].shape
        self._tokens += rows * seq
        self._pairs += rows * seq * seq
        interval = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if (batch_idx + 1) % trainer.accumulate_grad_batches or trainer.global_step % interval:
            return
        # Lightning has divided each loss by the number of batches in a step. This waits for the device, so that the
        # clock is right.
        mean_loss = float(self._losses) * trainer.accumulate_grad_batches / self._num_losses
        now, waited = time.perf_counter(), _seconds_waited(trainer)
        flops = self._costs.count(self._tokens, self._pairs, _share_read_out(batch) * self._tokens)
        work = Work(now - self._since, self._tokens * trainer.world_size, flops, waited - self._waited)
        self.total.add(work)
        self.peak = matmul_peak(pl_module.device, compute_dtype(trainer.precision))
        self.latest = {
            "train/loss": mean_loss,
            "train/learning_rate": trainer.optimizers[0].param_groups[0]["lr"],
            "throughput/tokens_per_second": work.tokens_per_second,
            "throughput/mfu": work.mfu(self.peak),
            "throughput/memory_gb": peak_memory(pl_module.device) / 1e9,
            "throughput/data_wait": work.data_wait,
        }
        # The peak may have been measured just now.
        self._since, self._waited = time.perf_counter(), waited
        for logger in trainer.loggers:
            logger.log_metrics(self.latest, step=trainer.global_step)
        self._losses, self._num_losses, self._tokens, self._pairs = None, 0, 0, 0


def _seconds_waited(trainer: L.Trainer) -> float:
    loader = trainer.train_dataloader
    assert isinstance(loader, EpochLoader)
    return loader.seconds


def _share_read_out(batch: Batch) -> float:
    """The share of a batch's tokens whose scores are needed; where a text is scored as a whole, one of each."""
    if "targets" not in batch:
        return 1 / batch["inputs"].shape[1]
    return float((batch["targets"] != IGNORED).float().mean())
