"""Probes of all heads: their measures, and what they leave unchanged."""

from contextlib import nullcontext

import pytest
import torch
from nn.model_cases import make_transformer, token_ids

from analysis.subjects import CAUSAL
from tinyformer.analysis import MEASURES, PATTERNS, capture_attention, capture_weights, repeated_tokens
from tinyformer.analysis.measures.probe import Probe, Probes, make_probes, measure_heads
from tinyformer.analysis.measures.table import measure_layers
from tinyformer.nn import AttentionMask, DifferentialAttention
from tinyformer.tasks import MaskedLM


@pytest.mark.parametrize(("max_seq_len", "period"), [(64, 12), (7, 3), (1, 0)])
def test_probes_are_windows_and_repeated_tokens_within_the_context(max_seq_len, period):
    windows = {"inputs": token_ids(3, 8)}
    probe, *patterns = make_probes(MaskedLM(), [windows], 50, max_seq_len, num_sequences=4, period=12).each
    assert probe.tokens is windows["inputs"]
    assert (probe.mask, probe.measures) == (AttentionMask(), MEASURES)
    assert [pattern.tokens.tolist() for pattern in patterns] == [repeated_tokens(50, 4, period).tolist()] * (period > 0)
    assert all((pattern.mask, pattern.measures) == (AttentionMask(), PATTERNS) for pattern in patterns)


@pytest.mark.parametrize("training", [True, False])
def test_capturing_leaves_the_network_and_the_random_state_unchanged(training):
    network = make_transformer(dropout=0.5).train(training)
    network.readout.register_forward_hook(lambda *args: pytest.fail("the readout was computed"))
    state = torch.random.get_rng_state()
    first, second = (capture_weights(network, token_ids(), CAUSAL) for _ in range(2))
    assert torch.equal(first[0], second[0])  # without dropout
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(module.training == training for module in network.modules())


DOCUMENTS = torch.tensor([[1, 1, 1, 2, 2, 2, 2, 4], [3, 3, 3, 3, 3, 3, 4, 4]])
BOTH, PADDED = AttentionMask(), AttentionMask(lengths=torch.tensor([8, 3]))


@pytest.mark.parametrize(
    ("first", "second", "joined"),
    [
        (CAUSAL, CAUSAL, True),
        (BOTH, BOTH, True),
        (AttentionMask(documents=DOCUMENTS), BOTH, True),
        (AttentionMask(causal=True, documents=DOCUMENTS), CAUSAL, True),
        (CAUSAL, BOTH, False),
        (PADDED, BOTH, False),
    ],
    ids=["causal", "bidirectional", "documents", "causal documents", "of two kinds", "padded"],
)
def test_probes_share_a_forward_pass_in_which_none_sees_padding(first, second, joined):
    """The pass ends in the last attention, and what it gives is what each probe alone gives."""
    torch.manual_seed(0)
    network = make_transformer().eval()
    network.encoder.layers[1].attention = DifferentialAttention(32, 2, window=5, layer_index=1)
    texts, passes, expected = (token_ids(2, 8), token_ids(3, 5)), [], {}
    probes = Probes([Probe(texts[0], first, MEASURES), Probe(texts[1], second, PATTERNS)])
    for probe in probes.each:
        maps = capture_weights(network, probe.tokens, probe.mask, 5)
        expected |= measure_layers(probe.measures, maps, probe.tokens)
    network.encoder.register_forward_pre_hook(lambda _, args: passes.append(tuple(args[0].shape)))
    network.encoder.layers[-1].feed_forward.register_forward_hook(lambda *args: pytest.fail("went on"))
    found = measure_heads(network, probes, 5, nullcontext())
    assert passes == ([(5, 8)] if joined else [(2, 8), (3, 5)])
    assert list(found.values) == [*MEASURES, *PATTERNS]
    assert found.names == [["00", "01", "02", "03"], ["00a", "00b", "01a", "01b"]]
    for name, layers in expected.items():
        torch.testing.assert_close(torch.tensor(found.values[name]), torch.tensor(layers), equal_nan=True)


def test_autocast_changes_what_layers_attend_with_as_it_does_in_training():
    network = make_transformer(bias=True, qk_norm=True).eval()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        with capture_attention(network) as maps:
            network(token_ids(), CAUSAL)
        assert all(map(torch.equal, maps, capture_weights(network, token_ids(), CAUSAL)))
    assert {weight.dtype for weight in network.parameters()} == {torch.float32}
