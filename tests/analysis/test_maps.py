"""The maps of a text, or of a pair: which tokens are shown, and what is measured."""

import base64
import itertools
import math
from functools import partial

import numpy as np
import pytest
import torch
from nn.model_cases import make_transformer

from analysis.contexts import (
    ADDRESSES,
    CAUSAL,
    EOS,
    TOKENIZER,
    columns_of,
    loud_encoder_decoder,
    loud_transformer,
    make_context,
    pair_context,
    stored,
)
from tinyformer.analysis import HeadMaps
from tinyformer.analysis.removal.ablation import head_importance
from tinyformer.measures import (
    MEASURES,
    PATTERNS,
    capture_pair,
    capture_weights,
    head_labels,
    measure_layers,
    pairs_of,
    repeated_tokens,
)
from tinyformer.model.model import Model
from tinyformer.nn import prune_heads
from tinyformer.tasks import CausalLM


@pytest.mark.parametrize("rows", [256, 2], ids=["all", "sampled"])
def test_the_table_holds_each_measure_of_each_head(tmp_path, rows):
    network = loud_transformer()
    prune_heads(network.attentions()[1], [2])
    context = make_context(network)
    found = HeadMaps(rows=rows, num_tokens=3)(context, tmp_path)
    table, data = columns_of(found.tables["maps"]), stored(tmp_path / "atlas.html")
    assert table["layer"] == (0, 0, 0, 0, 1, 1, 1)
    assert table["head"] == ("00", "01", "02", "03", "00", "01", "03")
    windows = torch.cat([batch["inputs"] for batch in context.batches])
    expected = measure_layers(MEASURES, capture_weights(network, windows, CAUSAL, rows), windows)
    repeated = repeated_tokens(50, 8, 7, TOKENIZER)
    expected |= measure_layers(PATTERNS, capture_weights(network, repeated, CAUSAL, rows), repeated)
    assert list(table) == ["layer", "head", *expected, "importance", "label"]
    for name, layers in expected.items():
        values = [value for layer in layers for value in layer]
        assert table[name] == tuple(pytest.approx(v, rel=1e-4) if math.isfinite(v) else None for v in values), name
    assert table["importance"] == tuple(head_importance(context).values())
    # Of two queries, random maps have some of the traits, too; no head is given those.
    limits = {
        label: (limit, values) for label, _, limit, *values, _ in found.tables["labels"][1] if label != "collapsed"
    }
    beyond = {label for label, (limit, values) in limits.items() if any(value and value >= limit for value in values)}
    assert beyond >= ({"uniform", "self"} if rows == 2 else {"uniform"})  # untrained heads are uniform
    withheld = beyond - ({"uniform"} if limits["uniform"][1][0] < 0.95 else set())
    labels = [set(label.split(" + ")) - withheld for label in itertools.chain(*head_labels(expected))]
    assert [set(label.split(" + ")) - {""} for label in table["label"]] == [label - {""} for label in labels]
    first = sum("previous token" in label for label in labels)
    assert found.lines["labels"].startswith(f"{first} previous token" if first else "none, of 7 heads")
    assert [head["name"] for head in data["heads"]] == ["0", "1", "2", "3", "0", "1", "3"]
    assert data["kinds"][0]["keys"] == TOKENIZER.token_strings(windows[0, :3].tolist())
    assert found.lines["atlas"].startswith("7 maps of 3 tokens;")


def test_the_measures_of_a_text_are_its_own(tmp_path):
    """Of as much of it as the model reads."""
    network, text = loud_transformer(max_seq_len=40), "x" + "abc" * 13
    untrained = partial(make_transformer, max_seq_len=40)
    found = HeadMaps(text=text, num_tokens=99)(make_context(network, untrained=untrained), tmp_path)
    own = Model(network, TOKENIZER, CausalLM()).attention(text[:39]).measures()
    table, data = columns_of(found.tables["maps"]), stored(tmp_path / "atlas.html")
    for name in MEASURES | PATTERNS:
        assert (table[name] == (None,) * 8) is (own[0][name] is None)
        assert table[name] == tuple(row[name] and pytest.approx(row[name], rel=1e-4) for row in own), name
    assert "importance" not in table
    assert data["facts"] == {"text": f'"{text}"'}
    assert data["kinds"][0]["keys"] == ["<eos>", *text[:39]]
    assert found.lines["atlas"].startswith("8 maps of 40 of the text's 41 tokens;")


def test_the_maps_of_a_pair(tmp_path):
    """Of the first pair of the split that fits, with a row of cross-attention for each token that is predicted."""
    context = pair_context(loud_encoder_decoder())
    found = HeadMaps(num_tokens=6)(context, tmp_path)
    pair = pairs_of(context.batches[0])[1]  # the first has 9 and 7 tokens
    source, target, predicted = (TOKENIZER.token_strings(ids[0].tolist()) for ids in pair)
    data = stored(tmp_path / "atlas.html")
    assert data["kinds"] == [
        {"name": "encoder", "queries": source, "keys": source},
        {"name": "decoder", "queries": target, "keys": target},
        {"name": "cross", "queries": predicted, "keys": source},
    ]
    assert predicted == [*target[1:], "<eos>"]
    assert found.lines["atlas"].startswith("16 maps of 5 source and 3 target tokens;")
    kinds = ("encoder", "decoder", "cross")
    addresses = [(kinds[head["kind"]], head["layer"], int(head["name"])) for head in data["heads"]]
    assert addresses == [(*address, head) for address in ADDRESSES for head in range(4)]
    captured = capture_pair(context.network, pair)
    whole = [weights for of_kind in captured.values() for layer in of_kind for weights in layer[0]]
    for head, weights in zip(data["heads"], whole, strict=True):
        levels = np.frombuffer(base64.b64decode(head["weights"]), "<u2").reshape(weights.shape)
        np.testing.assert_allclose(levels / 65535, weights, atol=1e-5)
    table = columns_of(found.tables["maps"])
    assert table["importance"] == tuple(head_importance(context).values())
    assert [value is None for value in table["coverage"]] == [kind != "cross" for kind in table["kind"]]
    # Where no pair is short enough, the first is cut.
    HeadMaps(num_tokens=2, importance=False)(context, tmp_path)
    source, _, predicted = (ids[0].tolist() for ids in pairs_of(context.batches[0])[0])
    cross = stored(tmp_path / "atlas.html")["kinds"][2]
    assert cross["keys"] == TOKENIZER.token_strings([source[0], EOS])
    assert cross["queries"] == TOKENIZER.token_strings(predicted[:2])
