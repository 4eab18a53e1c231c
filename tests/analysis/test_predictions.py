"""The findings of a classifier's predictions on a split."""

from types import SimpleNamespace

import pytest
import torch
from nn.model_cases import make_encoder, token_ids

from tinyformer.analysis import analyse_predictions
from tinyformer.analysis.texts.predictions import classification_result
from tinyformer.nn import ClassReadout, Transformer
from tinyformer.tasks import Classification

LABELS = ["bad", "good", "so-so"]


def test_the_confusion_matrix_and_the_worst_examples_by_hand():
    probabilities = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.3, 0.6], [0.5, 0.4, 0.1], [0.2, 0.1, 0.7]])
    found = classification_result(probabilities, torch.tensor([0, 1, 1, 0]), list("abcd"), LABELS)
    rows = found.tables["confusion"][1]
    assert rows == [["bad", 1, 0, 1], ["good", 1, 0, 1], ["so-so", 0, 0, 0]]  # true class down, predicted across
    axes = found.figures["confusion"].axes[0]
    shown = {tuple(map(int, text.get_position())): text.get_text() for text in axes.texts}
    assert shown == {(x, y): str(count) for y, row in enumerate(rows) for x, count in enumerate(row[1:])}
    expected = [("d", "bad", "so-so", 0.2), ("b", "good", "so-so", 0.3), ("c", "good", "bad", 0.4)]
    rows = found.tables["worst_examples"][1]
    assert [tuple(row) for row in rows[:3]] == [(*row[:3], pytest.approx(row[3])) for row in expected]


def test_predictions_are_made_without_dropout_and_matched_to_their_texts():
    torch.manual_seed(0)
    encoder = make_encoder(dropout=0.5)
    network = Transformer(encoder, lambda embedding: ClassReadout(embedding, LABELS, "mean", 0.5), init_std=0.5)
    task, ids, truth = Classification(LABELS), token_ids(5, 6), torch.tensor([0, 2, 1, 1, 0])
    lengths, order = torch.full((5,), 6), [torch.tensor([3, 1]), torch.tensor([4, 0, 2])]
    batches = [{"inputs": ids[rows], "lengths": lengths[rows], "labels": truth[rows], "rows": rows} for rows in order]
    network.train()
    split = SimpleNamespace(text=lambda row: f"text {row}", labels=truth.numpy())
    columns, found = analyse_predictions(task, network, batches, split).tables["worst_examples"]
    assert network.training
    shares = task.logits(network.eval(), {"inputs": ids, "lengths": lengths}).softmax(dim=-1)
    expected = {f"text {row}": shares[row, truth[row]].item() for row in range(5)}
    named = [dict(zip(columns, row, strict=True)) for row in found]
    assert {row["text"]: row["probability_of_label"] for row in named} == pytest.approx(expected, abs=1e-4)
    assert [row["label"] for row in named] == [LABELS[truth[int(row["text"].split()[1])]] for row in named]
