"""Losses of windows, and the confidence interval of their changes."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from analysis.subjects import loud_transformer, make_subject, windows_of
from tinyformer.analysis.subject import Losses
from tinyformer.batch import IGNORED


def losses(nats, targets):
    return Losses(torch.tensor(nats, dtype=torch.float64), torch.tensor(targets, dtype=torch.float64))


def random_losses(windows=40):
    rng = np.random.default_rng(0)
    targets = rng.integers(4, 12, windows).astype(float)
    before = rng.normal(3, 1, windows) * targets
    return losses(before + rng.normal(0.2, 0.5, windows) * targets, targets), losses(before, targets)


def test_the_loss_of_each_window():
    subject = make_subject(loud_transformer(), padded=True)
    found = subject.losses()
    assert found.targets.tolist() == [8, 8, 8, 8, 8, 3]
    for window, nats, targets in zip(windows_of(subject), found.nats, found.targets, strict=True):
        logits = subject.network(window["inputs"], subject.task.mask(window))[0]
        expected = F.cross_entropy(logits, window["targets"][0], ignore_index=IGNORED)
        assert float(nats / targets) == pytest.approx(expected.item(), rel=1e-5)


def test_means_and_changes_weight_windows_by_their_targets():
    after, before = losses([3.0, 9.0], [2, 4]), losses([2.0, 6.0], [2, 4])
    assert before.mean == pytest.approx(8 / 6)
    change = after.change_from(before, 10)
    assert change.mean == pytest.approx((1 + 3) / (2 + 4))
    assert change.row(before) == pytest.approx([12 / 6, 4 / 6, change.low, change.high])


def test_the_interval_is_the_bootstrap_of_numpy():
    after, before = random_losses()
    change = after.change_from(before, 20_000)
    draws = np.random.default_rng(2).integers(40, size=(20_000, 40))
    means = (after.nats - before.nats).numpy()[draws].sum(1) / after.targets.numpy()[draws].sum(1)
    expected = np.quantile(means, [0.025, 0.975])
    assert [change.low, change.high] == pytest.approx(expected, abs=0.04 * np.ptp(expected))
    assert change.low < change.mean < change.high
    assert after.change_from(before, 50) == after.change_from(before, 50) != after.change_from(before, 50, seed=1)


def test_each_resample_is_a_mean_over_its_own_targets():
    """A change of a tenth of a nat at every target is one in every resample, however long its windows are."""
    targets = torch.tensor([1.0, 10.0, 100.0])
    change = Losses(0.1 * targets, targets).change_from(Losses(0 * targets, targets), 50)
    assert (change.mean, change.low, change.high) == pytest.approx((0.1, 0.1, 0.1))
