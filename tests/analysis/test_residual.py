"""Tokens that become alike, and connections that keep them apart."""

from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch
from nn.model_cases import make_transformer, token_ids

from analysis.subjects import columns_of, loud_transformer, make_subject
from tinyformer.analysis import ResidualSurgery
from tinyformer.analysis.residual import distance_to_rank_one, rank_by_depth, residuals_of, scaled, token_cosine
from tinyformer.nn import AttentionMask, PostNormBlock, Residual

SAME = torch.tensor([3.0, 4.0]).expand(1, 5, 2)
SIGNS = torch.tensor([[[1.0, 0.0], [-1.0, 0.0]]])


def fail():
    raise ZeroDivisionError


# The measures, by hand.


@pytest.mark.parametrize(
    ("x", "distance"),
    [
        (SAME, 0),
        (SIGNS, 1),  # their mean is zero
        (torch.eye(4).unsqueeze(0), 0.75**0.5),  # each row is 3/4 and three times -1/4 from the mean
        (torch.tensor([[[2.0], [4.0]]]), (2 / 20) ** 0.5),
        (torch.zeros(1, 3, 2), 0),
        (torch.cat([SAME[:, :2], SIGNS]), 0.5),  # the mean over the batch
        (SIGNS.bfloat16() * 1e-3, 1),
    ],
)
def test_the_distance_to_one_vector(x, distance):
    assert float(distance_to_rank_one(x)) == pytest.approx(distance, abs=1e-6)


@pytest.mark.parametrize(
    ("x", "cosine"),
    [
        (SAME, 1),
        (SIGNS, -1),
        (torch.eye(4).unsqueeze(0), 0),
        (torch.tensor([[[1.0, 0.0], [5.0, 0.0], [0.0, 2.0]]]), 1 / 3),  # one pair of three
        (torch.zeros(1, 3, 2), 0),
        (torch.cat([SAME[:, :2], SIGNS]), 0),
    ],
)
def test_the_cosine_of_two_tokens(x, cosine):
    assert float(token_cosine(x)) == pytest.approx(cosine, abs=1e-6)


# With and without connections.


def test_a_deep_stack_collapses_without_connections():
    torch.manual_seed(0)
    network = make_transformer(num_layers=24, d_model=128, vocab_size=65, max_seq_len=64).eval()
    batch, mask = {"inputs": token_ids(4, 64, 65)}, AttentionMask(causal=True)
    with_skips = rank_by_depth(network, batch, mask)
    with scaled(residuals_of(network), "skip", 0.0):
        without = rank_by_depth(network, batch, mask)
    assert len(with_skips) == len(without) == 25
    assert with_skips[0] == without[0]
    assert without[-1][0] < 1e-3
    assert without[-1][1] > 0.999
    assert with_skips[-1][0] > 0.5
    assert with_skips[-1][1] < 0.5
    assert rank_by_depth(network, batch, mask) == with_skips


def test_each_depth_is_the_stream_there():
    network = loud_transformer(3)
    batch, mask, streams = {"inputs": token_ids(2, 8)}, AttentionMask(causal=True), []
    found = rank_by_depth(network, batch, mask)
    with torch.no_grad():
        x = network.encoder.position(network.encoder.token_embedding(batch["inputs"]), 0)
        streams = [x, *(x := layer(x, mask) for layer in network.encoder.layers)]
    expected = [(float(distance_to_rank_one(x)), float(token_cosine(x))) for x in streams]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected))
    assert len(set(expected)) == 4


@pytest.mark.parametrize("part", ["skip", "branch"])
def test_what_was_scaled_comes_back(part):
    residuals = residuals_of(make_transformer(attention_residual=partial(Residual, **{part: [0.5, 2.0]})))
    with suppress(ZeroDivisionError), scaled(residuals, part, 0.0):
        assert [getattr(residual, part) for residual in residuals] == [0, 0, 0, 0]
        fail()
    assert [getattr(residual, part) for residual in residuals] == [0.5, 1, 2, 1]


@pytest.mark.parametrize("kind", [None, PostNormBlock], ids=["pre", "post"])
def test_the_table_is_that_of_models_made_without_the_part(kind):
    options = {} if kind is None else {"kind": kind}
    network = loud_transformer(2, **options)
    subject = make_subject(network, untrained=partial(loud_transformer, 2, 5, **options))
    found = ResidualSurgery(num_resamples=20)(subject, Path())
    table = columns_of(found.tables["residual"])
    kinds = [(s, p) for s in ("attention_residual", "feed_forward_residual") for p in ("skip", "branch")]
    assert list(zip(table["layer"], table["sublayer"], table["removed"], strict=True)) == [
        (layer, *rest) for layer in (0, 1) for rest in kinds
    ]
    base = subject.losses().mean
    for layer, sublayer, part, loss, change in zip(*list(table.values())[:5], strict=True):
        scales = [0.0 if index == layer else 1.0 for index in (0, 1)]
        made = make_transformer(num_layers=2, **options, **{sublayer: partial(Residual, **{part: scales})}).eval()
        made.load_state_dict(network.state_dict())
        assert loss == pytest.approx(make_subject(made).losses().mean, rel=1e-5)
        assert change == pytest.approx(loss - base, abs=1e-9)
        assert abs(change) > 1e-4
    worst = max(range(8), key=table["change"].__getitem__)
    name = f"  layer {table['layer'][worst]} {table['sublayer'][worst]}.{table['removed'][worst]}=0"
    assert list(found.lines)[1] == name


def test_the_ranks_are_of_both_models_with_and_without():
    network, untrained = loud_transformer(2), loud_transformer(2, seed=5)
    subject = make_subject(network, untrained=lambda: untrained)
    found = ResidualSurgery(num_resamples=2)(subject, Path())
    table = columns_of(found.tables["rank"])
    assert table["depth"] == (0, 1, 2) * 4
    batch = subject.batches[0]
    for start, model, skip in ((0, network, 1), (3, network, 0), (6, untrained, 1), (9, untrained, 0)):
        name = f"{'untrained' if model is untrained else 'trained'}, {'with' if skip else 'without'} skips"
        assert set(table["model"][start : start + 3]) == {name}
        with scaled(residuals_of(model), "skip", float(skip)):
            expected = rank_by_depth(model, batch, subject.mask(batch))
        pairs = list(zip(table["distance_to_rank_one"], table["token_cosine"], strict=True))
        assert pairs[start : start + 3] == expected
        key = name.replace(", ", "_").replace(" ", "_")
        assert found.scalars[f"analysis/{key}/rank_distance"] == expected[-1][0]
        assert found.lines[f"  {name}"] == (
            f"distance to rank 1 {expected[-1][0]:.3f}, token cosine {expected[-1][1]:.3f}"
        )
    assert set(found.figures) == {"rank", "token_cosine"}


@pytest.mark.parametrize("name", ["num_windows", "num_resamples"])
def test_nothing_is_refused(name):
    with pytest.raises(ValueError, match=f"^analysis.{name}=0"):
        ResidualSurgery(**{name: 0})
