"""A model's predictions on a split: confused classes, worst examples, or generated texts."""

from collections.abc import Iterable, Sequence
from dataclasses import astuple
from functools import singledispatch
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tinyformer.data import LabelledSplit, PairSplit, QuestionSplit
from tinyformer.data.batches.windows import Batch
from tinyformer.nn import Network
from tinyformer.report.charts import confusion_grid
from tinyformer.report.result import AnalysisResult
from tinyformer.tasks import Classification, Seq2Seq, SpanExtraction, Task
from tinyformer.tasks.text_metrics import answer_scores, text_similarity

NUM_WORST = 50  # number of rows in the table of the worst examples


@singledispatch
def analyse_predictions(task: Task, network: Network, batches: Iterable[Batch], split: Any) -> AnalysisResult:
    """The tables and figures of a model's predictions, which depend on the task's class; most tasks have none."""
    return AnalysisResult()


@analyse_predictions.register
def _(task: Classification, network: Network, batches: Iterable[Batch], split: LabelledSplit) -> AnalysisResult:
    was_training = network.training
    network.eval()
    probabilities = torch.tensor([shares for _, *shares in task.predict(network, batches, split)[1]])
    network.train(was_training)
    texts = [split.text(row) for row in range(len(probabilities))]
    return classification_result(probabilities, torch.from_numpy(split.labels), texts, task.labels)


@analyse_predictions.register
def _(task: Seq2Seq, network: Network, batches: Iterable[Batch], split: PairSplit) -> AnalysisResult:
    """Each decoded pair next to its reference, with the chrF of the sentence (0 to 100); see `Seq2Seq.outputs`."""
    rows = [[*astuple(pair), text_similarity(pair.output, pair.reference)] for pair in task.outputs]
    return AnalysisResult(tables={"translations": (["source", "reference", "output", "chrf"], rows)} if rows else {})


@analyse_predictions.register
def _(task: SpanExtraction, network: Network, batches: Iterable[Batch], split: QuestionSplit) -> AnalysisResult:
    """The questions whose predicted answers have the lowest F1; see `SpanExtraction.predictions`."""
    answers, rows = split.answers(), []
    for row, text in ((predicted.row, predicted.text) for predicted in task.predictions):
        exact_match, f1 = answer_scores(text, answers[row])
        rows.append([split.question(row), split.context(row), " | ".join(answers[row]), text, exact_match, f1])
    rows = sorted(rows, key=lambda row: (row[-1], row[-2]))[:NUM_WORST]
    columns = ["question", "context", "answer", "prediction", "exact_match", "f1"]
    return AnalysisResult(tables={"worst_examples": (columns, rows)} if rows else {})


def classification_result(
    probabilities: Float[Tensor, "examples classes"],
    labels: Int[Tensor, " examples"],
    texts: Sequence[str],
    names: Sequence[str],
) -> AnalysisResult:
    """The confusion matrix, and the examples whose true class has the lowest probability."""
    predicted, num_classes = probabilities.argmax(dim=-1), len(names)
    counts = torch.bincount(labels * num_classes + predicted, minlength=num_classes**2)
    confusion = counts.view(num_classes, num_classes)
    of_label = probabilities.gather(1, labels.unsqueeze(1)).squeeze(1)
    worst = of_label.argsort(stable=True)[:NUM_WORST].tolist()
    rows = [[texts[i], names[int(labels[i])], names[int(predicted[i])], float(of_label[i])] for i in worst]
    return AnalysisResult(
        tables={
            "confusion": (
                ["label", *names],
                [[name, *row] for name, row in zip(names, confusion.tolist(), strict=True)],
            ),
            "worst_examples": (["text", "label", "predicted", "probability_of_label"], rows),
        },
        figures={"confusion": confusion_grid(confusion, names)},
    )
