"""Steps that are not finite: never applied, named by their layer, and never saved."""

import math
from copy import deepcopy

import lightning as L
import pytest
import torch
from nn.model_cases import make_transformer, token_ids
from nn.variants import NAMES, factory, network

from tinyformer.analysis import first_non_finite
from tinyformer.checkpoint.file import load_checkpoint
from tinyformer.errors import ArgumentError
from tinyformer.nn import AttentionMask
from tinyformer.training import AdamW, FiniteCheck, MuonWithAdamW, RunCSVLogger
from tinyformer.training.callbacks.checkpoints import Checkpoints
from tinyformer.training.callbacks.finite import NonFiniteStep
from tinyformer.training.callbacks.report import Report
from training.runs import QUIET, make_data, make_module, make_trainer
from training.test_callbacks import CONTENTS

pytestmark = pytest.mark.filterwarnings(*QUIET)


def plain_adam(network):
    return torch.optim.Adam(network.parameters(), fused=False)


OPTIMIZERS = {"adamw": AdamW(), "muon": MuonWithAdamW(), "adam": plain_adam}


class Poison(L.Callback):
    """Makes steps not finite, at batches counted from 0; records weights and optimizer before and after each step."""

    def __init__(self, how, *batches):
        self.how, self.batches = how, batches
        self.before, self.after, self.poisoned = {}, {}, []

    def setup(self, trainer, module, stage):
        compute, output = module.training_step, module.network.encoder.layers[1].attention.o_proj

        def training_step(batch, batch_idx):
            if not any(batch["inputs"] is inputs for inputs in self.poisoned):
                return compute(batch, batch_idx)
            if self.how == "layer":
                hook = output.register_forward_hook(lambda module, args, output: output / 0, prepend=True)
                try:
                    return compute(batch, batch_idx)
                finally:
                    hook.remove()
            loss = compute(batch, batch_idx)
            if self.how == "gradient":
                loss.register_hook(lambda grad: grad * torch.inf)
                return loss
            return loss * float(self.how)

        module.training_step = training_step

    def on_train_batch_start(self, trainer, module, batch, index):
        self.before[index] = self.state(trainer, module)
        if index in self.batches:
            self.poisoned.append(batch["inputs"])

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        self.after[index] = self.state(trainer, module)

    def state(self, trainer, module):
        return deepcopy((module.network.state_dict(), [each.state_dict()["state"] for each in parts(trainer)]))


def parts(trainer):
    return getattr(trainer.optimizers[0], "optimizers", trainer.optimizers)


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def fit(tmp_path, check, poison, optimizer="adamw", callbacks=(), **trainer):
    module = make_module(make_data(tmp_path), OPTIMIZERS[optimizer])
    trainer = make_trainer(tmp_path, [poison, check, *callbacks], **trainer)
    trainer.fit(module, datamodule=module.data)
    return trainer


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("how", ["nan", "inf", "gradient", "layer"])
def test_a_skipped_step_changes_nothing_and_the_others_do(how, optimizer, tmp_path):
    check, poison = FiniteCheck("skip"), Poison(how, 2, 5)
    fit(tmp_path, check, poison, optimizer)
    assert check.skipped == [3, 6]
    for batch, before in poison.before.items():
        assert same(before, poison.after[batch]) == (batch in (2, 5)), batch


def test_the_reported_loss_and_the_next_error_know_of_skipped_steps(tmp_path):
    check, report = FiniteCheck("skip", max_skipped=3), Report()
    logger = RunCSVLogger(tmp_path / "metrics.csv")
    module = make_module(make_data(tmp_path))
    trainer = make_trainer(tmp_path, [Poison("nan", 2, 6, 7), check, report], [logger])
    trainer.fit(module, datamodule=module.data)
    losses = {step: row["train/loss"] for step, row in logger.rows.items() if "train/loss" in row}
    assert all(math.isfinite(losses[step]) for step in (2, 4, 6))  # of steps 3 and 4, one was skipped
    assert math.isnan(losses[8])
    resumed = FiniteCheck("skip", max_skipped=3)
    resumed.load_state_dict(check.state_dict())
    with pytest.raises(NonFiniteStep, match=r"; the last finite loss was \d\.\d{4}; ") as stop:
        fit(tmp_path, resumed, Poison("nan", 0))
    assert stop.value.step == 1  # the third in a row


def zeros(state):
    """The state of a weight that no step was applied to."""
    return all(not value.any() for each in state for values in each.values() for value in values.values())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_first_step_that_is_skipped_leaves_the_optimizer_as_new(optimizer, tmp_path):
    poison = Poison("nan", 0)
    fit(tmp_path, FiniteCheck("skip"), poison, optimizer, max_steps=1)
    (weights, _), (weights_after, state) = poison.before[0], poison.after[0]
    assert same(weights, weights_after)
    assert zeros(state)


