"""Heads measured on fixed text: which numbers, and what is left as it was."""

import math
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from nn.model_cases import make_transformer, token_ids

from tinyformer.analysis import (
    MEASURES,
    PATTERNS,
    HeadMeasures,
    Probe,
    capture_attention,
    capture_weights,
    measure_heads,
)
from tinyformer.analysis.measures import measure_layers
from tinyformer.nn import AttentionMask, DifferentialAttention, PreNormBlock

CAUSAL = AttentionMask(causal=True)


def test_each_number_has_a_name():
    measures = HeadMeasures([["00", "02"], ["01a"]], {"entropy": [[1.0, 2.0], [3.0]], "self": [[0.1, 0.2], [math.nan]]})
    assert measures.scalars() == {
        "attention/layer_00/head_00/entropy": 1.0,
        "attention/layer_00/head_02/entropy": 2.0,
        "attention/layer_01/head_01a/entropy": 3.0,
        "attention/layer_00/head_00/self": 0.1,
        "attention/layer_00/head_02/self": 0.2,
    }
    columns, rows = measures.table()
    assert columns == ["layer", "head", "entropy", "self"]
    assert rows == [[0, "00", 1.0, 0.1], [0, "02", 2.0, 0.2], [1, "01a", 3.0, None]]


@pytest.mark.parametrize("training", [True, False])
def test_the_network_is_left_as_it_was(training):
    network = make_transformer(dropout=0.5).train(training)
    state = torch.random.get_rng_state()
    first, second = (capture_weights(network, token_ids(), CAUSAL) for _ in range(2))
    assert torch.equal(first[0], second[0])  # without dropout
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(module.training == training for module in network.modules())
    with pytest.raises(ValueError, match="longer than"):
        capture_weights(network, token_ids(seq=17), CAUSAL)
    assert all(module.training == training for module in network.modules())


def test_each_probe_has_its_measures():
    torch.manual_seed(0)
    network = make_transformer().eval()
    texts = token_ids(batch=3, seq=8), token_ids(batch=2, seq=6)
    probes = [Probe(texts[0], CAUSAL, MEASURES), Probe(texts[1], CAUSAL, PATTERNS)]
    found = measure_heads(network, probes, 5, nullcontext())
    assert list(found.values) == [*MEASURES, *PATTERNS]
    assert found.names == [["00", "01", "02", "03"]] * 2
    for text, measures in zip(texts, (MEASURES, PATTERNS), strict=True):
        with capture_attention(network, 5) as maps, torch.no_grad():
            network(text, CAUSAL)
        for name, layers in measure_layers(measures, maps, text).items():
            torch.testing.assert_close(torch.tensor(found.values[name]), torch.tensor(layers), equal_nan=True)


def test_what_is_read_from_the_network_is_not_computed():
    """A readout costs most of a forward pass where the vocabulary is large."""
    network = make_transformer()
    network.readout.register_forward_hook(lambda *args: pytest.fail("the readout was computed"))
    capture_weights(network, token_ids(), CAUSAL)


def test_both_softmaxes_of_a_head_are_measured():
    network = make_transformer()
    network.encoder.layers[1].attention = DifferentialAttention(32, 2, layer_index=1)
    found = measure_heads(network, [Probe(token_ids(), CAUSAL, MEASURES)], 64, nullcontext())
    assert found.names == [["00", "01", "02", "03"], ["00a", "00b", "01a", "01b"]]
    assert [len(layer) for layer in found.values["entropy"]] == [4, 4]


def test_the_context_is_of_the_network_alone():
    """What is measured of the weights is computed in their own precision."""
    network = make_transformer(kind=PreNormBlock)
    probe = Probe(token_ids(batch=4), CAUSAL, {"rank": MEASURES["rank"]})
    context = partial(torch.autocast, "cpu", torch.bfloat16)
    found = torch.tensor(measure_heads(network, [probe], 64, context()).values["rank"])
    with context():
        maps = capture_weights(network, probe.tokens, CAUSAL, 64)
    assert torch.equal(found, torch.tensor(measure_layers({"rank": MEASURES["rank"]}, maps, probe.tokens)["rank"]))
    assert not torch.equal(found, found.bfloat16().float())
