"""The task and the network that a config describes, instantiated and checked against the data."""

import contextlib
import pydoc
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import lightning as L
import torch
from hydra.utils import instantiate
from lightning.pytorch import callbacks as of_lightning
from omegaconf import DictConfig, OmegaConf

from tinyformer.config.checks import check_types
from tinyformer.config.compose import Invocation
from tinyformer.config.errors import OUT_OF_MEMORY, ConfigError, raising_module
from tinyformer.data import DataModule, QuestionFormat, TextTokenizer
from tinyformer.errors import ArgumentError, argument_path, require_choice
from tinyformer.hardware import free_memory
from tinyformer.nn import AttentionMask, EncoderDecoder, Network
from tinyformer.run.own_scores import register_score
from tinyformer.run.sample import Generation
from tinyformer.tasks import Seq2Seq, SpanExtraction, Task
from tinyformer.tasks.text_metrics import bleu_tokenizers
from tinyformer.training import FiniteCheck, Snapshots

LACKS = {
    "classification": "no labels for classification; data=docstrings works",
    "seq2seq": "no pairs of a source and a target for task=seq2seq; data=summaries works",
    "span": "no questions about contexts for task=span; data=docstring_questions works",
}
"""What generated data lack for a task, and data that work, by task."""

REFUSED: dict[type[L.Callback], str] = {
    of_lightning.BaseFinetuning: "changes which weights are optimized; freeze_encoder=true trains the readout alone",
    of_lightning.BasePredictionWriter: "has no effect, since a run predicts nothing",
    of_lightning.BatchSizeFinder: "changes batches for which the run has been planned; set data.batch_size",
    of_lightning.GradientAccumulationScheduler: "changes the length of a run; set trainer.accumulate_grad_batches",
    of_lightning.LearningRateFinder: "does not find optimizer.lr; -m optimizer.lr=1e-3,3e-3 compares rates",
    of_lightning.ModelPruning: "renames weights, after which training fails; model.pruned_heads removes heads",
    of_lightning.OnExceptionCheckpoint: "starts from a file that another run has left; resume=FOLDER continues a run",
    of_lightning.SpikeDetection: "lists batches that no run leaves out; callbacks.finite checks each step",
    of_lightning.StochasticWeightAveraging: "averages after the last checkpoint; EMAWeightAveraging does not",
}
"""Callbacks of Lightning that would not do in a run what Lightning documents: the reason, and what does."""


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
    """Set the names of the classes, and the number of texts of an example, as the data have them."""
    for key in ("labels", "num_texts"):
        if key in task and getattr(data, key) is not None:
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
    elif generation.has_prompt:
        with argument_path(passed={"text": "generate.prompt"}):
            data.tokenizer.read(generation.prompts)  # or fails after the training
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
            f"task.masking=null: {name} predicts masked tokens; choose task=masked_lm, leave task.masking=null out."
        )


def require_known_tokens(task: Task, network: Network) -> None:
    """Refuse special tokens that the vocabulary of a network does not have."""
    if isinstance(task, Seq2Seq):
        with argument_path("model", "special_tokens"):
            task.special_tokens.require_known(network.vocab_size)


def evaluation_mask(task: Task, data: DataModule, split: str, limit: float | None) -> AttentionMask:
    """The task's mask of the first batch of a split; an empty split is refused, and a limit to less than one batch."""
    with argument_path("datamodule"):
        batches = data.evaluation_dataloader(split)
        mask = task.mask(next(iter(batches)))
    if isinstance(limit, float) and limit * len(batches) < 1:
        found = f"{limit:g} of the {len(batches)} batches of the {split} split is less than one"
        raise ConfigError(f"trainer: {found}; a number of them works, such as trainer.limit_val_batches=1.")
    return mask


def make_seeded_network(config: DictConfig, tokenizer: TextTokenizer | None, further: int = 0) -> Network:
    """The network of a run, its weights drawn from `seed`, or from one `further` on; see `make_network`."""
    L.seed_everything((config.seed + further) % 2**32, verbose=False)
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


def make_callbacks(group: DictConfig) -> dict[str, L.Callback]:
    """The callbacks of the `callbacks` group by their names in it, without entries that are null.

    `FiniteCheck` follows those that may change gradients, since its norm is the one that clips them; `Snapshots`
    follows all others.
    """
    made = {str(name): instantiate(node, _convert_="all") for name, node in group.items() if node is not None}
    for name, callback in made.items():
        for reason in (reason for kind, reason in REFUSED.items() if isinstance(callback, kind)):
            raise ArgumentError(f"callbacks.{name}", type(callback).__name__, reason, {name: None})
    rank = {name: (isinstance(each, Snapshots), isinstance(each, FiniteCheck)) for name, each in made.items()}
    return {name: made[name] for name in sorted(made, key=rank.__getitem__)}


def require_monitored(callbacks: Mapping[str, L.Callback], task: Task, network: Network, data: DataModule) -> None:
    """Refuse a callback that needs a metric which validation does not log, as the scores of its first batch show."""
    kinds = (of_lightning.EarlyStopping, of_lightning.ModelCheckpoint)
    needs = {name: each.monitor for name, each in callbacks.items() if isinstance(each, kinds) and each.monitor}
    known: list[str] = []
    if needs:
        with torch.no_grad(), contextlib.suppress(ArgumentError):  # a backend that runs on CUDA alone
            scores = task.score(network.eval(), next(iter(data.evaluation_dataloader("validation"))))
            metrics = task.metrics(scores, data.splits["validation"])
            known = [f"val/{name}" for name, value in metrics.items() if value is not None]
        network.train()
    for name, monitor in needs.items():
        if known and monitor not in known and getattr(callbacks[name], "strict", True):
            reason = f"is no metric of validation, which logs {', '.join(known)}"
            raise ArgumentError(f"callbacks.{name}.monitor", monitor, reason, {"monitor": f"val/{task.monitor}"})
