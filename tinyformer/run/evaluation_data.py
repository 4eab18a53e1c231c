"""The data of an evaluation: those of the checkpoint's run, in the same splits, or others."""

from typing import Any

import numpy as np
from omegaconf import DictConfig

from tinyformer.checkpoint.file import Checkpoint
from tinyformer.config.invocation import Invocation
from tinyformer.data import DataModule, GeneratedDataModule
from tinyformer.errors import ArgumentError, argument_path
from tinyformer.run.parts import make_data
from tinyformer.run.starting_checkpoint import tokenizer_of


def prepare_data(
    config: DictConfig, stored: dict[str, Any], checkpoint: Checkpoint, invocation: Invocation
) -> tuple[DataModule, str]:
    """The data, tokenised by the checkpoint's tokenizer, and the split to score.

    Unless they are the run's own, and in the run's splits, the text that it has trained on is left out of every split
    but "train".

    Args:
        config: the config of the evaluation.
        stored: the unresolved config of the checkpoint's run.
        checkpoint: the checkpoint.
        invocation: what the command line says in addition to the config.

    Raises:
        ArgumentError: the run has trained on all of the text, or there is no such split.
    """
    data, tokenizer = make_data(config, invocation.choices), tokenizer_of(checkpoint, "checkpoint")
    with argument_path("datamodule"):
        is_own = reads_own_data(data, checkpoint)
        split = config.split or ("validation" if is_own or not data.scored_whole else "all")
        whole, known = split == "all", checkpoint.trained_on
        if isinstance(data, GeneratedDataModule):
            require_own_draw(config.data, data, stored["data"])
        without = None if known is None or split == "train" or (is_own and not whole) else known.numpy().view(np.uint64)
        data.without = without
        # The run's own data may already be in the cache, tokenised by its tokenizer.
        if not data.is_prepared(tokenizer, whole):
            data = make_data(config, invocation.choices, tokenizer)
            data.without = without
        data.prepare(whole)
    data.require_split(split)
    if data.left_out.get(split) and not data.splits[split].num_documents:
        raise ArgumentError("split", split, "the run was trained on all of it", {"split": "train"})
    return data, split


def require_own_draw(config: DictConfig, data: DataModule, of_run: dict[str, Any]) -> None:
    """Refuse to draw other sequences of the run's kind than it has: some of them may be those that it was trained on.

    Args:
        config: the `data` group of the evaluation.
        data: its data, which are generated.
        of_run: the unresolved `data` group of the checkpoint's run.

    Raises:
        ArgumentError: the fraction or the seed that divides them differs from the run's.
    """
    if of_run["module"]["_target_"].rpartition(".")[2] != type(data).__name__:
        return
    for name in ("split_seed", "train_fraction"):
        value, drawn = config.get(name), of_run.get(name)
        if value != drawn:
            reason = "would make other splits, with sequences that the checkpoint may have been trained on"
            raise ArgumentError(name, value, reason, {name: drawn})


def reads_own_data(data: DataModule, checkpoint: Checkpoint) -> bool:
    """Whether data are those that the run of a checkpoint read, divided in the same way; their paths do not matter."""
    return data.content == checkpoint.facts.get("content")
