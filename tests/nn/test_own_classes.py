"""User-defined classes: what is shown of them is what they compute, or is refused."""

import dataclasses
import math
from functools import partial

import pytest
import torch
from model.models import BYTES, UNTIED
from torch import nn

from nn.variants import CAUSAL, D_MODEL, error, projected, tokens
from tinyformer.costs.network import TrainingFlops, count_costs
from tinyformer.errors import ArgumentError
from tinyformer.generation.generation import Sampling, generate
from tinyformer.measures import capture_attention
from tinyformer.model.model import Model
from tinyformer.nn import QKV, Attention, AttentionMask, Encoder, FeedForward, LayerNorm, PreNormBlock, Transformer
from tinyformer.nn.block import make_attention
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


class Textbook(nn.Module):
    """Attention as textbooks write it; it stores its weights."""

    def __init__(self, d_model, num_heads, dropout=0.1):
        super().__init__()
        self.num_heads, self.dropout = num_heads, nn.Dropout(dropout)
        self.q, self.k, self.v, self.o = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, query, key, value, mask=None):
        projected = self.q(query), self.k(key), self.v(value)
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in projected)
        scores = q @ k.mT / q.shape[-1] ** 0.5
        scores = scores if mask is None else scores.masked_fill(mask == 0, -1e9)
        self.attention_weights = scores.softmax(-1)
        return self.o((self.dropout(self.attention_weights) @ v).transpose(1, 2).flatten(2))


class Annotated(Textbook):
    """The Annotated Transformer's, which adds the axis of heads to the mask."""

    def forward(self, query, key, value, mask=None):
        return super().forward(query, key, value, None if mask is None else mask.unsqueeze(1))


class Returns(Textbook):
    """Another order of arguments, and a tuple."""

    def forward(self, values, keys, query, mask):
        output = super().forward(query, keys, values, mask)
        return output, self.__dict__.pop("attention_weights")


class Leaks(Textbook):
    def forward(self, query, key, value, mask=None):
        return super().forward(query, key, value)


class ByLengths(Textbook):
    """As in Dive into Deep Learning."""

    def forward(self, queries, keys, values, valid_lens):
        return super().forward(queries, keys, values, torch.arange(keys.shape[1]) < valid_lens[:, None, None, None])


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
        made = attention if attention is Mean else partial(attention, d_model=D_MODEL, num_heads=4)
        return PreNormBlock(D_MODEL, made, partial(FeedForward, D_MODEL), LayerNorm, layer_index=layer_index, **layer)

    torch.manual_seed(0)
    encoder = Encoder(257, len(attentions), D_MODEL, 32, block, LayerNorm)
    return Model(Transformer(encoder, UNTIED, init_std=0.3), BYTES, CausalLM())


OURS = {"d_model": D_MODEL, "num_heads": 4, "dropout": 0.5, "head_dim": None, "position": None}


@pytest.mark.parametrize("own", [Textbook, Annotated, Returns])
def test_a_textbooks_attention_reads_what_the_mask_allows_and_shows_it(own):
    layer = make_attention(partial(own, **OURS), D_MODEL, layer_index=1)
    assert layer.training
    x, mask = tokens(2), AttentionMask(True, torch.tensor([11, 6]))
    masked = ~mask.dense(11, 11, x.device)
    weights = layer.weights(x, mask)
    assert weights.shape == (2, 4, 11, 11)
    assert not weights.masked_select(masked).any()
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 11))
    torch.testing.assert_close(layer.maps_of_call(layer.inputs(x, mask), torch.tensor([3])).weights, weights[:, :, 3:4])
    layer.eval()
    changed = x.clone()
    changed[1, 4:] += 1
    torch.testing.assert_close(layer(changed, mask)[1, :4], layer(x, mask)[1, :4])
    per_example = torch.rand(2, 11, 7, generator=torch.Generator().manual_seed(0)) < 0.7
    per_example[..., 0] = True
    given = {"context": x[:, :7], "context_mask": AttentionMask(allowed=per_example)}
    assert torch.equal(layer.weights(x, **given) > 0, per_example.unsqueeze(1).expand(-1, 4, -1, -1))
    model = model_of(own, own)
    (first, second), network = generate(model.network, [[1, 2]], 2, Sampling(0.0))[0], model.network
    assert network(torch.tensor([[1, 2, first]]), CAUSAL)[0, 1:].argmax(-1).tolist() == [first, second]
    model.network.train()(torch.tensor([[1, 2, 3]]), CAUSAL, targets=torch.tensor([[2, 3, 4]])).backward()
    assert all(weight.grad is not None for weight in model.network.encoder.layers.parameters())
    with pytest.raises(NoMapsError, match="is no BaseAttention, so its heads can be shown"):
        model.ablated([[0, 1]]).__enter__()


@pytest.mark.parametrize(
    ("own", "sentence"),
    {
        Leaks: "forward='query, key, value, mask': must hide the keys where a mask is False, as scores.*does.$",
        ByLengths: "forward='queries, keys, values, valid_lens': must hide .*; it raises: mat1",
        partial(lambda width, d_model: None, extra=1): r"width=None: is required by <lambda>; on a command line, \+KEY",
    }.items(),
)
def test_a_textbooks_attention_that_cannot_be_used_is_refused(own, sentence):
    with pytest.raises(ArgumentError, match=f"^{sentence}"):
        make_attention(partial(own, d_model=D_MODEL, num_heads=4), D_MODEL)


@pytest.mark.parametrize("own", [Sigmoid, Linear, Sharper])
@torch.no_grad()
def test_the_weights_that_are_shown_give_the_output(own):
    attention = own(D_MODEL, 4).eval()
    for x, mask in ((tokens(), CAUSAL), (tokens(2), AttentionMask(True, torch.tensor([11, 6])))):
        call = attention.inputs(x, mask)
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
    Clipped: "has no attention maps: Clipped overrides attend, but not apply_weights and",
    Elsewhere: "overrides forward, so the attention maps are unknown",
    Registers: "has keys that are not tokens, so its maps cannot be shown",
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
