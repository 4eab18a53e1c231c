import math
from functools import partial

import pytest
import torch
from attention_cases import MASKS, ON_CPU, TRAINABLE, assert_within_bf16, error, make_mask
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tinyformer.nn import Attention, AttentionMask, RotaryPosition, resolve_backend


def randomised(attention: Attention, seed: int = 0) -> Attention:
    """The same module with larger random parameters, biases and scales included: zeros hide mistakes."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=random) * parameter.shape[-1] ** -0.5)
    return attention


def tokens(batch: int = 2, seq: int = 7, d_model: int = 32, seed: int = 1) -> torch.Tensor:
    return torch.randn(batch, seq, d_model, generator=torch.Generator().manual_seed(seed))


def trains(backend: str) -> torch.set_grad_enabled:
    """Gradients, where the backend has them on CPU."""
    return torch.set_grad_enabled(backend != "flex")


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
@pytest.mark.parametrize("backend", ["auto", *ON_CPU])
def test_parity_with_multihead_attention(backend, bias, mask):
    attention = randomised(Attention(32, 4, bias=bias, backend=backend))
    reference = as_torch(attention)
    described = make_mask(mask, [7, 3])
    x, upstream = tokens().requires_grad_(), tokens(seed=2)
    with trains(backend):
        out = attention(x, described)
    expected, weights = reference(x, x, x, average_attn_weights=False, **torch_masks(described, 7, 7))
    assert error(out, expected) <= 1e-5
    assert error(attention.weights(x, described), weights) <= 1e-5
    if not out.requires_grad:
        return

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
    # The mask of the tokens that ask hides nothing of the context.
    assert torch.equal(attention(x, AttentionMask(True, torch.tensor([1, 2])), **masks), attention(x, **masks))


def test_two_heads_by_hand():
    # Identity projections and heads of one dimension: head 0 compares the first coordinates (1 and 0), head 1
    # the second (0 and 1), so a score is 1 where both are 1: weights e/(1+e) and 1/(1+e), or a half each.
    attention = Attention(2, 2)
    with torch.no_grad():
        for proj in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj):
            proj.weight.copy_(torch.eye(2))
    out = attention(torch.eye(2)[None])
    likely = math.e / (1 + math.e)
    torch.testing.assert_close(out, torch.tensor([[[likely, 0.5], [0.5, likely]]]))


def test_one_head_by_hand_is_scaled_by_the_root_of_its_dimensions():
    attention = Attention(2, 1)
    with torch.no_grad():
        for proj in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj):
            proj.weight.copy_(torch.eye(2))
    likely = 1 / (1 + math.exp(-1 / math.sqrt(2)))
    expected = torch.tensor([[[likely, 1 - likely], [1 - likely, likely]]])
    torch.testing.assert_close(attention(torch.eye(2)[None]), expected)
    torch.testing.assert_close(attention.weights(torch.eye(2)[None]), expected[:, None])


# Sharing keys and values.


@pytest.mark.parametrize("num_kv_heads", [1, 2, 3])
@pytest.mark.parametrize("backend", ON_CPU)
def test_grouped_queries_are_multi_head_with_repeated_keys_and_values(backend, num_kv_heads):
    grouped = randomised(Attention(48, 6, num_kv_heads, bias=True, backend=backend))
    repeated = Attention(48, 6, bias=True, backend="eager")
    state = dict(grouped.state_dict())
    for name in ("k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias"):
        by_head = state[name].unflatten(0, (num_kv_heads, 8))
        state[name] = by_head.repeat_interleave(6 // num_kv_heads, dim=0).flatten(0, 1)
    repeated.load_state_dict(state)
    x, mask = tokens(d_model=48), AttentionMask(causal=True)
    with trains(backend):
        out = grouped(x, mask)
    assert error(out, repeated(x, mask)) <= 1e-5
    assert error(grouped.weights(x, mask), repeated.weights(x, mask)) <= 1e-5
    if not out.requires_grad:
        return
    # The gradient of a shared head is the sum over the heads that share it.
    out.square().sum().backward()
    repeated(x, mask).square().sum().backward()
    summed = repeated.k_proj.weight.grad.unflatten(0, (num_kv_heads, -1, 8)).sum(1).flatten(0, 1)
    assert error(grouped.k_proj.weight.grad, summed) <= 1e-5


def test_multi_query_has_one_key_and_value_head():
    attention = Attention(32, 4, num_kv_heads=1)
    assert attention.k_proj.weight.shape == attention.v_proj.weight.shape == (8, 32)
    q, k, v = attention.project(tokens())
    assert q.shape == (2, 4, 7, 8)
    assert k.shape == v.shape == (2, 1, 7, 8)


def test_head_dim_may_differ_from_its_share_of_the_model():
    attention = randomised(Attention(32, 3, head_dim=10, backend="eager"))
    assert attention.o_proj.weight.shape == (32, 30)
    assert attention.score.scale == pytest.approx(10**-0.5)
    assert attention(tokens()).shape == (2, 7, 32)


# Backends through the module: parameters too.


def gradients(attention: Attention, x: torch.Tensor, mask: AttentionMask, upstream: torch.Tensor) -> dict:
    x = x.detach().clone().requires_grad_()
    attention.zero_grad()
    out = attention(x, mask)
    out.backward(upstream)
    return {"out": out.detach(), "x": x.grad} | {n: p.grad for n, p in attention.named_parameters()}


def with_backend(backend: str, dtype: torch.dtype) -> Attention:
    attention = Attention(
        128,
        4,
        2,
        bias=True,
        qk_norm=True,
        backend=backend,
        position=partial(RotaryPosition, 300),
        ablated_heads=[[0, 2]],
    )
    # Rounded to bf16 always, so that every dtype has the same parameters.
    return randomised(attention).to(torch.bfloat16).to(dtype)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("seq", [1, 63, 257])
@pytest.mark.parametrize("backend", ["auto", "sdpa", "flash"])
def test_parameters_get_the_same_gradients_in_fp32(backend, seq, mask):
    described = make_mask(mask, [max(1, seq // 2), 0])
    x, upstream = tokens(seq=seq, d_model=128), tokens(seq=seq, d_model=128, seed=5)
    expected = gradients(with_backend("eager", torch.float32), x, described, upstream)
    actual = gradients(with_backend(backend, torch.float32), x, described, upstream)
    # The bias of the keys shifts all scores of a query alike where keys are not normalised or turned;
    # here it is a parameter like any other.
    for name in expected:
        assert error(actual[name], expected[name]) <= 1e-5, name


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("seq", [63, 257])
@pytest.mark.parametrize("backend", ["auto", "sdpa", "flash"])
def test_parameters_get_the_same_gradients_in_bf16_to_its_rounding(backend, seq, mask):
    described = make_mask(mask, [seq // 2, 0])
    x, upstream = tokens(seq=seq, d_model=128).bfloat16(), tokens(seq=seq, d_model=128, seed=5).bfloat16()
    exact = gradients(with_backend("eager", torch.float64), x.double(), described, upstream.double())
    eager = gradients(with_backend("eager", torch.bfloat16), x, described, upstream)
    actual = gradients(with_backend(backend, torch.bfloat16), x, described, upstream)
    for name in exact:
        assert_within_bf16(actual[name], eager[name], exact[name], name)


@pytest.mark.parametrize("qk_norm", [False, True], ids=["plain", "qk-norm"])
@pytest.mark.parametrize("backend", ["auto", *TRAINABLE])
def test_autocast_gives_the_kernel_one_dtype_without_a_warning(backend, qk_norm):
    position = partial(RotaryPosition, 16)
    attention = randomised(Attention(32, 4, 2, qk_norm=qk_norm, backend=backend, position=position))
    expected = attention(tokens(), AttentionMask(causal=True))
    with torch.autocast("cpu", torch.bfloat16):
        q, k, v = attention.project(tokens())
        out = attention(tokens(), AttentionMask(causal=True))
    assert q.dtype == k.dtype == v.dtype == out.dtype == torch.bfloat16
    assert 0 < error(out, expected) < 0.05
    out.float().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in attention.parameters())


# What attention is and is not sensitive to.


@pytest.mark.parametrize("backend", ON_CPU)
@torch.no_grad()
def test_permuted_tokens_give_permuted_outputs(backend):
    attention = randomised(Attention(32, 4, 2, backend=backend))
    x, order = tokens(seq=9), torch.randperm(9, generator=torch.Generator().manual_seed(0))
    assert error(attention(x[:, order]), attention(x)[:, order]) <= 1e-5


def test_positions_end_the_permutation_symmetry():
    attention = randomised(Attention(32, 4, position=partial(RotaryPosition, 16)))
    x, order = tokens(seq=9), torch.arange(9).flip(0)
    assert error(attention(x[:, order]), attention(x)[:, order]) > 1e-3


@pytest.mark.parametrize("backend", ON_CPU)
@torch.no_grad()
def test_a_later_token_changes_nothing_before_it_bit_for_bit(backend):
    attention = randomised(Attention(32, 4, 2, backend=backend, position=partial(RotaryPosition, 64)))
    x, mask = tokens(seq=40), AttentionMask(causal=True)
    changed = x.clone()
    changed[:, 25:] += 10
    before, after = attention(x, mask), attention(changed, mask)
    assert torch.equal(before[:, :25], after[:, :25])
    assert not torch.equal(before[:, 25:], after[:, 25:])


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    backend=st.sampled_from(ON_CPU),
    num_kv_heads=st.sampled_from([1, 2, 4]),
    seq=st.integers(1, 12),
    padding=st.integers(0, 5),
)
@torch.no_grad()
def test_padding_at_the_right_changes_no_real_token(backend, num_kv_heads, seq, padding):
    attention = randomised(Attention(32, 4, num_kv_heads, backend=backend, position=partial(RotaryPosition, 32)))
    x = tokens(seq=seq)
    padded = torch.cat([x, torch.full((2, padding, 32), 7.0)], dim=1)
    lengths = torch.tensor([seq, seq])
    out = attention(padded, AttentionMask(lengths=lengths))[:, :seq]
    assert error(out, attention(x)) <= 1e-5


@pytest.mark.parametrize("backend", ON_CPU)
@torch.no_grad()
def test_a_row_of_length_zero_is_o_projs_bias_alone(backend):
    attention = randomised(Attention(32, 4, bias=True, backend=backend))
    out = attention(tokens(), AttentionMask(lengths=torch.tensor([7, 0])))
    assert torch.equal(out[1], attention.o_proj.bias.expand(7, 32))


# Weights.


def test_weights_mix_the_values_into_the_output():
    attention = randomised(Attention(32, 4, 2, bias=True, qk_norm=True, position=partial(RotaryPosition, 16)))
    x, mask = tokens(), AttentionMask(causal=True, lengths=torch.tensor([7, 0]))
    weights = attention.weights(x, mask)
    values = attention.project(x)[2].repeat_interleave(2, dim=1)
    heads = (weights @ values).transpose(1, 2).flatten(-2)
    assert error(attention.o_proj(heads), attention(x, mask)) <= 1e-5
    torch.testing.assert_close(weights.sum(-1), torch.tensor([1.0, 0.0])[:, None, None].expand(2, 4, 7))
    assert torch.count_nonzero(weights.triu(1)) == 0


def test_weights_have_no_dropout():
    attention = randomised(Attention(32, 4, dropout=0.5)).train()
    assert torch.equal(attention.weights(tokens()), attention.weights(tokens()))


# Normalised queries and keys.


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


def test_qk_norm_makes_scores_indifferent_to_the_size_of_a_token():
    attention = Attention(32, 4, qk_norm=True)
    x = tokens()
    scaled = x * torch.linspace(5, 50, 7)[None, :, None]
    assert error(attention.weights(scaled), attention.weights(x)) <= 1e-4
    assert error(Attention(32, 4).weights(scaled), Attention(32, 4).weights(x)) > 1e-2


# Cross-attention.


@pytest.mark.parametrize("backend", ON_CPU)
@torch.no_grad()
def test_lengths_are_those_of_the_context(backend):
    attention = randomised(Attention(32, 4, 2, backend=backend))
    x, context = tokens(seq=6), tokens(seq=9, seed=4)
    changed = context.clone()
    changed[0, 4:] = 5.0
    mask = AttentionMask(lengths=torch.tensor([4, 9]))
    before, after = (attention(x, context=tokens, context_mask=mask) for tokens in (context, changed))
    assert torch.equal(before, after)
    assert not torch.equal(attention(x, context=context), attention(x, context=changed))


@pytest.mark.parametrize("backend", ON_CPU)
@torch.no_grad()
def test_a_causal_last_query_stands_at_the_last_key(backend):
    attention = randomised(Attention(32, 4, 2, backend=backend))
    x = tokens(seq=9)
    mask = AttentionMask(causal=True)
    whole, last = attention(x, mask), attention(x[:, 6:], context=x, context_mask=mask)
    assert error(last, whole[:, 6:]) <= 1e-5


def test_positions_are_for_self_attention_only():
    attention = randomised(Attention(32, 4, position=partial(RotaryPosition, 16)))
    plain = randomised(Attention(32, 4))
    x, context = tokens(), tokens(seq=5, seed=3)
    assert torch.equal(attention(x, context=context), plain(x, context=context))
    assert not torch.equal(attention(x), plain(x))


def test_without_a_mask_everybody_sees_everybody():
    attention = randomised(Attention(32, 4))
    assert torch.equal(attention(tokens()), attention(tokens(), AttentionMask()))
    assert (attention.weights(tokens()) > 0).all()


# Dropout, and the choice of a backend.


@pytest.mark.parametrize("backend", ["auto", "eager", "sdpa"])
def test_attention_dropout_acts_in_training_only(backend):
    attention = randomised(Attention(32, 4, dropout=0.5, backend=backend))
    torch.manual_seed(0)
    attention.train()
    assert not torch.equal(attention(tokens()), attention(tokens()))
    attention.eval()
    plain = randomised(Attention(32, 4, backend=backend)).eval()
    assert torch.equal(attention(tokens()), plain(tokens()))


def test_attention_dropout_is_right_on_average():
    attention = randomised(Attention(32, 4, dropout=0.2, backend="eager"))
    x = tokens(batch=1, seq=16)
    torch.manual_seed(0)
    mean = attention(x.expand(4000, -1, -1)).mean(0)
    assert error(mean, attention.eval()(x)[0]) < 0.05


def test_flash_refuses_dropout_on_cpu_and_names_one_that_can():
    attention = Attention(32, 4, dropout=0.1, backend="flash")
    sentence = r"^backend='flash': cannot compute attention dropout on CPU \(eager, sdpa can\); backend='auto' works\.$"
    with pytest.raises(ValueError, match=sentence):
        attention.train()(tokens())
    with pytest.raises(ValueError, match=sentence):
        resolve_backend(attention, "cpu", torch.float32, AttentionMask())
    assert attention.eval()(tokens()).shape == (2, 7, 32)
    for able in ("auto", "eager", "sdpa"):
        assert Attention(32, 4, dropout=0.1, backend=able).train()(tokens()).shape == (2, 7, 32)


def test_an_unknown_backend_is_refused_at_construction():
    with pytest.raises(ValueError, match=r"^backend='fast': must be one of auto, eager, sdpa, flash"):
        Attention(32, 4, backend="fast")


# Mistakes of the user.


@pytest.mark.parametrize("num_heads", [3, 5, 33, 64, 0, -1])
def test_heads_that_do_not_divide_the_model_are_refused_with_a_number_that_works(num_heads):
    with pytest.raises(ValueError, match=rf"^num_heads={num_heads}: must divide d_model=32") as caught:
        Attention(32, num_heads)
    assert Attention(32, caught.value.works["num_heads"])(tokens()).shape == (2, 7, 32)


@pytest.mark.parametrize("num_kv_heads", [3, 5, 8, 0, -2])
def test_kv_heads_that_do_not_divide_the_heads_are_refused_with_a_number_that_works(num_kv_heads):
    with pytest.raises(ValueError, match=rf"^num_kv_heads={num_kv_heads}: must divide num_heads=4") as caught:
        Attention(32, 4, num_kv_heads)
    assert Attention(32, 4, caught.value.works["num_kv_heads"])(tokens()).shape == (2, 7, 32)


def test_the_proposed_number_of_heads_is_the_nearest_below():
    with pytest.raises(ValueError, match=r"; num_heads=6 works\.$"):
        Attention(48, 7)
    with pytest.raises(ValueError, match=r"; num_kv_heads=4 works\.$"):
        Attention(48, 12, 5)
