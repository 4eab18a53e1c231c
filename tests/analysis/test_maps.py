"""The maps of a text: which tokens are shown, and what is measured."""

import base64
import itertools
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from analysis.atlas_pages import stored
from analysis.pair_subjects import loud_encoder_decoder, pair_subject
from analysis.subjects import CAUSAL, TOKENIZER, columns_of, loud_transformer, make_subject
from tinyformer.analysis import (
    MEASURES,
    PATTERNS,
    HeadMaps,
    capture_attention,
    head_labels,
    measure_layers,
    repeated_tokens,
)
from tinyformer.analysis.ablation import head_importance
from tinyformer.errors import ArgumentError
from tinyformer.model.model import Model
from tinyformer.nn import DifferentialAttention, ShawPosition, T5Position, prune_heads
from tinyformer.tasks import CausalLM


def captured(network, tokens, rows=None):
    with capture_attention(network, rows) as maps, torch.no_grad():
        network(tokens, CAUSAL)
    return maps


@pytest.mark.parametrize("rows", [256, 2], ids=["all", "sampled"])
def test_the_table_holds_each_measure_of_each_head(tmp_path, rows):
    network = loud_transformer()
    prune_heads(network.attentions()[1], [2])
    subject = make_subject(network)
    found = HeadMaps(rows=rows)(subject, tmp_path)
    table = columns_of(found.tables["maps"])
    assert table["layer"] == (0, 0, 0, 0, 1, 1, 1)
    assert table["head"] == ("00", "01", "02", "03", "00", "01", "03")
    windows = torch.cat([batch["inputs"] for batch in subject.batches])
    expected = measure_layers(MEASURES, captured(network, windows, rows), windows)
    repeated = repeated_tokens(50, 8, 8)
    expected |= measure_layers(PATTERNS, captured(network, repeated, rows), repeated)
    assert list(table) == ["layer", "head", *expected, "importance", "label"]
    for name, layers in expected.items():
        values = [value for layer in layers for value in layer]
        assert table[name] == pytest.approx([None if value != value else value for value in values], rel=1e-4), name  # noqa: PLR0124
    assert table["importance"] == tuple(head_importance(subject))
    assert table["label"] == tuple(itertools.chain(*head_labels(expected)))
    data = stored(tmp_path / "atlas.html")
    assert [head["name"] for head in data["heads"]] == ["0", "1", "2", "3", "0", "1", "3"]
    assert all(measure["description"] for measure in data["measures"])


def test_page_and_picture_show_the_checkpoint_and_the_ablated_heads(tmp_path):
    network = loud_transformer(ablated_heads=[[1, 2]])
    subject = replace(make_subject(network), facts={"checkpoint": "a/last.ckpt", "step": "7"})
    found = HeadMaps(num_windows=2)(subject, tmp_path)
    data = stored(tmp_path / "atlas.html")
    assert [head["ablated"] for head in data["heads"]] == [False] * 6 + [True, False]
    loss = f"{subject.losses().mean:.4f} nats per token, over 6 windows"
    assert data["facts"] == {"checkpoint": "a/last.ckpt", "step": "7", "loss": loss}
    assert [label.text for label in found.figures["maps"].labels if "ablated" in label.text] == [
        "layer 1 head 2 ablated"
    ]


def test_both_maps_of_a_differential_head_have_its_importance(tmp_path):
    network = loud_transformer()
    network.encoder.layers[1].attention = DifferentialAttention(32, 2, layer_index=1)
    subject = make_subject(network)
    table = columns_of(HeadMaps()(subject, tmp_path).tables["maps"])
    assert table["head"][4:] == ("00a", "00b", "01a", "01b")
    first, second = head_importance(subject)[4:]
    assert table["importance"][4:] == (first, first, second, second)
    assert "importance" not in columns_of(HeadMaps(importance=False)(subject, tmp_path).tables["maps"])


