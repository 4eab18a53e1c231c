"""Heads that go one after the other, and the checkpoint of what is left."""

import pytest
import torch
from nn.model_cases import make_encoder, token_ids

from analysis.subjects import SHARINGS, columns_of, loud_transformer, make_subject
from tinyformer.analysis import HeadPruning
from tinyformer.analysis.ablation import head_changes
from tinyformer.analysis.importance import head_importance
from tinyformer.analysis.pruning import ORDERS, gated, pruning_order
from tinyformer.checkpoint import Checkpoint, load_checkpoint, load_weights, save_network
from tinyformer.nn import AttentionMask, TokenReadout, Transformer, prune_heads

CAUSAL = AttentionMask(causal=True)


def saving(path, network):
    config = {"model": {"pruned_heads": network.pruned_heads()}}
    save_network(path, network, Checkpoint(path, {}, {}, "{}", {"precision": "32-true"}, 7), config)


def prune(network, folder, **settings):
    """The findings, and the checkpoint."""
    subject = make_subject(network, save_pruned=lambda pruned, path: saving(path, pruned))
    return subject, HeadPruning(**settings)(subject, folder)


# The order.


def test_a_layer_keeps_its_last_head():
    subject = make_subject(loud_transformer())
    worth = [0.1, 0.3, 0.2, 0.4, 5.0, 6.0, 8.0, 7.0]
    assert pruning_order(subject, worth) == [(0, 0), (0, 2), (0, 1), (1, 0), (1, 1), (1, 3)]


def test_the_last_head_stays_though_it_is_worth_least():
    network = loud_transformer()
    prune_heads(network.attentions()[0], [0, 1, 3])
    assert pruning_order(make_subject(network), [-9.0, 2.0, 1.0, 4.0, 3.0]) == [(1, 1), (1, 0), (1, 3)]


def test_what_a_head_is_worth():
    subject = make_subject(loud_transformer())
    assert ORDERS["importance"](subject, 0) == head_importance(subject)
    assert ORDERS["oracle"](subject, 0) == head_changes(subject)
    drawn = [ORDERS["random"](subject, seed) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(set(drawn[0])) == 8


# The curve.


@pytest.mark.parametrize("order", ORDERS)
def test_the_curve_is_the_loss_without_the_first_heads(tmp_path, order):
    subject, found = prune(loud_transformer(num_kv_heads=2), tmp_path, fraction=0.4, order=order, seed=3)
    ranked = pruning_order(subject, ORDERS[order](subject, 3))
    curve = columns_of(found.tables["prune"])
    assert curve["pruned"] == tuple(range(7))
    assert curve["left"] == (8, 7, 6, 5, 4, 3, 2)
    assert curve["loss"][0] == found.scalars["analysis/loss"] == subject.losses().mean
    with gated(subject.network, ranked[:3]):
        assert curve["loss"][3] == found.scalars["analysis/pruned_loss"] == subject.losses().mean
    assert len(set(curve["loss"])) == 7
    assert found.scalars["analysis/num_pruned"] == 3
    names = ", ".join(f"[{layer},{head}]" for layer, head in sorted(ranked[:3]))
    assert found.lines["pruned"] == f"3 of 8 heads, by {order}: {names}"


def test_many_heads_make_a_curve_of_few_points(tmp_path):
    _, found = prune(loud_transformer(num_heads=16, d_model=32), tmp_path, fraction=0.19)
    assert columns_of(found.tables["prune"])["pruned"] == (0, 2, 4, 6, 8, 9, 11, 13, 15, 17, 19, 21, 22, 24, 26, 28, 30)


# The smaller checkpoint.


@pytest.mark.parametrize("num_kv_heads", SHARINGS.values(), ids=SHARINGS)
def test_the_checkpoint_is_the_gated_model(tmp_path, num_kv_heads):
    subject, found = prune(loud_transformer(num_kv_heads=num_kv_heads), tmp_path, fraction=0.6, order="oracle")
    assert found.files == [tmp_path / "pruned.ckpt"]
    checkpoint = load_checkpoint(found.files[0])
    assert (checkpoint.step, checkpoint.facts) == (7, {"precision": "32-true"})
    pruned = checkpoint.config["model"]["pruned_heads"]
    assert len(pruned) == 5
    again = Transformer(make_encoder(num_kv_heads=num_kv_heads), TokenReadout, pruned_heads=pruned).eval()
    load_weights(again, checkpoint)
    tokens = token_ids(4, 16, seed=9)
    with torch.no_grad():
        smaller = again(tokens, CAUSAL)
        with gated(subject.network, [tuple(pair) for pair in pruned]):
            expected = subject.network(tokens, CAUSAL)
    assert (smaller - expected).abs().max() < 1e-5 * expected.abs().max()
    assert (expected - subject.network(tokens, CAUSAL)).abs().max() > 0.01
    size = sum(parameter.numel() for parameter in again.parameters())
    assert found.scalars["analysis/pruned_num_parameters"] == size < found.scalars["analysis/num_parameters"]
    assert found.scalars["analysis/pruned_num_bytes"] == 4 * size
    assert not list(tmp_path.glob("*.partial"))


def test_the_model_itself_stays_whole(tmp_path):
    network = loud_transformer()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    prune(network, tmp_path, fraction=0.5)
    assert network.pruned_heads() == []
    assert all(layer.head_gate.factors is None for layer in network.attentions())
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())


