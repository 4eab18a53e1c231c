"""Heads taken away: what stands in for them, and what is said of the loss."""

from contextlib import suppress
from pathlib import Path

import pytest
import torch

from analysis.subjects import SHARINGS, columns_of, loud_transformer, make_subject
from tinyformer.analysis import HeadAblation
from tinyformer.analysis.ablation import MODES, ablated, head_changes, kv_groups, losses_without, mean_outputs
from tinyformer.nn import prune_heads


def fail():
    raise ZeroDivisionError


def factors(layer):
    gate = layer.head_gate
    return None if gate.factors is None else gate.factors.tolist()


def heads_into(o_proj, change):
    """Change the heads' outputs, `batch seq heads v_head_dim`, where the output projection takes them."""
    return o_proj.register_forward_pre_hook(lambda module, args: (change(args[0].unflatten(-1, (4, -1))).flatten(-2),))


# Taking heads away.


def test_what_was_taken_away_comes_back():
    layer = loud_transformer().attentions()[0]
    with suppress(ZeroDivisionError), ablated(layer, [1], lambda heads: heads):
        assert factors(layer) == [1, 0, 1, 1]
        fail()
    assert factors(layer) is None
    assert layer.head_gate.replacement is None


def test_blocks_within_blocks_take_more_away():
    layer = loud_transformer(ablated_heads=[[0, 3]]).attentions()[0]
    with ablated(layer, [0]):
        with ablated(layer, [1, 2]):
            assert factors(layer) == [0, 0, 0, 0]
        assert factors(layer) == [0, 1, 1, 0]
    assert factors(layer) == [1, 1, 1, 0]


@pytest.mark.parametrize("backend", ["eager", "sdpa", "flash"])
@pytest.mark.parametrize("num_kv_heads", SHARINGS.values(), ids=SHARINGS)
def test_without_a_head_is_without_its_part_of_the_projection(backend, num_kv_heads):
    network = loud_transformer(num_kv_heads=num_kv_heads, backend=backend)
    subject = make_subject(network)
    base = subject.losses().mean
    for index, layer in enumerate(network.attentions()):
        for head in range(4):
            (found,) = losses_without(subject, [(index, [head])])
            weight = layer.o_proj.weight.detach().clone()
            with torch.no_grad():
                layer.o_proj.weight[:, 8 * head : 8 * head + 8] = 0
            expected = subject.losses()
            with torch.no_grad():
                layer.o_proj.weight.copy_(weight)
            torch.testing.assert_close(found.nats, expected.nats, rtol=1e-5, atol=1e-5)
            assert abs(expected.mean - base) > 1e-3
    assert subject.losses().mean == base


def test_the_mean_of_each_head_over_all_tokens():
    subject, seen = make_subject(loud_transformer(), num_windows=5, batch_size=3), [[], []]
    hooks = [
        heads_into(layer.o_proj, lambda heads, kept=kept: kept.append(heads) or heads)
        for layer, kept in zip(subject.layers, seen, strict=True)
    ]
    found = mean_outputs(subject)
    for hook in hooks:
        hook.remove()
    for mean, batches in zip(found, seen, strict=True):
        assert mean.shape == (4, 1, 8)
        torch.testing.assert_close(mean[:, 0], torch.cat(batches).mean(dim=(0, 1)))
    assert not any(layer.head_gate._forward_pre_hooks for layer in subject.layers)


@pytest.mark.parametrize("mode", MODES)
def test_what_stands_in_for_a_head(mode):
    subject = make_subject(loud_transformer(), num_windows=6, batch_size=3)
    layer, means = subject.layers[1], mean_outputs(subject)[1][:, 0]
    stand_in = {
        "zero": torch.zeros_like,
        "mean": means[2].expand_as,
        "resample": lambda head: head[[2, 0, 1]],
    }[mode]

    def replaced(heads):
        return torch.stack([stand_in(heads[:, :, h]) if h == 2 else heads[:, :, h] for h in range(4)], dim=2)

    hook = heads_into(layer.o_proj, replaced)
    expected = subject.losses()
    hook.remove()
    (found,) = losses_without(subject, [(1, [2])], mode)
    torch.testing.assert_close(found.nats, expected.nats, rtol=1e-5, atol=1e-5)
    assert abs(found.mean - subject.losses().mean) > 1e-3


def test_a_window_alone_has_no_other_to_take_from():
    subject = make_subject(loud_transformer(), num_windows=4, batch_size=3)
    with pytest.raises(ValueError, match=r"^analysis.mode=resample .* data.batch_size=8 .* works"):
        HeadAblation("resample")(subject, Path())


