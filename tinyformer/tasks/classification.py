"""Text classification."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torchmetrics.functional.classification import multiclass_confusion_matrix

from tinyformer.data import TextTokenizer
from tinyformer.data.batches.windows import Batch
from tinyformer.data.sources.documents import class_name
from tinyformer.errors import ArgumentError, require_choice
from tinyformer.tasks.task import Table, Task, require_smoothing
from tinyformer.tasks.user_texts import TextReader, Texts


class Classification(Task):
    """One class for each text, predicted by a readout that pools the tokens.

    Args:
        labels: the names of the classes; None until the data are loaded, which determine the names.
        label_smoothing: share of the target probability that is spread evenly over all classes during training
            (Szegedy et al. 2015, arXiv 1512.00567).
        num_texts: see `Task`.
    """

    monitor = "accuracy"
    higher_is_better = True
    tests_best = True
    unit = "example"

    def __init__(
        self, labels: Sequence[Any] | None, label_smoothing: float = 0.0, num_texts: int | None = None
    ) -> None:
        require_smoothing(label_smoothing)
        self.labels, self.label_smoothing, self.num_texts = list(map(str, labels or [])), label_smoothing, num_texts

    def read_scored(self, reader: TextReader, texts: Texts, labels: Any = None) -> Batch:
        """A batch of texts, each with the index of its label, see `index_of`."""
        batch = self.read(reader, texts)
        given, number = [labels] if isinstance(labels, int | float | str) else labels, len(batch["inputs"])
        if not isinstance(given, Sequence) or len(given) != number:
            works = {"labels": self.labels[:1] * number}
            raise ArgumentError("labels", labels, f"must be {number}, one for each text", works)
        ids = [self.index_of("labels", label) for label in given]
        return {**batch, "labels": torch.tensor(ids, device=reader.device)}

    def index_of(self, argument: str, label: Any) -> int:
        """The index of a label, which is a name or an index; if all names are integers, a number is taken as a name.

        Any other label is refused; `argument` is the name of the argument in the error.
        """
        names = list(map(class_name, self.labels))
        are_numbers = all(re.fullmatch(r"[+-]?\d+", str(name)) for name in names)
        choices = names if are_numbers else [*names, *range(len(names))]
        choice = class_name(str(label)) if are_numbers or isinstance(label, str | bool) else label
        require_choice(argument, choice, choices)
        return choices.index(choice) % len(names)

    def places(self, batch: Batch, tokenizer: TextTokenizer) -> None:
        """None, since logits are for a whole text."""

    def logits(self, network: nn.Module, batch: Batch) -> Float[Tensor, "batch classes"]:
        logits = self.forward(network, batch)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def loss(self, network: nn.Module, batch: Batch) -> Float[Tensor, ""]:
        """Mean negative log-likelihood of the labels, in nats per example."""
        return F.cross_entropy(self.logits(network, batch), batch["labels"], label_smoothing=self.label_smoothing)

    def nats(self, network: nn.Module, batch: Batch) -> tuple[Float[Tensor, " batch"], Int[Tensor, " batch"]]:
        nats = F.cross_entropy(self.logits(network, batch), batch["labels"], reduction="none")
        return nats, self.num_targets(batch)

    @torch.no_grad()
    def predict(self, network: nn.Module, batches: Iterable[Batch], split: Any) -> Table:
        """The predicted class of each row, and the probabilities of all classes."""
        parts = [(self.logits(network, batch).softmax(dim=-1).cpu(), batch["rows"].cpu()) for batch in batches]
        probabilities, rows = map(torch.cat, zip(*parts, strict=True))
        table = [[self.labels[int(row.argmax())], *row.tolist()] for row in probabilities[rows.argsort()]]
        return ["prediction", *(f"probability_{name}" for name in self.labels)], table

    def score(self, network: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """The sum of `nats`, and `confusion`: numbers of texts by true class (rows) and predicted class (columns)."""
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
        absent = f" (over the classes that occur or are predicted; no examples of {split.absent})" * bool(split.absent)
        scores = f"{metrics['accuracy']:.1%}, macro-F1 {metrics['macro_f1']:.3f}{absent}"
        return {"accuracy": f"{scores}; the most frequent class makes up {metrics['majority_share']:.1%}"}
