"""Removed residual connections and sublayers, and the rank, gradients and softmax rows by depth."""

import itertools
import math
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from nn.model_cases import make_transformer

from analysis.contexts import (
    ADDRESSES,
    CAUSAL,
    all_rows,
    columns_of,
    loud_encoder_decoder,
    loud_transformer,
    make_context,
    pair_context,
)
from tinyformer.analysis import GradientFlow, ResidualSurgery
from tinyformer.analysis.depth.by_depth import RESIDUALS, stacks_of, without_skips
from tinyformer.analysis.depth.gradients import gradient_norms, sublayer_gradients
from tinyformer.analysis.depth.residual import distance_to_rank_one, linear_probe, rank_by_depth, token_cosine
from tinyformer.data.batches.windows import IGNORED
from tinyformer.measures.capture import attention_calls
from tinyformer.nn import ParallelBlock, PostNormBlock, PreNormBlock, Residual
from tinyformer.nn.kernels.eager import attention_weights
from tinyformer.nn.score import Scoring

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
    "pre": (loud_transformer, make_context, {}),
    "post": (loud_transformer, make_context, {"kind": PostNormBlock}),
    "parallel": (loud_transformer, make_context, {"kind": ParallelBlock}),
    "pairs": (loud_encoder_decoder, pair_context, {}),
}
subjects = pytest.mark.parametrize(("make", "context_of", "options"), SUBJECTS.values(), ids=SUBJECTS)


@subjects
def test_losses_equal_those_of_models_built_without_the_part(make, context_of, options):
    context = context_of(make(**options), untrained=partial(make, seed=5, **options))
    found = ResidualSurgery(num_resamples=20)(context, Path())
    table, stacks = columns_of(found.tables["residual"]), context.network.stacks()
    kinds = table.get("kind", ("encoder",) * len(table["layer"]))
    removed = list(zip(kinds, *(table[name] for name in ("layer", "sublayer", "removed")), strict=True))
    assert removed == [
        (kind, layer, name, part)
        for kind, stack in zip(("encoder", "decoder"), stacks, strict=False)
        for layer in range(len(stack.layers))
        for name in RESIDUALS
        if kind == "decoder" or "cross" not in name
        for part in ("skip", "branch")
        if (options, name, part) != ({"kind": ParallelBlock}, "feed_forward_residual", "skip")
    ]
    base = context.losses().mean
    for (kind, layer, sublayer, part), loss, change in zip(removed, table["loss"], table["change"], strict=True):
        built = make(**options)
        setattr(getattr(built, kind).layers[layer], sublayer, Residual(**{part: 0.0}))
        assert loss == pytest.approx(context_of(built).losses().mean, rel=1e-5)
        assert change == pytest.approx(loss - base, abs=1e-9)
        assert abs(change) > 1e-4
    # The picture holds each of them, rounded.
    shown = [float(text.get_text()) for text in found.figures["residual"].axes[0].texts]
    assert shown == pytest.approx(table["change"], abs=max(map(abs, table["change"])) / 100)


@subjects
@torch.no_grad()
def test_ranks_are_those_of_the_residual_stream_of_rows_without_padding(make, context_of, options):
    network, untrained = make(**options), make(seed=5, **options)
    context = context_of(network, untrained=lambda: untrained)
    found = ResidualSurgery(num_resamples=2)(context, Path())
    columns, rows = found.tables["rank"]
    assert columns[-4:] == ["model", "depth", "distance_to_rank_one", "token_cosine"]
    for model, skips in itertools.product((network, untrained), ("with", "without")):
        name = f"{'trained' if model is network else 'untrained'}, {skips} skips"
        with nullcontext() if skips == "with" else without_skips(model):
            of_rows = [rank_by_depth(replace(context, batches=[row]), model) for row in all_rows(context)]
        for stack, kind in enumerate(stacks_of(network)):
            expected = torch.tensor([of_row[stack] for of_row in of_rows]).mean(dim=0)
            of_model = [row for row in rows if row[:-3] == [*kind, name]]
            assert [row[-3] for row in of_model] == list(range(len(network.stacks()[stack].layers) + 1))
            torch.testing.assert_close(torch.tensor([row[-2:] for row in of_model]), expected)
    last = "/".join(["analysis", *kind, "untrained_without_skips/rank_distance"])
    assert found.scalars[last] == rows[-1][-2]


@torch.no_grad()
def test_a_parallel_layer_without_its_skip_is_the_sum_of_both_sublayers():
    network, x = loud_transformer(kind=ParallelBlock), torch.randn(2, 8, 32)
    block = network.encoder.layers[0]
    with without_skips(network):
        found = block(x, CAUSAL)
    expected = block.attention(block.attention_norm(x), CAUSAL) + block.feed_forward(block.feed_forward_norm(x))
    torch.testing.assert_close(found, expected)


# What a linear probe reads from the residual stream.


