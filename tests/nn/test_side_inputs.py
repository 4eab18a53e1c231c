"""Values of the first layer and of tokens, and the embedding in each layer: equal to loops, cached, recomputed."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nn.model_cases import block_factory, token_ids
from tinyformer.errors import ArgumentError
from tinyformer.nn import (
    Attention,
    AttentionMask,
    Cache,
    Encoder,
    FeedForward,
    LatentAttention,
    LayerNorm,
    PreNormBlock,
    Residual,
    TokenReadout,
    Transformer,
    by_layer,
)

CAUSAL = AttentionMask(causal=True)
RESIDUALS = dict.fromkeys(
    ("attention_residual", "feed_forward_residual"), partial(Residual, learned=True, embedding=True)
)
MIXED = {"value_residual": 0.5, "value_embedding": [True, False], "vocab_size": 50, **RESIDUALS}


def make(**options):
    torch.manual_seed(0)
    recompute = options.pop("checkpoint_activations", False)
    block = block_factory(num_kv_heads=2, **options)
    return Transformer(Encoder(50, 3, 32, 16, block, LayerNorm, checkpoint_activations=recompute), TokenReadout)


def mixed(**options):
    """A network with grouped queries, three layers and factors other than their initial values."""
    network = make(**MIXED | options)
    for name, parameter in network.named_parameters():
        if "factor" in name:
            nn.init.normal_(parameter)
    return network


def added(residual, x, update, embedding):
    return residual.factor * x + update + residual.embedding_factor * embedding


def by_loops(network, tokens):
    """The logits, by the equations of the papers, one layer after another."""
    encoder = network.encoder
    x = embedding = encoder.token_embedding(tokens)
    first = None
    for layer in encoder.layers:
        attention, heads = layer.attention, []
        read = layer.attention_norm(x)
        q, k, v = (proj(read) for proj in (attention.q_proj, attention.k_proj, attention.v_proj))
        if attention.value_embedding is not None:
            v = v + attention.value_embedding.factor * attention.value_embedding.table.weight[tokens]
        if first is not None:
            v = attention.value_residual.factors[0] * v + attention.value_residual.factors[1] * first
        first = v if first is None else first
        for head in range(4):
            own, shared = slice(8 * head, 8 * head + 8), slice(8 * (head // 2), 8 * (head // 2) + 8)
            scores = q[..., own] @ k[..., shared].mT / 8**0.5
            hidden = torch.ones_like(scores).triu(1).bool()
            heads.append(scores.masked_fill(hidden, -torch.inf).softmax(dim=-1) @ v[..., shared])
        x = added(layer.attention_residual, x, attention.o_proj(torch.cat(heads, dim=-1)), embedding)
        x = added(layer.feed_forward_residual, x, layer.feed_forward(layer.feed_forward_norm(x)), embedding)
    return network.readout(encoder.final_norm(x))


def test_outputs_and_gradients_are_those_of_loops():
    network, tokens = mixed(), token_ids()
    pull, weights = torch.randn(2, 8, 50), [*network.parameters()]
    logits, expected = network(tokens, CAUSAL), by_loops(network, tokens)
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    gradients = (torch.autograd.grad((of * pull).sum(), weights) for of in (logits, expected))
    torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-5)


def test_the_initial_factors_of_embeddings_and_of_a_share_of_0_are_the_identity():
    network, plain = make(**MIXED | {"value_residual": 0.0}), make()
    plain.load_state_dict(network.state_dict(), strict=False)
    assert torch.equal(network(token_ids(), CAUSAL), plain(token_ids(), CAUSAL))


def test_cached_tokens_give_the_logits_of_the_whole_text():
    network, tokens, cache = mixed(window=4).eval(), token_ids(), Cache(3)
    with torch.no_grad():
        parts = [network(part, CAUSAL, cache) for part in tokens.split([3, 1, 1, 2, 1], dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), network(tokens, CAUSAL), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])  # not with checked shapes
def test_recomputed_and_compiled_layers_have_the_same_gradients(compiled):
    def gradients(network):
        call = torch.compile(network, backend="aot_eager", fullgraph=True) if compiled else network
        F.cross_entropy(call(token_ids(), CAUSAL).flatten(0, 1), token_ids(seed=1).flatten()).backward()
        return [parameter.grad for parameter in network.parameters()]

    torch.testing.assert_close(gradients(mixed(checkpoint_activations=True)), gradients(mixed()))


def test_pruning_unequal_layers_latents_and_cross_attention_are_refused():
    with pytest.raises(ArgumentError, match="pruning does not change"):
        mixed().prune([[0, 0]])
    with pytest.raises(ArgumentError, match="value_embedding"):
        mixed(value_residual=None).prune([[0, 0]])
    kinds = {"gqa": partial(Attention, num_kv_heads=2), "mqa": partial(Attention, num_kv_heads=1)}
    attention = partial(by_layer, ["gqa", "mqa"], kinds, d_model=32, num_heads=4, value_residual=0.5)
    block = partial(PreNormBlock, 32, attention, partial(FeedForward, 32), LayerNorm)
    with pytest.raises(ArgumentError, match="needs a first layer with 1 K/V heads of 8 dimensions"):
        Encoder(50, 2, 32, 16, block, LayerNorm)
    with pytest.raises(ArgumentError, match="latents in place of values"):
        LatentAttention(32, 4, value_residual=0.5)
    x, alone = torch.zeros(1, 2, 32), Attention(32, 4, value_embedding=True, vocab_size=50)
    with pytest.raises(ArgumentError, match="needs side, which blocks pass"):
        alone(x)
    with pytest.raises(ArgumentError, match="vocab_size=None: is needed by value_embedding"):
        Attention(32, 4, value_embedding=True)
    with pytest.raises(ArgumentError, match="context='a tensor': must be None with exclusive"):
        Attention(32, 4, exclusive=True)(x, context=x)
    with pytest.raises(ArgumentError, match="values of one sequence"):
        Attention(32, 4, value_residual=0.5, kind="cross")
