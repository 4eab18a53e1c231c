"""Lightning's trainer of a run, and its callbacks."""

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import lightning as L
import torch
from hydra.utils import instantiate
from lightning.pytorch import callbacks as of_lightning
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import Strategy
from omegaconf import DictConfig

from tinyformer.config.errors import ConfigError
from tinyformer.config.folder import process_number
from tinyformer.data import DataModule
from tinyformer.errors import ArgumentError
from tinyformer.hardware import keep_freed_memory
from tinyformer.nn import Network
from tinyformer.run.cluster import with_environment
from tinyformer.run.settings import Settings, trainer_errors
from tinyformer.tasks import Task
from tinyformer.training import FiniteCheck, Snapshots
from tinyformer.training.sharding import FullyShardedStrategy
from tinyformer.training.trainer_parts import FitLoop, ReplicatedStrategy, WholeCheckpointIO, make_profiler

REFUSED: dict[type[L.Callback], str] = {
    of_lightning.BaseFinetuning: "changes which weights are optimized; freeze_encoder=true trains the readout alone",
    of_lightning.BasePredictionWriter: "has no effect, since a run predicts nothing",
    of_lightning.BatchSizeFinder: "changes batches for which the run has been planned; set data.batch_size",
    of_lightning.GradientAccumulationScheduler: "changes the length of a run; set trainer.accumulate_grad_batches",
    of_lightning.LearningRateFinder: "does not find optimizer.lr; -m optimizer.lr=1e-3,3e-3 compares rates",
    of_lightning.ModelPruning: "renames weights, after which training fails; model.pruned_heads removes heads",
    of_lightning.OnExceptionCheckpoint: "starts from a file that another run has left; resume=FOLDER continues a run",
    of_lightning.SpikeDetection: "lists batches that no run leaves out; callbacks.finite checks each step",
    of_lightning.StochasticWeightAveraging: "averages after the last checkpoint; EMAWeightAveraging does not",
}
"""Callbacks of Lightning that would not do in a run what Lightning documents: the reason, and what does."""

STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "ddp": ReplicatedStrategy,
    "fsdp": FullyShardedStrategy,
}
"""What a name stands for, if it is not what Lightning makes of it."""


def set_up_process() -> None:
    """Silence messages of libraries that a user can do nothing about, and let the process keep the memory it frees."""
    # "GPU available: False, used: False" and "`Trainer.fit` stopped: …": the summary says it.
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    logging.getLogger("lightning.pytorch.callbacks.model_summary").setLevel(logging.INFO)  # which a user has added
    for library in ("httpx", "httpx2", "absl"):  # a line for each request to the Hub; ROUGE's tokenizer
        logging.getLogger(library).setLevel(logging.WARNING)
    for message in (
        # A batch is one gather from a memory map, which takes microseconds: workers would cost more.
        r"The '\w+_dataloader' does not have many workers",
        # Lightning's own use of a deprecated function of torch.
        r"`isinstance\(treespec, LeafSpec\)` is deprecated",
        # On a node of a cluster from which jobs are started.
        r"The `srun` command is available",
        # Since torch 2.13; versions before have no other argument.
        r"`broadcast_buffers` is deprecated",
        # Flex is compiled on CUDA only; the summary names the kernel.
        r"flex_attention called without torch\.compile",
        # Metrics are already summed over all processes.
        r"It is recommended to use `self\.log\('val/",
        # Evaluation batches are in order, whatever their sampler is called.
        r"You requested to overfit but enabled val dataloader shuffling",
        # No task changes the output of a network in place.
        r"FSDP2-wrapped module .* returned a view tensor",
        # The hook shards weights, which is refused where they are averaged.
        r"You're using the WeightAveraging callback with a model that overrides the configure_model callback",
        # A resumed run may leave callbacks out.
        r"Be aware that when using `ckpt_path`",
        # A short run may end before the first report.
        r"The number of training batches .* is smaller than the logging interval",
    ):
        warnings.filterwarnings("ignore", message=message)
    keep_freed_memory()


