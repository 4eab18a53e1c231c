"""The data and the task of a run, made from its config, for training or for the evaluation of a checkpoint."""

import pydoc
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import numpy as np
from hydra.utils import instantiate
from jaxtyping import UInt64
from omegaconf import DictConfig, OmegaConf

from tinyformer.checkpoint.file import Checkpoint
from tinyformer.config.conf import format_value
from tinyformer.config.errors import ConfigError
from tinyformer.config.launch import CommandLine
from tinyformer.data import DataModule, GeneratedDataModule, QuestionFormat, SourceDataModule, TextTokenizer
from tinyformer.data.sources.documents import in_use
from tinyformer.data.sources.text_files import LocalFiles
from tinyformer.errors import ArgumentError, argument_path, relative_path, require_choice
from tinyformer.nn import AttentionMask, EncoderDecoder
from tinyformer.run.settings import Generation, Settings
from tinyformer.run.starting_checkpoint import InitialCheckpoint
from tinyformer.tasks import Seq2Seq, SpanExtraction, Task
from tinyformer.tasks.text_metrics import bleu_tokenizers

MakeData = Callable[..., DataModule]  # makes the data of a config; a tokenizer as argument replaces the config's


def make_data_and_task(
    config: DictConfig, invocation: CommandLine, settings: Settings
) -> tuple[DataModule, str, Task, AttentionMask]:
    """Make the data of a run, the name of the split to score, the task, and the attention mask of the first batch."""
    make = partial(make_data, config, invocation)
    if settings.is_training:
        inherits_tokenizer = settings.options.init_from is not None and not invocation.overridden("tokenizer")
        data, split = training_data(make, settings, inherits_tokenizer), "validation"
    else:
        data, split = evaluation_data(make, settings, config.data)
    task = make_task(config, data, settings.generation)
    if settings.is_training and not task.has_loss:
        reason = "the encoder has no prediction head, so there is no loss to minimise"
        raise ArgumentError("task", "states", reason, {"task": "classification"})
    if settings.is_scored and not task.has_loss:
        name, value = ("score", True) if settings.options.score else ("analysis", None)
        reason = "the encoder has no prediction head, so there is no loss to report; "
        reason += "the analyses maps, atlas, relations and heads need none"
        raise ArgumentError(name, value, reason, ({"score": False} if value else {}) | {"analysis": "maps"})
    mask = evaluation_mask(task, data, split, settings.limit)
    if settings.is_training and has_test(task, data):
        evaluation_mask(task, data, "test", settings.limit)  # an error now, not after training
    return data, split, task, mask


def has_test(task: Task, data: DataModule) -> bool:
    """Return True if a training run ends by scoring its best weights on the test split."""
    return task.tests_best and "test" in data.splits


def training_data(make: MakeData, settings: Settings, inherits_tokenizer: bool) -> DataModule:
    """Make the data of a training run; raise an error if they do not fit the checkpoint that the run starts from.

    With `inherits_tokenizer`, the checkpoint's tokenizer replaces the config's.
    """
    start = settings.start
    data = make(start.tokenizer.for_training() if start is not None and inherits_tokenizer else None)
    with argument_path("datamodule"):
        if start is not None:
            is_own = start.is_resumed or reads_own_data(data, start.checkpoint)
            data.without = known_text(start.checkpoint, is_own)
        data.prepare()
    if start is not None:
        if (known := known_text(start.checkpoint)) is not None:  # left-out text comes first, see `known_text`
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


def evaluation_data(make: MakeData, settings: Settings, group: Mapping[str, Any]) -> tuple[DataModule, str]:
    """Make the data of an evaluation, tokenised by the checkpoint's tokenizer, and choose the split to score.

    Text that the checkpoint was trained on is left out, except from the split "train" and from splits of the training
    run's own data. `group` has the values of the `data` group. With `predict=true`, all rows of the files are loaded,
    without labels.
    """
    start, split, predict = cast(InitialCheckpoint, settings.start), settings.options.split, settings.options.predict
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
            require_own_draw(group, data, start.stored["data"])
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
    """Refuse to split generated data in another way than the training run: training sequences could be scored.

    `settings` has the values of the evaluation's `data` group, `of_run` the values of this group in the training run.
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

    With `of_own_data`, only text that the run's initial weights were trained on is included, since the held-out splits
    of the run's own data have no text in common with its training split.
    """
    rows, number = checkpoint.trained_on, checkpoint.facts.get("inherited", 0) if of_own_data else None
    return None if rows is None or not len(rows[:number]) else rows[:number].numpy().view(np.uint64)


