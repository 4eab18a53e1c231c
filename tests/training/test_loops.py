"""However a run ends, it ends alike, and a resumed run reads the batches that an unbroken one reads."""

import contextlib
import math
import os
import signal

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping

from tinyformer.checkpoint.file import load_checkpoint
from tinyformer.training import AdamW, MuonWithAdamW
from tinyformer.training.callbacks.checkpoints import Checkpoints, Interrupted
from tinyformer.training.callbacks.report import Report
from tinyformer.training.trainer_parts import WholeCheckpointIO
from training.runs import CONTENTS, QUIET, TEXT, Do, fit

pytestmark = pytest.mark.filterwarnings(*QUIET)

SLOW = pytest.mark.slow


class Trace(L.Callback):
    """Records each batch with its loss, and the steps at which there was a validation."""

    def __init__(self):
        self.batches, self.validated, self.rates, self.steps = [], [], [], []

    def setup(self, trainer, module, stage):
        self.module = module

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        self.batches.append((tuple(batch["inputs"].flatten().tolist()), float(outputs["loss"])))
        self.steps.append(trainer.global_step)

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.rates.append(optimizer.param_groups[0]["lr"])

    def on_validation_end(self, trainer, module):
        self.validated.append(trainer.global_step)


def run(folder, *callbacks, batch_size=4, **settings):
    """A run with five batches an epoch: its trace, its checkpoints, and its module."""
    trace, checkpoints = Trace(), Checkpoints(folder, CONTENTS)
    data = {"text": TEXT[:400], "batch_size": batch_size, "validation_fraction": 0.1}
    usual = {"max_steps": -1, "limit_val_batches": None, "plugins": WholeCheckpointIO(), "data": data}
    with contextlib.suppress(Interrupted):
        fit(folder, trace, Report(), *callbacks, checkpoints, **usual | settings)
    return trace, checkpoints, trace.module


def stop(trainer):
    trainer.should_stop = True


def interrupt(step, hook="on_train_batch_end"):
    return Do(step, lambda trainer: os.kill(os.getpid(), signal.SIGTERM), hook)


ENDS = {
    "after a batch": Do(1, stop),
    "before a batch": Do(2, stop, "on_train_batch_start"),
    "after a validation": Do(1, stop, "on_validation_end"),
    "after an epoch": Do(1, stop, "on_train_epoch_end"),
    "early stopping": EarlyStopping("val/loss", stopping_threshold=1e9),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_run_ends_with_a_whole_step_that_is_validated_and_saved(tmp_path, end):
    trace, checkpoints, module = run(tmp_path, ENDS[end], accumulate_grad_batches=3, val_check_interval=4)
    last = load_checkpoint(checkpoints.last)
    assert len(trace.batches) % 3 == 0
    assert last.step == trace.steps[-1] == trace.validated[-1] == len(trace.batches) // 3
    assert all(torch.equal(last.weights[name], value) for name, value in module.network.state_dict().items())


LIMITS = {
    "steps": {"max_steps": 10},
    "epochs": {"max_epochs": 2},
    "both": {"max_steps": 10, "max_epochs": 3},
    "epochs of three batches": {"max_epochs": 2, "limit_train_batches": 3},
    "epochs, validated at every other": {"max_epochs": 3, "check_val_every_n_epoch": 2, "val_check_interval": 1.0},
    "one batch": {"max_epochs": 4, "overfit_batches": 1, "val_check_interval": 2},
}


GRID = [(limit, accumulated) for limit in LIMITS for accumulated in (1, 3) if (limit, accumulated) != ("epochs", 3)]


@pytest.mark.parametrize(("limit", "accumulated"), [("epochs", 3), *(pytest.param(*case, marks=SLOW) for case in GRID)])
def test_a_run_stopped_after_any_step_continues_with_the_same_batches(tmp_path, limit, accumulated):
    optimizer = AdamW() if accumulated == 1 else MuonWithAdamW()
    settings = LIMITS[limit] | {"accumulate_grad_batches": accumulated, "optimizer": optimizer}
    whole, checkpoints, module = run(tmp_path / "whole", **settings)
    last = whole.steps[-1]
    assert whole.validated[-1] == last
    assert load_checkpoint(checkpoints.last).step == last
    for step in range(1, last + 1):
        first, _, _ = run(tmp_path / "broken", interrupt(step), **settings)
        assert first.steps[-1] == step
        rest, ended, resumed = run(tmp_path / "broken", checkpoint=str(tmp_path / "broken" / "last.ckpt"), **settings)
        assert first.batches + rest.batches == whole.batches, step
        assert first.rates + rest.rates == whole.rates, step
        assert sorted({*first.validated, *rest.validated}) == sorted({*whole.validated}), step
        assert load_checkpoint(ended.last).step == last
        assert all(map(torch.equal, module.parameters(), resumed.parameters()))


AMID = ("on_train_batch_start", "on_before_backward", "on_before_optimizer_step", "on_validation_batch_start")


@pytest.mark.parametrize("hook", [*AMID, "on_validation_end"])
def test_a_signal_amid_a_step_or_a_validation_changes_no_weight(tmp_path, hook):
    """With dropout, whose masks continue the random numbers of the unbroken run; amid accumulated gradients."""
    settings = {"max_steps": 5, "accumulate_grad_batches": 3, "val_check_interval": 7, "network": {"dropout": 0.2}}
    _, _, module = run(tmp_path / "whole", **settings)
    _, checkpoints, _ = run(tmp_path / "broken", interrupt(2, hook), **settings)
    assert load_checkpoint(checkpoints.last).step == 3
    _, _, resumed = run(tmp_path / "broken", checkpoint=str(checkpoints.last), **settings)
    assert all(map(torch.equal, module.parameters(), resumed.parameters()))


CHANGED = {
    "larger batches": ({"batch_size": 8}, 3 + 1 + 2),  # 3 of 5 batches are 1 of 2, rounded down
    "shorter": ({"max_epochs": -1, "max_steps": 4}, 4),
    "smaller batches": ({"batch_size": 2}, 3 + 4 + 10),
    "accumulated": ({"accumulate_grad_batches": 3}, 3 + math.ceil(7 / 3)),
}


FAST, *OTHERS = CHANGED


@pytest.mark.parametrize("change", [FAST, *(pytest.param(change, marks=SLOW) for change in OTHERS)])
def test_a_resumed_run_may_change_its_length_and_its_batches(tmp_path, change):
    """It was stopped after 3 of 10 batches."""
    settings, steps = CHANGED[change]
    run(tmp_path, interrupt(3), max_epochs=2)
    last = str(tmp_path / "last.ckpt")
    trace, checkpoints, _ = run(tmp_path, checkpoint=last, **{"max_epochs": 2} | settings)
    assert trace.steps[-1] == trace.validated[-1] == load_checkpoint(checkpoints.last).step == steps
    # The first epoch is read to its end, without a window that was read before.
    assert len({batch for batch, _ in trace.batches[:2]}) == min(2, len(trace.batches))
