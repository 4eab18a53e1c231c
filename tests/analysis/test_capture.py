"""Captured weights equal the definition, capturing changes nothing else, and so do probes of all heads."""

from contextlib import nullcontext

import pytest
import torch
from nn.model_cases import make_transformer, token_ids
from nn.variants import NAMES, documents, factory, network

from analysis.contexts import CAUSAL, loud_transformer
from tinyformer.hardware import peak_bytes
from tinyformer.measures import MEASURES, PATTERNS, capture_attention, capture_weights
from tinyformer.measures.batches import of_one_length
from tinyformer.measures.capture import attention_calls
from tinyformer.measures.probe import Probe, measure_heads
from tinyformer.measures.table import measure_layers
from tinyformer.nn import AttentionMask, Cache, DifferentialAttention


def test_only_passes_inside_the_block_are_captured():
    network = loud_transformer()
    with capture_attention(network, rows=8) as maps:  # at least as many as there are queries: all of them
        assert maps.rows is None
        network(token_ids(), CAUSAL)
        network(token_ids(seq=4), CAUSAL)
    network(token_ids(), CAUSAL)
    assert [tuple(layer.shape) for layer in maps] == [(2, 4, 8, 8)] * 2 + [(2, 4, 4, 4)] * 2
    assert maps.names == [["0", "1", "2", "3"]] * 4
    with pytest.raises(ValueError, match="17"), capture_attention(network):  # longer than the context
        network(token_ids(seq=17), CAUSAL)
    assert sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in network.modules()) == 0


MASKS = {
    "causal": CAUSAL,
    "full": AttentionMask(),
    "padded": AttentionMask(True, torch.tensor([11, 4, 0])),
    "documents": AttentionMask(True, documents=documents()),
}
CELLS = [(name, mask) for i, name in enumerate(NAMES) for j, mask in enumerate(MASKS) if (i - j) % 4 == 0]
"""Each variant with one of the masks."""


