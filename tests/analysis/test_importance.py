"""The importance of heads by their gradient, against separate passes and finite differences."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from analysis.subjects import columns_of, loud_transformer, make_subject, windows_of
from tinyformer.analysis import HeadImportance
from tinyformer.analysis.ablation import head_changes
from tinyformer.analysis.importance import head_importance, rank_correlation
from tinyformer.nn import prune_heads


def gradients_of_windows(subject):
    """∂L/∂g of each window, by a backward pass of its own through gates of the whole model."""
    found = []
    for window in windows_of(subject):
        gates = [torch.ones(layer.num_heads, requires_grad=True) for layer in subject.layers]
        before = [layer.head_gate.factors for layer in subject.layers]
        for layer, factors, gate in zip(subject.layers, before, gates, strict=True):
            layer.head_gate.factors = gate if factors is None else gate * factors
        nats, targets = subject.nats(subject.network, window)
        (nats / targets).sum().backward()
        for layer, factors in zip(subject.layers, before, strict=True):
            layer.head_gate.factors = factors
        found.append(torch.cat([gate.grad for gate in gates]))
    return torch.stack(found)


@pytest.mark.parametrize("backend", ["eager", "sdpa", "flash"])
def test_it_is_the_mean_over_windows_of_each_ones_gradient(backend):
    subject = make_subject(loud_transformer(num_kv_heads=2, backend=backend), padded=True)
    gradients = gradients_of_windows(subject)
    assert head_importance(subject) == pytest.approx(gradients.abs().mean(0).tolist(), rel=1e-4)
    # Its sign differs between windows, or the test would not tell |mean| from mean |…|.
    assert (gradients.mean(0).abs() < 0.9 * gradients.abs().mean(0)).any()


def test_the_gradient_is_a_difference_of_losses():
    network = loud_transformer(backend="eager").double()
    subject, step = make_subject(network, num_windows=2), 1e-6
    found = torch.zeros(2, 8)
    for index, layer in enumerate(subject.layers):
        for head in range(4):
            ends = []
            for change in (step, -step):
                factors = torch.ones(4, dtype=torch.float64)
                factors[head] += change
                layer.head_gate.factors = factors
                # In fp64: the task's own loss is rounded to fp32.
                with torch.no_grad():
                    logits = [network(w["inputs"], subject.mask(w))[0] for w in windows_of(subject)]
                targets = [window["targets"][0] for window in windows_of(subject)]
                ends.append(
                    torch.stack([torch.nn.functional.cross_entropy(*x) for x in zip(logits, targets, strict=True)])
                )
            layer.head_gate.factors = None
            found[:, 4 * index + head] = (ends[0] - ends[1]) / (2 * step)
    torch.testing.assert_close(gradients_of_windows(subject), found, rtol=1e-4, atol=1e-6)
    assert head_importance(subject) == pytest.approx(found.abs().mean(0).tolist(), rel=1e-4)


def test_it_does_not_depend_on_the_batches():
    network = loud_transformer()
    one, other = (make_subject(network, num_windows=6, batch_size=size) for size in (2, 6))
    assert head_importance(one) == pytest.approx(head_importance(other), rel=1e-4)


def test_it_leaves_nothing_behind():
    network = loud_transformer(ablated_heads=[[1, 2]])
    subject = make_subject(network)
    head_importance(subject)
    assert subject.layers[0].head_gate.factors is None
    assert subject.layers[1].head_gate.factors.tolist() == [1, 1, 0, 1]
    assert all(parameter.grad is None for parameter in network.parameters())


def test_a_failure_leaves_nothing_behind_either():
    subject = make_subject(loud_transformer())

    def fails(network, batch):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        head_importance(replace(subject, nats=fails))
    assert all(layer.head_gate.factors is None for layer in subject.layers)


def test_a_head_that_is_gone_has_none_and_the_others_theirs_without_it():
    network = loud_transformer(ablated_heads=[[1, 2]])
    found = head_importance(make_subject(network))
    assert found[6] == 0
    prune_heads(network.attentions()[1], [2])
    assert found[:6] + found[7:] == pytest.approx(head_importance(make_subject(network)), rel=1e-4)


# Ranks.


@pytest.mark.parametrize(
    ("one", "other", "rho"),
    [
        ([1, 2, 3, 4], [10, 30, 20, 40], 1 - 6 * 2 / (4 * 15)),
        ([1, 2, 3], [1, 10, 100], 1),
        ([1, 2, 3], [3, 2, 1], -1),
        # Ranks 1.5, 1.5, 3 against 1, 2, 3: cov 1.5 / sqrt(1.5 * 2).
        ([5, 5, 7], [1, 2, 3], 1.5 / 3**0.5),
    ],
)
def test_how_alike_two_rank(one, other, rho):
    assert rank_correlation([float(x) for x in one], [float(x) for x in other]) == pytest.approx(rho, abs=1e-5)


def test_one_head_is_not_ranked():
    assert rank_correlation([1.0], [2.0]) is None


# What is said.


def test_the_table_holds_both_and_the_summary_how_alike_they_rank():
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
    assert found.lines["rank correlation"].startswith(f"{rho:.3f} ")
    value, layer, head = max(zip(table["importance"], table["layer"], table["head"], strict=True))
    assert list(found.lines.items())[1] == (f"  layer {layer} head {head}", f"{value:.4f}")


def test_without_the_comparison_no_head_is_taken_away():
    found = HeadImportance(compare=False)(make_subject(loud_transformer()), Path())
    assert found.tables["importance"][0] == ["layer", "head", "importance"]
    assert found.scalars == {}