def test_a_pruned_model_that_differs_from_the_gated_is_not_saved(tmp_path, monkeypatch):
    def other_heads(layer, heads):
        prune_heads(layer, [3 - head for head in heads])

    monkeypatch.setattr("tinyformer.analysis.pruning.prune_heads", other_heads)
    with pytest.raises(AssertionError, match="differs from the gated one by"):
        prune(loud_transformer(), tmp_path, fraction=0.2)
    assert not list(tmp_path.iterdir())


def test_a_pruned_model_can_lose_more(tmp_path):
    network = loud_transformer(num_kv_heads=2)
    prune_heads(network.attentions()[1], [2])
    _, found = prune(network, tmp_path, fraction=0.7, order="random", seed=1)
    pruned = load_checkpoint(found.files[0]).config["model"]["pruned_heads"]
    assert len(pruned) == 6
    assert [1, 2] in pruned
    assert [1, 3] in pruned  # the third of those that are left
    assert "[1,2]" not in found.lines["pruned"]


# What cannot be.


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"order": "nil"}, "analysis.order=nil: choose one of importance, oracle, random."),
        ({"fraction": 0}, "analysis.fraction=0 is no part of the heads; analysis.fraction=0.4 is."),
        ({"fraction": 1}, "analysis.fraction=1 is no part of the heads; analysis.fraction=0.4 is."),
        ({"fraction": -0.1}, "analysis.fraction=-0.1 is no part of the heads; analysis.fraction=0.4 is."),
        ({"num_windows": 0}, "analysis.num_windows=0: at least one, analysis.num_windows=32 works."),
        ({"fraction": 0.9}, "analysis.fraction=0.9 of 8 heads is 7, and from 1 to 6 can go"),
        ({"fraction": 0.01}, "analysis.fraction=0.01 of 8 heads is 0, and from 1 to 6 can go"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, settings, said):
    with pytest.raises(ValueError, match=r"^analysis\.") as caught:
        prune(loud_transformer(), tmp_path, **settings)
    assert str(caught.value).startswith(said)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("fraction", "works", "count"), [(0.99, "0.75", 6), (0.01, "0.125", 1)])
def test_the_fraction_that_is_named_works(tmp_path, fraction, works, count):
    with pytest.raises(ValueError, match=f"analysis.fraction={works} works"):
        prune(loud_transformer(), tmp_path, fraction=fraction)
    _, found = prune(loud_transformer(), tmp_path, fraction=float(works))
    assert found.scalars["analysis/num_pruned"] == count


def test_layers_of_one_head_keep_it(tmp_path):
    with pytest.raises(ValueError, match="each layer of this model has one"):
        prune(loud_transformer(num_heads=1), tmp_path)


@pytest.mark.parametrize(("order", "goes_back"), [("importance", True), ("oracle", False), ("random", False)])
def test_only_the_gradient_needs_gradients(order, goes_back):
    assert HeadPruning(order=order).needs_gradient is goes_back