@trainer_errors()
def training_trainer(
    settings: Settings, folder: Path, loggers: Sequence[Logger], callbacks: Sequence[L.Callback]
) -> L.Trainer:
    """Lightning's trainer for a run."""
    strategy, own = settings.arguments.get("strategy"), ("profiler", "plugins", "strategy")
    averaging = (of_lightning.WeightAveraging, of_lightning.StochasticWeightAveraging)
    if settings.is_sharded and any(isinstance(each, averaging) for each in callbacks):
        raise ArgumentError("trainer.strategy", strategy, "cannot average weights", {"strategy": "ddp"})
    trainer = L.Trainer(
        **{name: value for name, value in settings.arguments.items() if name not in own},
        strategy=STRATEGIES[strategy]() if strategy in STRATEGIES else strategy or "auto",
        profiler=make_profiler(settings.arguments.get("profiler"), folder),
        default_root_dir=folder,
        logger=list(loggers),
        callbacks=list(callbacks),
        plugins=[*with_environment(settings.arguments.get("plugins") or [], False), WholeCheckpointIO()],
        enable_model_summary=False,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
    )
    if trainer.is_global_zero and (number := process_number()) is not None:  # torchrun has started more than devices
        reason = f"makes this process the first of the run, and {number} does not; unset it, or train with trainer=ddp"
        raise ArgumentError("trainer.devices", settings.arguments.get("devices"), reason)
    trainer.fit_loop = FitLoop(trainer)
    return trainer


def require_one_process(trainer: L.Trainer) -> None:
    """Refuse a trainer that starts processes by repeating the command of this one, which may be a notebook."""
    launcher = trainer.strategy.launcher
    if trainer.world_size > 1 and launcher is not None and not launcher.is_interactive_compatible:
        raise ConfigError(
            f"trainer.devices={trainer.num_devices}: tinyformer.train is one process; `tinyformer train` on the "
            "command line starts more."
        )


@trainer_errors()
def scoring_trainer(
    settings: Settings,
    folder: Path,
    loggers: Sequence[Logger] = (),
    callbacks: Sequence[L.Callback] = (),
    profiler: str | None = None,
) -> L.Trainer:
    """Lightning's trainer for scoring a split: on one device, without a progress bar."""
    replaced = {
        "enable_progress_bar": False,
        "devices": [torch.cuda.current_device()] if settings.device == "cuda" else 1,
        "num_nodes": 1,
        "strategy": "auto",
        "plugins": with_environment(settings.arguments.get("plugins") or [], True),
        "profiler": make_profiler(profiler, folder),
    }
    return L.Trainer(
        **settings.arguments | replaced,
        default_root_dir=folder,
        logger=list(loggers),
        callbacks=list(callbacks),
        enable_model_summary=False,
        enable_checkpointing=False,
        inference_mode=False,  # as in validation during training, so that its compiled graph is reused
    )


@contextlib.contextmanager
def forward_context(trainer: L.Trainer, network: Network) -> Iterator[None]:
    """Compute outside the trainer's loops as inside them: on its device, in its precision.

    Its loops leave the network on the CPU. A compiled network runs uncompiled here, since each new shape would compile
    it again; FlexAttention stays compiled.
    """
    network.to(trainer.strategy.root_device)
    compiled, network._compiled_call_impl = network._compiled_call_impl, None
    try:
        with trainer.precision_plugin.forward_context():
            yield
    finally:
        network._compiled_call_impl = compiled


def make_callbacks(group: DictConfig) -> dict[str, L.Callback]:
    """The callbacks of the `callbacks` group by their names in it, without entries that are null.

    `FiniteCheck` follows those that may change gradients, since its norm is the one that clips them; `Snapshots`
    follows all others.
    """
    made = {str(name): instantiate(node, _convert_="all") for name, node in group.items() if node is not None}
    for name, callback in made.items():
        for reason in (reason for kind, reason in REFUSED.items() if isinstance(callback, kind)):
            raise ArgumentError(f"callbacks.{name}", type(callback).__name__, reason, {name: None})
    rank = {name: (isinstance(each, Snapshots), isinstance(each, FiniteCheck)) for name, each in made.items()}
    return {name: made[name] for name in sorted(made, key=rank.__getitem__)}


def require_monitored(callbacks: Mapping[str, L.Callback], task: Task, network: Network, data: DataModule) -> None:
    """Refuse a callback that needs a metric which validation does not log, as the scores of its first batch show."""
    kinds = (of_lightning.EarlyStopping, of_lightning.ModelCheckpoint)
    needs = {name: each.monitor for name, each in callbacks.items() if isinstance(each, kinds) and each.monitor}
    known: list[str] = []
    if needs:
        with torch.no_grad(), contextlib.suppress(ArgumentError):  # a backend that runs on CUDA alone
            scores = task.score(network.eval(), next(iter(data.evaluation_dataloader("validation"))))
            metrics = task.metrics(scores, data.splits["validation"])
            known = [f"val/{name}" for name, value in metrics.items() if value is not None]
        network.train()
    for name, monitor in needs.items():
        if known and monitor not in known and getattr(callbacks[name], "strict", True):
            reason = f"is no metric of validation, which logs {', '.join(known)}"
            raise ArgumentError(f"callbacks.{name}.monitor", monitor, reason, {"monitor": f"val/{task.monitor}"})
