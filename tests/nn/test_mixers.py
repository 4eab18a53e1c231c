"""LSTM and BaseConv in the place of self-attention: the values, the state in the cache, documents, costs, refusals."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nn.variants import CAUSAL, D_MODEL, documents, error, mha, network, tokens
from tinyformer.costs.network import TrainingFlops, batch_sizes, count_costs
from tinyformer.errors import ArgumentError
from tinyformer.generation.generation import Sampling, generate
from tinyformer.nn import (
    LSTM,
    AttentionMask,
    BaseConv,
    Cache,
    LayerCache,
    by_layer,
)
from tinyformer.nn.maps import NoMapsError

MIXERS = {
    "lstm": partial(LSTM, D_MODEL),
    "conv": partial(BaseConv, D_MODEL, 16),
    "short": partial(BaseConv, D_MODEL, 16, 3),
}
BOTH = pytest.mark.parametrize("name", MIXERS)


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MIXERS[name]()


def layers(*names: str):
    return partial(by_layer, names, {**MIXERS, "mha": mha})


@torch.no_grad()
def test_the_lstm_is_that_of_its_equations():
    mixer, x = made("lstm").double(), tokens().double()
    (w_x, w_h, b_x, b_h), h, c, steps = mixer.lstm._flat_weights, torch.zeros(3, D_MODEL), torch.zeros(3, D_MODEL), []
    for t in range(x.shape[1]):
        i, f, g, o = (x[:, t] @ w_x.T + b_x + h.double() @ w_h.T + b_h).chunk(4, dim=1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        steps.append(h)
    assert error(mixer(x, CAUSAL), torch.stack(steps, 1)) <= 1e-12


@pytest.mark.parametrize("kernel_size", [1, 3, None])
def test_the_convolution_is_torchs_and_its_gradient_too(kernel_size):
    mixer, x = BaseConv(D_MODEL, 16, kernel_size), tokens().requires_grad_()
    nn.init.normal_(mixer.filter_bias)
    padded = F.pad(x.mT, (mixer.window - 1, 0))
    mixed = F.conv1d(padded, mixer.filters, mixer.filter_bias, groups=D_MODEL).mT
    expected = F.linear(x, mixer.gate_proj.weight, mixer.gate_proj.bias) * mixed
    mixed_by_us = mixer(x, CAUSAL)
    assert error(mixed_by_us, expected) <= 1e-5
    for part in (x, *mixer.parameters()):
        ours, theirs = (torch.autograd.grad(y.sin().sum(), part, retain_graph=True)[0] for y in (mixed_by_us, expected))
        assert error(ours, theirs) <= 1e-5


@pytest.mark.parametrize("names", [("lstm",), ("conv",), ("short", "conv"), ("mha", "lstm")], ids="+".join)
@torch.no_grad()
def test_steps_with_a_cache_are_the_forward_pass(names):
    model, ids = network(layers(*names)), torch.randint(50, (3, 11))
    full = model(ids, CAUSAL)
    for chunks in ([1] * 11, [5, 1, 4, 1]):
        cache, parts = Cache(2), []
        for chunk in ids.split(chunks, dim=1):
            parts.append(model(chunk, CAUSAL, cache))
        assert error(torch.cat(parts, dim=1), full) <= 1e-5
        assert cache.length == 11
    cache.select(torch.tensor([2, 2, 0]))
    again = model(torch.zeros(3, 1, dtype=torch.long), CAUSAL, cache)
    longer = torch.cat([ids[[2, 2, 0]], torch.zeros(3, 1, dtype=torch.long)], dim=1)
    assert error(again[:, 0], model(longer, CAUSAL)[:, -1]) <= 1e-5
    texts = [[1, 2, 3], [4, 5, 6, 7]]
    with_cache, without = (generate(model, texts, 6, Sampling(0.0), use_cache=use) for use in (True, False))
    assert with_cache == without
    assert model.encoder.takes_cache


@BOTH
@torch.no_grad()
def test_no_document_and_no_padding_reads_another(name):
    mixer, x, rows = made(name), tokens(), documents()
    mixed = mixer(x, AttentionMask(True, documents=rows))
    for row in range(3):
        for document in rows[row].unique():
            own = rows[row] == document
            assert error(mixed[row, own], mixer(x[row, own][None], CAUSAL)[0]) <= 1e-5
    changed = x.clone()
    changed[:, 6:] = 9.0
    padded = AttentionMask(True, torch.tensor([6, 6, 6]))
    assert error(mixer(changed, padded)[:, :6], mixer(x[:, :6], CAUSAL)) <= 1e-5


@BOTH
def test_its_costs_are_its_parameters(name):
    model, d, k = network(layers(name)), D_MODEL, {"lstm": 0, "conv": 16, "short": 3}[name]
    costs, plain = count_costs(model, "fp32"), count_costs(network(mha))
    matrices = 2 * (8 * d * d if name == "lstm" else d * d)
    parameters = matrices + 2 * (8 * d if name == "lstm" else k * d + 2 * d)
    assert costs.attention_parameters == parameters
    assert costs.num_parameters == plain.num_parameters - plain.attention_parameters + parameters
    assert costs.flops_per_token_by_part["attention_projections"] == 2 * matrices
    assert costs.flops_per_token_by_part["attention_scores_and_values"] == 2 * 2 * k * d
    assert costs.attended_flops_per_token == costs.flops_per_token
    batch = {"inputs": torch.zeros(3, 16, dtype=torch.long)}
    flops = TrainingFlops.of(model).count(batch_sizes(batch), 48)
    assert flops == 48 * costs.training_flops_per_token
    cache = Cache(2)
    with torch.no_grad():
        model(batch["inputs"][:1], CAUSAL, cache)
    assert cache.num_bytes == costs.cache_bytes


def test_what_they_cannot_do_is_refused():
    for mask in (AttentionMask(), AttentionMask(True, window=3), AttentionMask(True, allowed=torch.ones(1, 1).bool())):
        with pytest.raises(ArgumentError, match=r"^attention='LSTM': processes tokens from left to right"):
            made("lstm")(tokens(), mask)
    with pytest.raises(ArgumentError, match=r"^encoder.block.attention='BaseConv': processes"):
        network(layers("mha", "conv")).resolve_backends("cpu", torch.float32, AttentionMask())
    with pytest.raises(ArgumentError, match=r"^mask.documents='…': must be None with a cache"):
        made("conv")(tokens(), AttentionMask(True, documents=documents()), LayerCache())
    with pytest.raises(ArgumentError, match=r"^kernel_size=\[3, 0\]: must be at least 1"):
        BaseConv(4, 8, [3, 0])
    with pytest.raises(NoMapsError, match="has no heads"):
        network(layers("lstm")).require_heads()
    with pytest.raises(NoMapsError, match="'LSTM': is no BaseAttention, but all layers need heads"):
        network(layers("mha", "lstm")).require_heads_everywhere()
