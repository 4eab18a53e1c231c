"""Heads that are found by their measures, kept alone and taken away."""

from contextlib import nullcontext

import pytest
import torch
from nn.model_cases import make_transformer

from analysis.subjects import CAUSAL, columns_of, loud, loud_transformer, make_subject
from tinyformer.analysis import (
    MEASURES,
    PATTERNS,
    HeadCircuit,
    Probe,
    Probes,
    capture_weights,
    measure_heads,
    measure_layers,
    repeated_tokens,
)
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
    probes = Probes([Probe(tokens, CAUSAL, {name: (MEASURES | PATTERNS)[name] for name in ("induction", "self")})])
    expected = measure_heads(subject.network, probes, 8, nullcontext()).values
    values = {name: [value for layer in layers for value in layer] for name, layers in expected.items()}
    least = {name: sorted(of_heads)[-2] for name, of_heads in values.items()}  # two heads by each measure
    pairs = [(layer, head) for layer in range(2) for head in range(4)]
    found = [pair for i, pair in enumerate(pairs) if any(values[name][i] >= least[name] - 1e-6 for name in least)]
    others = [pair for pair in pairs if pair not in found]
    assert 2 <= len(found) <= 4

    settings = {"num_sequences": 5, "period": 9, "num_draws": 3, "seed": 3}  # of 9 tokens, half of a window
    result = HeadCircuit({name: value - 1e-6 for name, value in least.items()}, **settings)(subject, tmp_path)
    heads = columns_of(result.tables["circuit_heads"])
    assert [pair for pair, is_found in zip(pairs, heads["found"], strict=True) if is_found] == found
    assert heads["induction"] == pytest.approx(values["induction"], rel=1e-5)
    rows = {tuple(row[:2]): row[2:] for row in result.tables["circuit"][1]}
    assert rows["all heads", None][1:] == scores(subject, [])
    assert rows["circuit alone", None][1:] == scores(subject, others)
    assert rows["without circuit", None][1:] == scores(subject, found)
    assert len({tuple(rows["random heads alone", draw]) for draw in range(3)}) > 1
    for draw in range(3):
        assert rows["random heads alone", draw][0] == len(found)
        assert rows["without random heads", draw][0] == len(others)


def test_a_head_of_two_softmaxes_has_the_larger_measure(tmp_path):
    network = make_transformer()
    for index, layer in enumerate(network.encoder.layers):
        layer.attention = DifferentialAttention(32, 4, layer_index=index)
    loud(network)
    tokens = repeated_tokens(50, 16, 4, seed=0)
    maps = measure_layers({"self": MEASURES["self"]}, capture_weights(network, tokens, CAUSAL), tokens)["self"]
    larger = [max(of_layer[2 * head : 2 * head + 2]) for of_layer in maps for head in range(4)]
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


def test_random_heads_are_as_many_of_each_layer(tmp_path):
    subject = make_subject(loud_transformer())
    found = HeadCircuit({"self": 1e-6}, num_draws=2)(subject, tmp_path)  # every head
    rows = columns_of(found.tables["circuit"])
    assert set(rows["num_heads"]) == {8, 0}
    alone = {accuracy for name, accuracy in zip(rows["heads"], rows["loss"], strict=True) if name.endswith("alone")}
    assert alone == {rows["loss"][0]}


@pytest.mark.parametrize("name", ["self", "near", "first_token", "previous_token", "induction"])
def test_the_suggested_threshold_finds_a_head(tmp_path, name):
    subject = make_subject(loud_transformer())
    with pytest.raises(ArgumentError) as caught:
        HeadCircuit({name: 1.5})(subject, tmp_path)
    assert HeadCircuit(**caught.value.works)(subject, tmp_path).scalars["analysis/num_found"] >= 1


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"measures": {"inductoin": 0.4}}, "inductoin"),
        ({"measures": {}}, "must name at least one measure"),
        ({"measures": {"self": 1.5}}, "none of the model's 8 heads reaches a threshold; measures=.* works"),
        ({"measures": {"self": 0}}, r"measures.self=0: must be above 0, .*; measures.self=0.5 works"),
        ({"num_draws": 0}, "num_draws=0: must be at least 1"),
    ],
)
def test_mistakes_are_named(tmp_path, arguments, problem):
    with pytest.raises(ArgumentError, match=problem):
        HeadCircuit(**arguments)(make_subject(loud_transformer()), tmp_path)
