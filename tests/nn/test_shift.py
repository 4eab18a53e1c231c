"""Short convolutions and shifted keys: equal to loops and to transformers, and in every place of every block.

`test_laws` tests those of attention's projections, like every variant.
"""

from functools import partial

import pytest
import torch
from torch import nn

from nn.model_cases import BLOCKS
from nn.variants import CAUSAL, D_MODEL, PLACES, documents, error, factory, network, tokens
from tinyformer.costs.network import TrainingFlops, count_costs
from tinyformer.nn import LSTM, AttentionMask, Cache, FeedForward, GatedFeedForward
from tinyformer.nn.shift import CausalSum, ShiftedKeys, ShortConvolution

IDS = torch.randint(50, (3, 11), generator=torch.Generator().manual_seed(0))
PLAIN = "gqa+differential+rotary+qk_norm"


def make(name="pre_norm", hidden=FeedForward, is_mixed=True):
    attention = partial(factory(PLAIN + "+shifted_keys+convolution" * is_mixed), window=4)
    kind = partial(BLOCKS.get(name, BLOCKS["pre_norm"]), **(PLACES if is_mixed else {}))
    attention = partial(LSTM, D_MODEL) if name == "lstm" else attention
    return network(attention, kind=kind, feed_forward=partial(hidden, convolution=is_mixed))


def test_a_convolution_is_that_of_transformers():
    from transformers.models.inkling.modeling_inkling import InklingShortConvolution

    theirs, ours, x = InklingShortConvolution(32, 4, 0, 0), ShortConvolution(32), tokens().requires_grad_()
    ours.filters = theirs.conv1d.weight
    pull, results = torch.randn_like(x), [each(x) for each in (ours, theirs)]
    gradients = [torch.autograd.grad(result, [x, ours.filters], pull) for result in results]
    torch.testing.assert_close(*zip(results, *zip(*gradients, strict=True), strict=True), atol=1e-5, rtol=1e-5)


def test_sums_are_those_of_loops_within_documents():
    x, ids = tokens(d_model=6).double(), documents()
    convolution, shift = ShortConvolution(6).double(), ShiftedKeys(2, 3).double()
    nn.init.normal_(convolution.filters), nn.init.normal_(shift.a)
    shares = [share.repeat_interleave(3) for share in (shift.a.sigmoid(), (-shift.a).sigmoid())]
    for module, weights in ((convolution, [convolution.filters[:, 0, 3 - t] for t in range(4)]), (shift, shares)):
        expected = x.clone() if module is convolution else torch.zeros_like(x)
        for row, j in torch.cartesian_prod(torch.arange(3), torch.arange(11)).tolist():
            for t, weight in enumerate(weights[: j + 1]):
                expected[row, j] += weight * x[row, j - t] * (ids[row, j - t] == ids[row, j])
        torch.testing.assert_close(module(x, AttentionMask(documents=ids)), expected)


@pytest.mark.parametrize("name", [*BLOCKS, "lstm"])
@pytest.mark.parametrize("hidden", [FeedForward, GatedFeedForward])
@torch.no_grad()
def test_caches_documents_costs_and_the_identity(name, hidden):
    model, plain, cache = make(name, hidden), make(name, hidden, is_mixed=False), Cache(2)
    expected, costs = model(IDS, CAUSAL), count_costs(model, "fp32")
    parts = [model(chunk, CAUSAL, cache) for chunk in IDS.split([5, 1, 1, 4], dim=1)]
    assert error(torch.cat(parts, dim=1), expected) <= 1e-5
    assert cache.num_bytes == 3 * costs.cache_bytes
    assert torch.equal(model(IDS.index_fill(1, torch.arange(6, 11), 7), CAUSAL)[:, :6], expected[:, :6])
    out = model(IDS, AttentionMask(True, documents=documents()))
    for row, first, end in ((0, 3, 4), (0, 4, 9), (1, 0, 6), (1, 6, 11)):
        assert error(out[row, first:end], model(IDS[row : row + 1, first:end], CAUSAL)[0]) <= 1e-5
    width = 2 * 32 + (4 * 32 if hidden is FeedForward else 2 * 88)
    width += 0 if name == "lstm" else 32 + 16 + 16 + 16 / 2  # q, k, v, and half as many terms in shifted keys
    assert costs.flops_per_token - count_costs(plain).flops_per_token == 2 * 2 * 4 * width
    flops = TrainingFlops.of(model).count({"tokens": 16, "pairs": 16**2}, 16)
    assert flops == 16 * costs.training_flops_per_token
    for part in [part for part in model.modules() if isinstance(part, CausalSum)]:
        nn.init.constant_(*part.parameters(), torch.inf if isinstance(part, ShiftedKeys) else 0.0)
    plain.load_state_dict(model.state_dict(), strict=False)
    assert error(model(IDS, CAUSAL), plain(IDS, CAUSAL)) <= 1e-6


def test_small_filters_of_bf16_weights_count():
    convolution = ShortConvolution(4).bfloat16()
    nn.init.constant_(convolution.filters, 0.003)
    assert convolution.weights()[0].gt(1).all()
