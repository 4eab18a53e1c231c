"""What every task answers: who may attend to whom, what a batch costs, and what its scores come to."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor, nn

from tinyformer.analysis import Findings
from tinyformer.batch import Batch
from tinyformer.data import TextTokenizer
from tinyformer.nn import AttentionMask, Transformer


class Task(ABC):
    """What a model is trained for.

    Attributes:
        generates: whether text can be drawn from the model, one token after the other.
        monitor: the metric of validation by which the best weights are chosen.
        higher_is_better: of that metric.
        tests_best: whether a run ends with a test of the best weights, where the data have a test split.
        unit: what the loss is the mean over, in the singular.
    """

    generates: bool = False
    monitor: str = "loss"
    higher_is_better: bool = False
    tests_best: bool = False
    unit: str = "token"

    @abstractmethod
    def mask(self, batch: Batch) -> AttentionMask:
        """Who may attend to whom in a batch."""

    @abstractmethod
    def loss(self, network: nn.Module, batch: Batch) -> Float[Tensor, ""]:
        """The mean loss of a batch, in nats, to go backward from."""

    @abstractmethod
    def nats(self, network: nn.Module, batch: Batch) -> tuple[Float[Tensor, " batch"], Int[Tensor, " batch"]]:
        """The negative log-likelihood of each row, and how many targets it is the sum of."""

    @abstractmethod
    def zeros(self) -> dict[str, Tensor]:
        """The scores of no batch."""

    @abstractmethod
    def score(self, network: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Scores of a batch, which add up over batches; see `zeros`."""

    @abstractmethod
    def metrics(self, sums: Mapping[str, Tensor], split: Any) -> dict[str, float | None]:
        """What the scores of a split come to: `loss`, `accuracy` and others; None where one has no value.

        Args:
            sums: of the scores over the batches.
            split: that was scored.
        """

    def final_metrics(self, network: Transformer, split: Any, tokenizer: TextTokenizer) -> dict[str, float | None]:
        """Further metrics of the validation split, which cost too much for each validation."""
        return {}

    def examine(self, network: Transformer, batches: Iterable[Batch], split: Any) -> Findings:
        """Tables and figures about what the model makes of a split, at the end; none unless a task has some.

        Args:
            network: on the batches' device, in the precision of the block that this is called in.
            batches: of the split.
            split: that they are of.
        """
        return Findings()

    @abstractmethod
    def describe(self, metrics: Mapping[str, float | None], split: Any) -> dict[str, str | None]:
        """Lines for the eye about the metrics of a split, by their headings."""
