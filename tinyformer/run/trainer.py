"""Lightning's trainer of a run, its callbacks and its loggers: `metrics.csv`, and the loggers of the `logger` group."""

import contextlib
import inspect
import logging
import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path, PurePath
from secrets import token_hex
from typing import Any

import lightning as L
import torch
from hydra.utils import get_class, instantiate
from lightning.pytorch import callbacks as of_lightning
from lightning.pytorch.loggers import Logger, MLFlowLogger
from lightning.pytorch.plugins.environments import (
    ClusterEnvironment,
    LightningEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from lightning.pytorch.strategies import Strategy
from omegaconf import DictConfig, OmegaConf

from tinyformer.config.conf import values_of_keys
from tinyformer.config.errors import ConfigError
from tinyformer.config.folder import is_first_process, process_number
from tinyformer.costs.network import count_costs
from tinyformer.errors import ArgumentError, relative_path
from tinyformer.hardware import keep_freed_memory
from tinyformer.nn import Network
from tinyformer.run.settings import Settings, trainer_errors
from tinyformer.training import FiniteCheck, RunCSVLogger, RunWandbLogger, Snapshots
from tinyformer.training.loggers import map_texts, public
from tinyformer.training.sharding import FullyShardedStrategy
from tinyformer.training.trainer_parts import FitLoop, ReplicatedStrategy, WholeCheckpointIO, make_profiler

REFUSED: dict[type[L.Callback], str] = {
    of_lightning.BaseFinetuning: "changes which weights are optimized; freeze_encoder=true trains the readout alone",
    of_lightning.BatchSizeFinder: "changes batches for which the run has been planned; set data.batch_size",
    of_lightning.GradientAccumulationScheduler: "changes the length of a run; set trainer.accumulate_grad_batches",
    of_lightning.LearningRateFinder: "does not find optimizer.lr; -m optimizer.lr=1e-3,3e-3 compares rates",
    of_lightning.StochasticWeightAveraging: "averages after the last checkpoint; EMAWeightAveraging does not",
}
"""Callbacks of Lightning that would not work in a run as documented, each with the reason and an alternative."""

STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "ddp": ReplicatedStrategy,
    "fsdp": FullyShardedStrategy,
}
"""Our strategies that replace Lightning's, by their names in `trainer.strategy`."""


