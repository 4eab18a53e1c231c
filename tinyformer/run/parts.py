"""The parts of a run that its config describes, checked: data, task, network."""

import pydoc
from collections.abc import Mapping
from typing import Any

import lightning as L
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from tinyformer.config.checks import check_types
from tinyformer.config.errors import OUT_OF_MEMORY, ConfigError
from tinyformer.config.hydra_errors import raising_module
from tinyformer.data import DataModule, QuestionFormat, TextTokenizer
from tinyformer.errors import ArgumentError, argument_path
from tinyformer.hardware import free_memory
from tinyformer.nn import AttentionMask, EncoderDecoder, Network
from tinyformer.run.sample import check_generation, make_beam, refuse_prompts
from tinyformer.run.scores import register_score
from tinyformer.tasks import Seq2Seq, SpanExtraction, Task

LACKS = {
    "classification": "no labels for classification; data=docstrings works",
    "seq2seq": "no pairs of a source and a target for task=seq2seq; data=summaries works",
    "span": "no questions about contexts for task=span; data=docstring_questions works",
}
"""What generated data lack for a task, and data that work, by task."""


def check_config(config: DictConfig, choices: Mapping[str, Any]) -> dict[str, Any]:
    """Check every value that a class or function receives.

    Returns:
        The config as plain containers, unresolved, so that overrides act on it when it is read from a checkpoint.

    Raises:
        ConfigError: a value has another type, or the network has a decoder, and no choice of cross-attention.
    """
    if "decoder" in config.network and config.get("cross_attention") is None:
        raise ConfigError("network: its decoder has no cross_attention; task=seq2seq chooses one; leave network= out.")
    # First, since Hydra's `instantiate` resolves, in place, the nodes that its node refers to.
    unresolved: Any = OmegaConf.to_container(config, resolve=False)
    register_score(unresolved)
    check_types(config, choices=choices)
    check_generation(config.generate)
    return unresolved


def make_data(config: DictConfig, choices: Mapping[str, Any], tokenizer: TextTokenizer | None = None) -> DataModule:
    """The data of a run, not yet read.

    Args:
        config: the config.
        choices: the choice of each axis, for errors.
        tokenizer: replaces the config's.

    Raises:
        ConfigError: the task needs labels, pairs or questions, and the data have none.
    """
    if OmegaConf.select(config, "datamodule", throw_on_resolution_failure=False) is None:
        lacks = LACKS.get(choices.get("task", ""), LACKS["classification"])
        raise ConfigError(f"data={choices.get('data', 'null')}: has {lacks}.")
    arguments = {} if tokenizer is None else {"tokenizer": tokenizer}
    return instantiate(config.datamodule, _convert_="all", **arguments)


def make_task(config: DictConfig, data: DataModule) -> Task:
    """The task of a run; its class labels are the data's, unless the config names them.

    Raises:
        ConfigError: `task.objective` is not a task, or needs other data or another network.
        ArgumentError: there is a prompt, and the task generates no text.
    """
    for key in ("labels", "num_texts"):
        if key in config.task and config.task[key] is None:
            config.task[key] = getattr(data, key)
    task = instantiate(config.task.objective, _convert_="all")
    if not isinstance(task, Task):
        raise ConfigError(f"task.objective: {type(task).__name__} is no subclass of tinyformer.tasks.Task.")
    _require_network_of(task, pydoc.locate(str(config.network._target_)), config.get("cross_attention") is not None)
    refuse_prompts(config.generate, task)
    if isinstance(task, Seq2Seq):
        task.beam = make_beam(config.generate)
    if isinstance(task, SpanExtraction) and isinstance(data.row_format, QuestionFormat):
        with argument_path("task", "objective"):
            task.require_answers(data.splits)
    if task.needs_masking and config.task.masking is None:
        name = type(task).__name__
        raise ConfigError(
            f"task.masking=null: {name} predicts masked tokens, but no token is masked; task=masked_lm masks some."
        )
    return task


