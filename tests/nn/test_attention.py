"""Parity with PyTorch's `MultiheadAttention`."""

import pytest
import torch
from torch import nn

from nn.variants import ON_CPU, error, tokens
from tinyformer.nn import Attention, AttentionMask


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


@pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])
@pytest.mark.parametrize("mask", ["full", "causal", "padded", "causal+padded"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_parity_with_multihead_attention(bias, mask, cross):
    x, upstream = tokens(2, 7 if not cross else 4).requires_grad_(), tokens(2, 7 if not cross else 4, seed=2)
    source = tokens(2, 9, seed=3) if cross else x
    described = AttentionMask("causal" in mask, torch.tensor([len(source[0]), 3]) if "padded" in mask else None)
    # The mask of the queries' sequence does not apply to the context.
    given = (AttentionMask(True, torch.tensor([1, 2])), source, described) if cross else (described,)
    for backend in ("auto", *ON_CPU):
        attention = Attention(32, 4, bias=bias, backend=backend)
        random = torch.Generator().manual_seed(0)
        for parameter in attention.parameters():  # biases, too: zeros hide mistakes
            parameter.data = torch.randn(parameter.shape, generator=random) * parameter.shape[-1] ** -0.5
        reference = as_torch(attention)
        expected, weights = reference(
            x, source, source, average_attn_weights=False, **torch_masks(described, x.shape[1], source.shape[1])
        )
        with torch.set_grad_enabled(backend != "flex"):
            out = attention(x, *given)
        assert error(out, expected) <= 1e-5
        assert error(attention.weights(x, *given), weights) <= 1e-5
        if backend != "flex":
            parameters = [p for name, p in attention.named_parameters() if name.endswith("weight")]
            dx, *dq_dk_dv, do = torch.autograd.grad(out, [x, *parameters], upstream)
            theirs = torch.autograd.grad(expected, [x, reference.in_proj_weight, reference.out_proj.weight], upstream)
            for ours, other in zip((dx, torch.cat(dq_dk_dv), do), theirs, strict=True):
                assert error(ours, other) <= 1e-5
