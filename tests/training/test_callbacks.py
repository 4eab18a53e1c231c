"""Callbacks in small real runs, steps that are not finite among them, and the file of metrics."""

import math
import re
import signal
from io import StringIO
from itertools import pairwise
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from nn.model_cases import make_transformer, token_ids

from tinyformer.checkpoint.file import load_checkpoint
from tinyformer.costs.network import count_costs
from tinyformer.data import Windows
from tinyformer.data.batches import loader
from tinyformer.hardware import Peak, peak_memory
from tinyformer.measures import first_non_finite
from tinyformer.nn import AttentionMask
from tinyformer.training import AdamW, FiniteCheck, MuonWithAdamW, RunCSVLogger, Snapshots
from tinyformer.training.callbacks import checkpoints, metrics
from tinyformer.training.callbacks.checkpoints import SIGNALS, Checkpoints, Interrupted
from tinyformer.training.callbacks.finite import NonFiniteStep
from tinyformer.training.callbacks.metrics import Report, StepProgress
from training.runs import CONTENTS, QUIET, Do, fit, interrupt

pytestmark = pytest.mark.filterwarnings(*QUIET)


def handlers():
    return [signal.getsignal(number) for number in SIGNALS]


# Checkpoints.


class FixedScores(L.Callback):
    """Makes validation log these scores, one after the other."""

    def __init__(self, *scores, name="val/loss"):
        self.scores, self.name = iter(scores), name

    def setup(self, trainer, module, stage):
        module.on_validation_epoch_end = lambda: module.log(self.name, torch.tensor(next(self.scores)))


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


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_stops_the_run_with_a_checkpoint(tmp_path, number):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    before, checkpoints, after = handlers(), Checkpoints(tmp_path, CONTENTS), []
    with pytest.raises(Interrupted) as caught:
        fit(tmp_path, interrupt(3, number=number), Do(3, lambda trainer: after.extend(handlers())), checkpoints)
    assert caught.value.signal_number == number
    assert after == [signal.SIG_DFL] * 4  # a second signal would end the process at once
    assert handlers() == before
    assert load_checkpoint(checkpoints.last).step == 3


