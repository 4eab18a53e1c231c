"""The gradients of the residual stream and of sublayers by depth, logits, and saturated softmax rows."""

import itertools
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from nn.model_cases import make_transformer

from analysis.pair_subjects import ADDRESSES, loud_encoder_decoder, pair_subject
from analysis.subjects import CAUSAL, columns_of, loud_transformer, make_subject, windows_of
from tinyformer.analysis import GradientFlow
from tinyformer.analysis.gradients import (
    count_saturated,
    gradient_norms,
    logit_statistics,
    sublayer_gradients,
    unscaled,
)
from tinyformer.analysis.measures.capture import attention_calls
from tinyformer.analysis.measures.pair_probe import pairs_of
from tinyformer.nn import AttentionMaps, PostNormBlock, PreNormBlock, Residual
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


def layer_by_hand(w, name, x, is_pre):
    """One layer of four heads of 8, causal, from its weights by name."""

    def linear(x, part):
        return x @ w[f"{name}.{part}.weight"].T

    def norm(x, part):
        return F.layer_norm(x, (32,), w[f"{name}.{part}.weight"])

    def attend(x):
        q, k, v = (linear(x, f"attention.{part}_proj").unflatten(-1, (4, 8)).transpose(0, 1) for part in "qkv")
        hidden = torch.ones(len(x), len(x)).triu(1).bool()
        attended = (q @ k.mT / 8**0.5).masked_fill(hidden, -torch.inf).softmax(dim=-1) @ v
        return linear(attended.transpose(0, 1).flatten(1), "attention.o_proj")

    def feed_forward(x):
        return linear(F.gelu(linear(x, "feed_forward.up_proj")), "feed_forward.down_proj")

    for part, sublayer in (("attention_norm", attend), ("feed_forward_norm", feed_forward)):
        x = x + sublayer(norm(x, part)) if is_pre else norm(x + sublayer(x), part)
    return x


@pytest.mark.parametrize("kind", [PreNormBlock, PostNormBlock], ids=["pre", "post"])
def test_gradients_of_sublayers_by_a_network_in_plain_torch(kind):
    """Of the mean loss of windows of unequal length, in the trained and in the untrained network."""
    network = loud_transformer(2, kind=kind).requires_grad_(False)  # as if it were frozen
    subject = make_subject(network, padded=True, untrained=partial(loud_transformer, 2, 5, kind=kind))
    table = columns_of(GradientFlow()(subject, Path()).tables["sublayers"])
    assert table["model"] == ("trained",) * 4 + ("untrained",) * 4
    assert table["layer"] == (0, 0, 1, 1) * 2
    assert table["sublayer"] == ("attention", "feed_forward") * 4
    assert not any(weight.requires_grad for weight in network.parameters())
    for first, model in ((0, network), (4, subject.untrained())):
        w = {name: weight.double().requires_grad_() for name, weight in model.state_dict().items()}
        losses, of_last = [], []
        for window in windows_of(subject):
            length = int(window["lengths"])
            tokens, targets = window["inputs"][0, :length], window["targets"][0, :length]
            x = w["encoder.token_embedding.weight"][tokens] + w["encoder.position.embedding.weight"][:length]
            for layer in range(2):
                x = layer_by_hand(w, f"encoder.layers.{layer}", x, kind is PreNormBlock)
            if kind is PreNormBlock:
                x = F.layer_norm(x, (32,), w["encoder.final_norm.weight"])
            nats = F.cross_entropy(x @ w["readout.proj.weight"].T, targets, reduction="none")
            losses.append(nats.mean())
            of_last.append(nats[-1])
        parts = [[f"attention.{name}_proj" for name in "qkvo"], [f"feed_forward.{way}_proj" for way in ("up", "down")]]
        sublayers = [[w[f"encoder.layers.{i}.{name}.weight"] for name in names] for i in range(2) for names in parts]

        def norms(loss, sublayers=sublayers):
            found = [torch.autograd.grad(loss, weights, retain_graph=True) for weights in sublayers]
            return [torch.cat([gradient.flatten() for gradient in several]).norm().item() for several in found]

        assert table["gradient_norm"][first : first + 4] == pytest.approx(norms(torch.stack(losses).mean()), rel=1e-4)
        last = torch.tensor([norms(loss) for loss in of_last]).mean(dim=0).tolist()
        assert table["target_gradient_norm"][first : first + 4] == pytest.approx(last, rel=1e-4)


