"""Multi-head attention against PyTorch's module and by hand; its options and what it refuses."""

import math
from functools import partial

import pytest
import torch
from torch import nn

from nn.attention_cases import MASKS, ON_CPU, TRAINABLE, error, make_mask
from tinyformer.errors import ArgumentError
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


# Against PyTorch's module and by hand.


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


def with_identity_projections(num_heads: int) -> Attention:
    attention = Attention(2, num_heads)
    with torch.no_grad():
        for proj in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj):
            proj.weight.copy_(torch.eye(2))
    return attention


def test_two_heads_by_hand():
    # With heads of one dimension, head 0 compares the first coordinates (1 and 0), head 1 the second (0 and 1), so a
    # score is 1 where both are 1: weights e/(1+e) and 1/(1+e), or a half each.
    out = with_identity_projections(2)(torch.eye(2)[None])
    likely = math.e / (1 + math.e)
    torch.testing.assert_close(out, torch.tensor([[[likely, 0.5], [0.5, likely]]]))


def test_one_head_by_hand_is_scaled_by_the_root_of_its_dimensions():
    attention = with_identity_projections(1)
    likely = 1 / (1 + math.exp(-1 / math.sqrt(2)))
    expected = torch.tensor([[[likely, 1 - likely], [1 - likely, likely]]])
    torch.testing.assert_close(attention(torch.eye(2)[None]), expected)
    torch.testing.assert_close(attention.weights(torch.eye(2)[None]), expected[:, None])


def test_multi_query_has_one_key_and_value_head():
    attention = Attention(32, 4, num_kv_heads=1)
    assert attention.k_proj.weight.shape == attention.v_proj.weight.shape == (8, 32)
    q, k, v = attention.project(tokens())
    assert q.shape == (2, 4, 7, 8)
    assert k.shape == v.shape == (2, 1, 7, 8)


# Masks.


@pytest.mark.parametrize("backend", ON_CPU)
@torch.no_grad()
def test_a_row_of_length_zero_is_the_bias_of_o_proj(backend):
    attention = randomised(Attention(32, 4, bias=True, backend=backend))
    out = attention(tokens(), AttentionMask(lengths=torch.tensor([7, 0])))
    assert torch.equal(out[1], attention.o_proj.bias.expand(7, 32))


@pytest.mark.parametrize("backend", ON_CPU)
@torch.no_grad()
def test_in_cross_attention_the_mask_is_that_of_the_context(backend):
    attention = randomised(Attention(32, 4, 2, backend=backend))
    x, context = tokens(seq=9), tokens(seq=9, seed=4)
    changed = context.clone()
    changed[0, 4:] = 5.0
    mask = AttentionMask(lengths=torch.tensor([4, 9]))
    before, after = (attention(x, context=tokens, context_mask=mask) for tokens in (context, changed))
    assert torch.equal(before, after)
    assert not torch.equal(attention(x, context=context), attention(x, context=changed))
    # A causal mask aligns the last query with the last key.
    assert error(attention(x[:, 6:], context=x, context_mask=CAUSAL), attention(x, CAUSAL)[:, 6:]) <= 1e-5


def test_without_a_mask_all_tokens_attend_to_all():
    attention = randomised(Attention(32, 4))
    assert torch.equal(attention(tokens()), attention(tokens(), AttentionMask()))
    assert (attention.weights(tokens()) > 0).all()


# Options.


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


def test_qk_norm_divides_each_head_by_its_root_mean_square_and_scales_it():
    attention = randomised(Attention(32, 4, 2, qk_norm=True))
    plain = Attention(32, 4, 2)
    plain.load_state_dict(attention.state_dict(), strict=False)
    q, k, v = attention.project(tokens())
    plain_q, plain_k, plain_v = plain.project(tokens())
    for normed, raw, norm in ((q, plain_q, attention.q_norm), (k, plain_k, attention.k_norm)):
        mean_square = (raw * raw).sum(-1, keepdim=True) / 8
        assert error(normed, raw / (mean_square + 1e-6).sqrt() * norm.weight) <= 1e-6
    assert torch.equal(v, plain_v)


def test_with_qk_norm_the_size_of_a_token_does_not_change_the_weights():
    attention = Attention(32, 4, qk_norm=True)
    x = tokens()
    scaled = x * torch.linspace(5, 50, 7)[None, :, None]
    assert error(attention.weights(scaled), attention.weights(x)) <= 1e-4
    assert error(Attention(32, 4).weights(scaled), Attention(32, 4).weights(x)) > 1e-2


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


def test_attention_dropout_preserves_the_mean():
    attention = randomised(Attention(32, 4, dropout=0.2, backend="eager"))
    x = tokens(batch=1, seq=16)
    torch.manual_seed(0)
    mean = attention(x.expand(4000, -1, -1)).mean(0)
    assert error(mean, attention.eval()(x)[0]) < 0.05


# Refusals.


def test_an_unknown_backend_is_refused_at_construction():
    with pytest.raises(ArgumentError, match=r"^backend='fast': must be one of auto, eager, sdpa, flash"):
        Attention(32, 4, backend="fast")


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        ((48, 7), "num_heads=7: must divide d_model=48; num_heads=6 works."),
        ((32, 33), "num_heads=33: must divide d_model=32; num_heads=32 works."),
        ((32, 0), "num_heads=0: must divide d_model=32; num_heads=1 works."),
        ((48, 12, 5), "num_kv_heads=5: must divide num_heads=12; num_kv_heads=4 works."),
        ((32, 4, 8), "num_kv_heads=8: must divide num_heads=4; num_kv_heads=4 works."),
        ((32, 4, -2), "num_kv_heads=-2: must divide num_heads=4; num_kv_heads=1 works."),
    ],
)
def test_numbers_of_heads_that_do_not_divide_are_refused_with_the_nearest_below(sizes, sentence):
    with pytest.raises(ArgumentError) as caught:
        Attention(*sizes)
    assert str(caught.value) == sentence
