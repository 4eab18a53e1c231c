"""The analyses of an encoder–decoder: its heads by [kind, layer, head], on pairs whose padding changes nothing."""

import base64
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from analysis.atlas_pages import stored
from analysis.pair_subjects import ADDRESSES, EOS, loud_encoder_decoder, pair_subject
from analysis.subjects import TOKENIZER
from tinyformer.analysis import HeadMaps, pairs_of
from tinyformer.analysis.ablation import head_importance
from tinyformer.analysis.measures.capture import capture_pair
from tinyformer.analysis.measures.probe import measure_pairs
from tinyformer.data import PairTokens
from tinyformer.errors import ArgumentError
from tinyformer.generation.beam_search import beam_search

HEADS = [(*address, head) for address in ADDRESSES for head in range(4)]


def all_pairs(subject):
    return [pair for batch in subject.batches for pair in pairs_of(batch)]


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
