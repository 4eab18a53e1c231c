"""However a run ends, it ends alike, and a resumed run reads the batches that an unbroken one reads."""

import contextlib
import math
import os
import signal

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping

from tinyformer import files
from tinyformer.checkpoint.file import load_checkpoint, load_newest
from tinyformer.training.callbacks.checkpoints import Checkpoints, Interrupted
from tinyformer.training.callbacks.report import Report
from tinyformer.training.trainer_parts import WholeCheckpointIO
from training.runs import QUIET, TEXT, make_data, make_module, make_trainer
from training.test_callbacks import CONTENTS

pytestmark = pytest.mark.filterwarnings(*QUIET)

SLOW = pytest.mark.slow


class Trace(L.Callback):
    """Records each batch with its loss, and the steps at which there was a validation."""

    def __init__(self):
        self.batches, self.validated, self.rates, self.steps = [], [], [], []

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        self.batches.append((tuple(batch["inputs"].flatten().tolist()), float(outputs["loss"])))
        self.steps.append(trainer.global_step)

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.rates.append(optimizer.param_groups[0]["lr"])

    def on_validation_end(self, trainer, module):
        self.validated.append(trainer.global_step)


class Do(L.Callback):
    """Does something in a hook after a step, once."""

    def __init__(self, hook, step, do):
        def act(trainer, *args):
            if trainer.global_step == step and not self.done:
                self.done = True
                do(trainer)

        self.done = False
        setattr(self, hook, act)


def fit(folder, *callbacks, checkpoint=None, batch_size=4, **settings):
    """A run with five batches an epoch: its trace, and its checkpoints."""
    folder.mkdir(exist_ok=True)
    data = make_data(folder, TEXT[:400], batch_size=batch_size, validation_fraction=0.1)
    module, trace = make_module(data), Trace()
    checkpoints = Checkpoints(folder, CONTENTS)
    settings = {
        "max_steps": -1,
        "val_check_interval": 3,
        "limit_val_batches": None,
        "plugins": WholeCheckpointIO(),
    } | settings
    trainer = make_trainer(folder, [trace, Report(), *callbacks, checkpoints], **settings)
    with contextlib.suppress(Interrupted):
        trainer.fit(module, datamodule=data, ckpt_path=checkpoint, weights_only=True)
    return trace, checkpoints, module


def stop(trainer):
    trainer.should_stop = True


