"""Next-token prediction, against numbers computed by hand."""

import math

import numpy as np
import pytest
import torch
from nn.model_cases import make_transformer, token_ids

from tasks.fixed import Fixed
from tinyformer.data import TokenSplit
from tinyformer.nn import IGNORED, AttentionMask
from tinyformer.tasks import CausalLM

# Six tokens of 1, 2, 3, 4, 5 and 6 shares, in log.
LOGITS = torch.tensor([1.0, 2, 3, 4, 5, 6]).log().expand(1, 4, 6)
BATCH = {"inputs": torch.tensor([[0, 1, 2, 3]]), "targets": torch.tensor([[5, 1, 0, IGNORED]])}
NATS = [math.log(21 / 6), math.log(21 / 2), math.log(21 / 1)]


def test_loss_is_the_mean_over_the_targets_that_count():
    assert CausalLM().loss(Fixed(LOGITS), BATCH).item() == pytest.approx(sum(NATS) / 3, rel=1e-6)


def test_nats_are_sums_of_each_row_and_say_over_how_many_targets():
    batch = {name: tensor.repeat(2, 1) for name, tensor in BATCH.items()}
    batch["targets"][1, :2] = IGNORED
    nats, targets = CausalLM().nats(Fixed(LOGITS.repeat(2, 1, 1)), batch)
    assert nats.tolist() == pytest.approx([sum(NATS), NATS[2]], rel=1e-6)
    assert targets.tolist() == [3, 1]


def test_scores_are_sums_over_the_targets_that_count():
    scores = CausalLM().score(Fixed(LOGITS), BATCH)
    assert {name: value.item() for name, value in scores.items()} == {
        "nats": pytest.approx(sum(NATS), rel=1e-6),
        "tokens": 3,
        "top1": 1,  # token 5 is the likeliest
        "top5": 2,  # token 1 is the fifth, token 0 the sixth
    }
    assert all(value.dtype == torch.float32 for value in scores.values())


def test_a_vocabulary_below_five_tokens_works():
    batch = {"inputs": torch.zeros(1, 2, dtype=torch.long), "targets": torch.tensor([[0, 2]])}
    scores = CausalLM().score(Fixed(torch.tensor([1.0, 2, 3]).expand(1, 2, 3)), batch)
    assert (scores["top1"].item(), scores["top5"].item()) == (1, 2)


def test_a_batch_of_padding_alone_adds_nothing():
    batch = BATCH | {"targets": torch.full((1, 4), IGNORED)}
    assert [value.item() for value in CausalLM().score(Fixed(LOGITS), batch).values()] == [0, 0, 0, 0]


def test_scores_add_up_over_batches():
    torch.manual_seed(0)
    network, ids = make_transformer(), token_ids(batch=6, seq=9)
    whole = CausalLM().score(network, {"inputs": ids[:, :-1], "targets": ids[:, 1:]})
    parts = [CausalLM().score(network, {"inputs": part[:, :-1], "targets": part[:, 1:]}) for part in ids.split(2)]
    for name, value in whole.items():
        torch.testing.assert_close(sum(part[name] for part in parts), value)
    loss = CausalLM().loss(network, {"inputs": ids[:, :-1], "targets": ids[:, 1:]})
    torch.testing.assert_close(whole["nats"] / whole["tokens"], loss)


def test_the_network_sees_the_inputs_under_a_causal_mask():
    network = Fixed(LOGITS)
    CausalLM().loss(network, BATCH)
    tokens, mask = network.asked
    assert tokens is BATCH["inputs"]
    assert mask == AttentionMask(causal=True) == CausalLM().mask(BATCH)


def test_documents_of_a_batch_reach_the_mask():
    documents = torch.tensor([[1, 1, 2, 2]])
    mask = CausalLM().mask({**BATCH, "documents": documents})
    assert mask.causal
    assert mask.documents is documents


def test_a_packed_document_is_scored_as_if_it_were_alone():
    torch.manual_seed(0)
    network, ids = make_transformer(position=False), token_ids(batch=1, seq=10)
    packed = {"inputs": ids[:, :9], "targets": ids[:, 1:], "documents": torch.tensor([[1] * 4 + [2] * 5])}
    parts = [{"inputs": ids[:, :4], "targets": ids[:, 1:5]}, {"inputs": ids[:, 4:9], "targets": ids[:, 5:]}]
    alone = sum(CausalLM().score(network, part)["nats"] for part in parts)
    torch.testing.assert_close(CausalLM().score(network, packed)["nats"], alone)
    without = CausalLM().score(network, {name: packed[name] for name in ("inputs", "targets")})["nats"]
    assert abs(without - alone) > 1e-4


def test_padding_at_the_right_changes_no_score():
    torch.manual_seed(0)
    network, ids = make_transformer(), token_ids(batch=2, seq=9)
    batch = {"inputs": ids[:, :-1], "targets": ids[:, 1:]}
    padded = {
        "inputs": torch.cat([batch["inputs"], torch.zeros(2, 3, dtype=torch.long)], dim=1),
        "targets": torch.cat([batch["targets"], torch.full((2, 3), IGNORED)], dim=1),
    }
    for name, value in CausalLM().score(network, batch).items():
        torch.testing.assert_close(CausalLM().score(network, padded)[name], value)


def test_what_is_said_of_the_metrics():
    metrics = {"perplexity": 8.0, "bits_per_byte": None, "accuracy": 0.25, "accuracy_top5": 0.5}
    split = TokenSplit(np.zeros(3, np.uint16), np.array([0, 3]), 9, 9, num_unknown=1)
    assert CausalLM().describe(metrics, split) == {
        "perplexity": "8.00",
        "bits per byte": "none, since characters were unknown",
        "next token": "25.0% right, 50.0% among the first five",
    }


def test_scores_in_bf16_are_summed_in_fp32():
    rounded = LOGITS.bfloat16()
    exact, found = (CausalLM().nats(Fixed(logits), BATCH)[0] for logits in (rounded.float(), rounded))
    assert found.dtype == torch.float32
    assert torch.equal(found, exact)
    assert torch.equal(*(CausalLM().score(Fixed(logits), BATCH)["nats"] for logits in (rounded.float(), rounded)))
