"""Pruning heads one after the other, and the smaller checkpoint."""

from functools import partial

import pytest
import torch
from nn.variants import D_MODEL, network
from torch import nn

from analysis.contexts import SHARINGS, columns_of, loud_encoder_decoder, loud_transformer, make_context, pair_context
from tinyformer.analysis import HeadPruning
from tinyformer.analysis.removal.ablation import gated
from tinyformer.analysis.removal.pruning import ORDERS, pruning_order
from tinyformer.checkpoint.file import Checkpoint, load_checkpoint, load_weights, save_network
from tinyformer.errors import ArgumentError
from tinyformer.nn import Attention, prune_heads


def save(network, path):
    overrides = {"model.pruned_heads": network.pruned_heads()}
    save_network(path, network, Checkpoint(path, {}, {}, "{}", {"precision": "32-true"}, 7), overrides)


def prune(network, folder, context_of=make_context, **settings):
    context = context_of(network, save_pruned=save)
    return context, HeadPruning(**settings)(context, folder)


def test_heads_are_ordered_by_score_and_each_layer_keeps_its_best():
    network = loud_transformer()
    context, scores = make_context(network), [0.1, 0.3, 0.2, 0.4, 5.0, 6.0, 8.0, 7.0]
    assert pruning_order(context, dict(zip(context.heads, scores, strict=True))) == [
        (0, 0),
        (0, 2),
        (0, 1),
        (1, 0),
        (1, 1),
        (1, 3),
    ]
    prune_heads(network.attentions()[0], [0, 1, 3])
    # The only head of a layer stays, even with the lowest score.
    scores = {(0, 0): -9.0, (1, 0): 2.0, (1, 1): 1.0, (1, 2): 4.0, (1, 3): 3.0}
    assert pruning_order(make_context(network), scores) == [(1, 1), (1, 0), (1, 3)]


@pytest.mark.parametrize("order", ORDERS)
def test_the_curve_is_the_loss_without_the_first_heads(tmp_path, order):
    settings = {"fraction": 0.4, "order": order, "seed": 3, "random_orders": 2}
    context, found = prune(loud_transformer(num_kv_heads=2), tmp_path, **settings)
    ranked = pruning_order(context, ORDERS[order](context, 3))
    curve = columns_of(found.tables["prune"])
    assert curve["pruned"] == tuple(range(7))
    assert curve["left"] == (8, 7, 6, 5, 4, 3, 2)
    assert curve["loss"][0] == found.scalars["analysis/loss"] == context.losses().mean
    with gated(context.network, ranked[:3]):
        assert curve["loss"][3] == found.scalars["analysis/pruned_loss"] == context.losses().mean
    assert len(set(curve["loss"])) == 7
    # Random orders to compare with, and the model that is saved.
    other = pruning_order(context, ORDERS["random"](context, 5))
    with gated(context.network, other[:3]):
        assert curve["loss_random_5"][3] == context.losses().mean
    drawn = {line.get_label(): line.get_xydata().tolist() for line in found.figures["prune"].axes[0].lines}
    assert list(drawn) == ["random, seed 4", "random, seed 5", order, "pruned.ckpt, 5 heads"]
    assert drawn[order] == [list(point) for point in zip(curve["left"], curve["loss"], strict=True)]
    assert drawn["pruned.ckpt, 5 heads"] == [[5, curve["loss"][3]]]
    assert HeadPruning(order=order).needs_gradient is (order == "importance")


@pytest.mark.parametrize("num_kv_heads", SHARINGS.values(), ids=SHARINGS)
@pytest.mark.parametrize("is_pair", [False, True], ids=["windows", "pairs"])
@torch.no_grad()
def test_the_checkpoint_computes_the_gated_model(tmp_path, num_kv_heads, is_pair):
    make, context_of = (loud_encoder_decoder, pair_context) if is_pair else (loud_transformer, make_context)
    network = make(num_kv_heads=num_kv_heads)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    context, found = prune(network, tmp_path, context_of, fraction=0.6, order="oracle")
    checkpoint = load_checkpoint(tmp_path / "pruned.ckpt")
    assert (checkpoint.step, checkpoint.facts) == (7, {"precision": "32-true"})
    heads = checkpoint.overrides["model.pruned_heads"]
    assert len(heads) == (10 if is_pair else 5)
    assert ", ".join(f"[{','.join(map(str, head))}]" for head in heads) in found.lines["pruned"]
    smaller = make(seed=1, num_kv_heads=num_kv_heads, pruned_heads=heads)
    load_weights(smaller, checkpoint)
    with gated(network, [network.find_head("heads", head) for head in heads]):
        expected = context.losses()
    assert found.scalars["analysis/pruned_loss"] == pytest.approx(expected.mean)
    torch.testing.assert_close(context_of(smaller).losses().nats, expected.nats, rtol=1e-5, atol=1e-5)
    assert (context.losses().nats - expected.nats).abs().max() > 0.01
    size = smaller.num_parameters()
    assert found.scalars["analysis/pruned_num_parameters"] == size < found.scalars["analysis/num_parameters"]
    assert found.scalars["analysis/pruned_num_bytes"] == 4 * size
    # The analysed model itself is left whole.
    assert network.pruned_heads() == []
    assert all(layer.head_gate.factors is None for layer in network.attentions())
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())


class Scaled(Attention):
    """A parameter whose second axis is the head."""

    def __init__(self, *sizes, **options):
        super().__init__(*sizes, **options)
        self.factors = nn.Parameter(torch.rand(1, self.num_heads, 1, 1))

    def transform_queries(self, q):
        return super().transform_queries(q) * self.factors[:, : q.shape[1]]


@pytest.mark.parametrize(
    ("make", "fraction", "message"),
    [
        (loud_transformer, 0.9, "fraction=0.9: is 7 of 8 heads; 1 to 6 heads can be pruned"),
        (loud_transformer, 0.01, "fraction=0.01: is 0 of 8 heads"),
        (partial(loud_transformer, qk_norm="projection"), 0.4, "qk_norm='projection': divides all heads by"),
        (
            partial(network, partial(Scaled, D_MODEL, 4)),
            0.4,
            "attention='Scaled': computes other outputs with pruned heads",
        ),
    ],
)
def test_what_cannot_be_pruned_is_named(tmp_path, make, fraction, message):
    with pytest.raises(ArgumentError, match=f"^{message}"):
        prune(make(), tmp_path, fraction=fraction)
    assert not list(tmp_path.iterdir())
