"""The dynamics of training over three snapshots, beside what NumPy computes of one head, and of any model."""

import numpy as np
import pytest
import torch
from nn.model_cases import make_encoder_decoder

from analysis.contexts import all_rows, columns_of, loud_transformer, make_context, pair_context
from analysis.over_training.test_events import of_steps
from analysis.over_training.test_similarity import hsic
from tinyformer.analysis import TrainingDynamics
from tinyformer.errors import ArgumentError
from tinyformer.nn import prune_heads


def values_of(found, name, head, measure):
    table = columns_of(found.tables["dynamics"])
    names = zip(table["name"], table["head"], table["measure"], table["step"], table["value"], strict=True)
    return {step: value for *at, step, value in names if at == [name, head, measure]}


def outputs(network, context, layer, head):
    """The outputs of a head for each row by itself, without padding."""
    found = []
    hook = network.attentions()[layer].head_gate.register_forward_hook(lambda *args: found.append(args[2][0, head]))
    with hook, torch.no_grad():
        for row in all_rows(context):
            network(row["inputs"], context.task.mask(row))
    return torch.cat(found)


def circuit(network):
    """OV of the last head of the first layer, which reads the second of two K/V heads."""
    layer = network.attentions()[0]
    return (layer.o_proj.weight[:, 24:].double() @ layer.v_proj.weight[8:].double()).detach().numpy()


def test_the_values_of_a_head_are_those_of_numpy():
    networks = {step: loud_transformer(seed=step, num_kv_heads=2).double() for step in (0, 1, 5)}
    context = of_steps(networks, make_context(networks[5], padded=True))
    found = TrainingDynamics()(context)
    x = {step: outputs(network, context, 0, 3) for step, network in networks.items()}
    for other, others in {"last": {0: 5, 1: 5, 5: 5}, "previous": {1: 0, 5: 1}}.items():
        pairs = {step: (x[step], x[of]) for step, of in others.items()}
        expected = {step: float(hsic(a, b) / (hsic(a, a) * hsic(b, b)).sqrt()) for step, (a, b) in pairs.items()}
        values = values_of(found, "layers.0.attention.output_by_head", "3", f"cka_to_{other}")
        assert values == pytest.approx(expected, abs=1e-6)
    for step, network in networks.items():
        before = circuit(network)
        losses = [context.task.nats(network, batch) for batch in context.batches]
        (sum(nats.sum() for nats, _ in losses) / sum(targets.sum() for _, targets in losses)).backward()
        torch.optim.SGD(network.parameters(), lr=1e-7).step()
        for prefix, matrix in {"": before, "gradient_": (before - circuit(network)) / 1e-7}.items():
            norm, sizes = np.linalg.norm(matrix), np.linalg.svd(matrix)[1]
            for measure, value in {"norm": norm, "rank": norm**4 / (sizes**4).sum()}.items():
                values = values_of(found, "layers.0.attention.OV", "3", prefix + measure)
                assert values[step] == pytest.approx(value, rel=1e-4), prefix + measure


def test_what_no_longer_changes_has_settled():
    first, last = loud_transformer(seed=1), loud_transformer(seed=2)
    found = TrainingDynamics(gradients=False, weights="*.OV")(
        of_steps({0: first, 8: last, 16: last}, make_context(last))
    )
    assert found.lines["  residual_post"] == "all at 8"
    assert found.scalars["analysis/settled/residual_post"] == 8
    (axes,) = found.figures["dynamics_norm"].axes
    for at, line in enumerate(axes.lines[:8]):
        values = values_of(found, f"layers.{at // 4}.attention.OV", str(at % 4), "norm")
        assert line.get_xydata().tolist() == [*map(list, values.items())]


def test_points_and_matrices_of_an_encoder_decoder_have_addresses():
    networks = {step: make_encoder_decoder(std=0.1 * step) for step in (1, 2)}
    for network in networks.values():
        prune_heads(network.attentions()[-1], [2])
    points, weights = ["*cross_attention.*_by_head", "encoder.*.keys", "logits"], ["*QK", "encoder.*_proj"]
    dynamics = TrainingDynamics(points, weights, gradients=False)
    table = columns_of(dynamics(of_steps(networks, pair_context(networks[2]))).tables["dynamics"])
    rows = set(zip(table["kind"], table["layer"], table["head"], table["name"], strict=True))
    for name in ("cross_attention.output_by_head", "cross_attention.QK"):
        assert {row[:3] for row in rows if row[3] == f"decoder.layers.1.{name}"} == {("cross", 1, at) for at in "013"}
    assert rows > {("encoder", 0, "", "encoder.layers.0.feed_forward.up_proj"), ("", "", "", "logits")}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": ["*.OX"]}, "weights='\\*.OX': matches no point; there are .* and others"),
        ({"measures": ["cca"]}, "measures='cca': must be one of cka, rank, norm"),
        ({}, "compares snapshots, and this run has 1; train with callbacks.snapshots.every_n_steps"),
    ],
)
def test_what_is_not_there_is_refused(options, message):
    context = make_context(network := loud_transformer())
    with pytest.raises(ArgumentError, match=message):
        TrainingDynamics(**options)(of_steps({0: network, 1: network} if options else {0: network}, context))