# Groups that share a K/V head.


@pytest.mark.parametrize(
    ("num_kv_heads", "pruned", "groups"),
    [
        (4, [], [[0], [1], [2], [3]]),
        (2, [], [[0, 1], [2, 3]]),
        (1, [], [[0, 1, 2, 3]]),
        (2, [1], [[0], [1, 2]]),
        (2, [0, 1], [[0, 1]]),
        (1, [2], [[0, 1, 2]]),
    ],
)
def test_the_readers_of_each_kv_head(num_kv_heads, pruned, groups):
    (layer,) = loud_transformer(1, num_kv_heads=num_kv_heads).attentions()
    prune_heads(layer, pruned)
    assert kv_groups(layer) == groups


# What is said.


def test_the_table_says_what_each_head_does():
    network = loud_transformer(num_kv_heads=2)
    subject = make_subject(network)
    found = HeadAblation(num_resamples=200)(subject, Path())
    base, table = subject.losses(), columns_of(found.tables["heads"])
    assert table["layer"] == (0, 0, 0, 0, 1, 1, 1, 1)
    assert table["head"] == (0, 1, 2, 3, 0, 1, 2, 3)
    assert table["kv_head"] == (0, 0, 1, 1, 0, 0, 1, 1)
    assert table["change"] == pytest.approx(head_changes(subject))
    expected = [losses.change_from(base, 200) for losses in losses_without(subject, [(0, [1]), (1, [3])])]
    assert (table["low"][1], table["high"][7]) == (expected[0].low, expected[1].high)
    assert [a - b for a, b in zip(table["loss"], table["change"], strict=True)] == pytest.approx([base.mean] * 8)
    assert found.scalars == {"analysis/loss": base.mean}
    groups = columns_of(found.tables["kv_groups"])
    assert groups["heads"] == ("0 1", "2 3", "0 1", "2 3")
    (third,) = losses_without(subject, [(1, [0, 1])])
    assert groups["change"][2] == pytest.approx(third.mean - base.mean)
    order = sorted(zip(table["change"], table["layer"], table["head"], strict=True), reverse=True)
    assert [line for line in found.lines if "head" in line] == [f"  layer {i} head {h}" for _, i, h in order[:5]]
    assert f"{order[0][0]:+.4f} [" in list(found.lines.values())[1]


def test_heads_keep_their_numbers_when_others_are_pruned():
    network = loud_transformer(num_kv_heads=2)
    prune_heads(network.attentions()[0], [1])
    found = HeadAblation(num_resamples=2)(make_subject(network), Path())
    assert columns_of(found.tables["heads"])["head"] == (0, 2, 3, 0, 1, 2, 3)
    assert columns_of(found.tables["kv_groups"])["heads"] == ("2 3", "0 1", "2 3")


def test_heads_that_share_nothing_are_no_groups():
    assert set(HeadAblation(num_resamples=2)(make_subject(loud_transformer()), Path()).tables) == {"heads"}


def test_a_head_that_says_nothing_changes_nothing():
    network = loud_transformer()
    with torch.no_grad():
        network.attentions()[1].o_proj.weight[:, 16:24] = 0
    changes = head_changes(make_subject(network))
    assert changes[6] == 0
    assert all(change != 0 for index, change in enumerate(changes) if index != 6)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"mode": "nil"}, "analysis.mode=nil: choose one of zero, mean, resample."),
        ({"num_windows": 0}, "analysis.num_windows=0: at least one, analysis.num_windows=32 works."),
        ({"num_resamples": -1}, "analysis.num_resamples=-1: at least one, analysis.num_resamples=1000 works."),
    ],
)
def test_what_cannot_be_is_refused(arguments, said):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        HeadAblation(**arguments)
    assert str(caught.value) == said


@pytest.mark.parametrize("mode", ["mean", "resample"])
def test_nothing_stands_in_for_a_head_that_was_away_before(mode):
    subject = make_subject(loud_transformer(ablated_heads=[[0, 1]]))
    away = subject.network.attentions()[0]
    (losses,) = losses_without(subject, [(0, [2])], mode)
    with torch.no_grad():
        away.v_proj.weight.unflatten(0, (4, -1))[1].zero_()  # whatever the absent head says
    (unmoved,) = losses_without(subject, [(0, [2])], mode)
    torch.testing.assert_close(unmoved.nats, losses.nats)