def reads_own_data(data: DataModule, checkpoint: Checkpoint) -> bool:
    """Return True if data have the contents and splits of the data of the checkpoint's run; their paths may differ."""
    return data.content == checkpoint.facts.get("content")


def make_data(config: DictConfig, invocation: CommandLine, tokenizer: TextTokenizer | None = None) -> DataModule:
    """Make the data of a run, without loading them; `tokenizer` replaces the config's tokenizer."""
    choices, chosen = invocation.choices, invocation.overridden("tokenizer")
    node = OmegaConf.select(config, "datamodule", throw_on_resolution_failure=False)
    if node is None:
        raise ConfigError(f"data={choices.get('data')}: does not have what task={choices.get('task')} needs.")
    if chosen and "tokenizer" not in node and not config.get("resume"):  # a resumed run may set an old default
        raise ConfigError(f"{chosen[0]}: data={choices.get('data')} has a tokenizer of its own; leave tokenizer= out.")
    return instantiate(node, _convert_="all", **({} if tokenizer is None else {"tokenizer": tokenizer}))


def make_task(config: DictConfig, data: DataModule, generation: Generation) -> Task:
    """Make the task of a run; raise an error if it does not fit the data, the network or a prompt.

    The class labels and the number of texts per example are set in the config, since the data determine them.
    """
    for key in ("labels", "num_texts"):
        if key in config.task and getattr(data, key) is not None:
            config.task[key] = getattr(data, key)
    task = instantiate(config.task.objective, _convert_="all")
    name = type(task).__name__
    network = pydoc.locate(str(config.network._target_))
    if isinstance(network, type):  # otherwise it is a function of the user's
        if not issubclass(network, task.network_class):
            needed = f"{name} needs {task.network_class.__name__}, and this is {network.__name__}"
            raise ConfigError(f"network: {needed}; leave network= out.")
        if config.get("cross_attention") is not None and not issubclass(network, EncoderDecoder):
            raise ConfigError("cross_attention: only an encoder–decoder has it (task=seq2seq); leave it out.")
    if not task.generates:
        with argument_path("generate"):
            reason = f"{name} cannot generate text; a model trained with task=causal_lm can"
            generation.refuse_prompt(reason, can_be_left_out=True)
    elif generation.has_prompt:
        with argument_path(passed={"text": "generate.prompt"}):
            data.tokenizer.read(generation.prompts)  # an error now, not after training
    if isinstance(task, Seq2Seq):
        task.beam = generation.beam
        task.bleu_tokenize = config.task.get("bleu_tokenize", task.bleu_tokenize)
        with argument_path("task"):
            require_choice("bleu_tokenize", task.bleu_tokenize, bleu_tokenizers())
    if isinstance(task, SpanExtraction) and isinstance(data.row_format, QuestionFormat) and not config.get("predict"):
        with argument_path("task", "objective"):
            task.require_answers(data.splits)
    if task.needs_masking and config.task.masking is None:
        raise ConfigError(
            f"task.masking=null: {name} predicts masked tokens; choose task=masked_lm and leave task.masking=null out."
        )
    return task


def evaluation_mask(task: Task, data: DataModule, split: str, limit: float | None) -> AttentionMask:
    """The attention mask of a split's first batch; raise an error for an empty split, or a limit below one batch."""
    with argument_path("datamodule"):
        batches = data.evaluation_dataloader(split)
        mask = task.mask(next(iter(batches)))
    if isinstance(limit, float) and limit * len(batches) < 1:
        found = f"{limit:g} of the {len(batches)} batches of the {split} split is less than one"
        raise ConfigError(f"trainer: {found}; give a number of batches, such as trainer.limit_val_batches=1.")
    return mask
