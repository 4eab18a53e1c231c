"""The analyses of an encoder–decoder: its heads by [kind, layer, head], on pairs whose padding changes nothing."""

import base64
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from analysis.atlas_pages import stored
from analysis.pair_subjects import ADDRESSES, EOS, LENGTHS, loud_encoder_decoder, pair_subject
from analysis.subjects import TOKENIZER, columns_of
from tinyformer.analysis import HeadAblation, HeadImportance, HeadMaps, HeadPruning, ResidualSurgery, pairs_of
from tinyformer.analysis.ablation import gated, losses_without
from tinyformer.analysis.importance import head_importance
from tinyformer.analysis.measures.pair_probe import capture_pair, measure_pairs
from tinyformer.analysis.residual import distance_to_rank_one, token_cosine
from tinyformer.batch import IGNORED
from tinyformer.checkpoint.file import Checkpoint, load_checkpoint, load_weights, save_network
from tinyformer.data import PairTokens
from tinyformer.errors import ArgumentError
from tinyformer.generation.beam_search import Beam, beam_search
from tinyformer.nn import Residual

HEADS = [(*address, head) for address in ADDRESSES for head in range(4)]


def all_pairs(subject):
    return [pair for batch in subject.batches for pair in pairs_of(batch)]


def loss_of(network, pair):
    """The summed cross-entropy of a pair alone."""
    logits = network(pair.source, pair.target)
    return F.cross_entropy(logits[0], pair.predicted[0], reduction="sum")


