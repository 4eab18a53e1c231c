"""Next tokens, masked tokens, classes and target texts: losses and metrics by hand and by the reference programs."""

import math
import re
import subprocess
import sys
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from analysis.contexts import loud_encoder_decoder
from data.test_pairs import prepared, write
from nn.model_cases import make_transformer, token_ids

from tasks.fixed import Fixed
from tinyformer.data import CharTokenizer, PairSplit, TokenSplit
from tinyformer.data.batches.windows import IGNORED
from tinyformer.nn import AttentionMask
from tinyformer.tasks import CausalLM, Classification, MaskedLM, Output, Seq2Seq
from tinyformer.tasks.text_metrics import text_metrics, text_similarity

# Next tokens.

# Six tokens of 1, 2, 3, 4, 5 and 6 shares, in log.
LOGITS = torch.tensor([1.0, 2, 3, 4, 5, 6]).log().expand(1, 4, 6)
BATCH = {"inputs": torch.tensor([[0, 1, 2, 3]]), "targets": torch.tensor([[5, 1, 0, IGNORED]])}
NATS = [math.log(21 / 6), math.log(21 / 2), math.log(21 / 1)]


@pytest.mark.parametrize("max_scores", [2**26, 12, 1])
def test_loss_nats_and_scores_by_hand(max_scores, monkeypatch):
    monkeypatch.setattr("tinyformer.tasks.task.MAX_SCORES", max_scores)  # all at once, two targets at once, one
    task, network = CausalLM(), Fixed(LOGITS)
    assert task.loss(network, BATCH).item() == pytest.approx(sum(NATS) / 3, rel=1e-6)
    assert network.asked == (BATCH["inputs"], AttentionMask(causal=True))
    packed = {"documents": torch.tensor([[1, 1, 2, 2]]), "document_starts": torch.tensor([0, 2], dtype=torch.int32)}
    task.loss(network, BATCH | packed)
    assert network.asked == (BATCH["inputs"], AttentionMask(causal=True, **packed))
    scores = task.score(network, BATCH)
    assert {name: value.item() for name, value in scores.items()} == {
        "nats": pytest.approx(sum(NATS), rel=1e-6),
        "tokens": 3,
        "top1": 1,  # token 5 is the most likely
        "top5": 2,  # token 1 is the fifth, token 0 the sixth
    }
    assert all(value.dtype == torch.float32 for value in scores.values())
    rows = {name: tensor.repeat(2, 1) for name, tensor in BATCH.items()}
    rows["targets"][1, :2] = IGNORED
    nats, targets = task.nats(Fixed(LOGITS.repeat(2, 1, 1)), rows)
    assert nats.tolist() == pytest.approx([sum(NATS), NATS[2]], rel=1e-6)
    assert targets.tolist() == [3, 1]
    padding = BATCH | {"targets": torch.full((1, 4), IGNORED)}
    assert [value.item() for value in task.score(network, padding).values()] == [0, 0, 0, 0]


SUMS = {name: torch.tensor(value) for name, value in {"nats": 8.0, "tokens": 4.0, "top1": 1.0, "top5": 2.0}.items()}


@pytest.mark.parametrize(
    ("num_unknown", "lost_bytes", "scored", "bits", "shown"),
    [
        (0, 0.001, None, 2 / math.log(2) * 12 / 9, "3.8472"),  # 12 targets of 2 nats, 9 bytes
        (1, 0.5, None, None, "none: the text has unknown tokens"),
        (0, 0.5, np.ones(13, bool), None, "none: not every token is scored"),
        (0, 0.0012, None, None, "none: decode(encode(text)) differs from the text in 0.12% of the bytes"),
    ],
)
def test_metrics_by_hand(num_unknown, lost_bytes, scored, bits, shown):
    split = TokenSplit(np.zeros(13, np.uint16), np.array([0, 13]), 9, 7, num_unknown, lost_bytes, scored=scored)
    metrics = CausalLM().metrics(SUMS, split)
    assert metrics == {
        "loss": 2.0,
        "accuracy": 0.25,
        "accuracy_top5": 0.5,
        "perplexity": pytest.approx(math.exp(2)),
        "bits_per_byte": None if bits is None else pytest.approx(bits),
    }
    large = CausalLM().metrics(SUMS | {"nats": torch.tensor(1e6)}, split)
    assert math.isfinite(large["perplexity"])
    assert CausalLM().describe(metrics, split)["bits per byte"] == shown


