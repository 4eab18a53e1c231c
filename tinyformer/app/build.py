"""From the config to the parts of a run, each checked as it is made."""

import logging
import os
import secrets
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import instantiate
from lightning.pytorch.loggers import Logger
from omegaconf import DictConfig, OmegaConf

from tinyformer.app.config import check_value
from tinyformer.checkpoint import Checkpoint
from tinyformer.data import DataModule, TextTokenizer
from tinyformer.errors import argument_path
from tinyformer.nn import AttentionMask, Transformer, kernel_of_layer
from tinyformer.tasks import Task
from tinyformer.training import RunCSVLogger, RunWandbLogger
from tinyformer.training.hardware import compute_dtype, resolve_device, resolve_precision
from tinyformer.training.profilers import PROFILERS, make_profiler


def quiet_libraries() -> None:
    """Silence, one by one, what libraries say that a user of this program can do nothing about."""
    # "GPU available: False, used: False", "`Trainer.fit` stopped: …": the summary says it.
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    for message in (
        # A batch is one gather from a memory map, which takes microseconds: workers would cost more.
        r"The '\w+_dataloader' does not have many workers",
        # Lightning and the torch that it runs on; the next release of either mends it.
        r"`isinstance\(treespec, LeafSpec\)` is deprecated",
        # Flex is compiled on CUDA only; the summary names the kernel.
        r"flex_attention called without torch\.compile",
        # A short run may end before the first report.
        r"The number of training batches .* is smaller than the logging interval",
    ):
        warnings.filterwarnings("ignore", message=message)


def run_dir() -> Path:
    """The folder of this run."""
    return Path(HydraConfig.get().runtime.output_dir)


def is_first_process() -> bool:
    """Whether this process writes: with several, the others only compute."""
    return int(os.environ.get("LOCAL_RANK", "0")) == 0 and int(os.environ.get("NODE_RANK", "0")) == 0


COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
"""Of `torch.compile`."""


def build_data(config: DictConfig, tokenizer: TextTokenizer | None = None) -> DataModule:
    """The run's data, not yet read; in the tokens of a given tokenizer, or of the config's.

    Raises:
        ValueError: the data are none for the task.
    """
    if OmegaConf.select(config, "datamodule", throw_on_resolution_failure=False) is None:
        choices = HydraConfig.get().runtime.choices
        raise ValueError(f"data={choices['data']} has no labels to classify by; data=docstrings has.")
    arguments = {} if tokenizer is None else {"tokenizer": tokenizer}
    return instantiate(config.datamodule, _convert_="all", **arguments)


def build_task(config: DictConfig, data: DataModule) -> Task:
    """What the model is trained for; the classes are the data's, unless the config names them."""
    if config.task.labels is None:
        config.task.labels = data.labels
    return instantiate(config.task.objective, _convert_="all")


def build_network(config: DictConfig, tokenizer: TextTokenizer) -> Transformer:
    """The model for a vocabulary, its weights drawn from `seed`; see `make_network`."""
    L.seed_everything(config.seed, verbose=False)
    return make_network(config, tokenizer)


def make_network(config: DictConfig, tokenizer: TextTokenizer | None) -> Transformer:
    """The model for a vocabulary, or without one of `model.vocab_size` tokens, its weights drawn as they come.

    Raises:
        ValueError: `model.vocab_size` is smaller than the vocabulary.
    """
    wanted, known = config.model.vocab_size, tokenizer.vocab_size if tokenizer else 0
    if wanted is not None and wanted < known:
        raise ValueError(
            f"model.vocab_size={wanted} is smaller than the tokenizer's {known}; model.vocab_size={known} works."
        )
    sized = OmegaConf.merge(config, {"model": {"vocab_size": wanted or known}})
    return instantiate(sized.network, _convert_="all")


def trainer_arguments(config: DictConfig) -> dict[str, Any]:
    """The `trainer` group as Lightning's arguments, each checked, `precision=auto` decided.

    Raises:
        ValueError: an argument does not exist, has another type, or asks for what is not there.
    """
    arguments: dict[str, Any] = OmegaConf.to_container(config.trainer, resolve=True)  # type: ignore[assignment]
    for name, value in arguments.items():
        if not (name == "precision" and value == "auto"):
            check_value(L.Trainer, name, value, f"trainer.{name}")
    for name, value in {"max_steps": 2000, "max_epochs": 1, "accumulate_grad_batches": 1}.items():
        given = arguments.get(name)
        # -1 is Lightning's word for any number of steps or epochs.
        if given is not None and given < 1 and not (given == -1 and name.startswith("max_")):
            raise ValueError(f"trainer.{name}={given} trains nothing; trainer.{name}={value} works.")
    profiler = arguments.get("profiler")
    if profiler is not None and profiler not in PROFILERS:
        raise ValueError(f"trainer.profiler={profiler}: choose one of {', '.join(PROFILERS)}, or null.")
    with argument_path("trainer"):
        arguments["precision"] = resolve_precision(arguments["precision"], resolve_device(arguments["accelerator"]))
    return arguments


