"""What analyses are given: losses of windows, and how sure their changes are."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from nn.model_cases import make_transformer

from analysis.subjects import loud_transformer, make_subject, windows_of
from tinyformer.analysis.subject import Change, Losses, at_least_one, by_layer, fullest, head_pairs
from tinyformer.nn import IGNORED, prune_heads


def losses(nats, targets):
    return Losses(torch.tensor(nats, dtype=torch.float64), torch.tensor(targets, dtype=torch.float64))


def many(seed=0, windows=40):
    rng = np.random.default_rng(seed)
    targets = rng.integers(4, 12, windows).astype(float)
    before = rng.normal(3, 1, windows) * targets
    return losses(before + rng.normal(0.2, 0.5, windows) * targets, targets), losses(before, targets)


# The losses of windows.


def test_the_loss_is_that_of_each_window():
    subject = make_subject(loud_transformer(), padded=True)
    found = subject.losses()
    assert found.targets.tolist() == [8, 8, 8, 8, 8, 3]
    for window, nats, targets in zip(windows_of(subject), found.nats, found.targets, strict=True):
        logits = subject.network(window["inputs"], subject.mask(window))[0]
        expected = F.cross_entropy(logits, window["targets"][0], ignore_index=IGNORED)
        assert float(nats / targets) == pytest.approx(expected.item(), rel=1e-5)


def test_a_window_counts_by_its_targets():
    assert losses([2.0, 6.0], [2, 4]).mean == pytest.approx(8 / 6)


# Their change.


def test_the_change_by_hand():
    change = losses([3.0, 9.0], [2, 4]).change_from(losses([2.0, 6.0], [2, 4]), 10)
    assert change.mean == pytest.approx((1 + 3) / (2 + 4))
    assert change.row(losses([2.0, 6.0], [2, 4])) == pytest.approx([12 / 6, 4 / 6, change.low, change.high])


@pytest.mark.parametrize("seed", [0, 1])
def test_the_interval_is_the_bootstrap_of_numpy(seed):
    after, before = many(seed)
    change = after.change_from(before, 20_000)
    draws = np.random.default_rng(2).integers(40, size=(20_000, 40))
    means = (after.nats - before.nats).numpy()[draws].sum(1) / after.targets.numpy()[draws].sum(1)
    expected = np.quantile(means, [0.025, 0.975])
    assert [change.low, change.high] == pytest.approx(expected, abs=0.04 * np.ptp(expected))
    assert change.low < change.mean < change.high


def test_windows_that_change_alike_leave_no_doubt():
    change = losses([3.0, 6.0, 9.0], [1, 2, 3]).change_from(losses([2.0, 4.0, 6.0], [1, 2, 3]), 100)
    assert (change.low, change.high) == pytest.approx((1.0, 1.0))


def test_more_windows_leave_less_doubt():
    few, more = (after.change_from(before, 2000) for after, before in (many(windows=20), many(windows=320)))
    assert (few.high - few.low) / (more.high - more.low) == pytest.approx(4, rel=0.3)


def test_the_interval_is_drawn_from_its_seed():
    after, before = many()
    assert after.change_from(before, 50) == after.change_from(before, 50)
    assert after.change_from(before, 50) != after.change_from(before, 50, seed=1)


def test_a_change_is_shown_with_its_sign_and_its_interval():
    assert str(Change(0.01234, -0.00004, 0.5)) == "+0.0123 [-0.0000, +0.5000]"


# Heads.


def test_heads_are_counted_through_the_layers():
    network = make_transformer(num_layers=2)
    prune_heads(network.attentions()[0], [0, 2])
    layers = network.attentions()
    assert head_pairs(layers) == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (1, 3)]
    assert by_layer(layers, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) == [[1.0, 2.0], [3.0, 4.0, 5.0, 6.0]]


def test_nothing_is_too_few():
    assert at_least_one("num_windows", 1, 32) == 1
    with pytest.raises(ValueError, match=r"^analysis.num_windows=0: .* analysis.num_windows=32 works.$"):
        at_least_one("num_windows", 0, 32)


def test_the_fullest_rows_have_no_padding():
    tokens = torch.arange(40).view(4, 10)
    lengths = torch.tensor([10, 4, 8, 5])
    rows = fullest({"inputs": tokens, "lengths": lengths, "labels": torch.zeros(4)}, 3)
    assert rows.keys() == {"inputs"}
    assert torch.equal(rows["inputs"], tokens[[0, 2, 3], :5])  # half as long as the longest, and no shorter
    targets = torch.where(torch.arange(10) < lengths.unsqueeze(1), tokens, IGNORED)
    found = fullest({"inputs": tokens, "targets": targets}, 2)
    assert torch.equal(found["inputs"], tokens[[0, 2], :8])
