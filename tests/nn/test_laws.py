"""The laws of attention that hold for any weights, in every variant of the shared table and every combination."""

import copy
from functools import partial

import pytest
import torch

from nn.variants import CAUSAL, EITHER_WAY, NAMES, able, documents, error, factory, make, network, projected, tokens
from tinyformer.nn import AttentionMask, Cache, prune_heads
from tinyformer.nn.heads import without_own_value

EVERY_VARIANT = pytest.mark.parametrize("name", NAMES)
CALLS = [pytest.param(name, False, id=f"{name}-full") for name in EITHER_WAY]
CALLS += [pytest.param(name, True, id=f"{name}-causal") for name in NAMES]
POSITIONED = {"rotary", "rotary_scaled", "alibi", "t5", "relative", "relative_keys", "window", "local_gaussian"}
POSITIONED |= {"convolution", "shifted_keys"}
"""Parts of a variant's name by which it depends on the order of the tokens without a mask."""


# What a token may attend to.


@EVERY_VARIANT
@torch.no_grad()
def test_a_later_token_does_not_change_an_earlier_output_by_a_single_bit(name):
    x, attention = tokens(), make(name, "auto")
    before = attention(x, CAUSAL)
    for cut in (1, 6, 10):
        after = attention(torch.cat([x[:, :cut], 3 * tokens(seed=2)[:, cut:]], dim=1), CAUSAL)
        assert torch.equal(before[:, :cut], after[:, :cut]), cut
        assert not torch.equal(before[:, cut], after[:, cut]), cut


@EVERY_VARIANT
@torch.no_grad()
def test_padding_has_no_effect_and_a_padded_row_equals_the_short_row(name):
    x, attention = tokens(batch=3), make(name, "auto")
    for causal, value in ((True, 1e4), (False, -30.0))[: 1 + (name in EITHER_WAY)]:
        mask = AttentionMask(causal, torch.tensor([4, 11, 0]))
        changed = x.clone()
        changed[0, 4:] = value
        out, after = attention(x, mask), attention(changed, mask)
        assert torch.equal(out[0, :4], after[0, :4])
        assert torch.equal(out[1], after[1])
        assert error(out[:1, :4], attention(x[:1, :4], AttentionMask(causal))) <= 1e-5
        assert torch.count_nonzero(out[2]) == 0


@pytest.mark.parametrize(("name", "causal"), CALLS)
@torch.no_grad()
def test_a_document_equals_a_sequence_of_its_own(name, causal):
    # Positions count from the beginning of the row, so this also shows that shifting them has no effect.
    x, ids, attention = tokens(2), documents(2), make(name, "auto")
    out = attention(x, AttentionMask(causal, documents=ids))
    for row in range(2):
        for document in ids[row].unique():
            own = ids[row] == document
            alone = attention(x[row : row + 1, own], AttentionMask(causal))
            assert error(out[row : row + 1, own], alone) <= 1e-5, (row, document)


@pytest.mark.parametrize("name", EITHER_WAY)
@torch.no_grad()
def test_without_positions_permuted_tokens_give_permuted_outputs(name):
    x, order = tokens(), torch.tensor([3, 0, 10, 7, 1, 9, 2, 8, 4, 6, 5])
    attention = make(name, "auto")
    difference = error(attention(x[:, order]), attention(x)[:, order])
    assert difference > 1e-4 if POSITIONED & {*name.split("+")} else difference <= 1e-5


@pytest.mark.parametrize("kind", ["mha", "mla"])
@pytest.mark.parametrize("position", ["rotary", "alibi", "t5", "relative_keys"])
@torch.no_grad()
def test_positions_have_no_effect_across_two_sequences(kind, position):
    attention, plain, context = make(f"{kind}+{position}"), make(kind), tokens(seq=14)
    plain.load_state_dict(attention.state_dict(), strict=False)
    assert error(attention(tokens(), context=context), plain(tokens(), context=context)) <= 1e-6


# Decoding.


