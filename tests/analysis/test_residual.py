"""Removed residual connections and sublayers, and the rank of the residual stream by depth."""

from functools import partial
from pathlib import Path

import pytest
import torch
from nn.model_cases import make_transformer, token_ids

from analysis.subjects import CAUSAL, columns_of, loud_transformer, make_subject
from tinyformer.analysis import ResidualSurgery
from tinyformer.analysis.residual import (
    PART_NAMES,
    distance_to_rank_one,
    rank_by_depth,
    residuals_of,
    scaled,
    token_cosine,
)
from tinyformer.nn import PostNormBlock, Residual

SAME = torch.tensor([3.0, 4.0]).expand(1, 5, 2)
SIGNS = torch.tensor([[[1.0, 0.0], [-1.0, 0.0]]])


@pytest.mark.parametrize(
    ("x", "distance", "cosine"),
    [
        (SAME, 0, 1),
        (SIGNS, 1, -1),  # their mean is zero
        (torch.eye(4).unsqueeze(0), 0.75**0.5, 0),  # each row is 3/4 and three times -1/4 from the mean
        (torch.tensor([[[2.0], [4.0]]]), (2 / 20) ** 0.5, 1),
        (torch.zeros(1, 3, 2), 0, 0),
        (torch.cat([SAME[:, :2], SIGNS]), 0.5, 0),  # the mean over the batch
        (SIGNS.bfloat16() * 1e-3, 1, -1),
        (torch.tensor([[[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]]), (4 / 9) ** 0.5, 1 / 3),  # one pair of three
    ],
)
def test_rank_measures_by_hand(x, distance, cosine):
    assert float(distance_to_rank_one(x)) == pytest.approx(distance, abs=1e-6)
    assert float(token_cosine(x)) == pytest.approx(cosine, abs=1e-6)


def test_ranks_are_those_of_the_residual_stream_at_each_depth():
    network = loud_transformer(3)
    batch = {"inputs": token_ids(2, 8)}
    (found,) = rank_by_depth(network, batch["inputs"], CAUSAL)
    with torch.no_grad():
        x = network.encoder.position(network.encoder.token_embedding(batch["inputs"]), 0)
        streams = [x, *(x := layer(x, CAUSAL) for layer in network.encoder.layers)]
    expected = [(float(distance_to_rank_one(x)), float(token_cosine(x))) for x in streams]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected))
    assert len(set(expected)) == 4


@pytest.mark.parametrize("kind", [None, PostNormBlock], ids=["pre", "post"])
def test_losses_equal_those_of_models_built_without_the_part(kind):
    options = {} if kind is None else {"kind": kind}
    network = loud_transformer(2, **options)
    subject = make_subject(network, untrained=partial(loud_transformer, 2, 5, **options))
    found = ResidualSurgery(num_resamples=20)(subject, Path())
    table = columns_of(found.tables["residual"])
    parts = [(s, p) for s in ("attention_residual", "feed_forward_residual") for p in ("skip", "branch")]
    assert list(zip(table["layer"], table["sublayer"], table["removed"], strict=True)) == [
        (layer, *part) for layer in (0, 1) for part in parts
    ]
    base = subject.losses().mean
    for layer, sublayer, part, loss, change in zip(*list(table.values())[:5], strict=True):
        scales = [0.0 if index == layer else 1.0 for index in (0, 1)]
        built = make_transformer(num_layers=2, **options, **{sublayer: partial(Residual, **{part: scales})}).eval()
        built.load_state_dict(network.state_dict())
        assert loss == pytest.approx(make_subject(built).losses().mean, rel=1e-5)
        assert change == pytest.approx(loss - base, abs=1e-9)
        assert abs(change) > 1e-4
    # The picture holds each of them, rounded.
    axes, _ = found.figures["residual"].axes
    names = [[label.get_text() for label in labels] for labels in (axes.get_yticklabels(), axes.get_xticklabels())]
    assert names[0] == ["layer 0", "layer 1"]
    assert names[1] == [
        f"{part}\n{sublayer}" for sublayer in ("attention", "feed-forward") for part in PART_NAMES.values()
    ]
    largest = max(map(abs, table["change"]))
    assert [float(text.get_text()) for text in axes.texts] == pytest.approx(table["change"], abs=largest / 100)
    worst = max(range(8), key=table["change"].__getitem__)
    name = f"  layer {table['layer'][worst]} {table['sublayer'][worst]}.{table['removed'][worst]}=0"
    assert list(found.lines)[1] == name


def test_ranks_of_the_trained_and_the_untrained_model():
    network, untrained = loud_transformer(2), loud_transformer(2, seed=5)
    subject = make_subject(network, untrained=lambda: untrained)
    found = ResidualSurgery(num_resamples=2)(subject, Path())
    table = columns_of(found.tables["rank"])
    assert table["depth"] == (0, 1, 2) * 4
    pairs = list(zip(table["distance_to_rank_one"], table["token_cosine"], strict=True))
    for start, model, skip in ((0, network, 1), (3, network, 0), (6, untrained, 1), (9, untrained, 0)):
        name = f"{'untrained' if model is untrained else 'trained'}, {'with' if skip else 'without'} skips"
        assert set(table["model"][start : start + 3]) == {name}
        with scaled(residuals_of(model), "skip", float(skip)):
            (expected,) = rank_by_depth(model, torch.cat([batch["inputs"] for batch in subject.batches]), CAUSAL)
        for pair, of_windows in zip(pairs[start : start + 3], expected, strict=True):
            assert pair == pytest.approx(of_windows, rel=1e-5)
    assert found.scalars["analysis/untrained_with_skips/rank_distance"] == pairs[8][0]
    assert set(found.figures) == {"residual", "rank", "token_cosine"}