@pytest.mark.parametrize("how", ["nan", "gradient"])
def test_one_of_several_accumulated_batches_is_enough(how, tmp_path):
    check, poison = FiniteCheck("skip"), Poison(how, 4)
    fit(tmp_path, check, poison, accumulate_grad_batches=3)
    assert check.skipped == [2]
    changed = [batch for batch in poison.before if not same(poison.before[batch], poison.after[batch])]
    assert changed == [2, 8, 11, 14, 17, 20, 23]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_stop_applies_no_step_from_there_on_and_saves_nothing(optimizer, tmp_path):
    checkpoints, poison = Checkpoints(tmp_path / "checkpoints", CONTENTS), Poison("layer", 4)
    with pytest.raises(NonFiniteStep) as stop:
        fit(tmp_path, FiniteCheck(), poison, optimizer, [checkpoints], log_every_n_steps=8, val_check_interval=3)
    assert max(poison.after) == 5  # the validation after step 6 reads the flags
    assert same(poison.before[4], poison.after[5])
    assert (stop.value.step, stop.value.origin) == (5, "the output of encoder.layers.1.attention.o_proj")
    assert str(stop.value).startswith("step 5 has a loss of nan; the last finite loss was "), str(stop.value)
    last = load_checkpoint(tmp_path / "checkpoints" / "last.ckpt")
    assert last.step == 3
    assert all(weight.isfinite().all() for weight in last.weights.values())


@pytest.mark.parametrize(
    ("how", "settings", "sentence"),
    [
        ("gradient", {"log_every_n_steps": 1}, "and a gradient that is not finite"),
        ("inf", {"val_check_interval": 100, "limit_val_batches": 0, "log_every_n_steps": 100}, "has a loss of inf"),
    ],
)
def test_flags_are_read_at_each_report_and_at_the_end(how, settings, sentence, tmp_path):
    poison = Poison(how, 6)
    with pytest.raises(NonFiniteStep, match=sentence) as stop:
        fit(tmp_path, FiniteCheck(), poison, **settings)
    assert stop.value.step == 7
    assert max(poison.after) == (6 if settings["log_every_n_steps"] == 1 else 7)


def test_skip_gives_up_after_so_many_steps_in_a_row(tmp_path):
    check, poison = FiniteCheck("skip", max_skipped=3), Poison("nan", 0, 1, 3, 4, 5)
    with pytest.raises(NonFiniteStep) as stop:
        fit(tmp_path, check, poison)
    assert (stop.value.step, check.skipped) == (6, [1, 2, 4, 5])


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    class Overflow(L.Callback):
        def on_train_batch_end(self, trainer, module, *args):
            if trainer.global_step == 6:
                module.network.encoder.layers[0].attention.o_proj.weight.data[0, 0] = torch.inf

    checkpoints = Checkpoints(tmp_path / "checkpoints", CONTENTS)
    with pytest.raises(NonFiniteStep, match=r"weights that are not finite.*: the weight network\.encoder\.layers\.0\."):
        fit(tmp_path, FiniteCheck(), Overflow(), callbacks=[checkpoints])
    assert load_checkpoint(checkpoints.last).step == 3


@pytest.mark.parametrize("name", NAMES)
def test_a_sound_model_has_no_origin(name):
    model = network(factory(name))
    tokens = token_ids(seq=11)
    assert first_non_finite(model, lambda: model(tokens, AttentionMask(causal=True)).square().mean()) is None


def broken(place):
    model = make_transformer(checkpoint_activations=True)
    layer = model.encoder.layers[1].feed_forward
    if place == "weight":
        layer.down_proj.weight.data[0, 0] = torch.nan
    elif place == "output":
        layer.down_proj.register_forward_hook(lambda module, args, output: output * torch.inf)
    elif place == "gradient":
        layer.down_proj.register_forward_hook(lambda module, args, output: output + 0 * (output * 0).sqrt())
    return model


@pytest.mark.parametrize(
    ("place", "origin"),
    [
        ("weight", "the weight encoder.layers.1.feed_forward.down_proj.weight"),
        ("output", "the output of encoder.layers.1.feed_forward.down_proj"),
        ("loss", "the loss"),
        ("gradient", "the gradient of the output of encoder.layers.1.feed_forward.up_proj"),
    ],
)
def test_the_origin_is_the_first_value_that_is_not_finite(place, origin):
    model = broken(place)
    scale = torch.inf if place == "loss" else 1.0
    grad = torch.full_like(model.encoder.layers[0].attention.o_proj.weight, 3.0)
    model.encoder.layers[0].attention.o_proj.weight.grad = grad.clone()
    found = first_non_finite(model, lambda: model(token_ids(), AttentionMask(causal=True)).square().mean() * scale)
    assert found == origin
    assert torch.equal(model.encoder.layers[0].attention.o_proj.weight.grad, grad)


@pytest.mark.parametrize("values", [{"action": "ignore"}, {"max_skipped": 0}])
def test_mistakes(values):
    with pytest.raises(ArgumentError, match=next(iter(values))):
        FiniteCheck(**values)
