"""The task and the network that a config describes, instantiated and checked against the data."""

import pydoc
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import lightning as L
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from tinyformer.config.checks import check_types
from tinyformer.config.compose import Invocation
from tinyformer.config.errors import OUT_OF_MEMORY, ConfigError, raising_module
from tinyformer.data import DataModule, QuestionFormat, TextTokenizer
from tinyformer.errors import ArgumentError, argument_path
from tinyformer.hardware import free_memory
from tinyformer.nn import AttentionMask, EncoderDecoder, Network
from tinyformer.run.own_scores import register_score
from tinyformer.run.sample import Generation
from tinyformer.tasks import Seq2Seq, SpanExtraction, Task
from tinyformer.training import FiniteCheck, Snapshots

LACKS = {
    "classification": "no labels for classification; data=docstrings works",
    "seq2seq": "no pairs of a source and a target for task=seq2seq; data=summaries works",
    "span": "no questions about contexts for task=span; data=docstring_questions works",
}
"""What generated data lack for a task, and data that work, by task."""


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

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "Options":
        return cls(**{each.name: values[each.name] for each in fields(cls) if each.name in values})


def check_config(config: DictConfig, choices: Mapping[str, Any]) -> None:
    """Check the type of every value that a class or function receives."""
    if "decoder" in config.network and config.get("cross_attention") is None:
        raise ConfigError("network: its decoder has no cross_attention; task=seq2seq chooses one; leave network= out.")
    unresolved: Any = OmegaConf.to_container(config, resolve=False)
    register_score(unresolved)
    check_types(config, choices=choices, groups={"": Options, "generate": Generation})


def make_data(config: DictConfig, invocation: Invocation, tokenizer: TextTokenizer | None = None) -> DataModule:
    """The data of a run, not yet read, if they have what its task needs; a tokenizer may replace the config's."""
    choices, chosen = invocation.choices, invocation.overridden("tokenizer")
    node = OmegaConf.select(config, "datamodule", throw_on_resolution_failure=False)
    if node is None:
        lacks = LACKS.get(choices.get("task", ""), LACKS["classification"])
        raise ConfigError(f"data={choices.get('data', 'null')}: has {lacks}.")
    if chosen and "tokenizer" not in node and not config.get("resume"):  # which holds the default of that time
        raise ConfigError(f"{chosen[0]}: data={choices.get('data')} has a tokenizer of its own; leave tokenizer= out.")
    return instantiate(node, _convert_="all", **({} if tokenizer is None else {"tokenizer": tokenizer}))


def set_labels(task: DictConfig, data: DataModule) -> None:
    """Set the class labels, and the number of texts of an example, that a `task` group leaves to the data."""
    for key in ("labels", "num_texts"):
        if key in task and task[key] is None:
            task[key] = getattr(data, key)


def prepare_task(task: Any, config: DictConfig, data: DataModule, generation: Generation) -> None:
    """Give a task the beam search of `generate`; refuse one that does not fit the data, the network or a prompt."""
    name = type(task).__name__
    if not isinstance(task, Task):
        raise ConfigError(f"task.objective: {name} is no subclass of tinyformer.tasks.Task.")
    network = pydoc.locate(str(config.network._target_))
    if isinstance(network, type):  # otherwise it is a function of the user's
        if not issubclass(network, task.network_class):
            needed = f"{name} needs {task.network_class.__name__}, and this is {network.__name__}"
            raise ConfigError(f"network: {needed}; leave network= out.")
        if config.get("cross_attention") is not None and not issubclass(network, EncoderDecoder):
            raise ConfigError("cross_attention: only an encoder–decoder has it, as task=seq2seq trains; leave it out.")
    if not task.generates:
        with argument_path("generate"):
            reason = f"{name} cannot generate text; a model trained with task=causal_lm can"
            generation.refuse_prompt(reason, can_be_left_out=True)
    if isinstance(task, Seq2Seq):
        task.beam = generation.beam
    if isinstance(task, SpanExtraction) and isinstance(data.row_format, QuestionFormat):
        with argument_path("task", "objective"):
            task.require_answers(data.splits)
    if task.needs_masking and config.task.masking is None:
        raise ConfigError(
            f"task.masking=null: {name} predicts masked tokens; choose task=masked_lm, leave task.masking=null out."
        )


def require_known_tokens(task: Task, network: Network) -> None:
    """Refuse special tokens that the vocabulary of a network does not have."""
    if isinstance(task, Seq2Seq):
        with argument_path("model", "special_tokens"):
            task.special_tokens.require_known(network.vocab_size)


def evaluation_mask(task: Task, data: DataModule, split: str) -> AttentionMask:
    """The task's mask of the first batch of a split; an empty split is refused."""
    with argument_path("datamodule"):
        return task.mask(next(iter(data.evaluation_dataloader(split))))


def make_seeded_network(config: DictConfig, tokenizer: TextTokenizer | None, further: int = 0) -> Network:
    """The network of a run, its weights drawn from `seed`, or from one `further` on; see `make_network`."""
    L.seed_everything(config.seed + further, verbose=False)
    return make_network(config, tokenizer)


def make_network(config: DictConfig, tokenizer: TextTokenizer | None, device: str = "cpu") -> Network:
    """The network for a tokenizer's vocabulary, or of `model.vocab_size` tokens without a tokenizer.

    On the device "meta" it takes no memory.
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
    """Refuse a network whose matrices alone do not fit into memory: the system would kill the process."""
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
    """Run a network on two tokens, to refuse parts that do not fit together."""
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


def make_callbacks(group: DictConfig) -> list[L.Callback]:
    """The callbacks of the `callbacks` group, without entries that are null.

    `FiniteCheck` follows those that may change gradients, since its norm is the one that clips them; `Snapshots`
    follows all others.
    """
    callbacks = [instantiate(node, _convert_="all") for node in group.values() if node is not None]
    return sorted(callbacks, key=lambda each: (isinstance(each, Snapshots), isinstance(each, FiniteCheck)))
