"""The checkpoint that a run starts from: `resume` continues its run, `init_from` starts a new one from its weights."""

import json
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig

from tinyformer.checkpoint.file import (
    EMBEDDING,
    LAST,
    OWN_PREFIXES,
    Checkpoint,
    load_checkpoint,
    load_newest,
    require_fitting,
    start_from,
)
from tinyformer.config.admission import admit_config
from tinyformer.config.errors import ConfigError
from tinyformer.config.invocation import Invocation
from tinyformer.config.keys import format_value
from tinyformer.config.resume import has_checkpoint, is_first_process, require_unused
from tinyformer.data import DataModule, TextTokenizer
from tinyformer.data.tokenizer.untrusted_tokenizer import tokenizer_from_stranger
from tinyformer.errors import ArgumentError, argument_path
from tinyformer.files import relative_path
from tinyformer.nn import Network, Transformer
from tinyformer.run.parts import make_data, make_network, make_seeded_network


@dataclass(frozen=True)
class Start:
    """The checkpoint that a run starts from.

    Args:
        checkpoint: the checkpoint.
        is_resumed: whether the checkpoint's own run continues, with its optimizer state and step count.
    """

    checkpoint: Checkpoint
    is_resumed: bool

    @property
    def key(self) -> str:
        """The config key that names it."""
        return "resume" if self.is_resumed else "init_from"

    @property
    def first_step(self) -> int:
        """The number of optimizer steps from which the run continues."""
        return self.checkpoint.step if self.is_resumed else 0


def load_start(config: DictConfig, folder: Path) -> Start | None:
    """Load the checkpoint that a run starts from, if any.

    Args:
        config: the config, whose `model.vocab_size`, unless it is set, becomes the number of rows of an embedding that
            has more rows than the tokenizer has tokens.
        folder: the folder of the run.

    Raises:
        ConfigError: the folder contains another run.
        ArgumentError: the checkpoint cannot be read or has no tokenizer, or the resumed run has no steps left.
    """
    for key in ("resume", "init_from"):
        if not isinstance(config[key], str | None):
            raise ConfigError(f"{key}={format_value(config[key])}: is not a path.")
    if config.resume is None:
        require_unused(relative_path(folder))
    if config.resume is None and config.init_from is None:
        return None
    # A resumed run has a checkpoint of its own, and the one that it started from may no longer exist.
    if config.resume is None:
        with argument_path(passed={"path": "init_from"}):
            start = Start(load_checkpoint(config.init_from), is_resumed=False)
            _require_same_network(start.checkpoint, config)
    else:
        start = Start(_newest(config.resume), is_resumed=True)
    step, max_steps = start.checkpoint.step, config.trainer.max_steps
    # A run that was killed after its last step still has to be scored.
    has_ended = isinstance(max_steps, int) and 0 <= max_steps <= step and _scored_steps(folder) == step
    if start.is_resumed and has_ended:
        raise ConfigError(
            f"resume={format_value(config.resume)}: the run has completed its {step} steps; "
            f"trainer.max_steps={2 * step} continues it."
        )
    embedding = start.checkpoint.weights.get(EMBEDDING)  # T5's has 32,128 rows, for 32,100 tokens
    if config.model.vocab_size is None and embedding is not None and embedding.ndim:
        num_tokens = tokenizer_of(start.checkpoint, start.key).vocab_size
        config.model.vocab_size = len(embedding) if len(embedding) > num_tokens else None
    return start


def continue_job(config: DictConfig, folder: Path) -> bool:
    """Make a job of a resumed sweep continue the run in its folder, or start one.

    Args:
        config: the config, whose `resume` names the sweep and is set to the job's folder, or to None.
        folder: the folder of the job.

    Returns:
        False if the run has made all its steps and was scored.
    """
    config.resume = str(folder) if has_checkpoint(folder) else None
    scored, max_steps = _scored_steps(folder), config.trainer.max_steps
    has_ended = scored is not None and isinstance(max_steps, int) and 0 <= max_steps <= scored
    if has_ended and config.resume is not None:
        print(f"{relative_path(folder)} has completed its {scored} steps.")
        return False
    return True


def _scored_steps(folder: Path) -> int | None:
    """The number of steps in the results of a run; None if it was not scored, or killed before its sample."""
    try:
        results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
        steps = results["steps"] if "sample" in results else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    return steps if isinstance(steps, int) else None


def _newest(run: str) -> Checkpoint:
    """The newest intact checkpoint of a run to resume; prints a line if it is not the last one."""
    folder = Path(run) / "checkpoints"
    with argument_path(passed={"path": "resume"}):
        checkpoint = load_newest(folder)
    if checkpoint.path.name != LAST and is_first_process():
        print(f"{LAST} is missing or damaged: the run continues from {checkpoint.path.name}, step {checkpoint.step}.")
        if (folder / LAST).exists():  # otherwise the next save would keep it as previous.ckpt
            (folder / LAST).rename(folder / "damaged.ckpt")
    return checkpoint