def _require_network_of(task: Task, network: Any, has_cross_attention: bool) -> None:
    """Refuse a network that the task cannot train, and options of an axis that the network does not have.

    Raises:
        ConfigError: the network is of another class, or there is cross-attention without a decoder.
    """
    needed = task.network_class
    if not isinstance(network, type):
        return  # a function of the user's
    if not issubclass(network, needed):
        own = f"{type(task).__name__} needs {needed.__name__}, and this is {network.__name__}"
        raise ConfigError(f"network: {own}; leave network= out.")
    if has_cross_attention and not issubclass(network, EncoderDecoder):
        raise ConfigError("cross_attention: only an encoder–decoder has it, as task=seq2seq trains; leave it out.")


def require_known_tokens(task: Task, network: Network) -> None:
    """Refuse special tokens that the vocabulary of a network does not have.

    Raises:
        ArgumentError: an id is too large.
    """
    if isinstance(task, Seq2Seq):
        with argument_path("model", "special_tokens"):
            task.special_tokens.require_known(network.vocab_size)


def evaluation_mask(task: Task, data: DataModule, split: str) -> AttentionMask:
    """The task's mask of the first batch of a split.

    Raises:
        ArgumentError: the split is empty.
    """
    with argument_path("datamodule"):
        return task.mask(next(iter(data.evaluation_dataloader(split))))


def make_seeded_network(config: DictConfig, tokenizer: TextTokenizer | None) -> Network:
    """The network of a run, its weights drawn from `seed`; see `make_network`."""
    L.seed_everything(config.seed, verbose=False)
    return make_network(config, tokenizer)


def make_network(config: DictConfig, tokenizer: TextTokenizer | None, device: str = "cpu") -> Network:
    """The network for a tokenizer's vocabulary, or of `model.vocab_size` tokens without a tokenizer.

    Args:
        config: the config.
        tokenizer: the tokenizer, if any.
        device: where its weights are; "meta" allocates none.

    Raises:
        ArgumentError: `model.vocab_size` is smaller than the vocabulary.
    """
    vocab_size, needed = config.model.vocab_size, tokenizer.vocab_size if tokenizer else 0
    if vocab_size is not None and vocab_size < needed:
        reason = f"must be at least {needed}, the size of the tokenizer's vocabulary"
        raise ArgumentError("model.vocab_size", vocab_size, reason, {"vocab_size": needed})
    sized = OmegaConf.merge(config, {"model": {"vocab_size": vocab_size or needed}})
    if device != "meta":
        _require_memory(sized)
    with torch.device(device):
        network = instantiate(sized.network, _convert_="all")
    if device == "cpu":
        _try_out(network)
    return network


def _require_memory(config: Any) -> None:
    """Refuse a network whose matrices alone do not fit into memory: the system would kill the process.

    Raises:
        ConfigError: a size is far too large.
    """
    model, free = config.model, free_memory("cpu")
    d_ff = OmegaConf.select(config, "feed_forward.d_ff") or model.d_model
    sizes = [model.vocab_size, model.num_layers, model.d_model, d_ff]
    if free is None or not all(isinstance(size, int) for size in sizes):
        return
    num_bytes = 4 * model.d_model * (model.vocab_size + 2 * model.num_layers * d_ff)
    if num_bytes > free:
        raise ConfigError(
            f"model: its matrices take {num_bytes / 1e9:,.0f} GB, and {free / 1e9:,.0f} GB of memory are free; smaller "
            f"model.d_model, model.num_layers, model.vocab_size or feed_forward.d_ff take less."
        )


@torch.no_grad()
def _try_out(network: Network) -> None:
    """Run a network on two tokens.

    Raises:
        ConfigError: its parts do not fit together.
    """
    was_training = network.training
    tokens = torch.zeros(1, min(2, network.max_seq_len), dtype=torch.long)
    try:
        network.eval()(*[tokens] * len(network.stacks()))
    except ArgumentError:
        return  # a backend that does not run here, which the run reports with its key
    except (RuntimeError, IndexError) as error:
        if OUT_OF_MEMORY.search(str(error)) or not raising_module(error).startswith(("torch.", "tinyformer.")):
            raise
        problem = f"the parts of the network do not fit together ({error})"
        raise ConfigError(
            f"{problem}; all of their sizes follow from the model group, such as model.d_model."
        ) from error
    finally:
        network.train(was_training)
