"""Masked language modelling, against numbers computed by hand."""

import math

import numpy as np
import pytest
import torch
from nn.model_cases import make_transformer

from tinyformer.data import CharTokenizer, TokenSplit
from tinyformer.tasks import MaskedLM

TOKENIZER = CharTokenizer().build(["abcdefgh"]).with_mask()


def split_of(text):
    ids = np.array([TOKENIZER.eos_id, *TOKENIZER.encode(text)], np.uint16)
    return TokenSplit(ids, np.array([0, len(ids)]), len(text), len(text), 0)


def test_the_metrics_by_hand():
    sums = {name: torch.tensor(value) for name, value in {"nats": 8.0, "tokens": 4.0, "top1": 1.0, "top5": 3.0}.items()}
    # 3 / 8: <eos> is never masked.
    expected = {"loss": 2.0, "accuracy": 0.25, "accuracy_top5": 0.75, "majority_share": 3 / 8}
    assert MaskedLM().metrics(sums, split_of("aaabbcde")) == expected
    assert MaskedLM().metrics(sums, split_of(""))["majority_share"] == 0.0


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
