"""Lightning's trainer of a run, its device, precision and attention kernels."""

import contextlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from hydra.utils import instantiate
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.callbacks import StochasticWeightAveraging, Timer, WeightAveraging
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from tinyformer.config.checks import check_value
from tinyformer.config.errors import ConfigError
from tinyformer.config.folder import process_number
from tinyformer.data import DataModule, PairSplit, QuestionSplit
from tinyformer.data.stream import Split
from tinyformer.errors import ArgumentError, argument_path, require_choice
from tinyformer.hardware import compute_dtype, keep_freed_memory, resolve_device, resolve_precision
from tinyformer.nn import Network
from tinyformer.run.cluster import is_in_cluster, with_environment
from tinyformer.run.parts import Options
from tinyformer.training.sharding import PRECISIONS, FullyShardedStrategy
from tinyformer.training.trainer_parts import (
    PROFILERS,
    FitLoop,
    ReplicatedStrategy,
    WholeCheckpointIO,
    make_profiler,
)

WITH_CUDA_GRAPHS = ("reduce-overhead", "max-autotune")  # modes that record the kernels of a step as CUDA graphs

NEEDED = ("accelerator", "precision", "max_steps", "limit_val_batches", "enable_progress_bar")
"""Arguments of Lightning's trainer that a run reads itself."""

POSITIVE: dict[str, tuple[int, str]] = {
    "max_steps": (2000, "must be at least 1, or -1 for no limit"),
    "max_epochs": (1, "must be at least 1, or -1 for no limit"),
    "accumulate_grad_batches": (1, "must be at least 1"),
    "log_every_n_steps": (10, "must be at least 1"),
    "val_check_interval": (100, "must be above 0: batches, or a fraction of an epoch"),
    "limit_train_batches": (1, "must be above 0, batches or a fraction of them"),
    "limit_val_batches": (1, "must be above 0, batches or a fraction of them: each validation writes the checkpoints"),
}
"""Arguments of Lightning's trainer that must be above 0, each with a value that works, and the reason."""

STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "ddp": ReplicatedStrategy,
    "fsdp": FullyShardedStrategy,
}
"""What a name stands for, if it is not what Lightning makes of it."""

CHOSEN = (
    *("logger", "callbacks", "default_root_dir", "num_sanity_val_steps", "enable_model_summary", "model_registry"),
    *("use_distributed_sampler", "inference_mode", "enable_autolog_hparams"),
)
"""Arguments of Lightning's trainer that a run sets itself."""

REFUSED: dict[str, tuple[bool | int | None, str]] = {
    "fast_dev_run": (False, "writes no checkpoint, with which a run ends; trainer.max_steps=1 is as short"),
    "barebones": (False, "writes no checkpoint, with which a run ends"),
    "enable_checkpointing": (True, "a run ends with a checkpoint"),
    "reload_dataloaders_every_n_epochs": (0, "would repeat the first epoch"),
    **dict.fromkeys(("limit_test_batches", "limit_predict_batches"), (None, "has no effect: only validation scores")),
}
"""Arguments that a run does not support: the only value that is accepted, and the reason."""


@contextlib.contextmanager
def _told_by_trainer() -> Iterator[None]:
    """Tell what Lightning refuses as a mistake in the `trainer` group."""
    try:
        yield
    except ArgumentError:
        raise
    except (ValueError, TypeError, ImportError, RuntimeError, MisconfigurationException) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise ConfigError(f"trainer: {reason}; `--cfg job -p trainer` prints values that work.") from error


@dataclass(frozen=True)
class Settings:
    """Lightning's arguments and the device of a run."""

    arguments: dict[str, Any]  # of Lightning's trainer, with the precision resolved
    device: str  # the device type
    compile_mode: str | None  # of `torch.compile`, or "auto", see `compile_arguments`; None if nothing is compiled

    @property
    def precision(self) -> Any:
        return self.arguments["precision"]

    @property
    def dtype(self) -> torch.dtype:
        return compute_dtype(self.precision)

    @property
    def is_one_process(self) -> bool:
        return self.arguments.get("devices") in (1, "1", "auto") and (self.arguments.get("num_nodes") or 1) == 1

    @property
    def is_sharded(self) -> bool:
        return self.arguments.get("strategy") == "fsdp"

    @property
    def limit(self) -> float | None:
        """The number of validation batches that are scored, or their fraction; None for all."""
        return self.arguments.get("overfit_batches") or self.arguments["limit_val_batches"]

    def decoded_part(self, data: DataModule, name: str) -> Split:
        """A split; of pairs or questions, only those in the batches that are scored."""
        split = data.splits[name]
        if self.limit is None or not isinstance(split, PairSplit | QuestionSplit):
            return split
        batches = len(data.evaluation_dataloader(name))
        scored = int(self.limit * batches) if isinstance(self.limit, float) else self.limit
        return split.first(scored * data.batch_size)


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