def test_gradients_of_sublayers_of_an_encoder_decoder():
    """By autograd of the pairs one by one, each without padding."""
    network = loud_encoder_decoder()
    subject = pair_subject(network)
    losses = []
    for pair in (pair for batch in subject.batches for pair in pairs_of(batch)):
        nats, targets = subject.task.nats(network, pair_subject_of(pair).batches[0])
        losses.append(nats[0] / targets[0])
    torch.stack(losses).mean().backward()
    for stack, found in zip(("encoder", "decoder"), sublayer_gradients(subject, network), strict=True):
        layers = getattr(network, stack).layers
        names = ["attention", "cross_attention", "feed_forward"][:: 1 if stack == "decoder" else 2]
        assert list(found) == [(depth, name) for depth in range(len(layers)) for name in names]
        for (depth, name), (norm, _) in found.items():
            gradients = [weight.grad.flatten() for weight in getattr(layers[depth], name).parameters()]
            assert norm == pytest.approx(float(torch.cat(gradients).norm()), rel=1e-4)


@pytest.mark.parametrize("sink", [-torch.inf, 0.5], ids=["plain", "sink"])
def test_logits_by_hand(sink):
    """The variance of a row's visible logits and the trace of the softmax's Jacobian, of rows that have a choice."""
    heads = [[[5.0], [1.0, 3.0], [0.0, 3.0, 6.0]], [[5.0], [2.0, 2.0], [-1.0, 0.0, 1.0]]]
    variances = [1 + 6, 0 + 2 / 3]

    def softmax(row):
        return torch.cat([row, torch.tensor([sink])]).softmax(dim=0)[:-1]

    logits, weights = torch.full((1, 2, 3, 3), -torch.inf), torch.zeros(1, 2, 3, 3)
    traces = [0.0, 0.0]
    for head, row in itertools.product(range(2), range(3)):
        visible = torch.tensor(heads[head][row])
        logits[0, head, row, : row + 1], weights[0, head, row, : row + 1] = visible, softmax(visible)
        traces[head] += float(torch.autograd.functional.jacobian(softmax, visible).trace()) if row else 0
    found = logit_statistics(AttentionMaps(weights, logits))
    for values, expected in zip(found.tolist(), (variances, traces, [2, 2]), strict=True):
        assert values == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("score", "scale"), [("scaled_dot", 8**-0.5), ("dot", 1.0)])
def test_logits_of_known_weights(score, scale):
    """In NumPy, from the weights of a layer: means over the rows of all windows."""
    network = loud_transformer(1, score=score)
    subject = make_subject(network, padded=True)
    w = {name: weight.double().numpy() for name, weight in network.state_dict().items()}
    variances, traces = [], []
    for window in windows_of(subject):
        length = int(window["lengths"])
        tokens = window["inputs"][0, :length].numpy()
        x = w["encoder.token_embedding.weight"][tokens] + w["encoder.position.embedding.weight"][:length]
        x = (x - x.mean(axis=1, keepdims=True)) / np.sqrt(x.var(axis=1, keepdims=True) + 1e-5)
        q, k = ((x @ w[f"encoder.layers.0.attention.{part}_proj.weight"].T).reshape(length, 4, 8) for part in "qk")
        logits = scale * np.einsum("ihd,jhd->ihj", q, k)
        for row in range(1, length):  # the first sees one key alone
            visible = logits[row, :, : row + 1]
            p = np.exp(visible) / np.exp(visible).sum(axis=1, keepdims=True)
            variances.append(visible.var(axis=1))
            traces.append((p * (1 - p)).sum(axis=1))
    table = columns_of(GradientFlow()(subject, Path()).tables["logits"])
    assert table["logit_variance"] == pytest.approx(np.mean(variances, axis=0).tolist(), rel=1e-4)
    assert table["softmax_jacobian"] == pytest.approx(np.mean(traces, axis=0).tolist(), rel=1e-3)


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
