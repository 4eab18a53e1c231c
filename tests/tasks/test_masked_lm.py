"""Hidden tokens, predicted from both sides."""

import math

import numpy as np
import pytest
import torch
from nn.model_cases import make_transformer, token_ids

from tinyformer.data import CharTokenizer, TokenSplit
from tinyformer.nn import IGNORED, AttentionMask
from tinyformer.tasks import MaskedLM

TOKENIZER = CharTokenizer().build(["abcdefgh"]).with_mask()


def split_of(text):
    ids = np.array([TOKENIZER.eos_id, *TOKENIZER.encode(text)], np.uint16)
    return TokenSplit(ids, np.array([0, len(ids)]), len(text), len(text), 0)


def small_network(seed=0, **options):
    torch.manual_seed(seed)
    network = make_transformer(vocab_size=TOKENIZER.vocab_size, **options).eval()
    with torch.no_grad():
        network.encoder.token_embedding.weight.normal_(0, 1)
    return network


def test_both_sides_are_seen_and_padding_is_not():
    lengths, documents = torch.tensor([3, 2]), torch.tensor([[1, 1, 2], [1, 1, 1]])
    assert MaskedLM().mask({"inputs": token_ids(2, 3)}) == AttentionMask()
    mask = MaskedLM().mask({"inputs": token_ids(2, 3), "lengths": lengths, "documents": documents})
    assert not mask.causal
    assert mask.lengths is lengths
    assert mask.documents is documents


def test_a_window_alone_and_padded_scores_the_same():
    network, ids = small_network(), token_ids(1, 6, TOKENIZER.vocab_size)
    targets = torch.tensor([[IGNORED, 3, IGNORED, 4, IGNORED, 5]])
    alone = MaskedLM().score(network, {"inputs": ids, "targets": targets})
    padded = {
        "inputs": torch.cat([ids, ids.flip(1)[:, :2]], dim=1),
        "targets": torch.cat([targets, torch.full((1, 2), IGNORED)], dim=1),
        "lengths": torch.tensor([6]),
    }
    for name, value in MaskedLM().score(network, padded).items():
        torch.testing.assert_close(value, alone[name])
    without = MaskedLM().score(network, {name: padded[name] for name in ("inputs", "targets")})
    assert abs(without["nats"] - alone["nats"]) > 1e-3


def test_the_most_frequent_token_is_what_guessing_comes_to():
    sums = {
        "nats": torch.tensor(8.0),
        "tokens": torch.tensor(4.0),
        "top1": torch.tensor(1.0),
        "top5": torch.tensor(3.0),
    }
    assert MaskedLM().metrics(sums, split_of("aaabbcde")) == {
        "loss": 2.0,
        "accuracy": 0.25,
        "accuracy_top5": 0.75,
        "majority_share": 3 / 8,  # the end of a text is never hidden
    }


def test_pseudo_perplexity_hides_one_token_at_a_time():
    network, text = small_network(max_seq_len=5), "abcdefgh"
    ids = [TOKENIZER.eos_id, *TOKENIZER.encode(text)]
    nats = []
    for window in (ids[:5], ids[5:]):  # as many as the model sees
        for at, truth in enumerate(window):
            if truth != TOKENIZER.eos_id:
                hidden = torch.tensor([[*window[:at], TOKENIZER.mask_id, *window[at + 1 :]]])
                nats.append(-network(hidden)[0, at].log_softmax(-1)[truth].item())
    assert len(nats) == 8
    expected = math.exp(sum(nats) / 8)
    found = MaskedLM().final_metrics(network, split_of(text), TOKENIZER)["pseudo_perplexity"]
    assert found == pytest.approx(expected, rel=1e-5)
    first = MaskedLM(pseudo_perplexity_tokens=3).final_metrics(network, split_of(text), TOKENIZER)
    assert first["pseudo_perplexity"] != pytest.approx(expected, rel=1e-3)


def test_pseudo_perplexity_can_be_left_out():
    metrics = MaskedLM(0).final_metrics(small_network(), split_of("abc"), TOKENIZER)
    assert metrics == {"pseudo_perplexity": None}
    described = MaskedLM().describe(
        {"accuracy": 0.5, "accuracy_top5": 0.75, "majority_share": 0.1} | metrics, split_of("abc")
    )
    assert described["pseudo-perplexity"] is None
    assert described["hidden token"].startswith("50.0% right")
    with pytest.raises(ValueError, match=r"task.objective.pseudo_perplexity_tokens=-1 is negative"):
        MaskedLM(-1)


@pytest.mark.parametrize("training", [True, False])
def test_pseudo_perplexity_is_without_dropout_and_leaves_the_mode(training):
    network = small_network(dropout=0.5)
    expected = MaskedLM().final_metrics(network, split_of("abcdefgh"), TOKENIZER)
    network.train(training)
    assert MaskedLM().final_metrics(network, split_of("abcdefgh"), TOKENIZER) == expected
    assert network.training == training


def test_what_is_said_of_the_metrics():
    metrics = {"accuracy": 0.25, "accuracy_top5": 0.5, "majority_share": 0.125, "pseudo_perplexity": 3.0}
    assert MaskedLM().describe(metrics, split_of("abc"))["hidden token"] == (
        "25.0% right, 50.0% among the first five; the most frequent is 12.5% of all"
    )


def test_a_split_without_text_has_no_most_frequent_token():
    sums = {name: torch.tensor(1.0) for name in ("nats", "tokens", "top1", "top5")}
    assert MaskedLM().metrics(sums, split_of(""))["majority_share"] == 0.0


def test_pseudo_perplexity_is_of_the_first_tokens():
    network = small_network(max_seq_len=5)
    first = MaskedLM(4).final_metrics(network, split_of("abcdefgh"), TOKENIZER)  # with the token before the text
    assert first == MaskedLM().final_metrics(network, split_of("abc"), TOKENIZER)