def test_an_ignored_signal_and_one_after_the_last_step(tmp_path):
    """As under `nohup`; and at the end, where the run has been saved."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    checkpoints = Checkpoints(tmp_path, CONTENTS)
    late = interrupt(8, "on_validation_start", signal.SIGUSR1)
    with pytest.raises(Interrupted) as caught:
        fit(tmp_path, interrupt(3, number=signal.SIGHUP), late, checkpoints)
    assert caught.value.signal_number == signal.SIGUSR1
    assert load_checkpoint(checkpoints.last).step == 8


# Report.


class Clock(L.Callback):
    """A clock that a step advances by a second, a validation batch by 100, and what follows validation by 1,000.

    Other work after steps and validations takes 10,000 seconds, and is reported as excluded.
    """

    def __init__(self, monkeypatch, reporter):
        self.now, self.reporter = 0.0, reporter
        for module in (metrics, loader, checkpoints):
            monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def on_before_backward(self, *args):
        self.now += 1

    def on_validation_batch_end(self, *args):
        self.now += 100

    def on_validation_end(self, *args):
        self.now += 1000
        self.work()

    def work(self, *args):
        self.now += 10_000
        self.reporter.exclude(10_000)

    on_train_start = on_train_batch_end = work


def test_throughput_by_hand(tmp_path, monkeypatch, logger):
    """Steps take a second each, and reading a batch a quarter of one; measuring the peak and snapshots do not count.

    The loss is the mean over the batches since the last report.
    """
    reporter, losses = Report(), []
    clock, read = Clock(monkeypatch, reporter), Windows.__getitems__

    def slow_peak(device, dtype):
        clock.now += 1e6
        return Peak(1e7, f"{device.type} {dtype}")

    def slowly(windows, indices):
        clock.now += 0.25
        return read(windows, indices)

    keep = L.Callback()
    # Lightning divides the loss of a batch by the number of accumulated ones.
    keep.on_train_batch_end = lambda trainer, module, outputs, *args: losses.append(2 * outputs["loss"].item())
    monkeypatch.setattr(metrics, "matmul_peak", slow_peak)
    monkeypatch.setattr(checkpoints, "write_raw", lambda path, raw: setattr(clock, "now", clock.now + 500))
    monkeypatch.setattr(Windows, "__getitems__", slowly)
    before = peak_memory(torch.device("cpu"))
    _, module = fit(tmp_path, reporter, clock, Snapshots(1), keep, logger=logger, accumulate_grad_batches=2)
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
    assert rows[-1]["throughput/seconds"] == reporter.total.seconds
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
    monkeypatch.setattr(metrics.time, "monotonic", lambda: float(next(ticks)))
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


# Steps that are not finite: never applied, named by their layer, and never saved.


def plain_adam(network):
    return torch.optim.Adam(network.parameters(), fused=False)


class Poison(L.Callback):
    """Makes steps not finite, at batches counted from 0; records weights and optimizer after each."""

    def __init__(self, how, *batches):
        self.how, self.batches = how, batches
        self.states, self.poisoned, self.is_bad = [], [], False

    def setup(self, trainer, module, stage):
        compute, output = module.training_step, module.network.encoder.layers[1].attention.o_proj

        def layer(module, args, output):
            return output / 0 if self.is_bad and self.how == "layer" else output

        def training_step(batch, batch_idx):
            self.is_bad = any(batch["inputs"] is inputs for inputs in self.poisoned)
            loss = compute(batch, batch_idx)
            if self.is_bad and self.how == "gradient":
                loss.register_hook(lambda grad: grad * torch.inf)
            return loss * float(self.how) if self.is_bad and self.how in ("nan", "inf") else loss

        def overflow(grad):  # without nan, which infinite losses and scales make of zeros
            return grad + torch.inf if self.is_bad and self.how == "overflow" else grad

        output.register_forward_hook(layer, prepend=True)
        output.weight.register_hook(overflow)
        module.training_step = training_step

    def on_train_batch_start(self, trainer, module, batch, index):
        if index in self.batches:
            self.poisoned.append(batch["inputs"])

    def record(self, trainer, module, *args):
        """Copy all weights, and the state of the optimizers as far as it is not zero."""
        optimizers = getattr(trainer.optimizers[0], "optimizers", trainer.optimizers)
        states = [value for each in optimizers for state in each.state.values() for value in state.values()]
        self.states.append([value.clone() for value in (*module.parameters(), *states) if value.any()])

    on_train_start = on_train_batch_end = record

    def changed(self):
        """The batches at which something changed."""
        pairs = enumerate(pairwise(self.states))
        return [batch for batch, (old, new) in pairs if len(old) != len(new) or not all(map(torch.equal, old, new))]


@pytest.mark.parametrize("optimizer", [AdamW(), MuonWithAdamW(), plain_adam], ids=["adamw", "muon", "adam"])
@pytest.mark.parametrize("how", ["nan", "inf", "gradient", "overflow", "layer"])
def test_a_skipped_step_changes_nothing_and_the_others_do(how, optimizer, tmp_path):
    check, poison = FiniteCheck("skip"), Poison(how, 0, 2, 5)
    fit(tmp_path, poison, check, optimizer=optimizer, gradient_clip_val=1.0)
    assert check.skipped == [1, 3, 6]
    assert poison.changed() == [1, 3, 4, 6, 7]


def test_the_reported_loss_and_the_next_error_know_of_skipped_steps(tmp_path):
    check, logger = FiniteCheck("skip", max_skipped=3), RunCSVLogger(tmp_path / "metrics.csv")
    fit(tmp_path, Poison("nan", 2, 6, 7), check, Report(), logger=logger)
    losses = {step: row["train/loss"] for step, row in logger.rows.items() if "train/loss" in row}
    assert all(math.isfinite(losses[step]) for step in (2, 4, 6))  # of steps 3 and 4, one was skipped
    assert math.isnan(losses[8])
    resumed = FiniteCheck("skip", max_skipped=3)
    resumed.load_state_dict(check.state_dict())
    with pytest.raises(NonFiniteStep, match=r"; the last finite loss was \d\.\d{4}; ") as stop:
        fit(tmp_path, Poison("nan", 0), resumed)
    assert stop.value.step == 1  # the third in a row


LAYER = "step 5 has a loss of nan; the last finite loss was .*the output of encoder.layers.1.attention.o_proj"


@pytest.mark.parametrize(
    ("how", "bad", "settings", "said", "read"),
    [
        ("layer", 4, {"log_every_n_steps": 8}, LAYER, 5),  # by the validation after step 6
        ("gradient", 6, {"log_every_n_steps": 1}, "a gradient that is not finite", 6),  # by the report
        ("inf", 6, {"val_check_interval": 100, "limit_val_batches": 0, "log_every_n_steps": 100}, "a loss of inf", 7),
    ],
    ids=["validation", "report", "end"],
)
def test_stop_applies_no_step_from_there_on_and_saves_nothing(how, bad, settings, said, read, tmp_path):
    checkpoints, poison = Checkpoints(tmp_path / "checkpoints", CONTENTS), Poison(how, bad)
    with pytest.raises(NonFiniteStep, match=said) as stop:
        fit(tmp_path, poison, FiniteCheck(), checkpoints, **settings)
    assert poison.changed() == list(range(bad))
    assert (stop.value.step, len(poison.states) - 2) == (bad + 1, read)
    saved = {path.name: load_checkpoint(path) for path in (tmp_path / "checkpoints").glob("*.ckpt")}
    assert all(weight.isfinite().all() for one in saved.values() for weight in one.weights.values())
    assert max((one.step for one in saved.values()), default=0) == (0 if read == 7 else bad // 3 * 3)


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", CONTENTS)
    overflow = Do(6, lambda trainer: next(trainer.model.parameters()).data.fill_(torch.inf))
    with pytest.raises(NonFiniteStep, match=r"weights that are not finite.*: the weight network\.encoder\."):
        fit(tmp_path, FiniteCheck(), overflow, checkpoints)
    assert load_checkpoint(checkpoints.last).step == 3


HOOKS = {
    "the weight encoder.layers.1.feed_forward.down_proj.weight": None,
    "the output of encoder.layers.1.feed_forward.down_proj": lambda module, args, output: output * torch.inf,
    "the gradient of the output of encoder.layers.1.feed_forward.up_proj": lambda module, args, output: (
        output + 0 * (output * 0).sqrt()
    ),
    "the loss": lambda module, args, output: output,
}


@pytest.mark.parametrize("origin", HOOKS)
def test_the_origin_is_the_first_value_that_is_not_finite(origin):
    model = make_transformer(checkpoint_activations=True)
    broken, scale = model.encoder.layers[1].feed_forward.down_proj, torch.inf if origin == "the loss" else 1.0
    assert first_non_finite(model, lambda: model(token_ids(), AttentionMask(causal=True)).square().mean()) is None
    if HOOKS[origin]:
        broken.register_forward_hook(HOOKS[origin])
    else:
        broken.weight.data[0, 0] = torch.nan
    weight = model.encoder.layers[0].attention.o_proj.weight
    weight.grad = torch.full_like(weight, 3.0)
    found = first_non_finite(model, lambda: model(token_ids(), AttentionMask(causal=True)).square().mean() * scale)
    assert found == origin
    assert (weight.grad == 3).all()


# The file of metrics.


def make_logger(path, entries, **options):
    logger = RunCSVLogger(path, **options)
    for step, name, value in entries:
        logger.log_metrics({name: value}, step=step)
    return logger


def test_a_resumed_run_continues_from_its_step_without_a_truncated_line(tmp_path):
    path = tmp_path / "metrics.csv"
    make_logger(path, [(step, "loss", step / 10) for step in (10, 20, 30)]).finalize("success")
    with path.open("a") as file:
        file.write("4")
    assert RunCSVLogger(path).rows == {}
    assert list(RunCSVLogger(path, first_step=100).rows) == [10, 20, 30]
    make_logger(path, [(30, "loss", 9.0), (30, "new", 4.0), (20, "new", 5.0)], first_step=20).save()
    assert path.read_text().split() == ["step,loss,new", "10,1.0,", "20,2.0,5.0", "30,9.0,4.0"]
