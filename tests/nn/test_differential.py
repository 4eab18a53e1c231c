"""Differential attention against its formula."""

import math

import pytest
import torch

from nn.variants import differential, error, make, prepared, tokens
from tinyformer.nn import AttentionMask

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


def test_qk_norm_is_that_of_each_half():
    module = make("gqa+differential", qk_norm=True)
    q, _, _ = module.project(tokens())
    raw = (tokens() @ module.q_proj.weight.T).unflatten(-1, (8, 4)).transpose(1, 2)
    expected = raw / (raw.square().mean(-1, keepdim=True) + 1e-6).sqrt() * module.q_norm.weight
    assert error(q, expected) <= 1e-6