def assert_rows(some, whole, rows):
    """The weights and logits of some rows are those of the whole maps, -inf included."""
    assert len(some) == len(whole) == 2
    for weights, ours, theirs in zip(some, some.layers, whole.layers, strict=True):
        assert weights is ours.weights
        torch.testing.assert_close(ours.weights, theirs.weights[:, :, rows], atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(ours.logits, theirs.logits[:, :, rows], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("name", "mask"), CELLS)
@torch.no_grad()
def test_captured_rows_are_those_of_the_whole_maps(name, mask):
    model, tokens, mask = network(factory(name)), token_ids(3, 11), MASKS[mask]
    mask = CAUSAL if "forget" in name and not mask.causal else mask
    expected = model(tokens, mask)
    with capture_attention(model) as whole:
        assert torch.equal(model(tokens, mask), expected)
    for layer, maps in zip(model.attentions(), whole.layers, strict=True):
        assert_made_from_the_logits(layer, maps, mask)
    for rows in (4, torch.tensor([10, 0, 7])):
        with capture_attention(model, rows) as some:
            model(tokens, mask)
        assert_rows(some, whole, some.rows)
    assert some.rows.tolist() == [10, 0, 7]
    # With a cache, which holds causal text only.
    for rows, places in ((torch.tensor([3, 1]), [10, 8]), (64, [7, 8, 9, 10])):
        if mask is CAUSAL:
            cache = Cache(2)
            model(tokens[:, :7], CAUSAL, cache)
            with capture_attention(model, rows) as some:
                model(tokens[:, 7:], CAUSAL, cache)
            assert some.rows.tolist() == places
            assert_rows(some, whole, places)


def assert_made_from_the_logits(layer, maps, mask):
    """The weights are the softmax of the logits, which are -inf exactly where the mask hides the key."""
    allowed = mask.within(layer.window).dense(11, 11, maps.logits.device)
    allowed = torch.tensor(True) if allowed is None else allowed
    assert torch.equal(maps.logits == -torch.inf, ~allowed.expand_as(maps.logits))
    sink = torch.full((4,), -torch.inf) if layer.sink is None else layer.sink
    sinks = sink.repeat_interleave(layer.num_softmaxes).view(1, -1, 1, 1).expand(3, -1, 11, 1)
    # A row of -inf has no weights.
    expected = torch.cat([maps.logits, sinks], dim=-1).softmax(dim=-1).nan_to_num(0)[..., :11]
    if layer.gaussian is None:
        torch.testing.assert_close(maps.weights, expected, atol=1e-6, rtol=1e-5)
    else:  # its factors lie between 0 and 1
        assert (maps.weights <= expected).all()
        assert torch.equal(maps.weights > 0, expected > 0)


@torch.no_grad()
def test_layers_of_other_windows_and_scales_are_captured_as_if_each_were_alone():
    model = loud_transformer(3, window=[3, 3, 7])
    model.attentions()[1].score.scale = 1.0
    with capture_attention(model) as maps:
        model(token_ids(3, 11), CAUSAL)
    for found, (layer, call) in zip(maps.layers, attention_calls(model, token_ids(3, 11), CAUSAL), strict=True):
        for part, expected in zip(found, layer.maps_of_call(call), strict=True):
            torch.testing.assert_close(part, expected)


def test_a_few_rows_of_a_long_sequence_take_little_memory():
    sizes = {"num_layers": 1, "d_model": 8, "num_heads": 1, "max_seq_len": 16_384}
    model, tokens = make_transformer(**sizes, position=False, backend="flash").eval(), token_ids(1, 16_384)

    # A map of 64 rows takes 4 MiB, and a few are held at once: 17 MiB. One bit for each pair would take 32 MiB.
    assert peak_bytes(lambda: capture_weights(model, tokens, CAUSAL, 64), "cpu") < 24 * 2**20


# Probes.


@pytest.mark.parametrize("training", [True, False])
def test_capturing_leaves_the_network_and_the_random_state_unchanged(training):
    network = make_transformer(dropout=0.5, max_seq_len=200).train(training)
    network.readout.register_forward_hook(lambda *args: pytest.fail("the readout was computed"))
    state, maps = torch.random.get_rng_state(), []
    for _ in range(2):
        maps.append(capture_weights(network, token_ids(1, 200), CAUSAL, 20))
        assert torch.equal(torch.random.get_rng_state(), state)
        torch.rand(1)  # the sampled rows do not depend on the state
        state = torch.random.get_rng_state()
    assert torch.equal(maps[0][0], maps[1][0])  # without dropout
    rows = maps[0].rows.tolist()
    assert maps[1].rows.tolist() == rows == sorted(set(rows))
    assert max(rows) - min(rows) > 100  # from the whole sequence
    assert all(module.training == training for module in network.modules())


def test_probes_are_measured_each_by_itself():
    """A pass ends in the last attention."""
    torch.manual_seed(0)
    network = make_transformer().eval()
    network.encoder.layers[1].attention = DifferentialAttention(32, 2, window=5, layer_index=1)
    padded, expected = AttentionMask(lengths=torch.tensor([8, 3])), {}
    probes = [Probe(token_ids(2, 8), padded, MEASURES), Probe(token_ids(3, 5), CAUSAL, PATTERNS)]
    for probe in probes:
        maps = capture_weights(network, probe.tokens, probe.mask, 5)
        expected |= measure_layers(probe.measures, maps, probe.tokens)
    network.encoder.layers[-1].feed_forward.register_forward_hook(lambda *args: pytest.fail("went on"))
    found = measure_heads(network, probes, 5, nullcontext())
    assert list(found.values) == [*MEASURES, *PATTERNS]
    assert found.names == [["00", "01", "02", "03"], ["00a", "00b", "01a", "01b"]]
    for name, layers in expected.items():
        torch.testing.assert_close(torch.tensor(found.values[name]).float(), torch.tensor(layers), equal_nan=True)


def test_rows_of_one_length_have_the_starts_of_their_documents():
    packed = torch.tensor([[1, 1, 2, 3], [4, 4, 4, 5]])
    rows = {"inputs": packed, "targets": packed, "lengths": torch.tensor([4, 3]), "documents": packed}
    # Short rows come first, and the last start of a row is repeated.
    assert of_one_length([rows])["document_starts"].tolist() == [0, 0, 3, 5, 6]
