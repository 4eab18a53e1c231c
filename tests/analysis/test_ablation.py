"""Ablated heads: what replaces them, the change of the loss and its estimate, padding, and circuits kept alone."""

from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from data.streams import split_of
from nn.model_cases import make_encoder

from analysis.contexts import (
    CAUSAL,
    SHARINGS,
    TOKENIZER,
    all_rows,
    columns_of,
    loud,
    loud_encoder_decoder,
    loud_transformer,
    make_context,
    pair_context,
    rows_of,
)
from tinyformer.analysis import AnalysisContext, HeadAblation, HeadCircuit, HeadImportance, HeadMaps, HeadPruning
from tinyformer.analysis.removal.ablation import (
    MODES,
    gated,
    head_changes,
    head_importance,
    losses_without,
    rank_correlation,
    resampled_positions,
)
from tinyformer.data import Examples, LabelledSplit, Windows
from tinyformer.measures import MEASURES, PATTERNS, capture_weights, measure_layers, repeated_tokens
from tinyformer.measures.intervals import Losses
from tinyformer.nn import AttentionMask, ClassReadout, DifferentialAttention, TokenReadout, Transformer, prune_heads
from tinyformer.tasks import CausalLM, Classification


def test_ablated_heads_are_named_and_neither_ranked_nor_pruned(tmp_path):
    context = make_context(loud_transformer(ablated_heads=[[0, 1], [1, 3]]))
    expected = [(layer, head) in [(0, 1), (1, 3)] for layer in (0, 1) for head in range(4)]
    for name, analysis in {"ablation": HeadAblation("mean"), "importance": HeadImportance()}.items():
        found = analysis(context, tmp_path)
        table = columns_of(found.tables[name])
        assert list(table["ablated"]) == expected
        assert [change == 0 for change in table["change"]] == expected
        assert not {"  layer 0 head 1", "  layer 1 head 3"} & set(found.lines)
    found = HeadPruning(0.5, order="oracle", random_orders=0)(context, tmp_path)
    assert (found.scalars["analysis/num_heads"], found.scalars["analysis/num_pruned"]) == (6, 3)
    assert not any(head in found.lines["pruned"] for head in ("[0,1]", "[1,3]"))
    heads = columns_of(HeadCircuit({"self": 1e-6})(context, tmp_path).tables["circuit_heads"])
    assert list(zip(heads["layer"], heads["head"], strict=True)) == [(0, 0), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2)]


@pytest.mark.parametrize(("num_kv_heads", "mode"), [(4, "zero"), (2, "mean"), (1, "resample")], ids=SHARINGS)
def test_findings_of_heads_and_groups(num_kv_heads, mode):
    network = loud_transformer(num_kv_heads=num_kv_heads)
    prune_heads(network.attentions()[0], [1])
    context = make_context(network)
    found = HeadAblation(mode, num_resamples=200)(context, Path())
    base, table = context.losses(), columns_of(found.tables["ablation"])
    assert table["layer"] == (0, 0, 0, 1, 1, 1, 1)
    assert table["head"] == (0, 2, 3, 0, 1, 2, 3)  # a pruned head leaves the numbers of the others alone
    kv_head = {4: (0, 1, 2, 0, 1, 2, 3), 2: (0, 1, 1, 0, 0, 1, 1), 1: (0,) * 7}
    assert table["kv_head"] == kv_head[num_kv_heads]
    changes = [after.change_from(base, 200) for after in losses_without(context, [[h] for h in context.heads], mode)]
    rows = zip(table["loss"], table["change"], table["low"], table["high"], strict=True)
    assert list(rows) == [(base.mean + change.mean, change.mean, change.low, change.high) for change in changes]
    assert found.scalars == {"analysis/loss": base.mean}
    order = sorted(zip(table["change"], table["layer"], table["head"], strict=True), reverse=True)
    assert list(found.lines)[1:] == [f"  layer {i} head {h}" for _, i, h in order[:5]]
    groups = {4: (), 2: ("2 3", "0 1", "2 3"), 1: ("0 2 3", "0 1 2 3")}[num_kv_heads]
    assert ("kv_groups" in found.tables) == bool(groups)
    if groups:
        shared = columns_of(found.tables["kv_groups"])
        assert shared["heads"] == groups
        (last,) = losses_without(context, [[(1, int(head)) for head in groups[-1].split()]], mode)
        assert shared["change"][-1] == pytest.approx(last.mean - base.mean)


@pytest.mark.parametrize("is_pair", [False, True], ids=["windows", "pairs"])
def test_importance_is_the_mean_absolute_gradient_of_the_rows(is_pair):
    context = pair_context(loud_encoder_decoder()) if is_pair else make_context(loud_transformer(), padded=True)
    rows = []
    for row in all_rows(context):
        gates = [torch.ones(layer.num_heads, requires_grad=True) for layer in context.layers]
        for layer, gate in zip(context.layers, gates, strict=True):
            layer.head_gate.factors = gate
        nats, targets = context.task.nats(context.network, row)
        rows.append(torch.cat(torch.autograd.grad((nats / targets).sum(), gates)))
    for layer in context.layers:
        layer.head_gate.factors = None
    gradients = torch.stack(rows)
    assert [*head_importance(context).values()] == pytest.approx(gradients.abs().mean(dim=0).tolist(), rel=1e-4)
    # The sign differs between rows, which tells |mean| from mean |…|.
    assert (gradients.mean(0).abs() < 0.9 * gradients.abs().mean(0)).any()


