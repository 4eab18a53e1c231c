"""The interface of a training objective, and what the prediction of tokens has in common."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from tinyformer.batch import IGNORED, Batch
from tinyformer.data import TextTokenizer
from tinyformer.errors import ArgumentError
from tinyformer.nn import AttentionMask, Network, Transformer
from tinyformer.tasks.user_texts import TextReader, Texts

Table: TypeAlias = tuple[list[str], list[list[Any]]]  # columns and rows

MAX_SCORES = 2**26
"""The most logits that are scored at once: 256 MB in fp32. 32 x 1,024 tokens of GPT-2 have 25 times as many."""


class Task(ABC):
    """A training objective: what is predicted from a batch, and how well."""

    generates: bool = False  # whether the model can generate text, one token after the other
    monitor: str = "loss"  # the validation metric that selects the best weights
    higher_is_better: bool = False  # whether a larger value of that metric is better
    tests_best: bool = False  # whether a run ends by scoring the best weights on the test split, where there is one
    unit: str = "token"  # what the loss is a mean over, in the singular
    num_texts: int | None = 1  # that are read as one row; None: one, or the two of a pair
    network_class: type[Network] = Transformer  # of the networks that it trains
    needs_masking: bool = False  # whether the data have to mask tokens, see `tinyformer.data.Masking`

    def mask(self, batch: Batch) -> AttentionMask:
        """The attention mask of a batch; by default it is bidirectional and hides padding."""
        return AttentionMask(lengths=batch.get("lengths"))

    def forward(self, network: nn.Module, batch: Batch, **options: Any) -> Tensor:
        """The output of a network for a batch, such as logits; the options are those of its own `forward`."""
        return network(batch["inputs"], self.mask(batch), **options)

    @abstractmethod
    def loss(self, network: nn.Module, batch: Batch) -> Float[Tensor, ""]:
        """The mean loss of a batch over its targets, in nats, for the backward pass; 0 if it has no target."""

    def num_targets(self, batch: Batch) -> Int[Tensor, " batch"]:
        """The number of targets of each row, by which `loss` is weighted in the mean of several batches.

        By default the tokens in `targets` that are not `IGNORED`; without `targets`, one for each row.
        """
        if "targets" not in batch:
            return torch.ones_like(batch["inputs"][:, 0])
        return (batch["targets"] != IGNORED).sum(dim=1)

    @abstractmethod
    def nats(self, network: nn.Module, batch: Batch) -> tuple[Float[Tensor, " batch"], Int[Tensor, " batch"]]:
        """The negative log-likelihood of each row, and the number of targets that it sums over."""

    def tokenize(self, reader: TextReader, texts: Texts) -> tuple[Int[Tensor, "batch seq"], Int[Tensor, " batch"]]:
        """The token ids that a network encodes of some texts, padded on the right, and the length of each."""
        # A tensor of token ids has no padding, so its value does not matter there.
        padding = reader.own_tokenizer.eos_id if reader.own_tokenizer else 0
        return reader.padded(reader.rows_of(texts, self.num_texts), padding)

    def read(self, reader: TextReader, texts: Texts) -> Batch:
        """The texts that a user gives, as a batch without targets; a task whose rows have two texts takes both."""
        inputs, lengths = self.tokenize(reader, texts)
        return {"inputs": inputs, "lengths": lengths}

    def read_scored(self, reader: TextReader, texts: Texts) -> Batch:
        """The texts that a user gives, as a batch with what the model is to predict; see `read`."""
        return self.read(reader, texts)

    def nats_of_texts(self, reader: TextReader, batch: Batch) -> tuple[Float[Tensor, " texts"], Int[Tensor, " texts"]]:
        """The negative log-likelihood of each text of `read_scored`, and the number of targets that it sums over."""
        return self.nats(reader.network, batch)

    def places(self, batch: Batch, tokenizer: TextTokenizer) -> Int[Tensor, " batch"] | None:
        """The position whose logits predict what follows each text of `read`; None where there is one for the text."""
        raise ArgumentError("task", type(self).__name__, "predicts no token after a text; CausalLM does")

    def prompts(self, reader: TextReader, texts: Sequence[str]) -> list[list[int]]:
        """The token ids of prompts, as `generate` takes them."""
        return reader.tokenizer.read(texts) if texts else []

    def generate(self, reader: TextReader, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """The token ids that a model generates for each prompt; each task that `generates` has settings of its own."""
        raise NotImplementedError

    def predict(self, network: Network, batches: Iterable[Batch], split: Any) -> Table:
        """The predictions of a network in evaluation mode for the rows of a split, in order."""
        raise ArgumentError("predict", True, f"{type(self).__name__} predicts nothing of a row", {"predict": False})

    @abstractmethod
    def score(self, network: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Scores of a batch, by name, that add up over batches."""

    @abstractmethod
    def metrics(self, sums: Mapping[str, Tensor], split: Any) -> dict[str, float | None]:
        """The metrics of a split, from its scores summed over batches: `loss`, `accuracy` and others.

        None where a metric is not defined.
        """

    def final_metrics(self, network: Network, split: Any, tokenizer: TextTokenizer) -> dict[str, float | None]:
        """Further metrics of a split, too expensive for every validation: computed once, at the end."""
        return {}

    @abstractmethod
    def describe(self, metrics: Mapping[str, float | None], split: Any) -> dict[str, str | None]:
        """The metrics of a split as lines of the summary, by heading."""


