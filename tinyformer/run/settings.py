"""The settings of a run: the checked values of its config, its device, its precision and its initial checkpoint."""

import contextlib
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from hydra.utils import instantiate
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.plugins.environments import (
    LSFEnvironment,
    MPIEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig, OmegaConf

from tinyformer.checkpoint.file import Checkpoint, load_step
from tinyformer.config.admission import register_score
from tinyformer.config.checks import check_types, check_value
from tinyformer.config.errors import ConfigError
from tinyformer.config.folder import require_unused
from tinyformer.config.launch import CommandLine
from tinyformer.data import DataModule, PairSplit, QuestionSplit
from tinyformer.data.stream import Split
from tinyformer.errors import ArgumentError, argument_path, relative_path, require_choice
from tinyformer.generation.generation import Beam, Sampling, require_amount
from tinyformer.hardware import compute_dtype, resolve_device, resolve_precision
from tinyformer.run.starting_checkpoint import InitialCheckpoint, load_start, refuse_finished
from tinyformer.training.sharding import PRECISIONS
from tinyformer.training.trainer_parts import PROFILERS

WITH_CUDA_GRAPHS = ("reduce-overhead", "max-autotune")  # modes that record the kernels of a step as CUDA graphs

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

CHOSEN = (
    *("logger", "callbacks", "default_root_dir", "num_sanity_val_steps", "enable_model_summary", "model_registry"),
    *("use_distributed_sampler", "inference_mode", "enable_autolog_hparams", "enable_checkpointing", "barebones"),
    *("fast_dev_run", "reload_dataloaders_every_n_epochs", "limit_test_batches", "limit_predict_batches"),
)
"""Arguments of Lightning's trainer that a run sets itself, or that would have no effect."""

CLUSTERS = (TorchElasticEnvironment, SLURMEnvironment, LSFEnvironment, MPIEnvironment)
"""The launchers, such as torchrun and Slurm, that start the processes of a run."""


@dataclass(frozen=True)
class Options:
    """The values of `train.yaml` and `evaluate.yaml` that are in no group."""

    seed: int = 0
    deterministic: bool | Literal["warn"] = False
    matmul_precision: Literal["highest", "high", "medium"] = "highest"
    compile: Literal["auto", True, False] = "auto"
    compile_mode: Literal["auto", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "auto"
    resume: str | None = None
    init_from: str | None = None
    freeze_encoder: bool = False
    checkpoint: str = ""
    step: int | Literal["all"] | None = None
    split: Literal["train", "validation", "test", "all"] | None = None
    score: bool | None = None
    predict: bool = False

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "Options":
        return cls(**{each.name: values[each.name] for each in fields(cls) if each.name in values})


@dataclass(frozen=True)
class Generation:
    """The `generate` group, whose comments describe its values."""

    prompt: str | list[str] | None = None
    prompt_file: str | None = None
    num_tokens: int = 200
    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    repetition_penalty: float = 1.0
    num_return_sequences: int = 1
    stop: str | list[str] | None = None
    beams: int = 4
    length_penalty: float = 1.0
    length_offset: float = 0.0

    def __post_init__(self) -> None:
        require_amount(self.num_tokens, self.seed, self.num_return_sequences, self.stops)
        _ = self.prompts, self.sampling(), self.beam  # raise an error for an invalid value

    @functools.cached_property
    def prompts(self) -> list[str]:
        """The prompts; a single empty prompt if none is given."""
        if self.prompt_file is None:
            return self.prompt if isinstance(self.prompt, list) else [self.prompt or ""]
        path = Path(self.prompt_file)
        if self.prompt is not None:
            raise ArgumentError("prompt_file", path, "only one of `prompt` and `prompt_file` can be given")
        try:
            return [path.read_text(encoding="utf-8")]
        except (OSError, UnicodeDecodeError) as error:
            raise ArgumentError("prompt_file", path, f"cannot be read as UTF-8 text ({error})") from error

    @property
    def stops(self) -> list[str]:
        """The strings at which generation stops."""
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [text.replace(r"\n", "\n") for text in given]  # a shell passes on \n as it is typed

    @property
    def has_prompt(self) -> bool:
        return self.prompt is not None or self.prompt_file is not None

    def sampling(self, suppressed: Sequence[int] = ()) -> Sampling:
        """The rule of sampling, under which the token ids in `suppressed` are never drawn."""
        return Sampling(self.temperature, self.top_k, self.top_p, suppressed, self.repetition_penalty)

    @functools.cached_property
    def beam(self) -> Beam:
        return Beam(self.beams, self.length_penalty, self.length_offset)

    def refuse_prompt(self, reason: str, can_be_left_out: bool = False) -> None:
        for name in ("prompt", "prompt_file"):
            if (value := getattr(self, name)) is not None:
                raise ArgumentError(name, value, reason, {name: None} if can_be_left_out else None)

    def of(self, texts: list[str]) -> str | list[str]:
        """The generated texts: a list if `prompt` is a list or there are several texts, else one string."""
        return texts if isinstance(self.prompt, list) or len(texts) > 1 else texts[0]


def make_generation(group: Mapping[str, Any]) -> Generation:
    """The settings of the `generate` group."""
    with argument_path("generate"):
        return Generation(**group)


@dataclass(frozen=True)
class Settings:
    """The checked settings of a run, with its device and precision."""

    arguments: dict[str, Any]  # arguments of Lightning's trainer, with the precision resolved
    device: str  # the device type
    compile_mode: str | None  # mode of `torch.compile`, or "auto", see `compile_arguments`; None: no compiling
    options: Options = Options()  # the values in no group
    generation: Generation = field(default_factory=Generation)  # the text generation at the end
    start: InitialCheckpoint | None = None  # the checkpoint that the run begins with
    is_training: bool = True  # False for an evaluation
    is_scored: bool = True  # whether the split is scored, its attention maps are drawn and text is generated

    @property
    def is_resumed(self) -> bool:
        """Return True if a run continues, with its optimizer state and step count."""
        return self.start is not None and self.start.is_resumed

    @property
    def resumed_facts(self) -> dict[str, Any]:
        """The facts of the checkpoint that is resumed, see `checkpoint_contents`; {} for a new run."""
        return self.start.checkpoint.facts if self.start is not None and self.is_resumed else {}

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
        """The split `name`; a split of pairs or questions is cut to the batches that are scored, see `limit`."""
        split = data.splits[name]
        if self.limit is None or not isinstance(split, PairSplit | QuestionSplit):
            return split
        batches = len(data.evaluation_dataloader(name))
        scored = int(self.limit * batches) if isinstance(self.limit, float) else self.limit
        return split.first(scored * data.batch_size)


def read_settings(
    config: DictConfig, folder: Path, invocation: CommandLine, is_training: bool, checkpoint: Checkpoint | None = None
) -> Settings:
    """Check the settings of a run, and load the checkpoint that it begins with unless `checkpoint` is given.

    Sets `trainer.precision`, and `model.vocab_size` if the embedding has more rows than the tokenizer has tokens.
    """
    check_config(config)
    values: Any = OmegaConf.to_container(config, resolve=True)
    options, generation, arguments = Options.of(values), make_generation(values["generate"]), values["trainer"]
    if not is_training:
        with argument_path(passed={"path": "checkpoint"}):
            path = checkpoint.path if checkpoint else options.checkpoint
            evaluated = InitialCheckpoint(load_step(path, options.step, checkpoint), "checkpoint")
        if arguments.get("precision") == "auto":
            arguments["precision"] = config.trainer.precision = evaluated.checkpoint.facts.get("precision", "32-true")
        is_scored = check_score(options, config.get("analysis") is not None, generation)
        settings = make_settings(arguments, options)
        settings = replace(settings, generation=generation, start=evaluated, is_training=False, is_scored=is_scored)
        return replace(settings, compile_mode=None)  # a few batches do not pay for compiling
    settings = make_settings(arguments, options)
    config.trainer.precision = settings.precision
    if options.resume is None:
        require_unused(relative_path(folder))
    start = load_start(options.resume, options.init_from) if options.resume or options.init_from else None
    if start is not None:
        if start.is_resumed:
            refuse_finished(start, folder, arguments["max_steps"])
        else:
            start.require_class(config.network._target_)
        if config.model.vocab_size is None:
            config.model.vocab_size = start.larger_vocabulary
    return replace(settings, generation=generation, start=start)


def check_config(config: DictConfig) -> None:
    """Check the type of every value that a class or function receives."""
    if "decoder" in config.network and config.get("cross_attention") is None:
        raise ConfigError("network: its decoder needs a cross_attention; use task=seq2seq in place of network=.")
    unresolved: Any = OmegaConf.to_container(config, resolve=False)
    register_score(unresolved)
    check_types(config, groups={"": Options, "generate": Generation})


def check_score(options: Options, is_analysed: bool, generation: Generation) -> bool:
    """Return True if an evaluation scores its split: if `score` is true, or is null and there is no analysis.

    Options that would have no effect, such as a prompt for an analysis, are refused.
    """
    if options.predict and (is_analysed or options.score or options.split or generation.has_prompt):
        reason = "predicts all rows of the files, without a score, a split, an analysis or a prompt"
        raise ArgumentError("predict", True, reason, {"predict": False})
    is_scored = not (is_analysed or options.predict) if options.score is None else options.score
    if not is_scored:
        with argument_path("generate"):
            generation.refuse_prompt("has no effect on an analysis alone; add score=true")
    return is_scored


@contextlib.contextmanager
def trainer_errors() -> Iterator[None]:
    """Turn errors of Lightning's trainer about its arguments into a `ConfigError` about the `trainer` group."""
    try:
        yield
    except ArgumentError:
        raise
    except (ValueError, TypeError, ImportError, RuntimeError, MisconfigurationException) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise ConfigError(f"trainer: {reason}; `--cfg job -p trainer` prints values that work.") from error


def make_settings(arguments: dict[str, Any], options: Options = Options()) -> Settings:
    """Check the `trainer` group as arguments of Lightning's trainer, and choose the device and precision."""
    with argument_path("trainer"):
        if isinstance(strategy := arguments.get("strategy"), dict) and "_target_" in strategy:
            arguments["strategy"] = instantiate(strategy)
        _check_arguments(arguments)
        if isinstance(arguments.get("val_check_interval"), float) and arguments.get("check_val_every_n_epoch") is None:
            arguments["check_val_every_n_epoch"] = 1  # the fraction refers to each epoch
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
    return Settings(arguments, device, mode if is_compiled else None, options)


def _check_arguments(arguments: dict[str, Any]) -> None:
    """Refuse arguments of Lightning's trainer that have a wrong type, are too small, or are set by a run itself."""
    for name, value in arguments.items():
        if not (name == "precision" and value == "auto"):
            check_value(L.Trainer, name, value, f"trainer.{name}")
    for name, (example, reason) in POSITIVE.items():
        value = arguments.get(name)
        if isinstance(value, int | float) and value <= 0 and not (value == -1 and name.startswith("max_")):
            raise ArgumentError(name, value, reason, {name: example})
    for name in sorted(arguments.keys() & CHOSEN):
        raise ArgumentError(name, arguments[name], "is not an argument that a run accepts; remove it")


def _check_strategy(arguments: dict[str, Any]) -> None:
    """Refuse several nodes without a launcher that starts their processes: Lightning would wait for them forever."""
    in_cluster = "NODE_RANK" in os.environ or any(cluster.detect() for cluster in CLUSTERS)
    if (arguments.get("num_nodes") or 1) > 1 and not in_cluster:
        reason = "needs a process on each node, which `torchrun --nnodes` or Slurm starts"
        raise ArgumentError("num_nodes", arguments["num_nodes"], reason, {"num_nodes": 1})


@trainer_errors()
def _own_gpu(devices: Any) -> int:
    """The index of the GPU of this process; Lightning selects this GPU only when training starts."""
    indices = CUDAAccelerator.parse_devices("-1" if devices == "auto" else devices) or [0]
    rank = int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or 0)
    return indices[rank % len(indices)]
