"""Differential attention against its formula."""

import math

import pytest
import torch

from nn.attention_cases import error
from nn.variants import differential, make, prepared, tokens
from tinyformer.nn import AttentionMask, DifferentialAttention

CAUSAL = AttentionMask(causal=True)


@torch.no_grad()
@pytest.mark.parametrize("layer_index", [0, 3])
def test_the_formula(layer_index):
    module = prepared(lambda: differential(layer_index=layer_index, num_layers=4)).double()
    x = tokens(2, 9).double()
    lambda_init = 0.8 - 0.6 * math.exp(-0.3 * layer_index)
    q1, k1, q2, k2 = module.lambdas
    factor = torch.exp((q1 * k1).sum()) - torch.exp((q2 * k2).sum()) + lambda_init
    hidden = torch.ones(9, 9).triu(1).bool()
    heads = []
    for h in range(4):
        g = h // 2
        q, k = x @ module.q_proj.weight[8 * h : 8 * h + 8].T, x @ module.k_proj.weight[8 * g : 8 * g + 8].T
        v = x @ module.v_proj.weight[8 * g : 8 * g + 8].T
        first, second = (
            (q[..., part] @ k[..., part].mT / math.sqrt(4)).masked_fill(hidden, -torch.inf).softmax(-1)
            for part in (slice(0, 4), slice(4, 8))
        )
        head = (first - factor * second) @ v
        head = head / (head.square().mean(-1, keepdim=True) + 1e-5).sqrt() * module.head_norm.weight
        heads.append((1 - lambda_init) * head)
    expected = torch.cat(heads, dim=-1) @ module.o_proj.weight.T
    assert error(module(x, CAUSAL), expected) <= 1e-12


@torch.no_grad()
def test_the_maps_are_both_softmaxes_of_each_head():
    module, x = make("gqa+differential").double(), tokens().double()
    maps = module.weights(x, CAUSAL)
    assert maps.shape == (3, 8, 11, 11)
    torch.testing.assert_close(maps.sum(-1), torch.ones(3, 8, 11, dtype=torch.float64))
    q = (x @ module.q_proj.weight.T).unflatten(-1, (4, 2, 4))
    k = (x @ module.k_proj.weight.T).unflatten(-1, (2, 2, 4)).repeat_interleave(2, dim=2)
    for h in range(4):
        for half in range(2):
            scores = q[:, :, h, half] @ k[:, :, h, half].mT / 2
            expected = scores.masked_fill(torch.ones(11, 11).triu(1).bool(), -torch.inf).softmax(-1)
            assert error(maps[:, 2 * h + half], expected) <= 1e-12


def test_lambda_begins_as_the_paper_says():
    # 0.8 - 0.6 exp(-0.3 l): 0.2 in the first layer, towards 0.8 in the last.
    for layer, expected in ((0, 0.2), (1, 0.355509), (11, 0.777870)):
        module = DifferentialAttention(32, 4, layer_index=layer, num_layers=12)
        assert module.lambda_init == pytest.approx(expected, abs=1e-6)
        with torch.no_grad():
            for vector in module.lambdas:
                vector.fill_(0.0)
        assert module.factor().item() == pytest.approx(expected, abs=1e-6)
    with torch.no_grad():
        for vector, value in zip(module.lambdas, (0.5, 0.5, -0.25, 0.5), strict=True):
            vector.fill_(value)
    # Four dimensions: exp(4 · 0.25) - exp(-4 · 0.125).
    assert module.factor().item() == pytest.approx(math.e - math.exp(-0.5) + 0.777870, abs=1e-5)


def test_qk_norm_is_that_of_each_half():
    module = make("gqa+differential", qk_norm=True)
    q, _, _ = module.project(tokens())
    raw = (tokens() @ module.q_proj.weight.T).unflatten(-1, (8, 4)).transpose(1, 2)
    expected = raw / (raw.square().mean(-1, keepdim=True) + 1e-6).sqrt() * module.q_norm.weight
    assert error(q, expected) <= 1e-6