@EVERY_VARIANT
@torch.no_grad()
def test_decoding_with_a_cache_equals_one_pass(name):
    ids = torch.randint(50, (2, 11), generator=torch.Generator().manual_seed(0))
    for backend in ("auto", *(() if "+" in name else able(name, training=False))):
        # The first chunk is longer than a window, and so is one behind it.
        model, cache = network(partial(factory(name), backend=backend)), Cache(2)
        parts = [model(chunk, CAUSAL, cache) for chunk in ids.split([5, 1, 1, 4], dim=1)]
        assert cache.length == 11
        assert error(torch.cat(parts, dim=1), model(ids, CAUSAL)) <= 1e-5, backend


# Weights and heads.


@pytest.mark.parametrize(("name", "causal"), CALLS)
@torch.no_grad()
def test_the_output_is_the_values_mixed_by_the_weights(name, causal):
    attention, x = make(name, "auto"), tokens()
    mask = AttentionMask(causal, torch.tensor([11, 6, 0]))
    call = attention.inputs(x, mask)
    weights, values = attention.maps_of_call(call).weights, call.qkv.v
    torch.testing.assert_close(attention.maps_of_call(call, torch.tensor([3, 9])).weights, weights[..., [3, 9], :])
    applied = attention.apply_weights(weights, call.qkv, is_cross=False)
    values = values.repeat_interleave(4 // values.shape[1], dim=1)
    if "differential" in name:
        first, second = (weights[:, half::2] @ values for half in (0, 1))
        heads = attention.head_norm(first - attention.factor() * second) * (1 - attention.lambda_init)
    else:
        heads = weights @ values
    mix = attention.position.mix(11, 11)
    heads = heads if mix is None else heads + mix(weights)
    assert error(applied, heads) <= 1e-5
    heads = without_own_value(heads, values) if attention.exclusive else heads
    if attention.output_gate is not None:
        heads = attention.output_gate(heads, x)
    assert error(attention(x, mask), projected(heads, attention)) <= 1e-5
    sums = weights.sum(-1)
    real = torch.cat([sums[0], sums[1, :, :6]], dim=-1)
    assert torch.count_nonzero(sums[2]) == 0
    if attention.sink is not None or "local_gaussian" in name:
        assert (real < 1).all()
    else:
        torch.testing.assert_close(real, torch.ones_like(real))


@EVERY_VARIANT
@torch.no_grad()
def test_a_closed_gate_equals_an_ablated_and_a_pruned_head(name):
    whole, x = make(name, "auto").double(), tokens().double()
    closed, zeroed, pruned = (copy.deepcopy(whole) for _ in range(3))
    closed.head_gate.factors = torch.tensor([1.0, 0.0, 1.0, 1.0])
    zeroed.o_proj.weight.unflatten(1, (4, -1))[:, 1] = 0
    ablated = make(name, "auto", ablated_heads=[[0, 1]]).double()
    expected = zeroed(x, CAUSAL)
    assert error(expected, whole(x, CAUSAL)) > 1e-3
    assert torch.equal(closed(x, CAUSAL), expected)
    assert torch.equal(ablated(x, CAUSAL), expected)
    if "projection_norm" in name:  # pruned heads would leave the mean square of all heads
        return
    prune_heads(pruned, [1])
    assert error(pruned(x, CAUSAL), expected) <= 1e-10
    assert pruned.o_proj.weight.numel() == 3 * whole.o_proj.weight.numel() // 4


@EVERY_VARIANT
def test_every_parameter_learns(name):
    attention = make(name, "auto")
    # T5 uses all of its buckets only with a causal mask, relative positions all distances only without.
    masks = [CAUSAL] if name not in EITHER_WAY else [CAUSAL, None]
    sum(attention(tokens(), mask).square().sum() for mask in masks).backward()
    for key, parameter in attention.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.isfinite().all(), key
        rows = parameter.grad.flatten(1).abs().amax(1) if parameter.dim() > 1 else parameter.grad.abs()
        assert (rows > 0).all(), key
