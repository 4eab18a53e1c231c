"""Redundancy of heads: backup between two heads, growing sets, and overlap, by hand and near chance before training."""

from functools import partial
from math import exp, log1p
from pathlib import Path

import numpy as np
import pytest
import torch
from nn.model_cases import make_transformer
from torch import nn

from analysis.contexts import columns_of, loud_encoder_decoder, loud_transformer, make_context, pair_context
from tinyformer.analysis import AnalysisContext, HeadRedundancy
from tinyformer.analysis.context import every_second
from tinyformer.analysis.removal.ablation import head_changes, head_importance, losses_without
from tinyformer.analysis.removal.redundancy import output_overlap, subspace_overlap
from tinyformer.measures.intervals import Losses, simultaneous
from tinyformer.nn import (
    Attention,
    Encoder,
    FeedForward,
    PreNormBlock,
    TokenReadout,
    Transformer,
)
from tinyformer.tasks import CausalLM


def softplus(x):
    return log1p(exp(x))


def made_by_hand(writes=(2.0, 2.0, 3.0)):
    """A token is two bits, each ±1, and predicts itself; heads 0 and 1 copy the first bit, head 2 copies the second.

    With uniform attention to equal tokens, a head adds `writes` times its bit to what the readout sees, and the loss is
    that of two logistic regressions: softplus(-(sum over heads of the first bit)) + softplus(-(that of the second)).
    """
    attention = partial(Attention, 4, 3, head_dim=1)
    block = partial(PreNormBlock, 4, attention, partial(FeedForward, 4), nn.Identity)
    encoder = Encoder(4, 1, 4, 8, block, nn.Identity)
    network = Transformer(encoder, partial(TokenReadout, tied=False)).eval()
    bits = torch.tensor([[1.0, 1], [1, -1], [-1, 1], [-1, -1]])
    (layer,) = network.attentions()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
        network.encoder.token_embedding.weight[:, :2] = bits
        network.readout.proj.weight[:, 2:] = bits / 2
        reads = torch.eye(4)[[0, 0, 1]]
        for projection in (layer.q_proj, layer.k_proj, layer.v_proj):
            projection.weight.copy_(reads)
        layer.o_proj.weight[[2, 2, 3], [0, 1, 2]] = torch.tensor(writes)
    tokens = torch.arange(4).repeat(2).unsqueeze(1).expand(8, 6)
    batches = [{"inputs": rows, "targets": rows, "lengths": torch.full((4,), 6)} for rows in tokens.split(4)]
    tokenizer = make_context(make_transformer()).tokenizer
    return AnalysisContext(network, batches, CausalLM(), tokenizer, untrained=lambda: network)


def test_two_heads_that_write_the_same_back_each_other_up_by_what_is_computed_by_hand():
    found = HeadRedundancy()(made_by_hand(), Path())
    whole, alone, none = softplus(-4), softplus(-2), softplus(0)
    second = softplus(0) - softplus(-3)
    table = columns_of(found.tables["pairs"])
    assert list(zip(table["head_a"], table["head_b"], strict=True)) == [(0, 1), (0, 2), (1, 2)]
    expected = [none - 2 * alone + whole, 0, 0]  # 0.4574 nats; the bits are independent
    for name in ("interaction", "low", "high"):  # every window is alike
        assert table[name] == pytest.approx(expected, abs=1e-6)
    assert table["change_a"] == pytest.approx([alone - whole] * 3, abs=1e-6)
    assert table["change_b"] == pytest.approx([alone - whole, second, second], abs=1e-6)
    assert table["change_both"][0] == pytest.approx(none - whole, abs=1e-6)
    assert found.lines["pairs"].startswith("1 of 3 pairs back each other up by more than 0.01, 0 lose less together")
    assert found.lines["  layer 0 head 0 and layer 0 head 1"].startswith(
        "back each other up: without both +0.6750, the sum of each alone +0.2176: +0.4574"
    )
    sets = columns_of(found.tables["sets"])
    assert sets["change"][:4] == pytest.approx([0, alone - whole, none - whole, none - whole + second], abs=1e-6)
    assert sets["change"][4:8] == pytest.approx([0, second, second + alone - whole, second + none - whole], abs=1e-6)
    assert found.scalars["analysis/sum_of_each_alone"] == pytest.approx(second + 2 * (alone - whole), abs=1e-6)
    assert columns_of(found.tables["alone"])["change"] == pytest.approx([*[alone - whole] * 2, second], abs=1e-6)
    overlap = columns_of(found.tables["overlap"])
    assert overlap["part"] == ("W_Q", "W_K", "W_V", "W_O", "outputs") * 3
    assert overlap["trained"] == pytest.approx([1] * 5 + [0] * 10, abs=1e-6)
    assert set(overlap["chance"][:4]) == {1 / 4}
    # Where the second head works against the first, less is lost without both.
    against = HeadRedundancy()(made_by_hand(writes=(4.0, -3.0, 3.0)), Path())
    assert "lose less together: without both" in against.lines["  layer 0 head 0 and layer 0 head 1"]
    assert sum(line.startswith("do not clearly back each other up: ") for line in against.lines.values()) == 1


