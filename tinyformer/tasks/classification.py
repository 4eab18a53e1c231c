"""Text classification."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torchmetrics.functional.classification import multiclass_confusion_matrix

from tinyformer.batch import Batch
from tinyformer.data import TextTokenizer
from tinyformer.errors import ArgumentError, require_choice
from tinyformer.tasks.task import Task, require_smoothing
from tinyformer.tasks.user_texts import TextReader, Texts


class Classification(Task):
    """One class for each text, predicted by a readout that pools the tokens.

    Args:
        labels: the class labels; None only until the data are read.
        label_smoothing: share of the target probability that is spread evenly over all classes during training
            (Szegedy et al. 2015, arXiv 1512.00567).
        num_texts: see `Task`.
    """

    monitor = "accuracy"
    higher_is_better = True
    tests_best = True
    unit = "example"

    def __init__(
        self, labels: Sequence[str] | None, label_smoothing: float = 0.0, num_texts: int | None = None
    ) -> None:
        require_smoothing(label_smoothing)
        self.labels, self.label_smoothing, self.num_texts = list(labels or []), label_smoothing, num_texts

    def read_scored(
        self, reader: TextReader, texts: Texts, labels: int | str | Sequence[int | str] | None = None
    ) -> Batch:
        """The texts with the label of each, or its index."""
        batch, known = self.read(reader, texts), self.labels
        given, number = [labels] if isinstance(labels, int | str) else labels, len(batch["inputs"])
        if not isinstance(given, Sequence) or len(given) != number:
            works = {"labels": known[:1] * number}
            raise ArgumentError("labels", labels, f"must be {number}, one for each text", works)
        for label in given:
            if isinstance(label, bool):
                raise ArgumentError("labels", label, "must be a label or its index", {"labels": known[:1]})
            require_choice("labels", label, [*known, *range(len(known))])
        ids = [known.index(label) if isinstance(label, str) else label for label in given]
        return {**batch, "labels": torch.tensor(ids, device=reader.device)}

    def places(self, batch: Batch, tokenizer: TextTokenizer) -> None:
        """A text has one set of logits, those of its classes."""

    def logits(self, network: nn.Module, batch: Batch) -> Float[Tensor, "batch classes"]:
        logits = self.forward(network, batch)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def loss(self, network: nn.Module, batch: Batch) -> Float[Tensor, ""]:
        """Mean negative log-likelihood of the labels, in nats per example."""
        return F.cross_entropy(self.logits(network, batch), batch["labels"], label_smoothing=self.label_smoothing)

    def nats(self, network: nn.Module, batch: Batch) -> tuple[Float[Tensor, " batch"], Int[Tensor, " batch"]]:
        nats = F.cross_entropy(self.logits(network, batch), batch["labels"], reduction="none")
        return nats, self.num_targets(batch)

    def score(self, network: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """`nats`, and `confusion`: the number of texts by true class (rows) and predicted class (columns)."""
        logits, labels = self.logits(network, batch), batch["labels"]
        confusion = multiclass_confusion_matrix(logits, labels, len(self.labels))
        return {"nats": F.cross_entropy(logits, labels, reduction="sum"), "confusion": confusion.float()}

    def metrics(self, sums: Mapping[str, Tensor], split: Any) -> dict[str, float | None]:
        """`loss`, `accuracy`, `macro_f1` and `majority_share`, the share of the most frequent class.

        Macro-F1 is the mean of 2 TP / (2 TP + FP + FN) over the classes that occur or were predicted.
        """
        confusion = sums["confusion"].double()
        correct, total = confusion.diagonal(), confusion.sum()
        either = confusion.sum(dim=0) + confusion.sum(dim=1)
        return {
            "loss": float(sums["nats"].double() / total),
            "accuracy": float(correct.sum() / total),
            "macro_f1": float((2 * correct / either)[either > 0].mean()),
            "majority_share": float(confusion.sum(dim=1).max() / total),
        }

    def describe(self, metrics: Mapping[str, float | None], split: Any) -> dict[str, str | None]:
        absent = f" (without {split.absent}: no examples)" if split.absent else ""
        scores = f"{metrics['accuracy']:.1%}, macro-F1 {metrics['macro_f1']:.3f}{absent}"
        return {"accuracy": f"{scores}; the most frequent class makes up {metrics['majority_share']:.1%}"}
