"""However a run ends, it ends alike, and a resumed run reads the batches that an unbroken one reads."""

import os
import signal

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, Timer

from tinyformer.checkpoint import load_checkpoint
from tinyformer.training.callbacks import Checkpoints, Interrupted, Report
from training.runs import QUIET, TEXT, make_data, make_module, make_trainer
from training.test_callbacks import CONTENTS

pytestmark = pytest.mark.filterwarnings(*QUIET)

BATCHES = 5
"""Batches in an epoch of these runs."""


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
    data = make_data(folder, TEXT[:370], batch_size=batch_size, validation_fraction=0.1)
    module, trace = make_module(data), Trace()
    checkpoints = Checkpoints(folder, CONTENTS)
    settings = {"max_steps": -1, "val_check_interval": 3, "limit_val_batches": None} | settings
    trainer = make_trainer(folder, [trace, Report(), *callbacks, checkpoints], **settings)
    try:
        trainer.fit(module, datamodule=data, ckpt_path=checkpoint, weights_only=True)
    except Interrupted:
        pass
    return trace, checkpoints, module


def stop(trainer):
    trainer.should_stop = True


LIMITS = {
    "steps": {"max_steps": 10},
    "epochs": {"max_epochs": 2},
    "both": {"max_steps": 10, "max_epochs": 3},
    "epochs of three batches": {"max_epochs": 2, "limit_train_batches": 3},
    "epochs, validated at each": {"max_epochs": 3, "check_val_every_n_epoch": 1, "val_check_interval": 1.0},
    "epochs, validated at every other": {"max_epochs": 3, "check_val_every_n_epoch": 2, "val_check_interval": 1.0},
    "one batch": {"max_epochs": 4, "overfit_batches": 1, "val_check_interval": 2},
}


@pytest.mark.parametrize("accumulated", [1, 3])
@pytest.mark.parametrize("limit", LIMITS)
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
