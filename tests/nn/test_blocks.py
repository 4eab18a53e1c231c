"""Every block: its points, its heads, and its cache; parity with other libraries is in the files next to this one."""

from functools import partial

import pytest
import torch
from model.models import TEXTS, causal
from torch import nn

from nn.model_cases import BLOCKS, block_factory, make_encoder_decoder, make_transformer, randomised, token_ids
from nn.variants import CAUSAL, error, tokens
from tinyformer.errors import ArgumentError
from tinyformer.nn import Attention, Cache, Encoder, FeedForward, LayerNorm, ParallelBlock, RMSNorm, SandwichBlock
from tinyformer.nn.transformer import count_branches

EVERY = pytest.mark.parametrize("name", BLOCKS)


@EVERY
@torch.no_grad()
def test_points_are_the_terms_of_the_equation(name):
    some = causal(kind=BLOCKS[name], norm=RMSNorm)
    randomised(some.network)
    at = some.run(TEXTS[0], capture="*").activations
    block, x = some.network.encoder.layers[1], at["layers.0.residual_post"]
    for part, end in (("attention", "residual_mid"), ("feed_forward", "residual_post")):
        norms, output = block.norms(part), at[f"layers.1.{part}.output"]
        torch.testing.assert_close(norms.stream(x + norms.output(output)), at[f"layers.1.{end}"])
        normed = at.get(f"layers.1.{part}.output_norm")
        assert (normed is None) == (name not in ("sandwich", "reordered"))
        assert normed is None or torch.equal(normed, norms.output(output))
        x = at[f"layers.1.{end}"]
    read = at["layers.0.residual_post" if isinstance(block, ParallelBlock) else "layers.1.residual_mid"]
    torch.testing.assert_close(norms.input(read), at["layers.1.feed_forward.input"])


@EVERY
@torch.no_grad()
def test_an_ablated_head_adds_nothing_and_a_cache_changes_nothing(name):
    ablated, zeroed = (causal(kind=BLOCKS[name], **options).network for options in ({"ablated_heads": [[0, 1]]}, {}))
    ids, cache = token_ids(), Cache(2)
    expected = zeroed(ids, CAUSAL)
    parts = [zeroed(chunk, CAUSAL, cache=cache) for chunk in ids.split([3, 1, 4], dim=1)]
    assert error(torch.cat(parts, dim=1), expected) <= 1e-5
    zeroed.attentions()[0].o_proj.weight.unflatten(1, (4, -1))[:, 1] = 0
    assert error(ablated(ids, CAUSAL), expected) > 1e-3
    torch.testing.assert_close(ablated(ids, CAUSAL), zeroed(ids, CAUSAL))


@EVERY
def test_dropout_acts_on_both_sublayers_in_training_only(name):
    block, x = randomised(block_factory(BLOCKS[name], dropout=1.0)()), tokens()
    expected = block.feed_forward_norm(block.attention_norm(x)) if name == "post_norm" else x
    assert torch.equal(block.train()(x, CAUSAL), expected)
    without = block_factory(BLOCKS[name])()
    without.load_state_dict(block.state_dict())
    assert torch.equal(block.eval()(x, CAUSAL), without(x, CAUSAL))


@EVERY
def test_last_projections_start_smaller_in_deep_networks_unless_a_norm_follows(name):
    torch.manual_seed(0)
    block = make_transformer(kind=BLOCKS[name], num_layers=8).encoder.layers[0]
    std = block.feed_forward.down_proj.weight.std().item() / block.feed_forward.up_proj.weight.std().item()
    assert std == pytest.approx(1 if name in ("sandwich", "reordered") else 1 / 4, rel=0.05)


def test_a_parallel_block_has_no_cross_attention():
    with pytest.raises(ArgumentError, match="block='ParallelBlock': has no cross-attention"):
        make_encoder_decoder(ParallelBlock)


@pytest.mark.parametrize(("norm", "expected"), [(LayerNorm, 1), (lambda d_model: nn.Identity(), 6)])
def test_norms_of_outputs_set_the_size_of_branches_unless_they_are_identities(norm, expected):
    block = partial(SandwichBlock, 32, partial(Attention, 32, 4), partial(FeedForward, 32), norm)
    assert count_branches(Encoder(50, 3, 32, 16, block, norm), 2) == expected
