"""The importance of heads, against separate backward passes and finite differences."""

from pathlib import Path

import pytest
import torch

from analysis.subjects import columns_of, loud_transformer, make_subject, windows_of
from tinyformer.analysis import HeadImportance
from tinyformer.analysis.ablation import head_changes
from tinyformer.analysis.importance import head_importance, rank_correlation
from tinyformer.nn import prune_heads


def gradients_of_windows(subject):
    """∂L/∂g of each window, by a backward pass of its own."""
    found = []
    for window in windows_of(subject):
        gates = [torch.ones(layer.num_heads, requires_grad=True) for layer in subject.layers]
        for layer, gate in zip(subject.layers, gates, strict=True):
            layer.head_gate.factors = gate
        nats, targets = subject.task.nats(subject.network, window)
        (nats / targets).sum().backward()
        for layer in subject.layers:
            layer.head_gate.factors = None
        found.append(torch.cat([gate.grad for gate in gates]))
    return torch.stack(found)


@pytest.mark.parametrize("backend", ["eager", "sdpa", "flash"])
def test_importance_is_the_mean_absolute_gradient_of_the_windows(backend):
    network = loud_transformer(num_kv_heads=2, backend=backend)
    gradients = gradients_of_windows(make_subject(network, padded=True))
    for batch_size in (2, 4, 6):
        subject = make_subject(network, padded=True, batch_size=batch_size)
        assert head_importance(subject) == pytest.approx(gradients.abs().mean(0).tolist(), rel=1e-4)
    # The sign differs between windows, which tells |mean| from mean |…|.
    assert (gradients.mean(0).abs() < 0.9 * gradients.abs().mean(0)).any()


def test_an_ablated_head_has_no_importance_and_counts_like_a_pruned_one():
    network = loud_transformer(ablated_heads=[[1, 2]])
    found = head_importance(make_subject(network))
    assert found[6] == 0
    prune_heads(network.attentions()[1], [2])
    assert found[:6] + found[7:] == pytest.approx(head_importance(make_subject(network)), rel=1e-4)


@pytest.mark.parametrize(
    ("x", "y", "rho"),
    [
        ([1, 2, 3, 4], [10, 30, 20, 40], 1 - 6 * 2 / (4 * 15)),
        ([1, 2, 3], [1, 10, 100], 1),
        ([1, 2, 3], [3, 2, 1], -1),
        # Ranks 1.5, 1.5, 3 against 1, 2, 3: cov 1.5 / sqrt(1.5 * 2).
        ([5, 5, 7], [1, 2, 3], 1.5 / 3**0.5),
        ([1], [2], None),
    ],
)
def test_rank_correlation(x, y, rho):
    found = rank_correlation([float(value) for value in x], [float(value) for value in y])
    assert found == (rho if rho is None else pytest.approx(rho, abs=1e-5))


def test_findings():
    network = loud_transformer()
    prune_heads(network.attentions()[0], [1])
    subject = make_subject(network)
    found = HeadImportance()(subject, Path())
    table = columns_of(found.tables["importance"])
    assert table["head"] == (0, 2, 3, 0, 1, 2, 3)
    assert table["importance"] == tuple(head_importance(subject))
    assert table["change"] == pytest.approx(head_changes(subject))
    rho = rank_correlation(list(table["importance"]), list(table["change"]))
    assert found.scalars == {"analysis/rank_correlation": rho}
    alone = HeadImportance(compare=False)(subject, Path())
    assert alone.tables["importance"][0] == ["layer", "head", "importance"]
    assert alone.scalars == {}
