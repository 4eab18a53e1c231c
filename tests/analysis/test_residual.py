"""Removed residual connections and sublayers, and the rank of the residual stream by depth."""

import itertools
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch

from analysis.subjects import (
    CAUSAL,
    all_rows,
    columns_of,
    loud_encoder_decoder,
    loud_transformer,
    make_subject,
    pair_subject,
)
from tinyformer.analysis import ResidualSurgery
from tinyformer.analysis.residual import (
    SUBLAYER_NAMES,
    distance_to_rank_one,
    rank_by_depth,
    stacks_of,
    token_cosine,
    without_skips,
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
        (torch.zeros(1, 3, 2), 0, 0),
        (torch.cat([SAME[:, :2], SIGNS]), 0.5, 0),  # the mean over the batch
        (SIGNS.bfloat16() * 1e-3, 1, -1),
        (torch.tensor([[[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]]), (4 / 9) ** 0.5, 1 / 3),  # one pair of three
    ],
)
def test_rank_measures_by_hand(x, distance, cosine):
    assert float(distance_to_rank_one(x)) == pytest.approx(distance, abs=1e-6)
    assert float(token_cosine(x)) == pytest.approx(cosine, abs=1e-6)


SUBJECTS = {
    "pre": (loud_transformer, make_subject, {}),
    "post": (loud_transformer, make_subject, {"kind": PostNormBlock}),
    "pairs": (loud_encoder_decoder, pair_subject, {}),
}
subjects = pytest.mark.parametrize(("make", "subject_of", "options"), SUBJECTS.values(), ids=SUBJECTS)


@subjects
def test_losses_equal_those_of_models_built_without_the_part(make, subject_of, options):
    subject = subject_of(make(**options), untrained=partial(make, seed=5, **options))
    found = ResidualSurgery(num_resamples=20)(subject, Path())
    table, stacks = columns_of(found.tables["residual"]), subject.network.stacks()
    kinds = table.get("kind", ("encoder",) * len(table["layer"]))
    removed = list(zip(kinds, *(table[name] for name in ("layer", "sublayer", "removed")), strict=True))
    assert removed == [
        (kind, layer, name, part)
        for kind, stack in zip(("encoder", "decoder"), stacks, strict=False)
        for layer in range(len(stack.layers))
        for name in SUBLAYER_NAMES
        if kind == "decoder" or "cross" not in name
        for part in ("skip", "branch")
    ]
    base = subject.losses().mean
    for (kind, layer, sublayer, part), loss, change in zip(removed, table["loss"], table["change"], strict=True):
        built = make(**options)
        setattr(getattr(built, kind).layers[layer], sublayer, Residual(**{part: 0.0}))
        assert loss == pytest.approx(subject_of(built).losses().mean, rel=1e-5)
        assert change == pytest.approx(loss - base, abs=1e-9)
        assert abs(change) > 1e-4
    # The picture holds each of them, rounded.
    shown = [float(text.get_text()) for text in found.figures["residual"].axes[0].texts]
    assert shown == pytest.approx(table["change"], abs=max(map(abs, table["change"])) / 100)


def inputs_of(row):
    return (row["source"], row["inputs"]) if "source" in row else (row["inputs"], CAUSAL)


@subjects
@torch.no_grad()
def test_ranks_are_those_of_the_residual_stream_of_rows_without_padding(make, subject_of, options):
    network, untrained = make(**options), make(seed=5, **options)
    subject = subject_of(network, untrained=lambda: untrained)
    found = ResidualSurgery(num_resamples=2)(subject, Path())
    columns, rows = found.tables["rank"]
    assert columns[-4:] == ["model", "depth", "distance_to_rank_one", "token_cosine"]
    for model, skips in itertools.product((network, untrained), ("with", "without")):
        name = f"{'trained' if model is network else 'untrained'}, {skips} skips"
        with nullcontext() if skips == "with" else without_skips(model):
            of_rows = [rank_by_depth(model, *inputs_of(row)) for row in all_rows(subject)]
        for stack, kind in enumerate(stacks_of(network)):
            expected = torch.tensor([of_row[stack] for of_row in of_rows]).mean(dim=0)
            of_model = [row for row in rows if row[:-3] == [*kind, name]]
            assert [row[-3] for row in of_model] == list(range(len(network.stacks()[stack].layers) + 1))
            torch.testing.assert_close(torch.tensor([row[-2:] for row in of_model]), expected)
    last = "/".join(["analysis", *kind, "untrained_without_skips/rank_distance"])
    assert found.scalars[last] == rows[-1][-2]