ENDS = {
    "after a batch": Do("on_train_batch_end", 1, stop),
    "before a batch": Do("on_train_batch_start", 2, stop),
    "after a validation": Do("on_validation_end", 1, stop),
    "after an epoch": Do("on_train_epoch_end", 1, stop),
    "early stopping": EarlyStopping("val/loss", stopping_threshold=1e9),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_run_ends_with_a_whole_step_that_is_validated_and_saved(tmp_path, end):
    trace, checkpoints, module = fit(tmp_path, ENDS[end], accumulate_grad_batches=3, val_check_interval=4)
    last = load_checkpoint(checkpoints.last)
    assert len(trace.batches) % 3 == 0
    assert last.step == trace.steps[-1] == trace.validated[-1] == len(trace.batches) // 3
    assert all(torch.equal(last.weights[name], value) for name, value in module.network.state_dict().items())


LIMITS = {
    "steps": {"max_steps": 10},
    "epochs": {"max_epochs": 2},
    "both": {"max_steps": 10, "max_epochs": 3},
    "epochs of three batches": {"max_epochs": 2, "limit_train_batches": 3},
    "epochs, validated at each": {"max_epochs": 3, "check_val_every_n_epoch": 1, "val_check_interval": 1.0},
    "epochs, validated at every other": {"max_epochs": 3, "check_val_every_n_epoch": 2, "val_check_interval": 1.0},
    "one batch": {"max_epochs": 4, "overfit_batches": 1, "val_check_interval": 2},
}


GRID = [(limit, accumulated) for limit in LIMITS for accumulated in (1, 3) if (limit, accumulated) != ("epochs", 3)]


@pytest.mark.parametrize(("limit", "accumulated"), [("epochs", 3), *(pytest.param(*one, marks=SLOW) for one in GRID)])
def test_a_run_stopped_after_any_step_continues_with_the_same_batches(tmp_path, limit, accumulated):
    settings = LIMITS[limit] | {"accumulate_grad_batches": accumulated}
    whole, checkpoints, module = fit(tmp_path / "whole", **settings)
    last = whole.steps[-1]
    assert whole.validated[-1] == last
    assert load_checkpoint(checkpoints.last).step == last
    for step in range(1, last + 1):
        interrupt = Do("on_train_batch_end", step, lambda trainer: os.kill(os.getpid(), signal.SIGTERM))
        first, _, _ = fit(tmp_path / "broken", interrupt, **settings)
        assert first.steps[-1] == step
        rest, ended, resumed = fit(tmp_path / "broken", checkpoint=str(tmp_path / "broken" / "last.ckpt"), **settings)
        assert first.batches + rest.batches == whole.batches, step
        assert first.rates + rest.rates == whole.rates, step
        assert sorted({*first.validated, *rest.validated}) == sorted({*whole.validated}), step
        assert load_checkpoint(ended.last).step == last
        assert all(torch.equal(*pair) for pair in zip(module.parameters(), resumed.parameters(), strict=True))


CHANGED = {
    "longer": ({"max_epochs": 3}, 15),
    "shorter": ({"max_epochs": -1, "max_steps": 4}, 4),
    "larger batches": ({"batch_size": 8}, 3 + 1 + 2),  # 3 of 5 batches are 1 of 2, rounded down
    "smaller batches": ({"batch_size": 2}, 3 + 4 + 10),
    "accumulated": ({"accumulate_grad_batches": 3}, 3 + math.ceil(7 / 3)),
    "less data": ({"limit_train_batches": 4}, 3 + 1 + 4),
}


@pytest.mark.parametrize("change", ["larger batches", *(pytest.param(each, marks=SLOW) for each in CHANGED)])
def test_a_resumed_run_may_change_its_length_and_its_batches(tmp_path, change):
    """It was stopped after 3 of 10 batches."""
    settings, steps = CHANGED[change]
    interrupt = Do("on_train_batch_end", 3, lambda trainer: os.kill(os.getpid(), signal.SIGTERM))
    fit(tmp_path, interrupt, max_epochs=2)
    last = str(tmp_path / "last.ckpt")
    trace, checkpoints, _ = fit(tmp_path, checkpoint=last, **{"max_epochs": 2} | settings)
    assert trace.steps[-1] == trace.validated[-1] == load_checkpoint(checkpoints.last).step == steps
    # The first epoch is read to its end, without a window that was read before.
    assert len({batch for batch, _ in trace.batches[:2]}) == min(2, len(trace.batches))


SCORES = {3: 2.0, 6: 1.0, 8: 1.5}
"""The validation loss after each step at which there is a validation."""


class Killed(BaseException):
    pass


class Scores(L.Callback):
    def setup(self, trainer, module, stage):
        module.on_validation_epoch_end = lambda: module.log("val/loss", torch.tensor(SCORES[trainer.global_step]))


def test_best_and_last_agree_after_a_kill_between_any_two_writes(tmp_path, monkeypatch):
    replace, left = os.replace, 0

    def counted(source, target):
        nonlocal left
        if left == 0:
            raise Killed
        left -= 1
        replace(source, target)

    monkeypatch.setattr(files.os, "replace", counted)
    for number in range(2, 8):  # renames: the tokens, best; last; best, previous, last; previous, last
        folder, left = tmp_path / str(number), number
        with pytest.raises(Killed):
            fit(folder, Scores(), max_steps=8)
        left = -1
        newest, best = load_newest(folder), load_checkpoint(folder / "best.ckpt")
        _, checkpoints, _ = fit(folder, Scores(), checkpoint=str(newest.path), max_steps=newest.step)
        assert checkpoints.best_value == SCORES[best.step]
        fit(folder, Scores(), checkpoint=str(load_newest(folder).path), max_steps=8)
        assert (load_checkpoint(checkpoints.best).step, load_checkpoint(checkpoints.last).step) == (6, 8)
