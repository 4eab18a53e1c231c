"""Classification, against numbers computed by hand."""

import math

import pytest
import torch
from nn.model_cases import token_ids

from tasks.fixed import Fixed
from tinyformer.tasks import Classification

LABELS = ["bad", "good", "so-so"]
LOGITS = torch.tensor([[2.0, 0, 0], [0, 0, 3], [0, 1, 0], [0, 0, 1], [5, 0, 0]])
TRUTH = torch.tensor([0, 1, 1, 2, 2])


def batch_of(truth, seq=4):
    return {"inputs": token_ids(len(truth), seq), "lengths": torch.full((len(truth),), seq), "labels": truth}


def metrics_of(logits, truth):
    task = Classification(LABELS)
    return task.metrics(task.score(Fixed(logits), batch_of(truth)), None)


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_loss_and_nats_by_hand(smoothing):
    """Smoothed labels are trained on, and not evaluated with."""
    task, network, batch = Classification(LABELS, label_smoothing=smoothing), Fixed(LOGITS), batch_of(TRUTH)
    log_p = [[x - math.log(sum(map(math.exp, row))) for x in row] for row in LOGITS.tolist()]
    picked = [row[k] for row, k in zip(log_p, TRUTH, strict=True)]
    nats, targets = task.nats(network, batch)
    assert nats.tolist() == pytest.approx([-value for value in picked], rel=1e-5)
    assert targets.tolist() == [1] * 5
    expected = -((1 - smoothing) * sum(picked) + smoothing / 3 * sum(map(sum, log_p))) / 5
    assert task.loss(network, batch).item() == pytest.approx(expected, rel=1e-5)
    assert task.metrics(task.score(network, batch), None)["loss"] == pytest.approx(-sum(picked) / 5, rel=1e-5)


@pytest.mark.parametrize(
    ("logits", "truth", "metrics"),  # accuracy, macro-F1 and the share of the most frequent class
    [
        (LOGITS, TRUTH, (3 / 5, (2 / 3 + 2 / 3 + 1 / 2) / 3, 2 / 5)),  # predicted: 0, 2, 1, 2, 0
        (LOGITS, torch.tensor([1, 1, 1, 2, 2]), (2 / 5, (0 + 1 / 2 + 1 / 2) / 3, 3 / 5)),
        (LOGITS * 0 + torch.tensor([1.0, 0, 0]), TRUTH * 0, (1, 1, 1)),  # a class that never occurs has no F1
    ],
)
def test_metrics_by_hand(logits, truth, metrics):
    found = metrics_of(logits, truth)
    assert [found[name] for name in ("accuracy", "macro_f1", "majority_share")] == pytest.approx(metrics)
