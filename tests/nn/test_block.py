from functools import partial

import pytest
import torch
from torch import nn

from nn.model_cases import block_factory
from nn.variants import error
from tinyformer.nn import AttentionMask, PostNormBlock, PreNormBlock, Residual

BLOCKS = pytest.mark.parametrize("kind", [PreNormBlock, PostNormBlock], ids=["pre", "post"])
CAUSAL = AttentionMask(causal=True)


def randomised(module: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module


def tokens(seq: int = 7) -> torch.Tensor:
    return torch.randn(2, seq, 32, generator=torch.Generator().manual_seed(1))


def as_torch(block: nn.Module) -> nn.TransformerEncoderLayer:
    layer = nn.TransformerEncoderLayer(
        32, 4, 128, dropout=0.0, activation="gelu", batch_first=True, norm_first=isinstance(block, PreNormBlock)
    )
    attention, feed_forward = block.attention, block.feed_forward
    if isinstance(block.attention_norm, nn.Identity):
        layer.norm1, layer.norm2 = nn.Identity(), nn.Identity()
    norms = {"norm1": block.attention_norm, "norm2": block.feed_forward_norm}
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    layer.load_state_dict(
        {
            "self_attn.in_proj_weight": torch.cat([proj.weight for proj in projections]),
            "self_attn.in_proj_bias": torch.cat([proj.bias for proj in projections]),
            "self_attn.out_proj.weight": attention.o_proj.weight,
            "self_attn.out_proj.bias": attention.o_proj.bias,
            "linear1.weight": feed_forward.up_proj.weight,
            "linear1.bias": feed_forward.up_proj.bias,
            "linear2.weight": feed_forward.down_proj.weight,
            "linear2.bias": feed_forward.down_proj.bias,
            **{f"{name}.{key}": value for name, norm in norms.items() for key, value in norm.state_dict().items()},
        }
    )
    return layer


@BLOCKS
@pytest.mark.parametrize("norm", [None, nn.Identity], ids=["layer_norm", "none"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_parity_with_transformer_encoder_layer(kind, causal, norm):
    block = randomised(block_factory(kind, bias=True, norm=norm)())
    layer = as_torch(block)
    x, upstream = tokens().requires_grad_(), torch.randn(2, 7, 32)
    torch_mask = torch.ones(7, 7, dtype=torch.bool).triu(1) if causal else None
    ours, theirs = block(x, AttentionMask(causal=causal)), layer(x, src_mask=torch_mask)
    assert error(ours, theirs) <= 1e-5
    pairs = [
        (x, x),
        (block.attention.o_proj.weight, layer.self_attn.out_proj.weight),
        (block.feed_forward.up_proj.weight, layer.linear1.weight),
        *zip(block.attention_norm.parameters(), layer.norm1.parameters(), strict=True),
        *zip(block.feed_forward_norm.parameters(), layer.norm2.parameters(), strict=True),
    ]
    ours = torch.autograd.grad(ours, [pair[0] for pair in pairs], upstream)
    theirs = torch.autograd.grad(theirs, [pair[1] for pair in pairs], upstream)
    for actual, expected in zip(ours, theirs, strict=True):
        assert error(actual, expected) <= 1e-5


@BLOCKS
@pytest.mark.parametrize("sublayer", ["attention", "feed_forward"])
def test_each_connection_is_scaled_on_its_own(kind, sublayer):
    whole = randomised(block_factory(kind)())
    scaled = block_factory(kind, **{f"{sublayer}_residual": partial(Residual, branch=0.5)})()
    scaled.load_state_dict(whole.state_dict())
    halved = block_factory(kind)()
    halved.load_state_dict(whole.state_dict())
    last = halved.attention.o_proj if sublayer == "attention" else halved.feed_forward.down_proj
    with torch.no_grad():
        last.weight *= 0.5
    x = tokens()
    torch.testing.assert_close(scaled(x, CAUSAL), halved(x, CAUSAL))
    assert error(scaled(x, CAUSAL), whole(x, CAUSAL)) > 1e-3


@BLOCKS
def test_dropout_acts_on_both_sublayers_in_training_only(kind):
    block = randomised(block_factory(kind, dropout=1.0)())
    x = tokens()
    expected = x if kind is PreNormBlock else block.feed_forward_norm(block.attention_norm(x))
    assert torch.equal(block.train()(x, CAUSAL), expected)
    without = block_factory(kind)()
    without.load_state_dict(block.state_dict())
    assert torch.equal(block.eval()(x, CAUSAL), without(x, CAUSAL))