# Masked tokens.

TOKENIZER = CharTokenizer().build(["abcdefgh"]).with_mask()


def split_of(text):
    ids = np.array([TOKENIZER.eos_id, *TOKENIZER.encode(text)], np.uint16)
    return TokenSplit(ids, np.array([0, len(ids)]), len(text), len(text), 0, 0)


def test_metrics_of_masked_tokens_by_hand():
    # 3 / 8: <eos> is never masked.
    expected = {"loss": 2.0, "accuracy": 0.25, "accuracy_top5": 0.5, "num_scored": 4, "majority_share": 3 / 8}
    assert MaskedLM().metrics(SUMS, split_of("aaabbcde")) == expected
    assert MaskedLM().metrics(SUMS, split_of(""))["majority_share"] == 0.0


def test_pseudo_perplexity_masks_one_token_at_a_time():
    torch.manual_seed(0)
    network, text = make_transformer(vocab_size=TOKENIZER.vocab_size, max_seq_len=5, dropout=0.5).eval(), "abcdefgh"
    torch.nn.init.normal_(network.encoder.token_embedding.weight)
    ids = [TOKENIZER.eos_id, *TOKENIZER.encode(text)]
    nats = []
    for window in (ids[:5], ids[5:]):  # the context length
        for at, truth in enumerate(window):
            if truth != TOKENIZER.eos_id:
                masked = torch.tensor([[*window[:at], TOKENIZER.mask_id, *window[at + 1 :]]])
                nats.append(-network(masked)[0, at].log_softmax(-1)[truth].item())
    assert len(nats) == 8
    expected = math.exp(sum(nats) / 8)
    found = MaskedLM().final_metrics(network, split_of(text), TOKENIZER)["pseudo_perplexity"]
    assert found == pytest.approx(expected, rel=1e-5)
    # Over the first 4 tokens of the split, <eos> included.
    assert MaskedLM(4).final_metrics(network, split_of(text), TOKENIZER) == MaskedLM().final_metrics(
        network, split_of("abc"), TOKENIZER
    )


# Classes.

LABELS = ["bad", "good", "so-so"]
CLASS_LOGITS = torch.tensor([[2.0, 0, 0], [0, 0, 3], [0, 1, 0], [0, 0, 1], [5, 0, 0]])
TRUTH = torch.tensor([0, 1, 1, 2, 2])


def batch_of(truth, seq=4):
    return {"inputs": token_ids(len(truth), seq), "lengths": torch.full((len(truth),), seq), "labels": truth}


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_smoothed_labels_of_classes_are_trained_on_and_not_evaluated_with(smoothing):
    logits = CLASS_LOGITS + torch.tensor([3.0, 0, 0])  # of which the loss with smoothing is another one
    task, network, batch = Classification(LABELS, label_smoothing=smoothing), Fixed(logits), batch_of(TRUTH)
    log_p = [[x - math.log(sum(map(math.exp, row))) for x in row] for row in logits.tolist()]
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
        (CLASS_LOGITS, TRUTH, (3 / 5, (2 / 3 + 2 / 3 + 1 / 2) / 3, 2 / 5)),  # predicted: 0, 2, 1, 2, 0
        (CLASS_LOGITS, torch.tensor([1, 1, 1, 2, 2]), (2 / 5, (0 + 1 / 2 + 1 / 2) / 3, 3 / 5)),
        (CLASS_LOGITS * 0 + torch.tensor([1.0, 0, 0]), TRUTH * 0, (1, 1, 1)),  # a class that never occurs has no F1
    ],
)
def test_metrics_of_classes_by_hand(logits, truth, metrics):
    task = Classification(LABELS)
    found = task.metrics(task.score(Fixed(logits), batch_of(truth)), None)
    assert [found[name] for name in ("accuracy", "macro_f1", "majority_share")] == pytest.approx(metrics)


# Target texts.