def test_a_linear_probe_by_hand():
    labels, is_fit = torch.tensor([0, 1, 2, 2] * 6), torch.arange(24) < 16
    assert linear_probe(torch.eye(3)[labels], labels, is_fit) == 1
    assert linear_probe(torch.eye(3)[labels] + 100, labels, is_fit) == 1  # equally far from the origin
    assert linear_probe(torch.ones(24, 3), labels, is_fit) == 1 / 2  # the most frequent label
    assert linear_probe(1 + 1e-5 * torch.eye(3)[labels], labels, is_fit) == 1 / 2  # below the resolution
    noisy = torch.cat([torch.eye(3)[labels], 50 * torch.randn(24, 1)], dim=1)
    assert linear_probe(noisy @ torch.randn(4, 4), labels, is_fit) == 1  # a direction without any label
    assert math.isnan(linear_probe(torch.ones(24, 3), labels, is_fit | True))


@pytest.mark.parametrize("seed", range(5))
def test_identity_blocks_keep_tokens_and_positions_and_empty_ones_lose_them(seed):
    """Of a network whose sublayers add nothing: with its skips the identity, without them zero."""
    bare = {name: partial(Residual, branch=0.0) for name in ("attention_residual", "feed_forward_residual")}
    context = make_context(loud_transformer(3, seed, **bare), 40, untrained=partial(loud_transformer, 3, seed))
    context = replace(context, batches=[batch | {"inputs": batch["inputs"] % 8} for batch in context.batches])
    found = ResidualSurgery(num_resamples=2)(context, Path())
    rows = [row[1:] for row in found.tables["reading"][1] if row[0] == "trained, with skips"]
    assert rows == [[depth, 1, 1] for depth in range(4)]
    tokens = torch.cat([batch["inputs"] for batch in context.batches])
    chance = (tokens[1::2] == tokens[::2].flatten().mode().values).double().mean().item()
    assert found.scalars["analysis/trained_without_skips/tokens_read"] == pytest.approx(chance)
    assert found.scalars["analysis/trained_without_skips/positions_read"] == pytest.approx(1 / 8)
    line = f"tokens {chance:.1%} (lost; embeddings 100.0%, chance {chance:.1%}), positions 12.5% (lost; embeddings"
    assert found.lines["  read, trained, without skips"].startswith(line)
    assert "tokens 100.0% (kept; " in found.lines["  read, trained, with skips"]


# Gradients by depth, logits, and saturated softmax rows.


@pytest.mark.parametrize(
    ("skip", "words"),
    [(1.0, "1 for each: it is kept"), (0.25, "0.0625 for each: it vanishes"), (4.0, "16 for each: it explodes")],
)
def test_the_ratio_of_gradients_by_hand(skip, words):
    """Of three layers of two sublayers that add nothing."""
    bare = {name: partial(Residual, skip, 0.0) for name in ("attention_residual", "feed_forward_residual")}
    found = GradientFlow()(make_context(loud_transformer(3, **bare)), Path())
    assert found.scalars["analysis/trained_with_skips/gradient_ratio"] == pytest.approx(skip**6, rel=1e-4)
    assert found.lines["  trained, with skips"].endswith(f"ratio {skip**6:.3g} over 3 layers, {words}")
    assert found.lines["  trained, without skips"].endswith("no ratio: a gradient norm is 0")
    shown = found.figures["gradients"].axes[0].lines[1].get_ydata()
    assert shown == pytest.approx([skip**6, skip**4, skip**2, 1], rel=1e-4)


def norms_by_hand(network, tokens, targets):
    """The gradient norms of one window without padding, layer after layer."""
    streams = [network.encoder.position(network.encoder.token_embedding(tokens), 0).detach().requires_grad_()]
    for layer in network.encoder.layers:
        streams.append(layer(streams[-1], CAUSAL))
    logits = network.readout(network.encoder.final_norm(streams[-1]))
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    return [float(gradient.norm()) for gradient in torch.autograd.grad(loss, streams)]


@pytest.mark.parametrize("kind", [PreNormBlock, PostNormBlock], ids=["pre", "post"])
def test_norms_by_hand_with_and_without_skips(kind):
    network = loud_transformer(3, kind=kind).requires_grad_(False)  # as if it were frozen
    context = make_context(network, padded=True, untrained=partial(loud_transformer, 3, 5, kind=kind))
    found = GradientFlow()(context, Path())
    table = columns_of(found.tables["gradients"])
    bare = {name: partial(Residual, skip=0.0) for name in ("attention_residual", "feed_forward_residual")}
    without = make_transformer(num_layers=3, kind=kind, **bare).eval()
    without.load_state_dict(network.state_dict())
    for first, model in ((0, network), (4, without), (8, context.untrained())):
        expected = [norms_by_hand(model, row["inputs"], row["targets"]) for row in all_rows(context)]
        mean = torch.tensor(expected).mean(dim=0).tolist()
        assert table["gradient_norm"][first : first + 4] == pytest.approx(mean, rel=1e-4)
    assert table["depth"] == (0, 1, 2, 3) * 4
    models = [f"{model}, {skips} skips" for model in ("trained", "untrained") for skips in ("with", "without")]
    assert list(table["model"][::4]) == models
    of_sublayers = sublayer_gradients(context, context.untrained())
    rows = [["untrained", *at, *norms] for (_, *at), norms in of_sublayers.items()]
    assert found.tables["sublayers"][1][6:] == rows