def scoring_trainer(
    arguments: dict[str, Any], folder: Path, loggers: Sequence[Logger] = (), callbacks: Sequence[L.Callback] = ()
) -> L.Trainer:
    """Lightning's trainer to score with: on one device, silently.

    Args:
        arguments: those of `trainer_arguments`.
        folder: of the run.
        loggers: of the run.
        callbacks: of the run.
    """
    return L.Trainer(
        **arguments
        | {
            "enable_progress_bar": False,
            "devices": 1,
            "strategy": "auto",
            "profiler": make_profiler(arguments.get("profiler"), folder),
        },
        default_root_dir=folder,
        logger=list(loggers),
        callbacks=list(callbacks),
        enable_model_summary=False,
        enable_checkpointing=False,
    )


def resolve_kernels(network: Transformer, arguments: dict[str, Any], mask: AttentionMask, training: bool) -> list[str]:
    """Fix the attention backend of every layer, and name the kernel that truly runs in each.

    Args:
        network: the model.
        arguments: of the trainer.
        mask: of the task.
        training: whether the network is to be trained.
    """
    device, dtype = resolve_device(arguments["accelerator"]), compute_dtype(arguments["precision"])
    with argument_path("network"):
        network.resolve_backends(device, dtype, mask, training)
    return [kernel_of_layer(layer, device, dtype, mask, training=training) for layer in network.attentions()]


def compile_arguments(config: DictConfig, device: str) -> dict[str, Any] | None:
    """What `torch.compile` is given; None where the network stays as it is: "auto" compiles on CUDA.

    Raises:
        ValueError: `compile` is none of true, false and auto, or there is no such mode.
    """
    choices = {"auto": device == "cuda", True: True, False: False}
    if config.compile not in choices:
        raise ValueError(f"compile={config.compile}: choose true, false or auto.")
    if config.compile_mode not in COMPILE_MODES:
        raise ValueError(f"compile_mode={config.compile_mode}: choose {', '.join(COMPILE_MODES)}.")
    return {"mode": config.compile_mode} if choices[config.compile] else None


def build_loggers(config: DictConfig, first_step: int = 0) -> list[Logger]:
    """`metrics.csv` always, and what `logger` asks for.

    Args:
        config: of the run.
        first_step: from which a resumed run goes on.
    """
    folder = run_dir()
    loggers: list[Logger] = [RunCSVLogger(folder / "metrics.csv", first_step)]
    if "_target_" in config.logger:
        is_sweep = HydraConfig.get().mode == RunMode.MULTIRUN
        run = {
            "run_dir": str(folder),
            "run_id": _wandb_id(folder),
            "group": "/".join(folder.parts[-3:-1]) if is_sweep else None,
        }
        loggers.append(instantiate(config.logger, _convert_="all", **run))
    return loggers


def close_loggers(loggers: list[Logger], status: str) -> None:
    """End the logging inside the job: in a sweep the next job opens its own.

    Args:
        loggers: of the run.
        status: "success", or anything else for a run that ended early.
    """
    for logger in loggers:
        logger.finalize(status)
        if isinstance(logger, RunWandbLogger):
            logger.finish(failed=status != "success")


def wandb_whereabouts(loggers: list[Logger]) -> str | None:
    """Where the run is seen in Weights & Biases, if it is logged there."""
    return next((logger.location() for logger in loggers if isinstance(logger, RunWandbLogger)), None)


def build_callbacks(config: DictConfig) -> list[L.Callback]:
    """The `callbacks` group; an entry that is null is left out."""
    nodes = [node for node in config.callbacks.values() if node is not None]
    return [instantiate(node, _convert_="all") for node in nodes]


def _wandb_id(folder: Path) -> str:
    """The same for a run and its resumption, so that they are one run in the browser."""
    path = folder / "wandb" / "run_id"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(secrets.token_hex(4))
    return path.read_text().strip()


def tokenizer_of(checkpoint: Checkpoint, key: str) -> TextTokenizer:
    """The tokenizer of a checkpoint.

    Raises:
        ValueError: the model came from a folder that has none.
    """
    if checkpoint.tokenizer is None:
        raise ValueError(
            f"{key}={checkpoint.path} has no tokenizer, as the folder that it came from has none; with a "
            "tokenizer.json there, `python -m tinyformer.convert hf` gives it one."
        )
    return TextTokenizer.from_json(checkpoint.tokenizer)


def require_same_vocabulary(checkpoint: Checkpoint, tokenizer: TextTokenizer, key: str) -> None:
    """Refuse text whose tokens are not those that a checkpoint knows.

    Raises:
        ValueError: the two tokenizers differ.
    """
    theirs = tokenizer_of(checkpoint, key)
    if tokenizer.fingerprint not in (theirs.fingerprint, theirs.with_mask().fingerprint):
        raise ValueError(
            f"{key}={checkpoint.path}: its vocabulary of {theirs.vocab_size} tokens does not fit this run's tokenizer, "
            f"which has {tokenizer.vocab_size}. With init_from, leave tokenizer= out: the checkpoint brings its own."
        )