def test_pairs_without_their_padding():
    pairs = all_pairs(pair_subject(loud_encoder_decoder()))
    assert [(pair.source.shape[1], pair.target.shape[1]) for pair in pairs] == LENGTHS
    for source, target, predicted in pairs:
        assert (source[0, -1], target[0, 0], predicted[0, -1]) == (EOS, EOS, EOS)
        assert torch.equal(target[0, 1:], predicted[0, :-1])
        assert IGNORED not in predicted


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@torch.no_grad()
def test_ablating_a_head_equals_zeroing_its_part_of_the_output_projection(backend):
    subject = pair_subject(loud_encoder_decoder(backend=backend))
    found = HeadAblation(num_resamples=10)(subject, Path())
    table, base = columns_of(found.tables["ablation"]), subject.losses().mean
    assert list(zip(table["kind"], table["layer"], table["head"], strict=True)) == HEADS
    pairs, tokens = all_pairs(subject), sum(target for _, target in LENGTHS)
    for index, loss in enumerate(table["loss"]):
        layer, head = subject.layers[index // 4], index % 4
        weight = layer.o_proj.weight.clone()
        layer.o_proj.weight[:, 8 * head : 8 * head + 8] = 0
        expected = sum(loss_of(subject.network, pair) for pair in pairs) / tokens
        layer.o_proj.weight.copy_(weight)
        assert loss == pytest.approx(float(expected), rel=1e-5)
        assert abs(loss - base) > 1e-3
    worst = max(range(16), key=table["change"].__getitem__)
    assert list(found.lines)[1] == "  {} layer {} head {}".format(*HEADS[worst])
    assert found.lines["ablation"].startswith("zero; 5 pairs with a loss of")
    assert [text.get_text() for text in found.figures["ablation"].axes[0].get_yticklabels()] == [
        "encoder 0",
        "encoder 1",
        "decoder 0",
        "cross 0",
    ]
    # The same head, ablated by its address.
    addressed = loud_encoder_decoder(backend=backend, ablated_heads=[HEADS[worst]])
    assert pair_subject(addressed).losses().mean == pytest.approx(table["loss"][worst])


def test_groups_that_share_keys_and_values():
    subject = pair_subject(loud_encoder_decoder(num_kv_heads=2))
    table = columns_of(HeadAblation(num_resamples=2)(subject, Path()).tables["kv_groups"])
    assert (table["kind"][-1], table["layer"][-1], table["heads"][-2:]) == ("cross", 0, ("0 1", "2 3"))
    (last,) = losses_without(subject, [[(3, 2), (3, 3)]])
    assert table["loss"][-1] == pytest.approx(last.mean)


def test_importance_is_the_mean_absolute_gradient_of_the_pairs():
    subject = pair_subject(loud_encoder_decoder())
    gradients = []
    for pair in all_pairs(subject):
        gates = [torch.ones(4, requires_grad=True) for _ in ADDRESSES]
        for layer, gate in zip(subject.layers, gates, strict=True):
            layer.head_gate.factors = gate
        loss = loss_of(subject.network, pair) / pair.target.shape[1]
        gradients.append(torch.cat(torch.autograd.grad(loss, gates)).abs())
    for layer in subject.layers:
        layer.head_gate.factors = None
    assert head_importance(subject) == pytest.approx(torch.stack(gradients).mean(dim=0).tolist(), rel=1e-4)
    columns, rows = HeadImportance()(subject, Path()).tables["importance"]
    assert columns == ["kind", "layer", "head", "importance", "change"]
    assert [tuple(row[:3]) for row in rows] == HEADS


@pytest.mark.parametrize("num_kv_heads", [4, 2])
@torch.no_grad()
def test_a_pruned_checkpoint_computes_the_gated_model_and_decodes(tmp_path, num_kv_heads):
    def save(pruned, path):
        overrides = {"model.pruned_heads": pruned.pruned_heads()}
        save_network(path, pruned, Checkpoint(path, {}, {}, "{}", {}, 7), overrides)

    network = loud_encoder_decoder(num_kv_heads=num_kv_heads)
    subject = pair_subject(network, save_pruned=save)
    found = HeadPruning(fraction=0.6, order="oracle")(subject, tmp_path)
    checkpoint = load_checkpoint(tmp_path / "pruned.ckpt")
    heads = checkpoint.overrides["model.pruned_heads"]
    assert len(heads) == 10
    assert {kind for kind, _, _ in heads} == {"encoder", "decoder", "cross"}
    assert ", ".join(f"[{kind},{layer},{head}]" for kind, layer, head in heads) in found.lines["pruned"]
    smaller = loud_encoder_decoder(seed=1, num_kv_heads=num_kv_heads, pruned_heads=heads)
    load_weights(smaller, checkpoint)
    assert smaller.pruned_heads() == heads
    assert smaller.num_parameters() == found.scalars["analysis/pruned_num_parameters"] < network.num_parameters()
    indices = [(ADDRESSES.index((kind, layer)), head) for kind, layer, head in heads]
    with gated(network, indices):
        expected, batch = subject.losses(), subject.batches[0]
        logits = subject.task.logits(network, batch)
    torch.testing.assert_close(pair_subject(smaller).losses().nats, expected.nats, rtol=1e-5, atol=1e-5)
    assert found.scalars["analysis/pruned_loss"] == pytest.approx(expected.mean)
    assert (subject.task.logits(smaller, batch) - logits).abs().max() < 1e-5 * logits.abs().max()
    special = PairTokens(EOS, EOS, (EOS,))
    search = partial(beam_search, smaller, batch["source"], batch["source_lengths"], special, Beam(2), 8)
    assert search(use_cache=True) == search(use_cache=False)


RESIDUALS = ("attention_residual", "cross_attention_residual", "feed_forward_residual")


@torch.no_grad()
def test_losses_without_a_connection_equal_those_of_models_built_without_it():
    network = loud_encoder_decoder()
    subject = pair_subject(network, untrained=partial(loud_encoder_decoder, seed=5))
    found = ResidualSurgery(num_resamples=5)(subject, Path())
    table = columns_of(found.tables["residual"])
    removed = list(zip(*(table[name] for name in ("kind", "layer", "sublayer", "removed", "loss")), strict=True))
    of_encoder = [("encoder", layer, name) for layer in (0, 1) for name in RESIDUALS if "cross" not in name]
    assert [at[:3] for at in removed[::2]] == of_encoder + [("decoder", 0, name) for name in RESIDUALS]
    for kind, layer, sublayer, part, loss in removed:
        built = loud_encoder_decoder()
        setattr(getattr(built, kind).layers[layer], sublayer, Residual(**{part: 0.0}))
        assert loss == pytest.approx(pair_subject(built).losses().mean, rel=1e-5)
        assert abs(loss - found.scalars["analysis/loss"]) > 1e-4
    line = "  {} layer {} {}.{}=0".format(*max(removed, key=lambda at: at[4])[:4])
    assert list(found.lines)[1] == line


@torch.no_grad()
def test_ranks_are_means_over_the_pairs_without_padding():
    network = loud_encoder_decoder()
    subject = pair_subject(network)
    found = ResidualSurgery(num_resamples=2)(subject, Path())
    columns, rows = found.tables["rank"]
    assert columns == ["kind", "model", "depth", "distance_to_rank_one", "token_cosine"]
    assert [row[:3] for row in rows[:4]] == [["encoder", "trained, with skips", depth] for depth in (0, 1, 2)] + [
        ["encoder", "trained, without skips", 0]
    ]
    assert [row[:3] for row in rows[12:14]] == [["decoder", "trained, with skips", depth] for depth in (0, 1)]
    streams = []
    for pair in all_pairs(subject):
        x = network.decoder.position(network.decoder.token_embedding(pair.target), 0)
        streams.append([float(distance_to_rank_one(x)), float(token_cosine(x))])
    assert rows[12][3:] == pytest.approx(torch.tensor(streams).mean(dim=0).tolist())
    ranks = {f"{kind}_{name}" for kind in ("encoder", "decoder") for name in ("rank", "token_cosine")}
    assert set(found.figures) == {"residual", *ranks}
    assert "analysis/decoder/untrained_without_skips/rank_distance" in found.scalars


@torch.no_grad()
def test_measures_of_pairs_are_means_and_of_logits_the_largest():
    network = loud_encoder_decoder()
    pairs = all_pairs(pair_subject(network))
    whole, *alone = (measure_pairs(network, some, nullcontext()).values for some in (pairs, *([one] for one in pairs)))
    for name, layers in whole.items():
        values = torch.tensor([[value for layer in one[name] for value in layer] for one in alone])
        expected = values.amax(dim=0) if name == "largest_logit" else values.nanmean(dim=0)
        found = torch.tensor([value for layer in layers for value in layer])
        torch.testing.assert_close(found, expected, equal_nan=True, msg=name)


def test_the_maps_of_a_pair(tmp_path):
    """Of the first pair of the split that fits, with a row of cross-attention for each token that is predicted."""
    subject = pair_subject(loud_encoder_decoder())
    found = HeadMaps(num_tokens=6)(subject, tmp_path)
    pair = all_pairs(subject)[1]  # the first has 9 and 7 tokens
    source, target, predicted = (TOKENIZER.token_strings(ids[0].tolist()) for ids in pair)
    data = stored(tmp_path / "atlas.html")
    assert data["kinds"] == [
        {"name": "encoder", "queries": source, "keys": source},
        {"name": "decoder", "queries": target, "keys": target},
        {"name": "cross", "queries": predicted, "keys": source},
    ]
    assert predicted == [*target[1:], "<eos>"]
    assert found.lines["atlas"].startswith("16 maps of 5 source and 3 target tokens;")
    assert [(head["kind"], head["layer"], head["name"]) for head in data["heads"]] == [
        (("encoder", "decoder", "cross").index(kind), layer, str(head)) for kind, layer, head in HEADS
    ]
    captured = capture_pair(subject.network, pair)
    whole = [weights for of_kind in captured.values() for layer in of_kind for weights in layer[0]]
    for head, weights in zip(data["heads"], whole, strict=True):
        levels = np.frombuffer(base64.b64decode(head["weights"]), "<u2").reshape(weights.shape)
        np.testing.assert_allclose(levels / 65535, weights, atol=1e-5)
    assert set(found.figures) == {"encoder_maps", "decoder_maps", "cross_maps"}
    columns, rows = found.tables["maps"]
    assert columns[:3] == ["kind", "layer", "head"]
    assert columns[-2:] == ["importance", "label"]
    assert [row[-2] for row in rows] == head_importance(subject)
    coverage = columns.index("coverage")
    assert [row[coverage] is None for row in rows] == [row[0] != "cross" for row in rows]


@pytest.mark.parametrize(
    ("settings", "source", "target", "line"),
    [
        ({"text": "abc", "target": "xy"}, "abc", "xy", "16 maps of 4 source and 3 target tokens;"),
        ({"text": "abc"}, "abc", None, "16 maps of 4 source and"),
        (
            {"text": "abc" * 9, "target": "xy" * 9, "num_tokens": 4},
            "abc",
            "xyxy",
            "16 maps of 4 of the text's 28 source and 4 of the text's 19 target tokens;",
        ),
    ],
    ids=["both", "decoded", "cut"],
)
def test_the_pair_that_is_shown(tmp_path, settings, source, target, line):
    network = loud_encoder_decoder()
    subject = pair_subject(network)
    found = HeadMaps(**settings, importance=False)(subject, tmp_path)
    cross = stored(tmp_path / "atlas.html")["kinds"][2]
    assert cross["keys"] == [*source, "<eos>"]
    if target is None:
        ids = torch.tensor([[*TOKENIZER.encode(source), EOS]])
        (found_ids,) = beam_search(network, ids, torch.tensor([4]), PairTokens(EOS, EOS, (EOS,)), subject.task.beam)
        assert cross["queries"] == TOKENIZER.token_strings([*found_ids, EOS])[: network.max_seq_len]
    else:
        assert cross["queries"] == [*target, "<eos>"][: settings.get("num_tokens")]
    assert found.lines["atlas"].startswith(line)
    assert "importance" not in found.tables["maps"][0]


def test_a_pair_longer_than_what_is_shown_is_cut(tmp_path):
    subject = pair_subject(loud_encoder_decoder())
    HeadMaps(num_tokens=2, importance=False)(subject, tmp_path)
    source, _, predicted = all_pairs(subject)[0]
    strings = (
        TOKENIZER.token_strings([*source[0, :1].tolist(), EOS]),
        TOKENIZER.token_strings(predicted[0, :2].tolist()),
    )
    assert [stored(tmp_path / "atlas.html")["kinds"][2][side] for side in ("keys", "queries")] == list(strings)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"target": "x"}, "target='x': needs text, the source that it belongs to; target=None works."),
        ({"text": "a", "target": ""}, "target='': must not be empty"),
        ({"text": ""}, "text='': must not be empty"),
        ({"num_tokens": 17}, "num_tokens=17: must be at most 16"),
    ],
)
def test_pairs_that_are_refused(tmp_path, settings, sentence):
    with pytest.raises(ArgumentError) as caught:
        HeadMaps(**settings)(pair_subject(loud_encoder_decoder()), tmp_path)
    assert str(caught.value).startswith(sentence)
    assert not list(tmp_path.iterdir())