@pytest.mark.parametrize(
    ("settings", "shown", "line"),
    [
        ({}, None, "8 maps of 8 tokens;"),
        ({"num_tokens": 3}, None, "8 maps of 3 tokens;"),
        ({"text": "abc"}, "abc", "8 maps of 4 tokens;"),
        ({"text": "abc" * 9}, "abc" * 5, "8 maps of 16 of the text's 28 tokens;"),
    ],
)
def test_the_tokens_that_are_shown(tmp_path, settings, shown, line):
    subject = make_subject(loud_transformer())
    found = HeadMaps(**settings)(subject, tmp_path)
    ids = subject.batches[0]["inputs"][0, : settings.get("num_tokens")].tolist()
    if shown:
        ids = [TOKENIZER.eos_id, *TOKENIZER.encode(shown)]
    assert stored(tmp_path / "atlas.html")["kinds"][0]["keys"] == TOKENIZER.token_strings(ids)
    assert found.lines["atlas"].startswith(line)
    captions = [label.text for label in found.figures["maps"].labels if "layer" in label.text]
    assert captions == [f"layer {layer} head {head}" for layer in (0, 1) for head in range(4)]


def test_the_measures_of_a_text_are_its_own(tmp_path):
    network, text = loud_transformer(max_seq_len=40), "abcabcab"
    found = HeadMaps(text=text)(make_subject(network), tmp_path)
    table, own = columns_of(found.tables["maps"]), Model(network, TOKENIZER, CausalLM()).attention(text).measures()
    for name in MEASURES | PATTERNS:
        assert table[name] == pytest.approx([row[name] for row in own], rel=1e-4), name
    assert max(table["entropy"]) <= math.log(9)
    assert "importance" not in table
    assert stored(tmp_path / "atlas.html")["facts"] == {"text": '"abcabcab"'}


def test_page_and_picture_show_the_maps_of_the_model(tmp_path):
    network, text = loud_transformer(max_seq_len=40), "x" + "abc" * 20
    found = HeadMaps(text=text)(make_subject(network), tmp_path)
    tokens = torch.tensor([[TOKENIZER.eos_id, *TOKENIZER.encode(text[:39])]])
    whole = torch.cat([layer[0] for layer in captured(network, tokens)])
    for head, weights in zip(stored(tmp_path / "atlas.html")["heads"], whole, strict=True):
        levels = np.frombuffer(base64.b64decode(head["weights"]), "<u2").reshape(weights.shape)
        np.testing.assert_allclose(levels / 65535, weights, atol=1e-4)
    picture = found.figures["maps"]
    below = max(label.bottom for label in picture.labels if label.text.startswith("layer 1"))
    across = [label.text for label in picture.labels if label.top > below and label.text != "Keys"]
    assert across[-96:] == ["<eos>", *text[:23]] * 4


LEARNED = [{"attention_position": lambda head_dim: T5Position(4)}, {"attention_position": ShawPosition}]
LEARNED += [{"sink": True}, {"score": "general"}, {"score": "additive"}]


@pytest.mark.parametrize("options", LEARNED, ids=["t5", "relative", "sink", "general", "additive"])
def test_maps_of_scores_with_parameters_of_their_own(tmp_path, options):
    one_stack, pair = make_subject(loud_transformer(**options)), pair_subject(loud_encoder_decoder(**options))
    assert list(HeadMaps(num_windows=1)(one_stack, tmp_path).figures) == ["maps"]
    found = HeadMaps(num_windows=1)(pair, tmp_path)
    assert list(found.figures) == ["encoder_maps", "decoder_maps", "cross_maps"]


MISTAKES = [
    (
        make_subject,
        loud_transformer,
        {"num_tokens": 17},
        "num_tokens=17: must be at most 16, the context length",
    ),
    (make_subject, loud_transformer, {"text": "a", "target": "b"}, "target='b': a model of one text has no target;"),
    (pair_subject, loud_encoder_decoder, {"text": "a\ud800"}, r"text='a\ud800': holds half of a surrogate pair"),
    (
        *(pair_subject, loud_encoder_decoder, {"text": "ab", "target": "\udfffb"}),
        r"target='\udfffb': holds half of a surrogate pair",
    ),
]


@pytest.mark.parametrize(("subject_of", "make", "settings", "message"), MISTAKES)
def test_mistakes_are_refused_before_anything_is_written(tmp_path, subject_of, make, settings, message):
    with pytest.raises(ArgumentError, match=f"^{re.escape(message)}"):
        HeadMaps(**settings)(subject_of(make()), tmp_path)
    assert not list(tmp_path.iterdir())
