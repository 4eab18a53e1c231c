"""Callbacks, in small real runs."""

import os
import re
import signal
from io import StringIO
from itertools import pairwise
from types import SimpleNamespace

import lightning as L
import pytest
import torch

from tinyformer.analysis.costs import count_costs
from tinyformer.checkpoint.file import load_checkpoint
from tinyformer.data import Windows
from tinyformer.data.batches import loader
from tinyformer.hardware import Peak, peak_memory
from tinyformer.training import RunCSVLogger
from tinyformer.training.callbacks import progress, report
from tinyformer.training.callbacks.checkpoints import SIGNALS, Checkpoints, Interrupted
from tinyformer.training.callbacks.progress import StepProgress
from tinyformer.training.callbacks.report import Report
from training.runs import CONTENTS, QUIET, Do, fit

pytestmark = pytest.mark.filterwarnings(*QUIET)


def handlers():
    return [signal.getsignal(number) for number in SIGNALS]


def kill(number):
    return lambda *args: os.kill(os.getpid(), number)


# Checkpoints.


class FixedScores(L.Callback):
    """Makes validation log these scores, one after the other."""

    def __init__(self, *scores, name="val/loss"):
        self.scores, self.name = iter(scores), name

    def setup(self, trainer, module, stage):
        module.on_validation_epoch_end = lambda: module.log(self.name, torch.tensor(next(self.scores)))


def test_metrics_are_written_before_a_checkpoint(tmp_path, logger):
    seen = []
    look = Do(5, lambda trainer: seen.extend(RunCSVLogger(logger.path, first_step=100).rows))
    fit(tmp_path, Report(), look, Checkpoints(tmp_path, CONTENTS), logger=logger)
    assert seen == [2, 3]


@pytest.mark.parametrize(
    ("monitor", "scores", "best_step", "best"),
    [
        ("val/loss", [1.0, 2.0, 1.0], 3, 1.0),  # of equal scores, the first is the best
        ("val/loss", [2.0, float("nan"), 1.0], 8, 1.0),
        ("val/accuracy", [0.5, 0.75, 0.75], 6, 0.75),
    ],
)
def test_best_is_the_first_of_the_best_scores(tmp_path, monitor, scores, best_step, best):
    checkpoints = Checkpoints(tmp_path, CONTENTS, monitor, higher_is_better=monitor == "val/accuracy")
    fit(tmp_path, FixedScores(*scores, name=monitor), checkpoints)
    assert load_checkpoint(checkpoints.best).step == best_step
    assert load_checkpoint(checkpoints.last).step == 8
    assert checkpoints.best_value == best


def test_a_resumed_run_keeps_the_best_so_far(tmp_path):
    checkpoints = Checkpoints(tmp_path, CONTENTS)
    fit(tmp_path, FixedScores(1.0), Checkpoints(tmp_path, CONTENTS), max_steps=3)
    fit(tmp_path, FixedScores(2.0, 1.5), checkpoints, checkpoint=str(checkpoints.last))
    assert (load_checkpoint(checkpoints.best).step, load_checkpoint(checkpoints.last).step) == (3, 8)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_stops_the_run_with_a_checkpoint(tmp_path, number):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    before, checkpoints, after = handlers(), Checkpoints(tmp_path, CONTENTS), []
    with pytest.raises(Interrupted) as caught:
        fit(tmp_path, Do(3, kill(number)), Do(3, lambda trainer: after.extend(handlers())), checkpoints)
    assert caught.value.signal_number == number
    assert after == [signal.SIG_DFL] * 4  # a second signal would end the process at once
    assert handlers() == before
    assert load_checkpoint(checkpoints.last).step == 3


def test_an_ignored_signal_and_one_after_the_last_step(tmp_path):
    """As under `nohup`; and at the end, where the run has been saved."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    checkpoints = Checkpoints(tmp_path, CONTENTS)
    late = Do(8, kill(signal.SIGUSR1), "on_validation_start")
    with pytest.raises(Interrupted) as caught:
        fit(tmp_path, Do(3, kill(signal.SIGHUP)), late, checkpoints)
    assert caught.value.signal_number == signal.SIGUSR1
    assert load_checkpoint(checkpoints.last).step == 8


# Report.


class Clock(L.Callback):
    """A clock that a step advances by a second, a validation batch by 100, and what follows validation by 1,000."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(report, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def on_before_backward(self, *args):
        self.now += 1

    def on_validation_batch_end(self, *args):
        self.now += 100

    def on_validation_end(self, *args):
        self.now += 1000


def excluded(clock, reporter):
    """A callback that takes 10,000 seconds after steps and validations, and reports them as excluded."""

    def work(*args):
        clock.now += 10_000
        reporter.exclude(10_000)

    callback = L.Callback()
    callback.on_train_start = callback.on_train_batch_end = callback.on_validation_end = work
    return callback