def test_sets_are_ordered_on_one_half_of_the_windows_and_measured_on_the_other():
    context = make_context(loud_transformer())
    ordering, measured = every_second(context, 0), every_second(context, 1)
    for order, score in {"oracle": head_changes, "importance": head_importance}.items():
        least, other = (sorted(of_heads, key=of_heads.__getitem__) for of_heads in map(score, (ordering, measured)))
        assert least != other
        base, *without = losses_without(measured, [least[:count] for count in range(len(least) + 1)])
        sets = columns_of(HeadRedundancy(order=order)(context, Path()).tables["sets"])
        expected = [losses.mean - base.mean for losses in (base, *without)]
        assert sets["change"][: len(expected)] == pytest.approx(expected, abs=1e-6)


def test_overlap_is_that_of_projections_and_of_gram_matrices_in_numpy():
    torch.manual_seed(0)
    weights = torch.randn(3, 8, 32)
    projections = [np.linalg.pinv(part) @ part for part in weights.double().numpy()]  # onto the row spaces
    expected = [[np.trace(a @ b) / 8 for a in projections] for b in projections]
    torch.testing.assert_close(subspace_overlap(weights), torch.tensor(expected), check_dtype=False)

    context = make_context(loud_transformer(num_layers=1), padded=True)
    outputs = []
    handle = context.layers[0].head_gate.register_forward_pre_hook(lambda gate, args: outputs.append(args[0]))
    context.losses()
    handle.remove()
    targets = torch.cat([batch["targets"] for batch in context.batches])
    tokens = torch.cat(outputs).transpose(0, 1)[:, targets >= 0].double().numpy()
    centred = [of - of.mean(axis=0) for of in tokens]
    grams = [of @ of.T for of in centred]
    norms = [np.linalg.norm(gram) for gram in grams]
    expected = [
        [np.sum(a * b) / (n * m) for a, n in zip(grams, norms, strict=True)] for b, m in zip(grams, norms, strict=True)
    ]
    ((found, chance),) = output_overlap(context)
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-4, atol=1e-5)
    assert chance.fill_diagonal_(0).max() < 0.5


def test_heads_of_several_kinds_of_attention_and_drawn_pairs():
    network = loud_encoder_decoder(num_kv_heads=2, ablated_heads=[["cross", 0, 1]])
    context = pair_context(network)
    found = HeadRedundancy("mean", num_pairs=6, num_resamples=50, random_orders=1)(context, Path())
    table = columns_of(found.tables["pairs"])
    assert list(table)[:6] == ["kind_a", "layer_a", "head_a", "kind_b", "layer_b", "head_b"]
    assert "of 6 pairs, drawn of 105, back each other up" in found.lines["pairs"]
    heads = [tuple(zip(*(table[f"{n}_{side}"] for n in ("kind", "layer", "head")), strict=True)) for side in "ab"]
    pairs = [[network.find_head("heads", head) for head in pair] for pair in zip(*heads, strict=True)]
    base, both = context.losses(), losses_without(context, pairs, "mean")
    first, second = (losses_without(context, [[pair[at]] for pair in pairs], "mean") for at in (0, 1))
    expected = [ab.mean - a.mean - b.mean + base.mean for ab, a, b in zip(both, first, second, strict=True)]
    assert table["interaction"] == pytest.approx(expected, abs=1e-9)
    overlap = columns_of(found.tables["overlap"])
    rows = zip(*(overlap[name] for name in ("kind", "part", "head_a", "head_b")), strict=True)
    cross = [row for kind, *row in rows if kind == "cross"]
    # Heads 2 and 3 share a K/V head, head 1 is ablated.
    assert [pair for part, *pair in cross if part == "W_K"] == [[0, 2], [0, 3]]
    assert [pair for part, *pair in cross if part == "W_O"] == [[0, 2], [0, 3], [2, 3]]


def test_intervals_hold_for_all_changes_at_once():
    """Of 100 changes that are noise, about five would be beyond intervals of their own; with five seeds, none is."""
    targets = torch.full((32,), 10.0, dtype=torch.float64)
    for seed in range(5):
        noise = torch.randn(100, 32, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        after, before = [Losses(nats, targets) for nats in noise], [Losses(0 * targets, targets)] * 100
        together, alone = simultaneous(after, before, 1000), [simultaneous([a], before[:1], 1000)[0] for a in after]
        assert all(change.low < 0 < change.high for change in together)
        widths = [sum(change.high - change.low for change in changes) for changes in (together, alone)]
        assert 3 / 2 < widths[0] / widths[1] < 2.2  # the normal quantiles of 0.05 / 100 and 0.05 are 3.5 and 1.96
        own = after[0].change_from(before[0], 1000)
        assert [alone[0].low, alone[0].high] == pytest.approx([own.low, own.high], abs=0.01)