class TokenTask(Task):
    """Prediction of tokens, whose `loss` is a mean over tokens."""

    def loss(self, network: nn.Module, batch: Batch) -> Float[Tensor, ""]:
        return self.forward(network, batch, targets=batch["targets"])

    def logits(self, network: nn.Module, batch: Batch) -> Float[Tensor, "batch seq vocab_size"]:
        return self.forward(network, batch)

    def nats(self, network: nn.Module, batch: Batch) -> tuple[Float[Tensor, " batch"], Int[Tensor, " batch"]]:
        logits = self.logits(network, batch).float()
        nats = F.cross_entropy(logits.mT, batch["targets"], ignore_index=IGNORED, reduction="none")
        return nats.sum(dim=1), self.num_targets(batch)

    def score(self, network: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Sums over the targets of a batch: of `nats`, the negative log-likelihood, and numbers of targets.

        `tokens` counts all of them, `top1` and `top5` those that were the most likely token, or among the five.
        """
        logits, targets = self.logits(network, batch).flatten(0, 1), batch["targets"].flatten()
        rows = max(1, MAX_SCORES // logits.shape[-1])
        parts = [_score(*part) for part in zip(logits.split(rows), targets.split(rows), strict=True)]
        return {name: torch.stack([part[name] for part in parts]).sum(dim=0) for name in parts[0]}

    def metrics(self, sums: Mapping[str, Tensor], split: Any) -> dict[str, float | None]:
        """`loss` (nats per token), `accuracy` and `accuracy_top5`."""
        tokens = float(sums["tokens"])
        names = {"loss": "nats", "accuracy": "top1", "accuracy_top5": "top5"}
        return {name: float(sums[summed]) / tokens for name, summed in names.items()}


def _score(
    logits: Float[Tensor, "targets vocab_size"], targets: Int[Tensor, " targets"]
) -> dict[str, Float[Tensor, ""]]:
    logits, scored = logits.float(), targets != IGNORED
    likeliest = logits.topk(min(5, logits.shape[-1]), dim=-1).indices
    hits = (likeliest == targets.unsqueeze(-1)) & scored.unsqueeze(-1)
    nats = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
    sums = {"nats": nats, "tokens": scored.sum(), "top1": hits[:, 0].sum(), "top5": hits.sum()}
    return {name: value.to(torch.float32) for name, value in sums.items()}


def describe_accuracy(metrics: Mapping[str, float | None]) -> str:
    """The accuracy of predicted tokens, for the summary."""
    return f"{metrics['accuracy']:.1%} correct, {metrics['accuracy_top5']:.1%} in the top five"


def require_smoothing(label_smoothing: float) -> None:
    """Refuse a share of smoothed labels that is negative or not below 1."""
    if not 0 <= label_smoothing < 1:
        reason = "must be at least 0 and below 1"
        raise ArgumentError("label_smoothing", label_smoothing, reason, {"label_smoothing": 0.1})


def perplexity(loss: float | None) -> float:
    """exp(loss), for a mean negative log-likelihood in nats; finite however large the loss."""
    assert loss is not None
    return math.exp(min(loss, 700.0))