def test_speed_counts_training_only(tmp_path, monkeypatch, logger):
    clock, reporter = Clock(monkeypatch), Report()
    fit(tmp_path, reporter, clock, excluded(clock, reporter), logger=logger)
    speeds = [row.get("throughput/tokens_per_second") for _, row in sorted(logger.rows.items())]
    assert [speed for speed in speeds if speed is not None] == pytest.approx([64.0] * 4)
    assert (reporter.total.seconds, reporter.total.tokens) == (8, 8 * 64)
    assert reporter.seconds == 8 + 3 * (2 * 100 + 1000) + 12 * 10_000  # validated at 3, 6 and the end
    resumed = Report()
    resumed.load_state_dict(reporter.state_dict())
    assert (resumed.seconds, resumed.total) == (reporter.seconds, reporter.total)
    # A run that ends before its first report is measured at its end; a longer run would have no report of it.
    logger.rows.clear()
    clock, reporter = Clock(monkeypatch), Report()
    fit(tmp_path, reporter, clock, excluded(clock, reporter), logger=logger, max_steps=6, log_every_n_steps=10)
    assert (reporter.total.seconds, reporter.total.tokens) == (6, 6 * 64)
    assert reporter.latest["throughput/tokens_per_second"] == 64.0
    assert reporter.latest["train/loss"] == pytest.approx(5.5, abs=0.2)  # ln 256 = 5.55
    assert not any("train/loss" in row for row in logger.rows.values())


def test_throughput_by_hand(tmp_path, monkeypatch, logger):
    """Steps take a second each, and reading a batch a quarter of one; measuring the peak does not count.

    The loss is the mean over the batches since the last report.
    """
    clock = Clock(monkeypatch)
    monkeypatch.setattr(loader, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    read = Windows.__getitems__

    def slow_peak(device, dtype):
        clock.now += 1e6
        return Peak(1e7, f"{device.type} {dtype}")

    def slowly(windows, indices):
        clock.now += 0.25
        return read(windows, indices)

    class Losses(L.Callback):
        def setup(self, trainer, module, stage):
            step = module.training_step
            module.training_step = lambda *args: losses.append((loss := step(*args)).item()) or loss

    losses = []
    monkeypatch.setattr(report, "matmul_peak", slow_peak)
    monkeypatch.setattr(Windows, "__getitems__", slowly)
    reporter, before = Report(), peak_memory(torch.device("cpu"))
    _, module = fit(tmp_path, reporter, clock, Losses(), logger=logger, accumulate_grad_batches=2)
    after = peak_memory(torch.device("cpu"))
    flops = 64 * count_costs(module.network).training_flops_per_token
    rows = [row for _, row in sorted(logger.rows.items()) if "train/loss" in row]
    means = [sum(losses[first : first + 4]) / 4 for first in range(0, 16, 4)]
    assert [row["train/loss"] for row in rows] == pytest.approx(means)
    # Lightning reads a batch ahead, and a batch that it reads right after validation is not counted.
    for row in rows:
        seconds = 64 / row["throughput/tokens_per_second"]
        assert seconds in (1.125, 1.1875, 1.25)
        assert row["throughput/data_wait"] == pytest.approx((seconds - 1) / seconds)
        assert row["throughput/mfu"] == pytest.approx(flops / seconds / 1e7)
    assert before / 1e9 <= rows[-1]["throughput/memory_gb"] <= after / 1e9
    assert reporter.total.flops == pytest.approx(16 * flops)
    assert reporter.total.mfu(reporter.peak) == pytest.approx(16 * flops / reporter.total.seconds / 1e7)
    assert reporter.total.waiting == pytest.approx(reporter.total.seconds - 16)
    assert reporter.peak.source == "cpu torch.float32"


def test_work_from_before_a_resumption_counts_for_the_loss_alone(tmp_path):
    whole, resumed = Report(), Report()
    fit(tmp_path, whole)
    resumed.load_state_dict(Report().state_dict() | {"unreported": [2e6, 1e6]})
    fit(tmp_path, resumed, log_every_n_steps=100)
    assert resumed.total.flops == pytest.approx(whole.total.flops)
    assert resumed.latest["train/loss"] == pytest.approx(2, abs=0.01)


# Progress.


def test_a_file_gets_lines_at_intervals(tmp_path, monkeypatch):
    ticks = iter(range(10_000))  # the clock advances by a second each time it is read
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: float(next(ticks))))
    reporter, stream = Report(), StringIO()
    bar = StepProgress(reporter, interval=4.0, stream=stream)
    fit(tmp_path, reporter, bar, enable_progress_bar=True, log_every_n_steps=1, max_steps=20)
    assert not re.search(r"[\r\x1b]", stream.getvalue())
    lines = stream.getvalue().splitlines()
    steps = [int(re.match(r"step (\d+)/20  loss \d+\.\d{3}  ", line)[1]) for line in lines]
    # The clock is read once a step and once a line, so lines are three to four steps apart.
    assert all(second - first >= 3 for first, second in pairwise(steps[:-1]))
    assert steps[-1] == 20
    assert 4 <= len(lines) <= 7
    assert re.search(r"val \d+\.\d{3}  [\d,]+ tokens/s  0:\d\d left$", lines[-2])


def test_a_terminal_gets_a_bar(tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    reporter, stream = Report(), StringIO()
    fit(tmp_path, reporter, StepProgress(reporter, stream=stream), enable_progress_bar=True)
    assert re.search(r"\x1b.*training.*8/8.*loss \d+\.\d{3}", stream.getvalue(), re.DOTALL)
