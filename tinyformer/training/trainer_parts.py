"""The parts of Lightning's trainer that a run replaces: loops, a strategy, the writing of checkpoints, profilers."""

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import lightning as L
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.loops.fetchers import _DataFetcher
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.profilers import AdvancedProfiler, Profiler, PyTorchProfiler, SimpleProfiler
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile, schedule

from tinyformer.checkpoint.file import LAST, PREVIOUS
from tinyformer.checkpoint.format import read_raw, write_raw
from tinyformer.data.batches.loader import EpochLoader
from tinyformer.training.module import TrainingModule


class FitLoop(_FitLoop):
    """The loop over epochs.

    - A run ends with a whole optimizer step and with a validation, at which checkpoints are written, whether a number
      of steps or epochs, a time limit or a callback (`trainer.should_stop`) ends it.
    - Before the first step, `trainer.max_epochs` is converted to optimizer steps, so that `trainer.max_steps` is the
      length of the run, or -1 if only a time limit or a callback ends the run.
    """

    epoch_loop: "EpochLoop"

    def __init__(self, trainer: L.Trainer) -> None:
        super().__init__(trainer, trainer.min_epochs, trainer.max_epochs)
        self.epoch_loop = EpochLoop(trainer, trainer.min_steps, trainer.max_steps)

    @property
    def skip(self) -> bool:
        """Return True if no step is left; False for a resumed run, which is validated even after its last step."""
        return self.done and not self.is_resuming

    def on_run_start(self) -> None:
        """Convert the number of epochs to steps, and run a validation that an interruption has prevented."""
        assert self.max_epochs is not None
        if self.max_epochs >= 0:
            self.epoch_loop.count_epochs(self.max_epochs)
            self.max_epochs = -1
        super().on_run_start()
        if self.is_resuming and (self.done or self.epoch_loop.is_due):
            self.validate()

    def on_advance_end(self) -> None:
        """Validate the last weights if a hook ends the run at the end of an epoch, after the epoch's validation."""
        was_done = self.done
        super().on_advance_end()
        if self.done and not was_done:
            self.validate()

    def validate(self) -> None:
        self.trainer.validating = True
        self.epoch_loop.val_loop.restarting = False
        self.epoch_loop.val_loop.run()
        self.trainer.training = True

    @property
    def _can_stop_early(self) -> bool:
        return super()._can_stop_early and not self._should_accumulate()

    def _iteration_based_training(self) -> bool:
        """Return True, so that a resumed run continues within its epoch."""
        return True


class EpochLoop(_TrainingEpochLoop):
    """The loop over the batches of an epoch; an optimizer step may have batches of two epochs."""

    last_position = math.inf  # batches until the end of the last epoch; its last step may have fewer
    is_due = False  # whether the loaded checkpoint precedes a validation

    def _broadcast_sigterm_tensor(self) -> None:
        """Do nothing: `Checkpoints` handles signals, and Lightning would wait for the other processes in every step."""

    def on_save_checkpoint(self) -> dict:
        fetcher = self.trainer.fit_loop._data_fetcher
        is_due = self.trainer.training and fetcher is not None and self._should_check_val_fx(fetcher)
        return {**super().on_save_checkpoint(), "is_due": is_due}

    def on_load_checkpoint(self, state_dict: dict) -> None:
        super().on_load_checkpoint(state_dict)
        self.is_due = bool(state_dict.get("is_due"))

    def count_epochs(self, max_epochs: int) -> None:
        self.last_position = max_epochs * self._loader.num_read
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


class ReplicatedStrategy(DDPStrategy):
    """Data parallelism in which each process has all weights; gradients are views of the buckets that are reduced.

    Buffers are equal in all processes, and are not sent. Unlike in Lightning 2.6, `DistributedDataParallel` is not made
    on a side stream, where each gradient would be accumulated after a wait for the stream of the backward pass.
    """

    def __init__(self) -> None:
        super().__init__(broadcast_buffers=False, gradient_as_bucket_view=True)

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        return DistributedDataParallel(model, self.determine_ddp_device_ids(), **self._ddp_kwargs)


class WholeCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint whole or not at all, even if the process is killed; `last.ckpt` becomes `previous.ckpt`.

    Lightning's own class holds a second copy in memory and writes through the system's temporary folder. If that
    folder is on another file system, the file is copied; a process killed meanwhile leaves a part of a checkpoint.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        path = Path(path)
        write_raw(path, checkpoint, path.with_name(PREVIOUS) if path.name == LAST else None)

    def load_checkpoint(self, path: str | Path, *_: Any, **__: Any) -> dict[str, Any]:
        return read_raw(Path(path))


class StepTrace(PyTorchProfiler):
    """Torch's profiler over three steps, after one skipped and one warm-up step, to bound the size of the trace.

    It counts training steps in training and validation steps in evaluation. Lightning's own class counts both, and
    traces neither in full if they alternate. It writes a table, and `trace.json` for chrome://tracing and
    ui.perfetto.dev.
    """

    def __init__(self, folder: Path) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise it reports each start and stop on stderr

        def export(trace: profile) -> None:
            trace.export_chrome_trace(str(folder / "trace.json"))

        super().__init__(
            folder,
            "profile",
            schedule=schedule(wait=1, warmup=1, active=3, repeat=1),
            on_trace_ready=export,
            record_module_names=False,  # they need hooks, which a compiled network does not call
            row_limit=40,
            acc_events=True,  # otherwise torch 2.11 warns that it drops the events of earlier cycles
        )

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        super().setup(stage, local_rank, log_dir)
        self.STEP_FUNCTIONS = {"training_step" if stage == "fit" else "validation_step"}


PROFILERS: dict[str, Callable[[Path], Profiler]] = {
    "simple": lambda folder: SimpleProfiler(folder, "profile"),
    "advanced": lambda folder: AdvancedProfiler(folder, "profile"),
    "torch": StepTrace,
}
"""Each profiler by its name; all of them write a table into the run's folder."""


def make_profiler(name: str | None, folder: Path) -> Profiler | None:
    """The profiler that `PROFILERS` has under a name, which writes into a folder; None without a name."""
    return None if name is None else PROFILERS[name](folder)
