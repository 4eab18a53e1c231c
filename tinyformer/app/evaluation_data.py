"""The data of an evaluation: those of the checkpoint's run, in the same splits, or others."""

import os.path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationToMissingValueError

from tinyformer.app.config import Invocation
from tinyformer.app.parts import make_data
from tinyformer.app.start import tokenizer_of
from tinyformer.app.stored_config import recorded_sources
from tinyformer.checkpoint import Checkpoint
from tinyformer.data import DataModule
from tinyformer.errors import ArgumentError, argument_path

HOLD_OUT = ("data.validation_fraction", "data.test_fraction", "data.group_near_copies", "data.split_seed")
"""Keys that determine which of the texts are held out."""

NOT_READ = ("batch_size", "num_workers", "cache_dir", "seed", "split_seed")
"""Last parts of keys that do not say what is read."""


def prepare_data(
    config: DictConfig, stored: dict[str, Any], checkpoint: Checkpoint, invocation: Invocation
) -> tuple[DataModule, str]:
    """The data, tokenised by the checkpoint's tokenizer, and the split to score.

    Args:
        config: the config of the evaluation.
        stored: the unresolved config of the checkpoint's run.
        checkpoint: the checkpoint.
        invocation: what the command line says in addition to the config.

    Raises:
        ArgumentError: the data are those of the run, but would be split in another way; or there is no such split.
    """
    is_own, split = reads_own_data(config, stored, checkpoint), config.split
    if is_own and split != "all":
        require_own_splits(config, stored)
    data, tokenizer = make_data(config, invocation.choices), tokenizer_of(checkpoint, "checkpoint")
    with argument_path("datamodule"):
        if split is None:
            split = "validation" if is_own or not data.scored_whole else "all"
        # The run's own data may already be in the cache, tokenised by its tokenizer.
        if not data.is_prepared(tokenizer, whole=split == "all"):
            data = make_data(config, invocation.choices, tokenizer)
        data.prepare(whole=split == "all")
    data.require_split(split)
    return data, split


def reads_own_data(config: DictConfig, stored: dict[str, Any], checkpoint: Checkpoint) -> bool:
    """Whether a config reads what the run of a checkpoint read; an imported checkpoint has no run."""
    if checkpoint.facts.get("data_fingerprint") is None:
        return False
    own = OmegaConf.create({name: stored[name] for name in ("data", "seed")})
    for key, value in recorded_sources(checkpoint).items():
        OmegaConf.update(own, key, value)
    try:
        return what_is_read(config) == what_is_read(own)
    except InterpolationToMissingValueError:
        return False  # a checkpoint that does not say what its run read


def what_is_read(config: DictConfig) -> dict[str, Any]:
    """The values of a config's source; for generated data, which have none, the values of the data themselves."""
    source = OmegaConf.select(config, "data.source")
    if source is not None:
        return _without_not_read(OmegaConf.to_container(source, resolve=True))
    values: Any = OmegaConf.to_container(config.data, resolve=False)
    return _without_not_read({name: value for name, value in values.items() if not isinstance(value, dict)})


def _without_not_read(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    read = {name: _without_not_read(value) for name, value in node.items() if name not in NOT_READ}
    return read | ({"files": _normal(read["files"])} if "files" in read else {})


def _normal(files: Any) -> Any:
    """Paths without "./" and the like, so that two spellings of a path count as one."""
    names = [files] if isinstance(files, str) else files
    return [os.path.normpath(name) for name in names] if isinstance(names, list) else names


def require_own_splits(config: DictConfig, stored: dict[str, Any]) -> None:
    """Refuse to hold out other texts than the run did: the checkpoint has been trained on some of them.

    Raises:
        ArgumentError: a key of `HOLD_OUT` differs.
    """
    own = OmegaConf.create({name: stored[name] for name in ("data", "seed")})
    for key in HOLD_OUT:
        value, of_run = OmegaConf.select(config, key), OmegaConf.select(own, key)
        if value != of_run:
            reason = "would hold out text that the checkpoint was trained on; the splits are those of its run"
            raise ArgumentError(key, value, reason, {key: of_run})