def set_up_process() -> None:
    """Silence messages of libraries that a user can do nothing about, and let the process reuse the memory it frees."""
    # "GPU available: False, used: False" and "`Trainer.fit` stopped: …": the summary says it.
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    logging.getLogger("lightning.pytorch.callbacks.model_summary").setLevel(logging.INFO)  # used if a user adds it
    for library in ("httpx", "httpx2", "absl"):  # a line for each request to the Hub; ROUGE's tokenizer
        logging.getLogger(library).setLevel(logging.WARNING)
    for message in (
        # A batch is one gather from a memory map, which takes microseconds: workers would cost more.
        r"The '\w+_dataloader' does not have many workers",
        # Lightning's own use of a deprecated function of torch.
        r"`isinstance\(treespec, LeafSpec\)` is deprecated",
        # On a node of a cluster from which jobs are started.
        r"The `srun` command is available",
        # Since torch 2.13; earlier versions lack the new argument.
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
    """Make Lightning's trainer for a training run that writes into a folder."""
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
        reason = f"is for one process, but {number} says that this one is not the first; unset it, or use trainer=ddp"
        raise ArgumentError("trainer.devices", settings.arguments.get("devices"), reason)
    trainer.fit_loop = FitLoop(trainer)
    return trainer


def require_one_process(trainer: L.Trainer) -> None:
    """Refuse a trainer that starts processes by repeating the command of this process, which may be a notebook."""
    launcher = trainer.strategy.launcher
    if trainer.world_size > 1 and launcher is not None and not launcher.is_interactive_compatible:
        raise ConfigError(
            f"trainer.devices={trainer.num_devices}: tinyformer.train uses one process; `tinyformer train` on the "
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
    """Make Lightning's trainer for scoring a split, on one device and without a progress bar."""
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


def with_environment(plugins: Sequence[Any], is_alone: bool) -> list[Any]:
    """Add a plugin that describes the launcher of the run's processes to the plugins of Lightning's trainer.

    With `is_alone`, there is one process. Under Slurm, Lightning's default plugin would save checkpoints at a signal.
    """
    if any(isinstance(plugin, ClusterEnvironment) for plugin in plugins):
        return list(plugins)
    if is_alone:
        return [*plugins, LightningEnvironment()]
    is_slurm = SLURMEnvironment.detect() and not TorchElasticEnvironment.detect()
    return [*plugins, *([SLURMEnvironment(auto_requeue=False)] if is_slurm else [])]


@contextlib.contextmanager
def forward_context(trainer: L.Trainer, network: Network) -> Iterator[None]:
    """Compute on a trainer's device and in its precision inside a `with` statement, as in the trainer's loops.

    The loops leave the network on the CPU. A compiled network runs uncompiled in the `with` statement, since each new
    shape would compile it again; FlexAttention stays compiled.
    """
    network.to(trainer.strategy.root_device)
    compiled, network._compiled_call_impl = network._compiled_call_impl, None
    try:
        with trainer.precision_plugin.forward_context():
            yield
    finally:
        network._compiled_call_impl = compiled


def make_callbacks(group: DictConfig) -> dict[str, L.Callback]:
    """Make the callbacks of the `callbacks` group, by their names in the group; entries of null are left out.

    `FiniteCheck` comes after callbacks that may change gradients, since gradients are clipped by the norm that it
    computes; `Snapshots` comes last.
    """
    made = {str(name): instantiate(node, _convert_="all") for name, node in group.items() if node is not None}
    for name, callback in made.items():
        for reason in (reason for kind, reason in REFUSED.items() if isinstance(callback, kind)):
            raise ArgumentError(f"callbacks.{name}", type(callback).__name__, reason, {name: None})
    rank = {name: (isinstance(each, Snapshots), isinstance(each, FiniteCheck)) for name, each in made.items()}
    return {name: made[name] for name in sorted(made, key=rank.__getitem__)}


def make_loggers(group: DictConfig, folder: Path, is_sweep: bool = False, first_step: int = 0) -> list[Logger]:
    """Make the loggers of a run, for `metrics.csv` and of the `logger` group; the folder is made if it is missing.

    The group is the node of one logger, or has a node for each logger. The runs of a sweep are one group in Weights &
    Biases. A resumed run continues from `first_step`.
    """
    nodes = [group] if "_target_" in group else [node for node in group.values() if node is not None]
    folder.mkdir(parents=True, exist_ok=True)
    loggers: list[Logger] = [RunCSVLogger(folder / "metrics.csv", first_step)]
    for node in nodes:
        loggers.append(instantiate(node, _convert_="all", **_facts_of_run(node, folder, is_sweep)))
    return loggers


def _facts_of_run(node: DictConfig, folder: Path, is_sweep: bool) -> dict[str, Any]:
    """The arguments that a run gives to a logger if the logger's node lacks them, such as the folder and a name."""
    logger = get_class(node._target_)
    facts: dict[str, Any] = {"save_dir": str(folder), "run_name": "/".join(folder.parts[-2:])}
    if issubclass(logger, RunWandbLogger):
        group = "/".join(folder.parts[-3:-1]) if is_sweep else None
        facts = {"run_dir": str(folder), "run_id": _wandb_id(folder), "group": group}
    elif issubclass(logger, MLFlowLogger):  # its default is a folder, which MLflow no longer supports
        facts["tracking_uri"] = os.environ.get("MLFLOW_TRACKING_URI", "sqlite:///mlflow.db")
    return {name: facts[name] for name in facts.keys() & inspect.signature(logger).parameters.keys() - node.keys()}


def log_hyperparameters(loggers: list[Logger], config: dict[str, Any], network: Network) -> None:
    """Log the config of a run, given unresolved, and the costs of its network, except into `metrics.csv`."""
    for logger in loggers[1:]:
        logger.log_hyperparams(_hyperparameters(config, network))


@contextlib.contextmanager
def closing(loggers: list[Logger]) -> Iterator[None]:
    """Close loggers at the end of a `with` statement, so that the next job of a sweep opens its own."""
    status = "failed"
    try:
        yield
        status = "success"
    finally:
        for logger in loggers:
            logger.finalize(status)
            if isinstance(logger, RunWandbLogger):
                logger.finish(failed=status != "success")


def wandb_location(loggers: list[Logger]) -> str | None:
    """The URL of the run in Weights & Biases, or the command that uploads it; None if it is not logged there."""
    return next((logger.location() for logger in loggers if isinstance(logger, RunWandbLogger)), None)


def _hyperparameters(config: dict[str, Any], network: Network) -> dict[str, Any]:
    """The resolved config as nested plain values, and `costs`. `${oc.env:NAME}` is kept; paths lose their folders."""
    ours = {value for values in values_of_keys().values() for value in values if isinstance(value, str)}

    def shortened(text: str) -> str:
        is_path = text.startswith(("/", "~", "..")) or os.path.exists(text)
        return text if text in ours else public(PurePath(text).name if is_path else text)

    costs = {}
    with contextlib.suppress(ArgumentError):  # raised for layers that cannot be counted
        costs = asdict(count_costs(network))
    config = map_texts(lambda text: text.replace("${", "\\${") if "oc.env" in text else text, config)
    return map_texts(shortened, OmegaConf.to_container(OmegaConf.create(config), resolve=True)) | {"costs": costs}


def _wandb_id(folder: Path) -> str:
    """The id of a run in Weights & Biases, which the resumed run keeps; a copy of the folder gets its own id."""

    def stored(path: Path) -> list[str]:
        return os.fsdecode(path.read_bytes()).split("\n", 1) if path.is_file() else []

    path, here = folder / "wandb" / "run_id", str(folder.resolve())
    run_id, *home = stored(path) or [token_hex(4)]
    if not re.fullmatch(r"[0-9a-f]{8}", run_id):
        raise ConfigError(f"{relative_path(path)} contains no id of a wandb run; remove the file to make a new one.")
    if home != [here] and is_first_process():  # the folder is new, or was moved or copied
        run_id = token_hex(4) if home and stored(Path(*home, "wandb", "run_id"))[:1] == [run_id] else run_id
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.fsencode(f"{run_id}\n{here}"))
    return run_id
