"""The interface of a training objective."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tinyformer.batch import IGNORED, Batch
from tinyformer.data import TextTokenizer
from tinyformer.nn import AttentionMask, Network, Transformer
from tinyformer.tasks.user_texts import TextReader, Texts


class Task(ABC):
    """A training objective: what is predicted from a batch, and how well.

    Attributes:
        generates: whether the model can generate text, one token after the other.
        monitor: the validation metric that selects the best weights.
        higher_is_better: whether a larger value of that metric is better.
        tests_best: whether a run ends by scoring the best weights on the test split, where the data have one.
        unit: what the loss is a mean over, in the singular.
        num_texts: the number of texts that are read as one row; None: one, or the two of a pair.
        network_class: the class of the networks that it trains.
        needs_masking: whether the data have to mask tokens, see `tinyformer.data.Masking`.
    """

    generates: bool = False
    monitor: str = "loss"
    higher_is_better: bool = False
    tests_best: bool = False
    unit: str = "token"
    num_texts: int | None = 1
    network_class: type[Network] = Transformer
    needs_masking: bool = False

    @abstractmethod
    def mask(self, batch: Batch) -> AttentionMask:
        """The attention mask of a batch."""

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
        """The token ids that a network encodes of some texts, padded on the right, and the length of each.

        Raises:
            ArgumentError: there is no text, one is too long, or a token id is unknown.
        """
        # A tensor of token ids has no padding, so its value does not matter there.
        padding = reader.own_tokenizer.eos_id if reader.own_tokenizer else 0
        return reader.padded(reader.rows_of(texts, self.num_texts), padding)

    def read(self, reader: TextReader, texts: Texts) -> Batch:
        """The texts that a user gives, as a batch without targets; a task whose rows have two texts takes both.

        Raises:
            ArgumentError: see `tokenize`.
        """
        inputs, lengths = self.tokenize(reader, texts)
        return {"inputs": inputs, "lengths": lengths}

    def read_scored(self, reader: TextReader, texts: Texts) -> Batch:
        """The texts that a user gives, as a batch with what the model is to predict; see `read`."""
        return self.read(reader, texts)

    def nats_of_texts(self, reader: TextReader, batch: Batch) -> tuple[Float[Tensor, " texts"], Int[Tensor, " texts"]]:
        """The negative log-likelihood of each text of `read_scored`, and the number of targets that it sums over."""
        return self.nats(reader.network, batch)

    def generate(self, reader: TextReader, prompts: str | Sequence[str]) -> list[str]:
        """The texts that a model generates; each task that `generates` has settings of its own."""
        raise NotImplementedError

    @abstractmethod
    def score(self, network: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Scores of a batch, by name, that add up over batches."""

    @abstractmethod
    def metrics(self, sums: Mapping[str, Tensor], split: Any) -> dict[str, float | None]:
        """The metrics of a split: `loss`, `accuracy` and others; None where a metric is not defined.

        Args:
            sums: the scores, summed over the batches of the split.
            split: the split that was scored.
        """

    def final_metrics(self, network: Network, split: Any, tokenizer: TextTokenizer) -> dict[str, float | None]:
        """Further metrics of a split, too expensive for every validation: computed once, at the end."""
        return {}

    @abstractmethod
    def describe(self, metrics: Mapping[str, float | None], split: Any) -> dict[str, str | None]:
        """The metrics of a split as lines of the summary, by heading."""