def prepare_data(config: DictConfig, start: Start | None, invocation: Invocation, device: str) -> DataModule:
    """The data of a run, tokenised by the config's tokenizer, or by that of the checkpoint that the run starts from.

    Args:
        config: the config.
        start: the checkpoint that the run starts from, if any.
        invocation: what the command line says in addition to the config.
        device: the device type that the run computes on.

    Raises:
        ConfigError: a tokenizer is chosen for data that have their own, or the data do not fit the checkpoint.
    """
    chosen = invocation.overridden("tokenizer")
    if chosen and config.get("datamodule") and "tokenizer" not in config.datamodule:
        raise ConfigError(
            f"{chosen[0]}: data={invocation.choices.get('data')} has a tokenizer of its own; leave tokenizer= out."
        )
    # A run that was started from another's weights keeps the tokenizer that came with them.
    tokenizer = None
    if start is not None and not chosen and (config.init_from is not None or not start.is_resumed):
        tokenizer = tokenizer_of(start.checkpoint, start.key).for_training()
    data = make_data(config, invocation.choices, tokenizer)
    with argument_path("datamodule"):
        data.require_device(device)
        data.prepare()
    if start is not None:
        _require_same_vocabulary(start, data.tokenizer)
    if start is not None and start.is_resumed and start.checkpoint.facts.get("data_fingerprint") != data.fingerprint:
        raise ConfigError(
            f"resume={format_value(config.resume)}: {data.title}: the data, or how they are split, have changed; "
            f"init_from={format_value(relative_path(start.checkpoint.path))} starts a new run from its weights."
        )
    return data


def make_starting_network(config: DictConfig, tokenizer: TextTokenizer, start: Start | None) -> Network:
    """The network of a run before its first step; Lightning loads the weights of a resumed run later.

    Raises:
        ArgumentError: the checkpoint does not fit the network, or no parameter would be trained.
    """
    if start is not None:  # before memory is allocated
        within = "" if start.is_resumed else OWN_PREFIXES
        with argument_path(passed={"checkpoint": start.key}):
            require_fitting(make_network(config, tokenizer, "meta"), start.checkpoint, within)
    network = make_seeded_network(config, tokenizer)
    if start is not None:
        with argument_path(passed={"checkpoint": start.key}):
            if not start.is_resumed:
                start_from(network, start.checkpoint, with_readout=has_same_readout(start.checkpoint, config))
    if config.freeze_encoder:
        if not isinstance(network, Transformer):
            reason = "trains the readout alone, but the readout of an encoder–decoder is trained with its decoder"
            raise ArgumentError("freeze_encoder", True, reason, {"freeze_encoder": False})
        network.encoder.requires_grad_(False)
        if not network.num_parameters():
            reason = "no parameter would be trained, since the readout is the token embedding"
            raise ArgumentError("freeze_encoder", True, reason, {"model.tied_readout": False})
    return network


def _require_same_network(checkpoint: Checkpoint, config: DictConfig) -> None:
    """Refuse a checkpoint of another network class, such as an encoder–decoder for a language model.

    Raises:
        ArgumentError: it is one.
    """
    # Any class is admitted, since names are only compared.
    theirs = admit_config(checkpoint, lambda key, name: True)["network"]["_target_"]
    if theirs != config.network._target_:
        names = (target.rpartition(".")[2] for target in (theirs, config.network._target_))
        reason = "is of class {}, and this run trains {}; start from a checkpoint of the same kind of task"
        raise ArgumentError("path", str(checkpoint.path), reason.format(*names))


def has_same_readout(checkpoint: Checkpoint, config: DictConfig) -> bool:
    """Whether a checkpoint's network has a config's kind of readout, for the same class labels."""
    task = admit_config(checkpoint, lambda key, name: True)["task"]  # any class, since names are only compared
    return (task["readout"]["_target_"], task["labels"]) == (config.task.readout._target_, config.task.labels)


def tokenizer_of(checkpoint: Checkpoint, key: str = "path") -> TextTokenizer:
    """The tokenizer of a checkpoint.

    Args:
        checkpoint: the checkpoint.
        key: the argument or config key that names it, for errors.

    Raises:
        ArgumentError: the checkpoint was converted from a folder without a tokenizer, or its tokenizer is malformed.
    """
    if checkpoint.tokenizer is None:
        reason = "has no tokenizer; add a tokenizer.json to the Hugging Face folder and convert it again"
        raise ArgumentError(key, checkpoint.path, reason)
    try:
        return tokenizer_from_stranger(checkpoint.tokenizer)
    except ArgumentError as error:
        raise ArgumentError(key, str(checkpoint.path), f"its tokenizer {error.reason}") from error


def _require_same_vocabulary(start: Start, tokenizer: TextTokenizer) -> None:
    own = tokenizer_of(start.checkpoint, start.key).for_training()
    if tokenizer.fingerprint not in (own.fingerprint, own.with_mask().fingerprint):
        reason = (
            f"its vocabulary of {own.vocab_size} tokens is not that of this run's tokenizer, which has "
            f"{tokenizer.vocab_size}; without tokenizer=, the checkpoint's own is used"
        )
        raise ArgumentError(start.key, start.checkpoint.path, reason)
