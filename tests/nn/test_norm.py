import pytest
import torch
from torch import nn

from tinyformer.nn import LayerNorm, RMSNorm


def randomised(norm: nn.Module) -> nn.Module:
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    return norm


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_layer_norm_is_its_formula(bias):
    torch.manual_seed(0)
    norm, x = randomised(LayerNorm(16, bias=bias)), 3 * torch.randn(2, 5, 16) + 1
    centred = x - x.sum(-1, keepdim=True) / 16
    variance = (centred**2).sum(-1, keepdim=True) / 16
    expected = centred / (variance + 1e-5).sqrt() * norm.weight
    torch.testing.assert_close(norm(x), expected + norm.bias if bias else expected)
    assert (norm.bias is not None) == bias


def test_rms_norm_is_its_formula():
    torch.manual_seed(0)
    norm, x = randomised(RMSNorm(16)), 3 * torch.randn(2, 5, 16) + 1
    mean_square = (x**2).sum(-1, keepdim=True) / 16
    torch.testing.assert_close(norm(x), x / (mean_square + 1e-6).sqrt() * norm.weight)
    assert [name for name, _ in norm.named_parameters()] == ["weight"]


@pytest.mark.parametrize("norm", [LayerNorm(4, eps=3.0), RMSNorm(4, eps=3.0)], ids=["layer", "rms"])
def test_eps_is_added_to_the_mean_square(norm):
    # Mean 0 and mean square 1, so that the divisor is √(1 + 3) = 2.
    x = torch.tensor([1.0, -1.0, 1.0, -1.0])
    torch.testing.assert_close(norm(x), x / 2)


def test_rms_norm_takes_bf16_beside_fp32_weights_without_a_warning():
    norm, x = RMSNorm(16), torch.randn(2, 5, 16).bfloat16()
    out = norm(x)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, norm(x.float()))
    assert norm.bfloat16()(x).dtype == torch.bfloat16