def test_both_stacks_of_an_encoder_decoder():
    """Padded pairs have the gradients that each has alone."""
    context = pair_context(loud_encoder_decoder())
    found = GradientFlow()(context, Path())
    table = columns_of(found.tables["gradients"])
    assert table["kind"] == ("encoder",) * 12 + ("decoder",) * 8
    alone = [gradient_norms(replace(context, batches=[row]), context.network) for row in all_rows(context)]
    for stack, first in enumerate((0, 12)):
        mean = torch.tensor([norms[stack] for norms in alone]).mean(dim=0).flatten().tolist()
        assert table["gradient_norm"][first : first + len(mean)] == pytest.approx(mean, rel=1e-4)
    heads = columns_of(found.tables["saturation"])
    assert list(zip(heads["kind"], heads["layer"], strict=True))[::4] == ADDRESSES


@pytest.mark.parametrize("is_pair", [False, True], ids=["windows", "pairs"])
def test_gradients_of_sublayers_are_those_of_the_rows_one_by_one(is_pair):
    """Of their mean loss, and of the loss of the last target of each, averaged."""
    context = pair_context(loud_encoder_decoder()) if is_pair else make_context(loud_transformer(2), padded=True)
    network = context.network.requires_grad_(False)  # as if it were frozen
    found = sublayer_gradients(context, network)
    assert not any(weight.requires_grad for weight in network.parameters())
    network.requires_grad_()
    losses, last = [], []
    for row in all_rows(context):
        nats, targets = context.task.nats(network, row)
        losses.append(nats[0] / targets[0])
        one = row["targets"].clone()
        one[:, :-1] = IGNORED
        last.append(context.task.nats(network, row | {"targets": one})[0][0])

    def norm(loss, weights):
        gradients = torch.autograd.grad(loss, weights, retain_graph=True)
        return float(torch.cat([gradient.flatten() for gradient in gradients]).norm())

    expected = {}
    for kind, stack in stacks_of(network).items():
        names = ["attention", "cross_attention", "feed_forward"][:: 1 if kind == ("decoder",) else 2]
        for (depth, layer), name in itertools.product(enumerate(stack.layers), names):
            weights = list(getattr(layer, name).parameters())
            of_last = sum(norm(loss, weights) for loss in last) / len(last)
            expected[kind, depth, name] = pytest.approx((norm(torch.stack(losses).mean(), weights), of_last), rel=1e-4)
    assert list(found) == list(expected)
    assert found == expected


@pytest.mark.parametrize("options", [{}, {"score": "dot"}, {"num_kv_heads": 2}, {"score": "general"}], ids=str)
def test_rows_of_all_windows_with_and_without_the_scale(options):
    """Means over the rows of windows without padding; without the scale, queries and keys stay."""
    network = loud_transformer(2, **options)
    context = make_context(network, padded=True)
    found = GradientFlow(saturated=0.9)(context, Path())
    rows = {name: [[] for _ in context.layers] for name in ("variance", "jacobian", "saturated", "unscaled")}
    for window in all_rows(context):
        for index, (layer, call) in enumerate(attention_calls(network, window["inputs"], CAUSAL)):
            q, k, _ = call.qkv
            weights, logits = (part[0, :, 1:].double() for part in layer.maps_of_call(call))  # the first sees one key
            visible = logits.masked_fill(logits == -torch.inf, torch.nan)
            squares = (visible - visible.nanmean(dim=-1, keepdim=True)).square()
            rows["variance"][index].append(squares.nanmean(dim=-1))
            rows["jacobian"][index].append((weights * (1 - weights)).sum(dim=-1))
            unscaled = weights if "score" in options else attention_weights(q, k, CAUSAL, Scoring(1.0))[0, :, 1:]
            for name, these in (("saturated", weights), ("unscaled", unscaled)):
                rows[name][index].append((these.amax(dim=-1) >= 0.9).double())
    expected = {
        name: [value for of_layer in layers for value in torch.cat(of_layer, dim=1).mean(dim=1).tolist()]
        for name, layers in rows.items()
    }
    logits, shares = columns_of(found.tables["logits"]), columns_of(found.tables["saturation"])
    assert logits["logit_variance"] == pytest.approx(expected["variance"], rel=1e-4)
    assert logits["softmax_jacobian"] == pytest.approx(expected["jacobian"], rel=1e-3)
    assert shares["saturated"] == pytest.approx(expected["saturated"])
    assert shares["saturated_without_scale"] == pytest.approx(expected["unscaled"])
    assert (sum(expected["unscaled"]) > sum(expected["saturated"])) is ("score" not in options)
