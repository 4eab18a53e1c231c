import math

import pytest
import torch
from torch import nn

from tinyformer.nn import FeedForward, GatedFeedForward

FORMULAS = {
    "gelu": lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: x * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: torch.where(x > 0, x, 0.0),
    "relu2": lambda x: torch.where(x > 0, x * x, 0.0),
    "silu": lambda x: x / (1 + torch.exp(-x)),
}


def randomised(module: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module


def linear(proj: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    out = torch.einsum("bsi,oi->bso", x, proj.weight)
    return out if proj.bias is None else out + proj.bias


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("activation", FORMULAS)
def test_both_kinds_are_their_formulas(activation, bias):
    plain, module = (randomised(kind(8, 12, activation, bias)) for kind in (FeedForward, GatedFeedForward))
    x = torch.randn(2, 3, 8)
    expected = linear(plain.down_proj, FORMULAS[activation](linear(plain.up_proj, x)))
    torch.testing.assert_close(plain(x), expected, rtol=1e-4, atol=1e-4)
    gate = FORMULAS[activation](linear(module.gate_proj, x))
    expected = linear(module.down_proj, gate * linear(module.up_proj, x))
    torch.testing.assert_close(module(x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("d_model", [8, 100, 768])
def test_default_widths_make_both_kinds_equally_large(d_model):
    plain, gated = FeedForward(d_model), GatedFeedForward(d_model)
    assert plain.up_proj.out_features == 4 * d_model
    d_ff = gated.up_proj.out_features
    assert d_ff % 8 == 0
    assert 8 * d_model / 3 <= d_ff < 8 * d_model / 3 + 8
    assert gated.gate_proj.out_features == gated.down_proj.in_features == d_ff
