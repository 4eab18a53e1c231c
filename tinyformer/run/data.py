"""The data of a run: those of its config, in a training run, and in an evaluation of a checkpoint."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from jaxtyping import UInt64
from torch import Tensor

from tinyformer.checkpoint.file import Checkpoint
from tinyformer.config.errors import ConfigError
from tinyformer.config.keys import format_value
from tinyformer.data import DataModule, GeneratedDataModule
from tinyformer.errors import ArgumentError, argument_path
from tinyformer.files import relative_path
from tinyformer.run.starting_checkpoint import Start

Fingerprints: TypeAlias = UInt64[np.ndarray, " fingerprints"]
MakeData = Callable[..., DataModule]  # `make_data` of a config: its argument is a tokenizer that replaces the config's


def training_data(make: MakeData, start: Start | None, inherits_tokenizer: bool, device: str) -> DataModule:
    """The data of a training run; a `ConfigError` if they do not fit the checkpoint that it starts from.

    With `inherits_tokenizer`, the checkpoint's tokenizer replaces the config's.
    """
    data = make(start.tokenizer.for_training() if start is not None and inherits_tokenizer else None)
    with argument_path("datamodule"):
        data.require_device(device)
        if start is not None:
            is_own = start.is_resumed or reads_own_data(data, start.checkpoint)
            data.without = known_text(start.checkpoint, is_own)
        data.prepare()
    if start is not None:
        for split in filter(partial(_is_all_known, data), data.splits):
            reason = f"was trained on all text of the {split} split of these data; other data are needed"
            raise ArgumentError(start.key, str(start.checkpoint.path), reason)
        start.require_same_vocabulary(data.tokenizer)
        if start.is_resumed and start.checkpoint.facts.get("data_fingerprint") != data.fingerprint:
            path = start.checkpoint.path
            raise ConfigError(
                f"resume={format_value(relative_path(path.parents[1]))}: {data.title}: the data, or how they are "
                f"split, have changed; init_from={format_value(relative_path(path))} starts a new run from its weights."
            )
    return data


def evaluation_data(
    make: MakeData, start: Start, split: str | None, settings: Mapping[str, Any]
) -> tuple[DataModule, str]:
    """The data of an evaluation, tokenised by the checkpoint's tokenizer, and the split to score.

    Unless they are the run's own, and in the run's splits, the text that its weights were trained on is left out of
    every split but "train". `settings` are the values of the `data` group.
    """
    data = make()
    with argument_path("datamodule"):
        is_own = reads_own_data(data, start.checkpoint)
        split = split or ("validation" if is_own or not data.scored_whole else "all")
        whole = split == "all"
        if isinstance(data, GeneratedDataModule):
            require_own_draw(settings, data, start.stored["data"])
        without = None if split == "train" and not is_own else known_text(start.checkpoint, is_own and not whole)
        data.without = without
        # The run's own data may already be in the cache, tokenised by its tokenizer.
        if not data.is_prepared(start.tokenizer, whole):
            data = make(start.tokenizer)
            data.without = without
        data.prepare(whole)
    data.require_split(split)
    if _is_all_known(data, split):
        raise ArgumentError("split", split, "the run was trained on all of it", {"split": "train"})
    return data, split


def require_own_draw(settings: Mapping[str, Any], data: DataModule, of_run: Mapping[str, Any]) -> None:
    """Refuse to draw other sequences of the run's kind than it has: some of them may be those that it was trained on.

    `settings` are the values of the `data` group of the evaluation, `of_run` those of the checkpoint's run.
    """
    if of_run["module"]["_target_"].rpartition(".")[2] != type(data).__name__:
        return
    for name in ("split_seed", "train_fraction"):
        value, drawn = settings.get(name), of_run.get(name)
        if value != drawn:
            reason = "would make other splits, with sequences that the checkpoint may have been trained on"
            raise ArgumentError(name, value, reason, {name: drawn})


def known_text(checkpoint: Checkpoint, of_own_data: bool = False) -> Fingerprints | None:
    """The fingerprints of the text that the weights of a checkpoint were trained on; None if none are known.

    The held-out splits of its run's own data have none of their training text, so that there only the text counts that
    the weights which the run began with were trained on.
    """
    if checkpoint.trained_on is None:
        return None
    rows = checkpoint.trained_on.numpy().view(np.uint64)
    rows = rows[: checkpoint.facts.get("inherited", 0)] if of_own_data else rows
    return rows if len(rows) else None


def trained_text(data: DataModule, start: Start | None) -> tuple[Tensor | None, int]:
    """The fingerprints that a checkpoint keeps: first those that its run leaves out, whose number is returned, too."""
    parts = (data.without, data.trained_on, known_text(start.checkpoint) if start is not None else None)
    if not (known := [rows for rows in parts if rows is not None]):
        return None, 0
    inherited = np.zeros(0, np.uint64) if data.without is None else data.without
    rows = np.concatenate([inherited, np.setdiff1d(np.concatenate(known), inherited)])
    return torch.from_numpy(rows.view(np.int64)), len(inherited)


def _is_all_known(data: DataModule, split: str) -> bool:
    """Whether a split is empty without the text that weights were trained on."""
    return bool(data.left_out.get(split)) and not data.splits[split].num_documents


def reads_own_data(data: DataModule, checkpoint: Checkpoint) -> bool:
    """Whether data are those of the checkpoint's run, divided in the same way; their paths do not matter."""
    return data.content == checkpoint.facts.get("content")