PROBABILITIES = torch.tensor([[[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]], [[0.2, 0.7, 0.1], [1 / 3, 1 / 3, 1 / 3]]])
PAIRS = {
    "source": torch.tensor([[2, 1, 0], [1, 0, 0]]),
    "source_lengths": torch.tensor([3, 2]),
    "inputs": torch.zeros(2, 2, dtype=torch.long),
    "targets": torch.tensor([[0, 1], [1, IGNORED]]),
}


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_loss_and_scores_of_target_texts_by_hand(smoothing):
    """Smoothed labels are trained on, and not evaluated with."""
    task, network = Seq2Seq(label_smoothing=smoothing), Fixed(PROBABILITIES.log())
    chosen = [-math.log(probability) for probability in (0.5, 0.1, 0.7)]
    spread = -math.fsum(map(math.log, (0.5, 0.25, 0.25, 0.1, 0.1, 0.8, 0.2, 0.7, 0.1))) / 3
    assert task.loss(network, PAIRS).item() == pytest.approx(((1 - smoothing) * sum(chosen) + smoothing * spread) / 3)
    nats, targets = task.nats(network, PAIRS)
    assert network.asked[2].lengths.tolist() == [3, 2]
    assert nats.tolist() == pytest.approx([chosen[0] + chosen[1], chosen[2]])
    assert targets.tolist() == [2, 1]
    metrics = task.metrics(task.score(network, PAIRS), None)
    assert metrics["loss"] == pytest.approx(sum(chosen) / 3)
    assert metrics["perplexity"] == pytest.approx(math.exp(sum(chosen) / 3))
    assert (metrics["accuracy"], metrics["accuracy_top5"]) == (pytest.approx(2 / 3), 1.0)


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
        decoded = Seq2Seq().final_metrics(network, split, data.tokenizer)
        best = text_metrics([re.sub("[^tea ndwlk]", "<unk>", text) for text in references], references)
        told = {name: decoded.get(f"{name}_ceiling") for name in best}  # nothing of what all come back
        assert told == (best if best["exact_match"] < 1 else dict.fromkeys(best))
        shown = Seq2Seq().describe(metrics | decoded, split).get("tokenizer allows", "")
        assert ("66.7% equal" in shown) == (best["exact_match"] < 1)
    line = "1 of 3: the loss is over the beginning, the scores are over the whole target"
    assert found == [(["and", long, "d"], line), (["and", "d"], None)]


OUTPUTS = ["The cat sat on the mat.", "It rains, and it pours!", "a b", "", "山川日月木火", "土金。"]
REFERENCES = ["The cat is on the mat.", "It rains, and it pours!", "c d e f", "the end", "山川日月木水", "土金。"]


@pytest.mark.parametrize("tokenize", ["13a", "zh", "char", "intl"])
def test_bleu_and_chrf_are_those_of_the_command_line(tmp_path, tokenize):
    for name, texts in (("outputs", OUTPUTS), ("references", REFERENCES)):
        (tmp_path / name).write_text("\n".join(texts) + "\n")
    command = [sys.executable, "-m", "sacrebleu", "references", "-i", "outputs", "-m", "bleu", "chrf", "-b", "-w", "6"]
    command += ["-tok", tokenize]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    metrics = text_metrics(OUTPUTS, REFERENCES, tokenize)
    expected = [float(number) for number in ended.stdout.replace("[", " ").replace("]", " ").replace(",", " ").split()]
    assert [metrics["bleu"], metrics["chrf"]] == pytest.approx(expected, abs=1e-5)
    assert metrics["exact_match"] == 2 / 6
    assert (text_similarity("same", "same"), text_similarity("ab", "xy")) == (100.0, 0.0)


def test_the_summary_names_the_tokens_of_bleu_and_warns_where_words_are_none():
    metrics = dict.fromkeys(("perplexity", "accuracy", "accuracy_top5"), 0.0) | text_metrics(OUTPUTS, REFERENCES)
    for tokenize, first, warns in (("13a", 4, True), ("13a", 0, False), ("zh", 4, False)):
        task = Seq2Seq()
        task.bleu_tokenize, task.outputs = tokenize, [Output("", reference, "") for reference in REFERENCES[first:]]
        lines = task.describe(metrics | {"num_decoded": 6}, Mock(PairSplit, num_truncated_targets=0))
        assert (lines["decoded"].split(")")[0], "BLEU" in lines) == (f"BLEU ({tokenize}", warns)


def test_rouge_by_hand():
    assert text_metrics(["b a"], ["a b"])["rouge1"] == 100
    assert text_metrics(["b a"], ["a b"])["rougeL"] == 50
    assert text_metrics(["he walks"], ["he walked"])["rouge1"] == 100  # of stems