def test_findings_of_importance():
    context = make_context(loud_transformer(ablated_heads=[[1, 2]]))
    found = HeadImportance()(context, Path())
    table = columns_of(found.tables["importance"])
    assert table["importance"][6] == 0
    assert table["change"] == pytest.approx([*head_changes(context).values()])
    ranked = [[*column[:6], *column[7:]] for column in (table["importance"], table["change"])]
    assert found.scalars == {"analysis/rank_correlation": rank_correlation(*ranked)}
    assert HeadImportance(compare=False)(context, Path()).scalars == {}


def test_rank_correlation():
    assert rank_correlation([1.0, 2.0, 3.0, 4.0], [1.0, 3.0, 2.0, 4.0]) == pytest.approx(1 - 6 * 2 / 60, abs=1e-5)
    # Ranks 1.5, 1.5, 3 against 1, 2, 3: cov 1.5 / sqrt(1.5 * 2).
    assert rank_correlation([5.0, 5.0, 7.0], [1.0, 2.0, 3.0]) == pytest.approx(1.5 / 3**0.5, abs=1e-5)


def test_the_interval_is_the_bootstrap_of_numpy():
    """Each resample is a mean over its own targets."""
    rng = np.random.default_rng(0)
    targets = torch.tensor(rng.integers(4, 12, 40).astype(float))
    before = Losses(torch.tensor(rng.normal(3, 1, 40)) * targets, targets)
    after = Losses(before.nats + torch.tensor(rng.normal(0.2, 0.5, 40)) * targets, targets)
    change = after.change_from(before, 20_000)
    draws = np.random.default_rng(2).integers(40, size=(20_000, 40))
    means = (after.nats - before.nats).numpy()[draws].sum(1) / targets.numpy()[draws].sum(1)
    expected = np.quantile(means, [0.025, 0.975])
    assert [change.low, change.high] == pytest.approx(expected, abs=0.04 * np.ptp(expected))
    assert change.mean == pytest.approx(float((after.nats - before.nats).sum() / targets.sum()))
    assert after.change_from(before, 50) == after.change_from(before, 50)
    # A change of a tenth of a nat at every target is one in every resample, however long its windows are.
    change = Losses(0.1 * targets**3, targets**3).change_from(Losses(0 * targets, targets**3), 50)
    assert (change.mean, change.low, change.high) == pytest.approx((0.1, 0.1, 0.1))


# Circuits: heads that are found by their measures.


def scores(context, heads):
    """Loss and accuracy with the gates of some heads at 0, by the definition."""
    inputs, targets = (torch.cat([batch[name] for batch in context.batches]) for name in ("inputs", "targets"))
    with torch.no_grad(), gated(context.network, heads):
        logits = context.network(inputs, CAUSAL)
    loss = -logits.log_softmax(dim=-1).gather(-1, targets.unsqueeze(-1)).mean()
    return pytest.approx([loss.item(), (logits.argmax(dim=-1) == targets).float().mean().item()], rel=1e-5)


def test_the_found_heads_are_kept_alone_and_ablated(tmp_path):
    context = make_context(loud_transformer(num_kv_heads=2))
    tokens = repeated_tokens(50, 5, 3, TOKENIZER, seed=3)
    measures = {name: (MEASURES | PATTERNS)[name] for name in ("induction", "self")}
    expected = measure_layers(measures, capture_weights(context.network, tokens, CAUSAL), tokens)
    values = {name: [value for layer in layers for value in layer] for name, layers in expected.items()}
    least = {name: sorted(of_heads)[-2] - 1e-6 for name, of_heads in values.items()}  # two heads by each measure
    found = [head for i, head in enumerate(context.heads) if any(values[name][i] >= least[name] for name in least)]
    others = [head for head in context.heads if head not in found]
    assert 2 <= len(found) <= 4

    # The period is 3, half of a window after its first token.
    result = HeadCircuit(least, num_sequences=5, period=9, num_draws=3, seed=3)(context, tmp_path)
    heads = columns_of(result.tables["circuit_heads"])
    assert [head for head, is_found in zip(context.heads, heads["found"], strict=True) if is_found] == found
    assert heads["induction"] == pytest.approx(values["induction"], rel=1e-5)
    rows = {tuple(row[:2]): row[2:] for row in result.tables["circuit"][1]}
    for name, removed in (("all heads", []), ("circuit alone", others), ("without circuit", found)):
        assert rows[name, None][1:] == scores(context, removed)
    assert len({tuple(rows["random heads alone", draw]) for draw in range(3)}) > 1
    for draw in range(3):
        assert rows["random heads alone", draw][0] == len(found)
        assert rows["without random heads", draw][0] == len(others)


