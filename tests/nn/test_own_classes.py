"""Classes of one's own, as a user writes them: what is shown of them is what they compute, or is refused."""

import dataclasses
import math
from functools import partial

import pytest
import torch
from model.models import BYTES, UNTIED
from torch import nn

from nn.variants import CAUSAL, D_MODEL, error, projected, tokens
from tinyformer.analysis import capture_attention
from tinyformer.analysis.costs import TrainingFlops, count_costs
from tinyformer.errors import ArgumentError
from tinyformer.generation.sampling import Sampling, generate
from tinyformer.model.model import Model
from tinyformer.nn import QKV, Attention, AttentionMask, Encoder, FeedForward, LayerNorm, PreNormBlock, Transformer
from tinyformer.nn.maps import NoMapsError
from tinyformer.tasks import CausalLM


class Sigmoid(Attention):
    """Rows do not sum to 1."""

    def attend(self, qkv, mask, is_cross):
        scores = qkv.q @ qkv.k.mT * self.score.scale - math.log(qkv.k.shape[2])
        weights = scores.sigmoid()
        allowed = mask.dense(*scores.shape[2:], scores.device)
        return self.apply_weights(weights if allowed is None else weights * allowed, qkv, is_cross)

    def apply_weights(self, weights, qkv, is_cross):
        return weights @ qkv.v


class Linear(Attention):
    """Overrides `attend` alone, and can have negative weights."""

    def attend(self, qkv, mask, is_cross):
        return (qkv.q @ qkv.k.mT).tril() @ qkv.v


class Sharper(Attention):
    """Sets an attribute after `super().__init__()`, which its scores need; a row of a parameter for each head."""

    def __init__(self, *sizes, **options):
        super().__init__(*sizes, **options)
        self.factor = 2.0
        self.temperature = nn.Parameter(torch.rand(self.num_heads, 1, 1))

    def transform_queries(self, q):
        return super().transform_queries(q) * self.temperature

    def scoring(self, *call, **options):
        scoring = super().scoring(*call, **options)
        return dataclasses.replace(scoring, scale=self.factor * scoring.scale)


class Clipped(Attention):
    """Its output is no product of weights with the values."""

    def attend(self, qkv, mask, is_cross):
        return super().attend(qkv, mask, is_cross).relu()


class Elsewhere(Attention):
    """Overrides `forward`."""

    def forward(self, x, mask=None, **options):
        return self.o_proj(self.v_proj(x))


class Registers(Attention):
    """Keys that belong to no token."""

    def project(self, x, context=None, cache=None):
        return QKV(*(torch.cat([part[:, :, :2], part], 2) if i else part for i, part in enumerate(super().project(x))))


class Mean(nn.Module):
    """A causal module without heads, whose `forward` takes the mask alone."""

    def __init__(self, **layer):
        super().__init__()
        self.proj = nn.Linear(D_MODEL, D_MODEL)

    def forward(self, x, mask):
        return self.proj(x.cumsum(1) / torch.arange(1, x.shape[1] + 1).unsqueeze(1))


def model_of(*attentions):
    """A model with a class of attention in each layer."""

    def block(layer_index, **layer):
        attention = attentions[layer_index]
        made = attention if attention is Mean else partial(attention, D_MODEL, 4)
        return PreNormBlock(D_MODEL, made, partial(FeedForward, D_MODEL), LayerNorm, layer_index=layer_index, **layer)

    torch.manual_seed(0)
    encoder = Encoder(257, len(attentions), D_MODEL, 32, block, LayerNorm)
    return Model(Transformer(encoder, UNTIED, init_std=0.3), BYTES, CausalLM())


@pytest.mark.parametrize("own", [Sigmoid, Linear, Sharper])
@torch.no_grad()
def test_the_weights_that_are_shown_give_the_output(own):
    attention = own(D_MODEL, 4).eval()
    for x, mask in ((tokens(), CAUSAL), (tokens(2), AttentionMask(True, torch.tensor([11, 6])))):
        call = attention.call(x, mask)
        weights = attention.maps_of_call(call).weights
        heads = attention.apply_weights(weights, call.qkv, is_cross=False)
        assert error(attention(x, mask), projected(heads, attention)) <= 1e-5
        some = attention.maps_of_call(call, torch.tensor([3, 9]))
        torch.testing.assert_close(some.weights, weights[..., [3, 9], :])
    model, texts = model_of(own, own), ["The cat", "a"]
    again = model.run(texts, replace={"layers.*.attention.weights": lambda weights: weights}).logits
    torch.testing.assert_close(again, model.logits(texts), rtol=1e-4, atol=1e-4)


REFUSED = {
    Mean: "is no BaseAttention, so it has no heads",
    Clipped: "has no attention maps: Clipped overrides attend without apply_weights and",
    Elsewhere: "overrides forward, and what it computes there has no maps",
    Registers: "has keys that are no tokens, so its maps cannot be shown",
}


@pytest.mark.parametrize(("own", "reason"), REFUSED.items())
def test_maps_that_are_not_known_are_refused(own, reason):
    model = model_of(own)
    assert model.run("abc").logits.shape == (1, 4, 257)
    with pytest.raises(NoMapsError, match=f"^attention='{own.__name__}': {reason}"):
        model.attention("abc")


def test_a_module_without_heads_trains_and_generates():
    network, ids = model_of(Attention, Mean).network, torch.tensor([[1, 2, 3, 4]])
    network(ids, CAUSAL, targets=ids).backward()
    assert network.encoder.layers[1].attention.proj.weight.grad.abs().sum() > 0
    assert network.layer_addresses() == [(0,)]
    assert model_of(Mean, Attention).network.layer_addresses() == [(1,)]
    greedy = [1, 2]
    with torch.no_grad():
        for _ in range(2):
            greedy.append(network(torch.tensor([greedy]), CAUSAL)[0, -1].argmax().item())
    assert generate(network, [[1, 2]], 2, Sampling(0.0)) == [greedy[2:]]  # although its first layer takes a cache
    with capture_attention(network) as maps:
        network(ids, CAUSAL)
    assert [tuple(layer.shape) for layer in maps] == [(1, 4, 4, 4)]
    assert math.isnan(TrainingFlops.of(network).count({"tokens": 3}, 1))
    with pytest.raises(ArgumentError, match=r"^attention='Mean': is no BaseAttention, so its FLOPs"):
        count_costs(network)