def make_settings(arguments: dict[str, Any], options: Options) -> Settings:
    """The `trainer` group as Lightning's arguments, each checked; the device is chosen."""
    if missing := [name for name in NEEDED if name not in arguments]:
        raise ConfigError(f"trainer.{missing[0]} is needed; leave ~trainer.{missing[0]} out.")
    with argument_path("trainer"):
        if isinstance(strategy := arguments.get("strategy"), dict) and "_target_" in strategy:
            arguments["strategy"] = instantiate(strategy)
        _check_time(arguments.get("max_time"))
        for name, value in arguments.items():
            if not (name == "precision" and value == "auto"):
                check_value(L.Trainer, name, value, f"trainer.{name}")
        for name, (example, reason) in POSITIVE.items():
            value = arguments.get(name)
            if isinstance(value, int | float) and value <= 0 and not (value == -1 and name.startswith("max_")):
                raise ArgumentError(name, value, reason, {name: example})
        _refuse_arguments(arguments)
        if isinstance(arguments.get("val_check_interval"), float) and arguments.get("check_val_every_n_epoch") is None:
            arguments["check_val_every_n_epoch"] = 1  # the fraction is one of each epoch
        _check_strategy(arguments)
        for name, choices in (("profiler", PROFILERS), ("gradient_clip_algorithm", ("norm", "value"))):
            if arguments.get(name) is not None:
                require_choice(name, arguments[name], choices)
        device = resolve_device(arguments["accelerator"])
    torch.set_float32_matmul_precision(options.matmul_precision)
    if device == "cuda":
        torch.cuda.set_device(_own_gpu(arguments["devices"]))
    arguments["precision"] = resolve_precision(arguments["precision"], device)
    if arguments.get("strategy") == "fsdp":
        with argument_path("trainer"):
            require_choice("precision", arguments["precision"], PRECISIONS)
    mode = options.compile_mode
    is_compiled = device == "cuda" if options.compile == "auto" else options.compile
    if is_compiled and mode in WITH_CUDA_GRAPHS and (arguments.get("accumulate_grad_batches") or 1) > 1:
        # A graph overwrites the gradients of the batch before it: github.com/pytorch/pytorch/issues/169545.
        reason = "accumulates wrong gradients in CUDA graphs, with trainer.accumulate_grad_batches above 1"
        raise ArgumentError("compile_mode", mode, reason, {"compile_mode": "default"})
    return Settings(arguments, device, mode if is_compiled else None)


def _check_time(limit: Any) -> None:
    """Refuse what is not a time in a sentence about it: Lightning's are about the arguments of `timedelta`."""
    try:
        Timer(limit)
    except (AttributeError, TypeError, MisconfigurationException) as error:
        reason = "must be days, hours, minutes and seconds as DD:HH:MM:SS, or a mapping of some of these"
        raise ArgumentError("max_time", limit, reason, {"max_time": "00:00:30:00"}) from error


def _check_strategy(arguments: dict[str, Any]) -> None:
    """Refuse processes that could not be started, or that would train apart."""
    if (arguments.get("num_nodes") or 1) > 1 and not is_in_cluster():
        reason = "needs a process on each node, which `torchrun --nnodes` or Slurm starts"
        raise ArgumentError("num_nodes", arguments["num_nodes"], reason, {"num_nodes": 1})
    strategy = arguments.get("strategy")
    copies = str(strategy).startswith(("ddp_spawn", "ddp_fork", "ddp_notebook"))
    if copies or getattr(strategy, "_start_method", "popen") != "popen":
        reason = "starts processes with a copy of the run, which cannot be made"
        raise ArgumentError("strategy", str(strategy), reason, {"strategy": "ddp"})
    if isinstance(strategy, ModelParallelStrategy):
        raise ArgumentError("strategy", type(strategy).__name__, "shards nothing by itself", {"strategy": "fsdp"})


def _refuse_arguments(arguments: dict[str, Any]) -> None:
    """Refuse arguments of Lightning's trainer that would not do in a run what Lightning documents."""
    for name in sorted(arguments.keys() & CHOSEN):
        raise ArgumentError(name, arguments[name], "is chosen by the run; remove it")
    for name, (accepted, reason) in REFUSED.items():
        if arguments.get(name) not in (None, accepted):
            raise ArgumentError(name, arguments[name], reason, {name: accepted})


@_told_by_trainer()
def training_trainer(
    settings: Settings, folder: Path, loggers: Sequence[Logger], callbacks: Sequence[L.Callback]
) -> L.Trainer:
    """Lightning's trainer for a run."""
    strategy, own = settings.arguments.get("strategy"), ("profiler", "plugins", "strategy")
    if settings.is_sharded and any(isinstance(each, WeightAveraging | StochasticWeightAveraging) for each in callbacks):
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


@_told_by_trainer()
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


@_told_by_trainer()
def _own_gpu(devices: Any) -> int:
    """The GPU of this process; Lightning makes it the current one only when training starts."""
    indices = CUDAAccelerator.parse_devices("-1" if devices == "auto" else devices) or [0]
    rank = int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or 0)
    return indices[rank % len(indices)]
