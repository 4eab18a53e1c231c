"""Heads that are found by their measures, kept alone and taken away."""

import pytest
import torch

from analysis.subjects import CAUSAL, columns_of, loud_transformer, make_subject
from tinyformer.analysis import MEASURES, PATTERNS, HeadCircuit, capture_weights, measure_layers, repeated_tokens
from tinyformer.analysis.ablation import MODES, gated, losses_without
from tinyformer.errors import ArgumentError
from tinyformer.nn import DifferentialAttention


def scores(subject, heads):
    """Loss and accuracy with the gates of some heads at 0, by the definition."""
    inputs, targets = (torch.cat([batch[name] for batch in subject.batches]) for name in ("inputs", "targets"))
    with torch.no_grad(), gated(subject.network, heads):
        logits = subject.network(inputs, CAUSAL)
    loss = -logits.log_softmax(dim=-1).gather(-1, targets.unsqueeze(-1)).mean()
    return pytest.approx([loss.item(), (logits.argmax(dim=-1) == targets).float().mean().item()], rel=1e-5)


def test_the_found_heads_are_kept_alone_and_ablated(tmp_path):
    subject = make_subject(loud_transformer(num_kv_heads=2))
    tokens = repeated_tokens(50, 5, 4, seed=3)
    measures = {name: (MEASURES | PATTERNS)[name] for name in ("induction", "self")}
    expected = measure_layers(measures, capture_weights(subject.network, tokens, CAUSAL), tokens)
    values = {name: [value for layer in layers for value in layer] for name, layers in expected.items()}
    least = {name: sorted(of_heads)[-2] - 1e-6 for name, of_heads in values.items()}  # two heads by each measure
    found = [head for i, head in enumerate(subject.heads) if any(values[name][i] >= least[name] for name in least)]
    others = [head for head in subject.heads if head not in found]
    assert 2 <= len(found) <= 4

    # The period is 4, half of a window.
    result = HeadCircuit(least, num_sequences=5, period=9, num_draws=3, seed=3)(subject, tmp_path)
    heads = columns_of(result.tables["circuit_heads"])
    assert [head for head, is_found in zip(subject.heads, heads["found"], strict=True) if is_found] == found
    assert heads["induction"] == pytest.approx(values["induction"], rel=1e-5)
    rows = {tuple(row[:2]): row[2:] for row in result.tables["circuit"][1]}
    for name, removed in (("all heads", []), ("circuit alone", others), ("without circuit", found)):
        assert rows[name, None][1:] == scores(subject, removed)
    assert len({tuple(rows["random heads alone", draw]) for draw in range(3)}) > 1
    for draw in range(3):
        assert rows["random heads alone", draw][0] == len(found)
        assert rows["without random heads", draw][0] == len(others)


def test_a_head_of_two_softmaxes_has_the_larger_measure(tmp_path):
    network = loud_transformer()
    network.encoder.layers[1].attention = DifferentialAttention(32, 4, layer_index=1)
    tokens = repeated_tokens(50, 16, 4, seed=0)
    maps = measure_layers({"self": MEASURES["self"]}, capture_weights(network, tokens, CAUSAL), tokens)["self"]
    larger = maps[0] + [max(maps[1][2 * head : 2 * head + 2]) for head in range(4)]
    heads = columns_of(HeadCircuit({"self": 1e-6})(make_subject(network), tmp_path).tables["circuit_heads"])
    assert heads["self"] == pytest.approx(larger, rel=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_heads_are_replaced_as_in_an_ablation_of_a_layer(tmp_path, mode):
    subject = make_subject(loud_transformer())
    of_heads = columns_of(HeadCircuit({"self": 1e-6})(subject, tmp_path).tables["circuit_heads"])["self"]
    best = max(range(8), key=of_heads.__getitem__)
    found = HeadCircuit({"self": of_heads[best]}, mode=mode)(subject, tmp_path)
    (expected,) = losses_without(subject, [[(best // 4, best % 4)]], mode)
    assert found.scalars["analysis/without_circuit/loss"] == pytest.approx(expected.mean, rel=1e-5)


@pytest.mark.parametrize("name", ["self", "induction"])
def test_the_suggested_threshold_finds_a_head(tmp_path, name):
    subject = make_subject(loud_transformer())
    with pytest.raises(ArgumentError, match="none of the model's 8 heads reaches a threshold") as caught:
        HeadCircuit({name: 1.5})(subject, tmp_path)
    assert HeadCircuit(**caught.value.works)(subject, tmp_path).scalars["analysis/num_found"] >= 1


@pytest.mark.parametrize(("measures", "words"), [({"inductoin": 0.4}, "inductoin"), ({"self": 0}, "must be above 0")])
def test_mistakes_are_named(measures, words):
    with pytest.raises(ArgumentError, match=words):
        HeadCircuit(measures)
