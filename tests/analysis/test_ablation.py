"""Ablated heads: what replaces their output, and the reported change of the loss."""

from contextlib import suppress
from pathlib import Path

import pytest
import torch

from analysis.subjects import SHARINGS, columns_of, loud_transformer, make_subject
from tinyformer.analysis import HeadAblation, HeadCircuit, HeadImportance, HeadPruning
from tinyformer.analysis.ablation import MODES, ablated, head_changes, losses_without, mean_outputs
from tinyformer.nn import prune_heads


def factors(layer):
    gate = layer.head_gate
    return None if gate.factors is None else gate.factors.tolist()


def change_inputs(o_proj, change):
    """Change the heads' outputs, `batch seq heads v_head_dim`, at the input of the output projection."""
    return o_proj.register_forward_pre_hook(lambda module, args: (change(args[0].unflatten(-1, (4, -1))).flatten(-2),))


def test_ablated_heads_are_named_and_neither_ranked_nor_pruned(tmp_path):
    subject = make_subject(loud_transformer(ablated_heads=[[0, 1], [1, 3]]))
    expected = [(layer, head) in [(0, 1), (1, 3)] for layer in (0, 1) for head in range(4)]
    for name, analysis in {"ablation": HeadAblation("mean"), "importance": HeadImportance()}.items():
        found = analysis(subject, tmp_path)
        table = columns_of(found.tables[name])
        assert list(table["ablated"]) == expected
        assert [change == 0 for change in table["change"]] == expected
        assert not {"  layer 0 head 1", "  layer 1 head 3"} & set(found.lines)
    found = HeadPruning(0.5, order="oracle", random_orders=0)(subject, tmp_path)
    assert (found.scalars["analysis/num_heads"], found.scalars["analysis/num_pruned"]) == (6, 3)
    assert not any(head in found.lines["pruned"] for head in ("[0,1]", "[1,3]"))
    heads = columns_of(HeadCircuit({"self": 1e-6})(subject, tmp_path).tables["circuit_heads"])
    assert list(zip(heads["layer"], heads["head"], strict=True)) == [(0, 0), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2)]


def test_ablation_ends_with_the_block_and_nests():
    layer = loud_transformer(ablated_heads=[[0, 3]]).attentions()[0]
    with suppress(ZeroDivisionError), ablated(layer, [0], lambda heads: heads):
        with ablated(layer, [1, 2]):
            assert factors(layer) == [0, 0, 0, 0]
        assert factors(layer) == [0, 1, 1, 0]
        raise ZeroDivisionError
    assert factors(layer) == [1, 1, 1, 0]
    assert layer.head_gate.replacement is None


@pytest.mark.parametrize(("backend", "num_kv_heads"), [("eager", 4), ("sdpa", 2), ("flash", 1)])
def test_ablating_a_head_equals_zeroing_its_part_of_the_output_projection(backend, num_kv_heads):
    network = loud_transformer(num_kv_heads=num_kv_heads, backend=backend)
    subject = make_subject(network)
    base = subject.losses().mean
    for index, layer in enumerate(network.attentions()):
        for head in range(4):
            (found,) = losses_without(subject, [[(index, head)]])
            weight = layer.o_proj.weight.detach().clone()
            with torch.no_grad():
                layer.o_proj.weight[:, 8 * head : 8 * head + 8] = 0
                expected = subject.losses()
                layer.o_proj.weight.copy_(weight)
            torch.testing.assert_close(found.nats, expected.nats, rtol=1e-5, atol=1e-5)
            assert abs(expected.mean - base) > 1e-3
    assert subject.losses().mean == base


@pytest.mark.parametrize("mode", MODES)
def test_the_mode_chooses_what_replaces_a_head(mode):
    # Head 0 is ablated already, and stays at zero in every mode.
    subject = make_subject(loud_transformer(ablated_heads=[[1, 0]]), num_windows=6, batch_size=3)
    layer, means = subject.layers[1], mean_outputs(subject)[1][:, 0]
    replacement = {"zero": torch.zeros_like, "mean": means[2].expand_as, "resample": lambda head: head[[2, 0, 1]]}[mode]

    def replaced(heads):
        return torch.stack([replacement(heads[:, :, h]) if h == 2 else heads[:, :, h] for h in range(4)], dim=2)

    hook = change_inputs(layer.o_proj, replaced)
    expected = subject.losses()
    hook.remove()
    (found,) = losses_without(subject, [[(1, 2)]], mode)
    torch.testing.assert_close(found.nats, expected.nats, rtol=1e-5, atol=1e-5)
    assert abs(found.mean - subject.losses().mean) > 1e-3
    # The findings are those of the mode.
    table = columns_of(HeadAblation(mode, num_resamples=2)(subject, Path()).tables["ablation"])
    assert table["loss"][6] == pytest.approx(found.mean)


@pytest.mark.parametrize("num_kv_heads", SHARINGS.values(), ids=SHARINGS)
def test_findings_of_heads_and_groups(num_kv_heads):
    network = loud_transformer(num_kv_heads=num_kv_heads)
    prune_heads(network.attentions()[0], [1])
    subject = make_subject(network)
    found = HeadAblation(num_resamples=200)(subject, Path())
    base, table = subject.losses(), columns_of(found.tables["ablation"])
    assert table["layer"] == (0, 0, 0, 1, 1, 1, 1)
    assert table["head"] == (0, 2, 3, 0, 1, 2, 3)  # a pruned head leaves the numbers of the others alone
    kv_head = {4: (0, 1, 2, 0, 1, 2, 3), 2: (0, 1, 1, 0, 0, 1, 1), 1: (0,) * 7}
    assert table["kv_head"] == kv_head[num_kv_heads]
    assert table["change"] == pytest.approx(head_changes(subject))
    expected = [losses.change_from(base, 200) for losses in losses_without(subject, [[(0, 1)], [(1, 3)]])]
    assert (table["low"][1], table["high"][6]) == (expected[0].low, expected[1].high)
    assert [a - b for a, b in zip(table["loss"], table["change"], strict=True)] == pytest.approx([base.mean] * 7)
    assert found.scalars == {"analysis/loss": base.mean}
    order = sorted(zip(table["change"], table["layer"], table["head"], strict=True), reverse=True)
    assert [line for line in found.lines if "head" in line] == [f"  layer {i} head {h}" for _, i, h in order[:5]]
    groups = {2: ("2 3", "0 1", "2 3"), 1: ("0 2 3", "0 1 2 3")}.get(num_kv_heads)
    assert ("kv_groups" in found.tables) == (groups is not None)
    if groups:
        shared = columns_of(found.tables["kv_groups"])
        assert shared["heads"] == groups
        (last,) = losses_without(subject, [[(1, int(head)) for head in groups[-1].split()]])
        assert shared["change"][-1] == pytest.approx(last.mean - base.mean)
