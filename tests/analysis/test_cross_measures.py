"""Measures of cross-attention by hand, and of pairs against the maps of each pair alone."""

import math
from contextlib import nullcontext

import pytest
import torch

from analysis.pair_subjects import ADDRESSES, loud_encoder_decoder, pair_batch
from tinyformer.analysis import CROSS_MEASURES, MEASURES, capture_pair, measure_pairs, pairs_of
from tinyformer.analysis.measures.measures import coverage, diagonal_distance, entropy, monotonicity, source_end

DIAGONAL = torch.eye(3)
BACKWARD = torch.eye(3).flip(0)
FIRST = torch.tensor([[1.0, 0, 0]] * 3)
EVEN = torch.full((3, 3), 1 / 3)
MAPS = torch.stack([DIAGONAL, BACKWARD, FIRST, EVEN]).unsqueeze(0)


@pytest.mark.parametrize(
    ("measure", "expected"),
    [
        (diagonal_distance, [0, 2 / 3, 1 / 2, (1 / 2 + 1 / 3 + 1 / 2) / 3]),
        (monotonicity, [1, -1, 0, 0]),
        (coverage, [1, 1, 1 / 3, 1]),
        (source_end, [1 / 3, 1 / 3, 0, 1 / 3]),
    ],
)
def test_measures_by_hand(measure, expected):
    assert measure(MAPS).tolist() == pytest.approx(expected)
    stacked = torch.stack([MAPS, MAPS.flip(1)])
    assert measure(stacked).tolist() == [pytest.approx(expected), pytest.approx(expected[::-1])]


def test_an_order_that_is_half_kept():
    weights = torch.eye(4)[[0, 2, 1, 3]].view(1, 1, 4, 4)
    assert monotonicity(weights).item() == pytest.approx((5 - 1) / 6)
    assert math.isnan(monotonicity(torch.ones(1, 1, 1, 4)).item())
    assert diagonal_distance(torch.ones(1, 1, 1, 1)).item() == 0


def test_each_kind_has_its_measures_on_every_pair_alone():
    network = loud_encoder_decoder().train()
    pairs = pairs_of(pair_batch([(9, 7), (5, 3)], seed=0))
    measures = measure_pairs(network, pairs, nullcontext())
    assert network.training
    assert measures.addresses == ADDRESSES
    captured = [capture_pair(network, pair) for pair in pairs]
    assert captured[1]["cross"][0].shape == (1, 4, 3, 5)
    layer, call = network.cross_attentions()[0], []
    layer.call_point.register_forward_hook(lambda module, args, out: call.append(out) and None)
    with torch.no_grad():
        network.eval()(*pairs[1][:2])
        torch.testing.assert_close(captured[1]["cross"][0], layer.maps_of_call(call[0]).weights)
    assert torch.equal(captured[0]["decoder"][0].triu(1), torch.zeros(1, 4, 7, 7))
    mean = torch.stack([entropy(maps["cross"][0]) for maps in captured]).mean(dim=0)
    assert measures.values["entropy"][3] == pytest.approx(mean.tolist())
    for name, layers in measures.values.items():
        known = [name in MEASURES] * 2 + [name in MEASURES and name != "block", name in CROSS_MEASURES]
        assert [not math.isnan(values[0]) for values in layers] == known
    columns, rows = measures.table()
    assert columns[:3] == ["kind", "layer", "head"]
    assert [row[:3] for row in rows[:2] + rows[-1:]] == [["encoder", 0, "00"], ["encoder", 0, "01"], ["cross", 0, "03"]]
    assert "attention/cross/layer_00/head_03/coverage" in measures.scalars()