# Padding takes no part in what replaces a head, nor in measures.


def context_of(rows, task, readout, **options):
    """The rows of a data set in two batches."""
    torch.manual_seed(0)
    network = loud(Transformer(make_encoder(num_layers=2, **options), readout=readout))
    half = len(rows) // 2
    batches = [rows.__getitems__(list(part)) for part in (range(half), range(half, len(rows)))]
    return AnalysisContext(network, batches, task, TOKENIZER, nullcontext, lambda: network, lambda network, path: None)


def windows():
    split = split_of([8, 3, 14, 5])
    # A head that is ablated already stays at zero in every mode.
    return context_of(Windows(split, 8, "document"), CausalLM(), TokenReadout, ablated_heads=[[1, 0]])


def examples(lengths=(3, 7, 12, 1, 5)):
    lengths = np.array(lengths)
    ids = torch.randint(2, 50, (lengths.sum(),), generator=torch.Generator().manual_seed(0)).numpy().astype(np.uint16)
    offsets = np.concatenate([[0], lengths.cumsum()])
    split = LabelledSplit(ids, offsets, np.arange(len(lengths)) % 2, ["a", "b"], TOKENIZER, 0, 0, 0)
    return context_of(Examples(split), Classification(["a", "b"]), partial(ClassReadout, labels=["a", "b"]))


@torch.no_grad()
def outputs_of(context, row):
    """The outputs of the heads of each layer for a row, `heads seq v_head_dim`."""
    outputs, gates = [], [layer.head_gate for layer in context.layers]
    hooks = [gate.register_forward_pre_hook(lambda gate, args: outputs.append(args[0][0])) for gate in gates]
    context.task.forward(context.network, row)
    for hook in hooks:
        hook.remove()
    return outputs


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", [windows, examples, lambda: pair_context(loud_encoder_decoder())])
@torch.no_grad()
def test_what_replaces_a_head_of_rows_without_padding(make, mode):
    context = make()
    batches = [list(rows_of(batch)) for batch in context.batches]
    outputs = [[outputs_of(context, row) for row in rows] for rows in batches]
    for index, layer in enumerate(context.layers):
        (found,) = losses_without(context, [[(index, 1)]], mode)
        expected, of_head = [], [[of_row[index][1] for of_row in of_batch] for of_batch in outputs]
        mean = torch.cat([own for of_batch in of_head for own in of_batch]).mean(dim=0)
        for rows, of_batch in zip(batches, of_head, strict=True):
            lengths = torch.tensor([len(own) for own in of_batch])
            positions = resampled_positions(lengths.roll(1), int(lengths.max()))
            for number, (row, own) in enumerate(zip(rows, of_batch, strict=True)):
                other = {
                    "zero": torch.zeros_like(own),
                    "mean": mean.expand_as(own),
                    # An index behind the tokens of the row before would raise.
                    "resample": of_batch[number - 1][positions[number, : len(own)]],
                }[mode]
                hook = layer.o_proj.register_forward_pre_hook(
                    lambda module, args, other=other: torch.cat([args[0][..., :8], other[None], args[0][..., 16:]], -1)
                )
                expected.append(context.task.nats(context.network, row)[0])
                hook.remove()
        torch.testing.assert_close(found.nats, torch.cat(expected).to(found.nats), rtol=1e-4, atol=1e-4)
        assert abs(found.mean - context.losses().mean) > 1e-4


def test_measures_are_those_of_rows_without_padding(tmp_path):
    context = examples((3, 7, 12, 3, 3, 1, 5))
    rows = all_rows(context)
    maps = [capture_weights(context.network, row["inputs"], AttentionMask()) for row in rows]
    measures = [measure_layers(MEASURES, *each) for each in zip(maps, (row["inputs"] for row in rows), strict=True)]
    table = columns_of(HeadMaps(importance=False)(context, tmp_path).tables["maps"])
    # Rows of one length are measured together, and share the head that is most similar.
    for name in MEASURES.keys() - {"similarity", "offset", "offset_share", "segment_vertical"}:  # rows are too short
        values = torch.tensor([found[name] for found in measures]).flatten(1)
        expected = values.amax(dim=0) if name == "largest_logit" else values.nanmean(dim=0)
        torch.testing.assert_close(torch.tensor(table[name]), expected, msg=name)


def test_a_head_of_two_softmaxes_has_the_larger_measure(tmp_path):
    network = loud_transformer()
    network.encoder.layers[1].attention = DifferentialAttention(32, 4, layer_index=1)
    tokens = repeated_tokens(50, 16, 3, TOKENIZER, seed=0)
    maps = measure_layers({"self": MEASURES["self"]}, capture_weights(network, tokens, CAUSAL), tokens)["self"]
    larger = maps[0] + [max(maps[1][2 * head : 2 * head + 2]) for head in range(4)]
    heads = columns_of(HeadCircuit({"self": 1e-6})(make_context(network), tmp_path).tables["circuit_heads"])
    assert heads["self"] == pytest.approx(larger, rel=1e-5)
