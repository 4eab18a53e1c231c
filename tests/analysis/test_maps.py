"""The maps of a text: whose they are, and what is measured of them."""

import base64
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from analysis.subjects import columns_of, loud_transformer, make_subject
from tinyformer.analysis import MEASURES, PATTERNS, HeadMaps, capture_attention, measure_layers, repeated_tokens
from tinyformer.analysis.importance import head_importance
from tinyformer.nn import AttentionMask, prune_heads

CAUSAL = AttentionMask(causal=True)


def captured(network, tokens):
    with capture_attention(network) as maps, torch.no_grad():
        network(tokens, CAUSAL)
    return maps


def page_of(folder: Path):
    text = (folder / "atlas.html").read_text(encoding="utf-8")
    return json.loads(re.search(r'id="atlas-data">(.*?)</script>', text, re.DOTALL)[1])


def test_the_table_holds_each_measure_of_each_head(tmp_path):
    network = loud_transformer()
    prune_heads(network.attentions()[1], [2])
    subject = make_subject(network)
    found = HeadMaps()(subject, tmp_path)
    table = columns_of(found.tables["maps"])
    assert table["layer"] == (0, 0, 0, 0, 1, 1, 1)
    assert table["head"] == ("00", "01", "02", "03", "00", "01", "03")
    windows = torch.cat([batch["inputs"] for batch in subject.batches])
    expected = measure_layers(MEASURES, captured(network, windows), windows)
    repeated = repeated_tokens(50, 8, 8)
    expected |= measure_layers(PATTERNS, captured(network, repeated), repeated)
    assert list(table) == ["layer", "head", *expected, "importance"]
    for name, layers in expected.items():
        assert table[name] == pytest.approx([value for layer in layers for value in layer], rel=1e-4), name
    assert table["importance"] == tuple(head_importance(subject))
    data = page_of(tmp_path)
    assert [head["name"] for head in data["heads"]] == ["0", "1", "2", "3", "0", "1", "3"]
    assert all(measure["description"] for measure in data["measures"])


def test_a_sample_of_queries_is_measured(tmp_path):
    subject = make_subject(loud_transformer())
    found = columns_of(HeadMaps(rows=2)(subject, tmp_path).tables["maps"])
    windows = torch.cat([batch["inputs"] for batch in subject.batches])
    with capture_attention(subject.network, 2) as maps, torch.no_grad():
        subject.network(windows, CAUSAL)
    expected = measure_layers(MEASURES, maps, windows)["entropy"]
    assert found["entropy"] == pytest.approx([value for layer in expected for value in layer], rel=1e-4)


def test_what_has_no_number_is_left_out(tmp_path):
    # The first token attends to itself alone: nothing to measure a share of.
    found = columns_of(HeadMaps(importance=False)(make_subject(loud_transformer()), tmp_path).tables["maps"])
    assert "importance" not in found
    assert all(value is None or value == value for values in found.values() for value in values)  # noqa: PLR0124


@pytest.mark.parametrize(
    ("settings", "ids", "said"),
    [
        ({}, None, "8 maps of 8 tokens;"),
        ({"num_tokens": 3}, None, "8 maps of 3 tokens;"),
        ({"text": "abc"}, [47, 48, 49], "8 maps of 3 tokens;"),
        ({"text": "abc" * 9}, [47, 48, 49] * 5 + [47], "8 maps of 16 tokens (analysis.text has 27);"),
        ({"text": "abcd", "num_tokens": 2}, [47, 48], "8 maps of 2 tokens (analysis.text has 4);"),
    ],
)
def test_whose_maps_they_are(tmp_path, settings, ids, said):
    subject = make_subject(loud_transformer())
    found = HeadMaps(**settings)(subject, tmp_path)
    ids = ids or subject.batches[0]["inputs"][0, : settings.get("num_tokens")].tolist()
    data = page_of(tmp_path)
    assert data["tokens"] == [str(i) for i in ids]
    assert found.lines["atlas"].startswith(said)
    captions = [label.text for label in found.figures["maps"].labels if "layer" in label.text]
    assert captions == [f"layer {layer} head {head}" for layer in (0, 1) for head in range(4)]


def test_the_maps_are_the_models(tmp_path):
    network = loud_transformer(max_seq_len=40)
    found = HeadMaps(text="x" + "abc" * 20)(make_subject(network), tmp_path)
    tokens = torch.tensor([[20, *[47, 48, 49] * 13]])
    whole = torch.cat([layer[0] for layer in captured(network, tokens)])
    for head, weights in zip(page_of(tmp_path)["heads"], whole, strict=True):
        levels = np.frombuffer(base64.b64decode(head["weights"]), "<u2").reshape(weights.shape)
        np.testing.assert_allclose(levels / 65535, weights, atol=1e-4)
    # The picture shows as many tokens as can be told apart.
    picture = found.figures["maps"]
    lowest = max(label.top for label in picture.labels)
    labels = [label.text for label in picture.labels if label.top == lowest]
    assert labels == [str(int(i)) for i in tokens[0, :24]] * 4


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"text": ""}, "analysis.text is empty"),
        ({"num_tokens": 17}, "analysis.num_tokens=17: the model sees 16; analysis.num_tokens=16 works."),
        ({"num_tokens": 0}, "analysis.num_tokens=0: at least one, analysis.num_tokens=48 works."),
        ({"rows": 0}, "analysis.rows=0: at least one, analysis.rows=256 works."),
        ({"num_windows": 0}, "analysis.num_windows=0: at least one, analysis.num_windows=16 works."),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, settings, said):
    with pytest.raises(ValueError, match=r"^analysis\.") as caught:
        HeadMaps(**settings)(make_subject(loud_transformer()), tmp_path)
    assert str(caught.value).startswith(said)
    assert not list(tmp_path.iterdir())
