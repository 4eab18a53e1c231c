"""Captured weights are the definition's, and capturing changes nothing."""

import os
import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path

import pytest
import torch
from nn.model_cases import make_transformer, token_ids

from tinyformer.analysis import capture_attention
from tinyformer.nn import AttentionMask, PostNormBlock, RotaryPosition

CAUSAL = AttentionMask(causal=True)
MODELS = {
    "mha": {},
    "gqa": {"num_kv_heads": 2},
    "mqa": {"num_kv_heads": 1},
    "rotary": {"attention_position": partial(RotaryPosition, 16), "num_kv_heads": 2},
    "qk-norm": {"qk_norm": True},
    "post-norm": {"kind": PostNormBlock, "bias": True},
    "flash": {"backend": "flash"},
    "eager": {"backend": "eager"},
    "ablated": {"ablated_heads": [[0, 1]]},
}


def make(**settings):
    torch.manual_seed(0)
    network = make_transformer(**settings).eval()
    for parameter in network.parameters():  # weights that tell heads and positions apart
        torch.nn.init.normal_(parameter, std=0.3)
    return network


def weights_by_hand(attention, x, allowed):
    """softmax(q kᵀ / √head_dim) head by head, without what the model uses for it."""
    q, k, _ = attention.project(x)
    heads = []
    for head in range(attention.num_heads):
        shared = head // (attention.num_heads // attention.num_kv_heads)
        scores = q[:, head].double() @ k[:, shared].double().mT / attention.head_dim**0.5
        heads.append(scores.masked_fill(~allowed, -torch.inf).softmax(-1).float())
    return torch.stack(heads, dim=1)


def inputs_of_layers(network, tokens, mask):
    """What each attention is given, by going through the network layer by layer."""
    x, found = network.encoder.position(network.encoder.token_embedding(tokens)), []
    for layer in network.encoder.layers:
        found.append(x if isinstance(layer, PostNormBlock) else layer.attention_norm(x))
        x = layer(x, mask)
    return found


@pytest.mark.parametrize("padded", [False, True], ids=["causal", "padded"])
@pytest.mark.parametrize("settings", MODELS.values(), ids=MODELS)
@torch.no_grad()
def test_the_weights_are_the_definitions(settings, padded):
    network, tokens = make(**settings), token_ids(batch=3)
    lengths = torch.tensor([8, 5, 1])
    mask = AttentionMask(causal=True, lengths=lengths) if padded else CAUSAL
    allowed = torch.ones(8, 8, dtype=torch.bool).tril().expand(3, 8, 8)
    if padded:
        allowed = allowed & (torch.arange(8) < lengths.view(3, 1, 1))
    with capture_attention(network) as maps:
        network(tokens, mask)
    assert len(maps) == 2
    for found, layer, x in zip(maps, network.encoder.layers, inputs_of_layers(network, tokens, mask), strict=True):
        expected = weights_by_hand(layer.attention, x, allowed)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(found.sum(-1), torch.ones(3, 4, 8))
        assert (found[~allowed.unsqueeze(1).expand_as(found)] == 0).all()
        assert found[0, 0].std() > 0.01  # weights that say something


@pytest.mark.parametrize("settings", MODELS.values(), ids=MODELS)
def test_the_output_is_the_same(settings):
    network, tokens = make(**settings), token_ids()
    plain = network(tokens, CAUSAL)
    with capture_attention(network):
        captured = network(tokens, CAUSAL)
    assert torch.equal(captured, plain)


def hooks(network):
    return sum(len(module._forward_hooks) for module in network.modules())


def test_nothing_is_kept_outside_of_the_block():
    network = make()
    with capture_attention(network) as maps:
        assert hooks(network) == 2
        network(token_ids(), CAUSAL)
        network(token_ids(seq=4), CAUSAL)
    network(token_ids(), CAUSAL)
    assert [tuple(layer.shape) for layer in maps] == [(2, 4, 8, 8)] * 2 + [(2, 4, 4, 4)] * 2
    assert hooks(network) == 0


def test_hooks_go_after_an_error_too():
    network = make()
    with pytest.raises(ValueError, match="longer than"), capture_attention(network):
        network(token_ids(seq=17), CAUSAL)
    assert hooks(network) == 0


def test_dropout_of_the_weights_is_not_captured():
    network = make(backend="eager")
    for attention in network.attentions():
        attention.dropout = 0.9
    network.train()
    with capture_attention(network) as maps, torch.no_grad():
        network(token_ids(), CAUSAL)
    torch.testing.assert_close(maps[0].sum(-1), torch.ones(2, 4, 8))


SCRIPT = """
    import torch
    from nn.model_cases import make_transformer, token_ids
    from tinyformer.analysis import capture_attention
    from tinyformer.nn import AttentionMask

    torch.manual_seed(0)
    network, tokens, mask = make_transformer(num_layers=2).eval(), token_ids(), AttentionMask(causal=True)
    with torch.no_grad():
        with capture_attention(network) as plain:
            expected = network(tokens, mask)
        network.compile()
        torch.testing.assert_close(network(tokens, mask), expected)
        with capture_attention(network) as maps:
            network(tokens, mask)
        torch.testing.assert_close(network(tokens, mask), expected)
    assert len(maps) == len(plain) == 2
    torch.testing.assert_close(maps, plain)
    print("compiled and captured")
"""


@pytest.mark.slow
def test_a_compiled_network_is_captured_too():
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT)],
        env=os.environ | {"PYTHONPATH": f"{root}:{root / 'tests'}"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout.strip() == "compiled and captured", done.stderr
