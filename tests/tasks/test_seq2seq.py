"""Translation and summarisation: loss and scores by hand, and the metrics of texts by the reference programs."""

import math
import subprocess
import sys

import pytest
import torch
from analysis.pair_subjects import loud_encoder_decoder
from data.test_pairs import prepared, write
from torch import nn

from tinyformer.batch import IGNORED
from tinyformer.data import ByteTokenizer, CharTokenizer
from tinyformer.tasks import Seq2Seq
from tinyformer.tasks.text_metrics import text_metrics, text_similarity
from tinyformer.tasks.user_texts import TextReader

TOKENIZER = ByteTokenizer().build([])
PROBABILITIES = torch.tensor([[[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]], [[0.2, 0.7, 0.1], [1 / 3, 1 / 3, 1 / 3]]])
BATCH = {
    "source": torch.tensor([[2, 1, 0], [1, 0, 0]]),
    "source_lengths": torch.tensor([3, 2]),
    "inputs": torch.zeros(2, 2, dtype=torch.long),
    "targets": torch.tensor([[0, 1], [1, IGNORED]]),
}


class Fixed(nn.Module):
    """An encoder–decoder with these probabilities."""

    def forward(self, source, tokens, source_mask, mask=None, targets=None, label_smoothing=0.0):
        assert source_mask.lengths.tolist() == [3, 2]
        logits = PROBABILITIES.log()
        if targets is None:
            return logits
        return nn.functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, label_smoothing=label_smoothing
        )


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_loss_and_scores_by_hand(smoothing):
    """Smoothed labels are trained on, and not evaluated with."""
    task = Seq2Seq(label_smoothing=smoothing)
    chosen = [-math.log(probability) for probability in (0.5, 0.1, 0.7)]
    spread = -math.fsum(map(math.log, (0.5, 0.25, 0.25, 0.1, 0.1, 0.8, 0.2, 0.7, 0.1))) / 3
    assert task.loss(Fixed(), BATCH).item() == pytest.approx(((1 - smoothing) * sum(chosen) + smoothing * spread) / 3)
    nats, targets = task.nats(Fixed(), BATCH)
    assert nats.tolist() == pytest.approx([chosen[0] + chosen[1], chosen[2]])
    assert targets.tolist() == [2, 1]
    metrics = task.metrics(task.score(Fixed(), BATCH), None)
    assert metrics["loss"] == pytest.approx(sum(chosen) / 3)
    assert metrics["perplexity"] == pytest.approx(math.exp(sum(chosen) / 3))
    assert (metrics["accuracy"], metrics["accuracy_top5"]) == (pytest.approx(2 / 3), 1.0)


def test_a_text_that_is_too_long_is_cut():
    network, long = loud_encoder_decoder(vocab_size=TOKENIZER.vocab_size), "abcdefgh" * 5
    whole, cut = Seq2Seq().generate(TextReader(network, TOKENIZER), [long, long[: network.max_seq_len - 1]])
    assert whole == cut


def test_references_are_whole_and_as_they_stand_in_the_file(tmp_path):
    """Longer than the context, and with a character that the tokenizer does not know."""
    folder, long = tmp_path / "pairs", "çay and a long walk along the river"
    folder.mkdir()
    for name, rows in (
        ("train", [("tea", "and a walk")] * 4),
        ("validation", [("tea", "and"), ("a walk", long), ("a", "d")]),
    ):
        write(folder, rows, f"{name}.tsv")
    metrics = dict.fromkeys(("perplexity", "accuracy", "accuracy_top5"), 0.0)
    found = []
    for too_long in ("truncate", "skip"):
        data = prepared(tmp_path, str(folder), 12, tokenizer=CharTokenizer(), too_long=too_long)
        split, network = data.splits["validation"], loud_encoder_decoder(vocab_size=data.tokenizer.vocab_size)
        references = [one.reference for one in Seq2Seq().decode_split(network, split)]
        found.append((references, Seq2Seq().describe(metrics, split).get("truncated targets")))
        assert Seq2Seq().decode_split(network, split.first(1))[0].reference == "and"
    line = "1 of 3: loss over their beginning, scores over the whole"
    assert found == [(["and", long, "d"], line), (["and", "d"], None)]


OUTPUTS = ["The cat sat on the mat.", "It rains, and it pours!", "a b", ""]
REFERENCES = ["The cat is on the mat.", "It rains, and it pours!", "c d e f", "the end"]


def test_bleu_and_chrf_are_those_of_the_command_line(tmp_path):
    for name, texts in (("outputs", OUTPUTS), ("references", REFERENCES)):
        (tmp_path / name).write_text("\n".join(texts) + "\n")
    command = [sys.executable, "-m", "sacrebleu", "references", "-i", "outputs", "-m", "bleu", "chrf", "-b", "-w", "6"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    metrics = text_metrics(OUTPUTS, REFERENCES)
    expected = [float(number) for number in ended.stdout.replace("[", " ").replace("]", " ").replace(",", " ").split()]
    assert [metrics["bleu"], metrics["chrf"]] == pytest.approx(expected, abs=1e-5)
    assert metrics["exact_match"] == 1 / 4
    assert (text_similarity("same", "same"), text_similarity("ab", "xy")) == (100.0, 0.0)


def test_rouge_by_hand():
    # "on" and "the" and "mat" and "cat" and "the": 5 of 6 words; the longest common subsequence has as many.
    metrics = text_metrics(OUTPUTS[:1], REFERENCES[:1])
    assert (metrics["rouge1"], metrics["rougeL"]) == (pytest.approx(500 / 6), pytest.approx(500 / 6))
    assert text_metrics(["b a"], ["a b"])["rouge1"] == 100
    assert text_metrics(["b a"], ["a b"])["rougeL"] == 50
    assert text_metrics(["he walks"], ["he walked"])["rouge1"] == 100  # of stems
