"""Say which class a text belongs to."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torchmetrics.functional.classification import multiclass_confusion_matrix

from tinyformer.analysis import Findings, classified_examples
from tinyformer.data import LabelledSplit
from tinyformer.nn import AttentionMask, Transformer
from tinyformer.tasks.task import Batch, Task


class Classification(Task):
    """One class for each text, which a readout pools the tokens for.

    Args:
        labels: the names of the classes; none only as long as the data have not been read.
        label_smoothing: of the target, the share that goes to all classes alike, in training (Szegedy et al. 2015,
            arXiv 1512.00567).

    Raises:
        ValueError: it is no share below 1.
    """

    monitor = "accuracy"
    higher_is_better = True
    tests_best = True
    unit = "example"

    def __init__(self, labels: Sequence[str] | None, label_smoothing: float = 0.0) -> None:
        if not 0 <= label_smoothing < 1:
            raise ValueError(
                f"task.objective.label_smoothing={label_smoothing} is no share from 0 to below 1; "
                "task.objective.label_smoothing=0.1 is."
            )
        self.labels, self.label_smoothing = list(labels or []), label_smoothing

    def mask(self, batch: Batch) -> AttentionMask:
        """Everybody sees everybody, but for padding."""
        return AttentionMask(lengths=batch.get("lengths"))

    def logits(self, network: nn.Module, batch: Batch) -> Float[Tensor, "batch classes"]:
        """The score of each class for each text."""
        return network(batch["inputs"], self.mask(batch)).float()

    def loss(self, network: nn.Module, batch: Batch) -> Float[Tensor, ""]:
        """Mean negative log-likelihood of the labels, in nats per example."""
        return F.cross_entropy(self.logits(network, batch), batch["labels"], label_smoothing=self.label_smoothing)

    def nats(self, network: nn.Module, batch: Batch) -> tuple[Float[Tensor, " batch"], Int[Tensor, " batch"]]:
        """The negative log-likelihood of each label; one target each."""
        labels = batch["labels"]
        return F.cross_entropy(self.logits(network, batch), labels, reduction="none"), torch.ones_like(labels)

    def zeros(self) -> dict[str, Tensor]:
        """See `score`."""
        return {"nats": torch.zeros(()), "confusion": torch.zeros(len(self.labels), len(self.labels))}

    def score(self, network: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """`nats`, and `confusion`: how many texts of each class (rows) were taken for each class (columns)."""
        logits, labels = self.logits(network, batch), batch["labels"]
        confusion = multiclass_confusion_matrix(logits, labels, len(self.labels))
        return {"nats": F.cross_entropy(logits, labels, reduction="sum"), "confusion": confusion.float()}

    def metrics(self, sums: Mapping[str, Tensor], split: Any) -> dict[str, float | None]:
        """`loss`, `accuracy`, `macro_f1`, and `majority_share`: how often the most frequent class is right.

        Macro-F1 is the mean over the classes that occur, or were predicted, of 2 TP / (2 TP + FP + FN).
        """
        confusion = sums["confusion"].double()
        right, total = confusion.diagonal(), confusion.sum()
        either = confusion.sum(dim=0) + confusion.sum(dim=1)
        return {
            "loss": float(sums["nats"].double() / total),
            "accuracy": float(right.sum() / total),
            "macro_f1": float((2 * right / either)[either > 0].mean()),
            "majority_share": float(confusion.sum(dim=1).max() / total),
        }

    @torch.no_grad()
    def examine(self, network: Transformer, batches: Iterable[Batch], split: LabelledSplit) -> Findings:
        """The confusion matrix, and the examples whose label is found least likely."""
        was_training = network.training
        network.eval()
        probabilities, labels, rows = [], [], []
        for batch in batches:
            probabilities.append(self.logits(network, batch).softmax(dim=-1).cpu())
            labels.append(batch["labels"].cpu())
            rows += batch["rows"].tolist()
        network.train(was_training)
        texts = [split.text(row) for row in rows]
        return classified_examples(torch.cat(probabilities), torch.cat(labels), texts, self.labels)

    def describe(self, metrics: Mapping[str, float | None], split: Any) -> dict[str, str | None]:
        """How often the class was right, beside the most frequent one."""
        return {
            "accuracy": f"{metrics['accuracy']:.1%}, macro-F1 {metrics['macro_f1']:.3f}; "
            f"the most frequent class is {metrics['majority_share']:.1%} of all"
        }
