"""Steps that are not finite: never applied, named by their layer, and never saved."""

import math

import lightning as L
import pytest
import torch
from nn.model_cases import make_transformer, token_ids

from tinyformer.analysis import first_non_finite
from tinyformer.checkpoint.file import load_checkpoint
from tinyformer.nn import AttentionMask
from tinyformer.training import AdamW, FiniteCheck, MuonWithAdamW, RunCSVLogger
from tinyformer.training.callbacks.checkpoints import Checkpoints
from tinyformer.training.callbacks.finite import NonFiniteStep
from tinyformer.training.callbacks.report import Report
from training.runs import CONTENTS, QUIET, Do, fit

pytestmark = pytest.mark.filterwarnings(*QUIET)


def plain_adam(network):
    return torch.optim.Adam(network.parameters(), fused=False)


class Poison(L.Callback):
    """Makes steps not finite, at batches counted from 0; records weights and optimizer before and after each step."""

    def __init__(self, how, *batches):
        self.how, self.batches = how, batches
        self.before, self.after, self.poisoned, self.is_bad = {}, {}, [], False

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
        self.before[index] = self.state(trainer, module)
        if index in self.batches:
            self.poisoned.append(batch["inputs"])

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        self.after[index] = self.state(trainer, module)

    def state(self, trainer, module):
        """A copy of all weights, and of the state of the optimizers as far as it is not zero."""
        optimizers = getattr(trainer.optimizers[0], "optimizers", trainer.optimizers)
        states = [value for each in optimizers for state in each.state.values() for value in state.values()]
        return [value.clone() for value in (*module.parameters(), *states) if value.any()]

    def changed(self):
        """The batches at which something changed."""
        pairs = ((batch, self.before[batch], after) for batch, after in self.after.items())
        return [batch for batch, before, after in pairs if not same(before, after)]


def same(before, after):
    return len(before) == len(after) and all(map(torch.equal, before, after))


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


def test_one_of_several_accumulated_batches_is_enough(tmp_path):
    check, poison = FiniteCheck("skip"), Poison("gradient", 4)
    fit(tmp_path, poison, check, accumulate_grad_batches=3)
    assert check.skipped == [2]
    assert poison.changed() == [2, 8, 11, 14, 17, 20, 23]


def test_stop_applies_no_step_from_there_on_and_saves_nothing(tmp_path):
    checkpoints, poison = Checkpoints(tmp_path / "checkpoints", CONTENTS), Poison("layer", 4)
    with pytest.raises(NonFiniteStep) as stop:
        fit(tmp_path, poison, FiniteCheck(), checkpoints, log_every_n_steps=8)
    assert poison.changed() == [0, 1, 2, 3]
    assert max(poison.after) == 5  # the validation after step 6 reads the flags
    assert (stop.value.step, stop.value.origin) == (5, "the output of encoder.layers.1.attention.o_proj")
    assert str(stop.value).startswith("step 5 has a loss of nan; the last finite loss was "), str(stop.value)
    last = load_checkpoint(checkpoints.last)
    assert last.step == 3
    assert all(weight.isfinite().all() for weight in last.weights.values())


@pytest.mark.parametrize(
    ("how", "settings", "sentence", "last"),
    [
        ("gradient", {"log_every_n_steps": 1}, "and a gradient that is not finite", 6),
        ("inf", {"val_check_interval": 100, "limit_val_batches": 0, "log_every_n_steps": 100}, "has a loss of inf", 7),
    ],
)
def test_flags_are_read_at_each_report_and_at_the_end(how, settings, sentence, last, tmp_path):
    poison = Poison(how, 6)
    with pytest.raises(NonFiniteStep, match=sentence) as stop:
        fit(tmp_path, poison, FiniteCheck(), **settings)
    assert (stop.value.step, max(poison.after)) == (7, last)


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", CONTENTS)
    overflow = Do(6, lambda trainer: next(trainer.model.parameters()).data.fill_(torch.inf))
    with pytest.raises(NonFiniteStep, match=r"weights that are not finite.*: the weight network\.encoder\."):
        fit(tmp_path, FiniteCheck(), overflow, checkpoints)
    assert load_checkpoint(checkpoints.last).step == 3


# Where it begins.


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
