"""Small real runs for the tests of this folder."""

import os
import signal

import lightning as L
import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.plugins import DoublePrecision
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher, _WorkerOutput
from nn.model_cases import make_transformer

from tinyformer.checkpoint.file import load_checkpoint, snapshots_of
from tinyformer.checkpoint.format import FORMAT
from tinyformer.data import ByteTokenizer, SourceDataModule, TextFiles, WindowFormat
from tinyformer.tasks import CausalLM
from tinyformer.training import AdamW, TrainingModule, WarmupCosine
from tinyformer.training.sharding import FullyShardedStrategy
from tinyformer.training.trainer_parts import FitLoop, WholeCheckpointIO

TEXT = "All happy families are alike; each unhappy family is unhappy in its own way.\n" * 40

CONTENTS = {"format": FORMAT, "overrides": {"seed": 3}, "tokenizer": "{}", "facts": {"precision": "32-true"}}
"""The contents of the checkpoints of these runs."""

QUIET = (
    "ignore:.*does not have many workers",
    "ignore:.*isinstance.treespec, LeafSpec.",
    "ignore:The number of training batches",
    "ignore:You requested to overfit but",
    "ignore:FSDP2-wrapped module .* returned a view tensor",
    "ignore:It is recommended to use `self.log",
    "ignore:You're using the WeightAveraging callback with a model that overrides",
    "ignore:The `srun` command is available",
)
"""The warnings of Lightning about runs this small."""


def snapshots(folder):
    """The weights of each snapshot of a run by step."""
    return {step: load_checkpoint(path).weights for step, path in snapshots_of(folder).items()}


class Do(L.Callback):
    """Does something in a hook after a step, once."""

    def __init__(self, step, do, hook="on_train_batch_end"):
        def act(trainer, *args):
            if trainer.global_step == step and not self.done:
                self.done = True
                do(trainer)

        self.done = False
        setattr(self, hook, act)


def interrupt(step, hook="on_train_batch_end", number=signal.SIGTERM):
    """Sends this process a signal in a hook after a step."""
    return Do(step, lambda trainer: os.kill(os.getpid(), number), hook)


class ForkLauncher(_MultiProcessingLauncher):
    """Lightning's launcher of forked processes, which knows no sharded weights."""

    def _wrapping_function(self, process_idx, *args):
        os.environ["LOCAL_RANK"] = str(process_idx)
        super()._wrapping_function(process_idx, *args)

    def _collect_rank_zero_results(self, trainer, results):
        """Write no temporary file of the weights, of which the first process has a part."""
        if self._strategy.local_rank == 0:
            return _WorkerOutput(None, None, trainer.state, results, self.get_extra_results(trainer))
        return None

    def _recover_results_in_main_process(self, output, trainer):
        """Leave the weights where they are: each process has a part of them."""


class ForkedShards(FullyShardedStrategy):
    def _configure_launcher(self):
        self._launcher = ForkLauncher(self, start_method="fork")


def strategy_of(name, processes, precision):
    """The settings of a strategy; Lightning knows no fp64 where weights are sharded."""
    if processes == 1 and name != "fsdp":
        return {"precision": precision}
    if name == "ddp":
        return {"precision": precision, "strategy": "ddp_fork", "devices": processes}
    plugin = {"precision": None, "plugins": DoublePrecision()} if precision == "64-true" else {"precision": precision}
    return {"strategy": ForkedShards(), "devices": processes} | plugin


def make_data(folder, text=TEXT, tokenizer=None, pack="concat", **changes):
    folder.mkdir(exist_ok=True)
    (folder / "book.txt").write_text(text, encoding="utf-8")
    settings = {"batch_size": 4, "cache_dir": str(folder / "cache"), "test_fraction": 0.0}
    source, windows = TextFiles(str(folder / "book.txt")), WindowFormat(16, pack)
    return SourceDataModule(source, tokenizer or ByteTokenizer(), windows, **settings | changes)


def make_module(data, optimizer=None, schedule=None, evaluated="validation", first_step=0, **network):
    data.prepare()
    torch.manual_seed(0)
    network = make_transformer(vocab_size=data.tokenizer.vocab_size, max_seq_len=16, **network)
    return TrainingModule(
        network, CausalLM(), data, optimizer or AdamW(), schedule or WarmupCosine(2), evaluated, first_step
    )


def make_trainer(folder, callbacks=(), loggers=(), **changes):
    settings = {
        "accelerator": "cpu",
        "max_steps": 8,
        "max_epochs": -1,
        "val_check_interval": 3,
        "check_val_every_n_epoch": None,
        "log_every_n_steps": 2,
        "num_sanity_val_steps": 0,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "enable_checkpointing": any(isinstance(callback, Checkpoint) for callback in callbacks),
        "limit_val_batches": 2,
        "plugins": WholeCheckpointIO(),
    }
    folders = {"default_root_dir": folder, "callbacks": list(callbacks), "logger": list(loggers)}
    trainer = L.Trainer(**settings | changes, **folders)
    trainer.fit_loop = FitLoop(trainer)
    return trainer


def fit(folder, *callbacks, logger=None, checkpoint=None, optimizer=None, network=None, data=None, **settings):
    """A run: its trainer and its module."""
    data = make_data(folder, **data or {})
    module = make_module(data, optimizer, **network or {})
    trainer = make_trainer(folder, callbacks, [logger] if logger else [], **settings)
    trainer.fit(module, datamodule=data, ckpt_path=checkpoint)
    return trainer, module
