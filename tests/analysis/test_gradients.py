"""The gradient of the residual stream by depth, and saturated softmax rows."""

from functools import partial
from pathlib import Path

import pytest
import torch
from nn.model_cases import make_transformer

from analysis.pair_subjects import ADDRESSES, loud_encoder_decoder, pair_subject
from analysis.subjects import CAUSAL, columns_of, loud_transformer, make_subject, windows_of
from tinyformer.analysis import GradientFlow
from tinyformer.analysis.capture import attention_calls
from tinyformer.analysis.gradients import count_saturated, gradient_norms, unscaled
from tinyformer.analysis.pair_probe import pairs_of
from tinyformer.nn import AttentionMaps, PostNormBlock, Residual
from tinyformer.nn.kernels.eager import attention_weights
from tinyformer.nn.score import Scoring


def norms_by_hand(network, tokens, targets):
    """The gradient norms of one window without padding, layer after layer."""
    streams = [network.encoder.position(network.encoder.token_embedding(tokens), 0).detach().requires_grad_()]
    for layer in network.encoder.layers:
        streams.append(layer(streams[-1], CAUSAL))
    logits = network.readout(network.encoder.final_norm(streams[-1]))
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    return [float(gradient.norm()) for gradient in torch.autograd.grad(loss, streams)]


@pytest.mark.parametrize("kind", [None, PostNormBlock], ids=["pre", "post"])
def test_norms_by_hand_with_and_without_skips(kind):
    options = {} if kind is None else {"kind": kind}
    network = loud_transformer(3, **options).requires_grad_(False)  # as if it were frozen
    subject = make_subject(network, padded=True, untrained=partial(loud_transformer, 3, 5, **options))
    found = GradientFlow()(subject, Path())
    table = columns_of(found.tables["gradients"])
    bare = {name: partial(Residual, skip=0.0) for name in ("attention_residual", "feed_forward_residual")}
    without = make_transformer(num_layers=3, **options, **bare).eval()
    without.load_state_dict(network.state_dict())
    for first, model in ((0, network), (4, without), (8, subject.untrained())):
        expected = []
        for window in windows_of(subject):
            length = int((window["targets"] >= 0).sum())
            expected.append(norms_by_hand(model, window["inputs"][:, :length], window["targets"][:, :length]))
        mean = torch.tensor(expected).mean(dim=0)
        assert table["gradient_norm"][first : first + 4] == pytest.approx(mean.tolist(), rel=1e-4)
    assert table["depth"] == (0, 1, 2, 3) * 4
    assert table["model"][::4] == tuple(
        f"{model}, {skips} skips" for model in ("trained", "untrained") for skips in ("with", "without")
    )
    assert set(found.figures) == {"gradients", "saturation"}


def test_both_stacks_of_an_encoder_decoder():
    """Padded pairs have the gradients that each has alone."""
    network = loud_encoder_decoder()
    subject = pair_subject(network)
    found = GradientFlow()(subject, Path())
    table = columns_of(found.tables["gradients"])
    assert table["kind"] == ("encoder",) * 12 + ("decoder",) * 8
    alone = [gradient_norms(pair_subject_of(pair), network) for batch in subject.batches for pair in pairs_of(batch)]
    for stack, first in enumerate((0, 12)):
        mean = torch.tensor([norms[stack] for norms in alone]).mean(dim=0).tolist()
        assert table["gradient_norm"][first : first + len(mean)] == pytest.approx(mean, rel=1e-4)
    assert set(found.figures) == {"encoder_gradients", "decoder_gradients", "saturation"}
    heads = columns_of(found.tables["saturation"])
    assert list(zip(heads["kind"], heads["layer"], strict=True))[::4] == ADDRESSES


def pair_subject_of(pair):
    """A subject with one pair."""
    subject = pair_subject(None)
    batch = {"source": pair.source, "source_lengths": torch.tensor([pair.source.shape[1]])}
    batch |= {"inputs": pair.target, "targets": pair.predicted, "rows": torch.tensor([0])}
    subject.batches[:] = [batch]
    return subject


def test_saturated_rows_by_hand():
    weights = torch.tensor([[1.0, 0.0, 0.0], [0.01, 0.99, 0.0], [0.985, 0.005, 0.01]])
    logits = torch.zeros(3, 3).masked_fill(torch.ones(3, 3).triu(1) > 0, -torch.inf)
    maps = AttentionMaps(torch.stack([weights, weights.flip(0)])[None], logits.expand(1, 2, 3, 3))
    # The first row has one visible key.
    assert count_saturated(maps, 0.99).tolist() == [[1, 2], [2, 2]]
    assert count_saturated(maps, 0.98).tolist() == [[2, 2], [2, 2]]


@pytest.mark.parametrize("sharing", [{}, {"num_kv_heads": 2}, {"score": "general"}], ids=["mha", "gqa", "general"])
def test_without_the_scale_queries_and_keys_stay(sharing):
    network = loud_transformer(2, **sharing)
    subject = make_subject(network)
    calls = attention_calls(network, subject.batches[0]["inputs"], CAUSAL)
    before = [layer.maps_of_call(call).weights for layer, call in calls]
    with unscaled(subject.layers):
        found = [layer.maps_of_call(call).weights for layer, call in calls]
    for weights, old, (layer, call) in zip(found, before, calls, strict=True):
        q, k, _ = call.qkv
        expected = attention_weights(q, k, CAUSAL, Scoring(1.0))
        torch.testing.assert_close(weights, expected)
        assert torch.equal(layer.maps_of_call(call).weights, old)
        assert torch.equal(weights, old) is ("score" in sharing)
    shares = columns_of(GradientFlow(saturated=0.9)(subject, Path()).tables["saturation"])
    assert (sum(shares["saturated_without_scale"]) > sum(shares["saturated"])) is ("score" not in sharing)
