"""The data of a run: those of its config, in a training run, and in an evaluation of a checkpoint."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jaxtyping import UInt64

from tinyformer.checkpoint.file import Checkpoint
from tinyformer.config.errors import ConfigError
from tinyformer.config.keys import format_value
from tinyformer.data import DataModule, GeneratedDataModule, SourceDataModule
from tinyformer.data.sources.source import in_use
from tinyformer.data.sources.text_files import LocalFiles
from tinyformer.errors import ArgumentError, argument_path
from tinyformer.files import relative_path
from tinyformer.run.starting_checkpoint import Start

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
        if (known := known_text(start.checkpoint)) is not None:  # first what the splits leave out, see `known_text`
            left_out = known[:0] if data.without is None else data.without
            own = left_out if data.trained_on is None else data.trained_on
            data.trained_on = np.concatenate([left_out, np.setdiff1d(np.union1d(known, own), left_out)])
        start.require_same_vocabulary(data.tokenizer)
        if start.is_resumed and start.checkpoint.facts.get("data_fingerprint") != data.fingerprint:
            path = start.checkpoint.path
            raise ConfigError(
                f"resume={format_value(relative_path(path.parents[1]))}: {data.title}: the data, or how they are "
                f"split, have changed; init_from={format_value(relative_path(path))} starts a new run from its weights."
            )
    return data


def evaluation_data(
    make: MakeData, start: Start, split: str | None, settings: Mapping[str, Any], predict: bool
) -> tuple[DataModule, str]:
    """The data of an evaluation, tokenised by the checkpoint's tokenizer, and the split to score.

    Unless they are the run's own, and in the run's splits, the text that its weights were trained on is left out of
    every split but "train". `settings` are the values of the `data` group. To `predict`, all rows of files are read,
    without their labels.
    """
    data = make(start.tokenizer if predict else None)
    if predict:
        source = in_use(data.source) if isinstance(data, SourceDataModule) else None
        if not isinstance(source, LocalFiles) or data.row_format.source_rows == "texts":
            raise ArgumentError("predict", True, "needs data.files with texts, pairs or questions", {"predict": False})
        source.is_labelled, data.row_format.max_examples, data.row_format.too_long = False, None, "truncate"
        with argument_path("datamodule"):
            data.prepare(whole=True)
        return data, "all"
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


def known_text(checkpoint: Checkpoint, of_own_data: bool = False) -> UInt64[np.ndarray, " fingerprints"] | None:
    """The fingerprints of the text that the weights of a checkpoint were trained on; None if none are known.

    The held-out splits of its run's own data have none of their training text, so that there only the text counts that
    the weights which the run began with were trained on.
    """
    rows, number = checkpoint.trained_on, checkpoint.facts.get("inherited", 0) if of_own_data else None
    return None if rows is None or not len(rows[:number]) else rows[:number].numpy().view(np.uint64)


def reads_own_data(data: DataModule, checkpoint: Checkpoint) -> bool:
    """Whether data are those of the checkpoint's run, divided in the same way; their paths do not matter."""
    return data.content == checkpoint.facts.get("content")
