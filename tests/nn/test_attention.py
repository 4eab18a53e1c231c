"""Multi-head attention against PyTorch's module, under autocast and with dropout."""

from functools import partial

import pytest
import torch
from torch import nn

from nn.attention_cases import MASKS, ON_CPU, TRAINABLE, error, make_mask
from tinyformer.nn import Attention, AttentionMask, RotaryPosition

CAUSAL = AttentionMask(causal=True)


def randomised(attention: Attention, seed: int = 0) -> Attention:
    """The module with larger random parameters, biases and scales included: zeros hide mistakes."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=random) * parameter.shape[-1] ** -0.5)
    return attention


def tokens(batch: int = 2, seq: int = 7, d_model: int = 32, seed: int = 1) -> torch.Tensor:
    return torch.randn(batch, seq, d_model, generator=torch.Generator().manual_seed(seed))


def as_torch(attention: Attention) -> nn.MultiheadAttention:
    """torch's module with the same weights."""
    d_model, has_bias = attention.q_proj.in_features, attention.q_proj.bias is not None
    module = nn.MultiheadAttention(d_model, attention.num_heads, bias=has_bias, batch_first=True)
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    with torch.no_grad():
        module.in_proj_weight.copy_(torch.cat([proj.weight for proj in projections]))
        module.out_proj.weight.copy_(attention.o_proj.weight)
        if has_bias:
            module.in_proj_bias.copy_(torch.cat([proj.bias for proj in projections]))
            module.out_proj.bias.copy_(attention.o_proj.bias)
    return module


def torch_masks(mask: AttentionMask, q_seq: int, k_seq: int) -> dict:
    """torch's arguments, where True means "may not"."""
    causal = torch.ones(q_seq, k_seq, dtype=torch.bool).triu(1 + k_seq - q_seq)
    padding = None if mask.lengths is None else torch.arange(k_seq) >= mask.lengths[:, None]
    return {"attn_mask": causal if mask.causal else None, "key_padding_mask": padding}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_parity_with_multihead_attention(bias, mask):
    described = make_mask(mask, [7, 3])
    x, upstream = tokens().requires_grad_(), tokens(seed=2)
    for backend in ("auto", *ON_CPU):
        attention = randomised(Attention(32, 4, bias=bias, backend=backend))
        reference = as_torch(attention)
        with torch.set_grad_enabled(backend != "flex"):
            out = attention(x, described)
        expected, weights = reference(x, x, x, average_attn_weights=False, **torch_masks(described, 7, 7))
        assert error(out, expected) <= 1e-5
        assert error(attention.weights(x, described), weights) <= 1e-5
        if backend != "flex":
            parameters = [p for name, p in attention.named_parameters() if name.endswith("weight")]
            dx, *dq_dk_dv, do = torch.autograd.grad(out, [x, *parameters], upstream)
            theirs = torch.autograd.grad(expected, [x, reference.in_proj_weight, reference.out_proj.weight], upstream)
            for ours, other in zip((dx, torch.cat(dq_dk_dv), do), theirs, strict=True):
                assert error(ours, other) <= 1e-5


@pytest.mark.parametrize("mask", MASKS)
def test_parity_of_cross_attention_with_multihead_attention(mask):
    attention = randomised(Attention(32, 4, bias=True))
    x, context, described = tokens(seq=4), tokens(seq=9, seed=3), make_mask(mask, [9, 6])
    expected, weights = as_torch(attention)(
        x, context, context, average_attn_weights=False, **torch_masks(described, 4, 9)
    )
    masks = {"context": context, "context_mask": described}
    assert error(attention(x, **masks), expected) <= 1e-5
    assert error(attention.weights(x, **masks), weights) <= 1e-5
    # The mask of the queries' sequence does not apply to the context.
    assert torch.equal(attention(x, AttentionMask(True, torch.tensor([1, 2])), **masks), attention(x, **masks))


@pytest.mark.parametrize("qk_norm", [False, True], ids=["plain", "qk-norm"])
@pytest.mark.parametrize("backend", ["auto", *TRAINABLE])
def test_autocast_gives_the_kernel_one_dtype_without_a_warning(backend, qk_norm):
    position = partial(RotaryPosition, 16)
    attention = randomised(Attention(32, 4, 2, qk_norm=qk_norm, backend=backend, position=position))
    expected = attention(tokens(), CAUSAL)
    with torch.autocast("cpu", torch.bfloat16):
        q, k, v = attention.project(tokens())
        out = attention(tokens(), CAUSAL)
    assert q.dtype == k.dtype == v.dtype == out.dtype == torch.bfloat16
    assert 0 < error(out, expected) < 0.05
    out.float().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in attention.parameters())


@pytest.mark.parametrize("backend", ["auto", "eager", "sdpa"])
def test_attention_dropout_acts_in_training_only(backend):
    attention = randomised(Attention(32, 4, dropout=0.5, backend=backend))
    torch.manual_seed(0)
    attention.train()
    assert not torch.equal(attention(tokens()), attention(tokens()))
    assert torch.equal(attention.weights(tokens()), attention.weights(tokens()))
    attention.eval()
    plain = randomised(Attention(32, 4, backend=backend)).eval()
    assert torch.equal(attention(tokens()), plain(tokens()))
