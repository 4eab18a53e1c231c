"""Optimizer steps: of accumulated batches, of processes, of runs that end early, and of runs that are resumed."""

import contextlib
import copy
import math

import lightning as L
import pytest
import torch
from nn.model_cases import make_transformer

from tinyformer.checkpoint.file import load_checkpoint
from tinyformer.data.batches.windows import IGNORED
from tinyformer.tasks import CausalLM
from tinyformer.training import AdamW, MuonWithAdamW, Snapshots, TrainingModule, WarmupCosine
from tinyformer.training.callbacks.checkpoints import Checkpoints, Interrupted
from tinyformer.training.callbacks.metrics import Report
from tinyformer.training.step import train_step
from training.runs import CONTENTS, QUIET, TEXT, Do, fit, interrupt, make_data, make_module, make_trainer, snapshots
from training.step_cases import LAYOUTS, ROWS, SEQ, STEPS, TASKS, Given, off, trained

pytestmark = pytest.mark.filterwarnings(*QUIET, "ignore:.*fork", "ignore:You defined a .validation_step")


@pytest.mark.parametrize("name", TASKS)
def test_the_steps_are_those_of_one_batch(name, tmp_path):
    """In fp64; of one task in all layouts, of the others in the one that has everything.

    Tokens of sources and targets and of all processes are counted, and the operations of one process.
    """
    gradients, weights, loss, (tokens, flops) = trained(tmp_path, name)
    assert tokens == STEPS * ROWS * SEQ * (2 if name == "seq2seq" else 1)
    for layout in LAYOUTS if name == "causal_lm" else ["accumulated in processes"]:
        found, after, reported, total = trained(tmp_path, name, LAYOUTS[layout])
        assert off(found, gradients) < 1e-9, layout
        assert off(after, weights) < 1e-9, layout
        assert reported == pytest.approx(loss, rel=1e-9), layout
    assert total == (tokens, pytest.approx(flops / 2))


def test_a_step_without_lightning_is_that_of_the_mean_over_all_targets():
    torch.manual_seed(3)
    network, task, ids = make_transformer().double(), CausalLM(), torch.randint(50, (5, 9))
    targets = ids[:, 1:].clone()
    targets[:2, 2:], targets[4] = IGNORED, IGNORED
    rows = {"inputs": ids[:, :-1], "targets": targets}
    before, expected = copy.deepcopy(network), task.loss(network, rows)
    gradients = torch.autograd.grad(expected, [*network.parameters()])
    norm = float(torch.nn.utils.get_total_norm(gradients))
    batches = [{name: x[part] for name, x in rows.items()} for part in (slice(2), slice(2, 4), slice(4, 5))]
    optimizer = torch.optim.SGD(network.parameters(), lr=1.0)
    assert train_step(network, task, batches, optimizer, norm / 2).item() == pytest.approx(expected.item())
    for weight, old, gradient in zip(network.parameters(), before.parameters(), gradients, strict=True):
        torch.testing.assert_close(weight, old - gradient / 2, atol=1e-6, rtol=1e-6)
    with torch.no_grad():
        next(network.parameters())[0] = math.nan
    kept = copy.deepcopy(network.state_dict())
    assert math.isnan(train_step(network, task, batches, optimizer))
    torch.testing.assert_close(network.state_dict(), kept, equal_nan=True, atol=0, rtol=0)


def test_processes_have_the_same_weights_and_dropout_masks_of_their_own(tmp_path):
    losses, keep = [], L.Callback()
    keep.on_train_batch_end = lambda trainer, module, outputs, *args: torch.save(
        float(outputs["loss"]), tmp_path / f"{trainer.global_rank}.pt"
    )
    for dropout in (0.0, 0.5):
        torch.manual_seed(3)
        module = TrainingModule(make_transformer(dropout=dropout), CausalLM(), None, AdamW(), WarmupCosine(2))
        settings = {"strategy": "ddp_fork", "devices": 2, "max_steps": 1, "limit_val_batches": 0}
        make_trainer(tmp_path, [keep], **settings).fit(module, Given("causal_lm", ROWS))
        losses.append([torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)])
    (first, second), (one, other) = losses
    assert first == second
    assert abs(one - other) > 1e-3


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_scores_are_summed_in_fp64_whatever_the_precision(tmp_path, precision):
    """bf16 has 8 bits and fp32 has 24: from 2^24 on it does not count single tokens."""
    module = make_module(make_data(tmp_path, validation_fraction=0.21))
    first = {"nats": 3.0 * 2**24, "tokens": 2.0**24, "top1": 0.0, "top5": 0.0}
    scored, score = [], module.task.score

    def large_score(*args):
        scored.append(score(*args) if scored else {name: torch.tensor(value) for name, value in first.items()})
        return scored[-1]

    module.task.score = large_score
    trainer = make_trainer(tmp_path, precision=precision, limit_val_batches=1.0)
    trainer.validate(module, module.data.evaluation_dataloader("validation"), verbose=False)
    assert len(scored) > 3
    nats, tokens = (sum(batch[name].double() for batch in scored) for name in ("nats", "tokens"))
    assert module.metrics["loss"] == pytest.approx(float(nats / tokens), rel=1e-12)
    assert float(module.sums["tokens"]) == float(tokens)


# Ends and resumptions.


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
    usual = {"max_steps": -1, "limit_val_batches": None, "data": data}
    with contextlib.suppress(Interrupted):
        fit(folder, trace, Report(), *callbacks, checkpoints, **usual | settings)
    return trace, checkpoints, trace.module


def stop(trainer):
    trainer.should_stop = True


ENDS = {
    "after a batch": Do(1, stop),
    "before a batch": Do(2, stop, "on_train_batch_start"),
    "after a validation": Do(1, stop, "on_validation_end"),
    "after an epoch": Do(1, stop, "on_train_epoch_end"),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_run_ends_with_a_whole_step_that_is_validated_and_saved(tmp_path, end):
    trace, checkpoints, module = run(tmp_path, ENDS[end], accumulate_grad_batches=3, val_check_interval=4)
    last = load_checkpoint(checkpoints.last)
    assert len(trace.batches) % 3 == 0
    assert last.step == trace.steps[-1] == trace.validated[-1] == len(trace.batches) // 3
    assert all(torch.equal(last.weights[name], value) for name, value in module.network.state_dict().items())


HALF = {"val_check_interval": 0.5, "check_val_every_n_epoch": 1}

LIMITS = {
    "steps": {"max_steps": 10},
    "epochs": {"max_epochs": 2},
    "both": {"max_steps": 10, "max_epochs": 3},
    "epochs of three batches": {"max_epochs": 2, "limit_train_batches": 3},
    "epochs, validated at every other": {"max_epochs": 3, "check_val_every_n_epoch": 2, "val_check_interval": 1.0},
    "one batch": {"max_epochs": 4, "overfit_batches": 1, "val_check_interval": 2},
    "halves of a fraction": {"max_epochs": 2, "limit_train_batches": 0.8} | HALF,
}


GRID = [
    pytest.param(limit, accumulated, marks=pytest.mark.slow)
    for limit in LIMITS
    for accumulated in (1, 3)
    if (limit, accumulated) != ("epochs", 3)
]


@pytest.mark.parametrize(("limit", "accumulated"), [("epochs", 3), *GRID])
def test_a_run_stopped_after_any_step_continues_with_the_same_batches(tmp_path, limit, accumulated):
    optimizer = AdamW() if accumulated == 1 else MuonWithAdamW()
    settings = LIMITS[limit] | {"accumulate_grad_batches": accumulated, "optimizer": optimizer}
    whole, checkpoints, module = run(tmp_path / "whole", Snapshots(2), **settings)
    last, saved = whole.steps[-1], snapshots(tmp_path / "whole")
    assert whole.validated[-1] == last
    assert load_checkpoint(checkpoints.last).step == last
    for step in range(1, last + 1):
        first, _, _ = run(tmp_path / "broken", interrupt(step), Snapshots(2), **settings)
        assert first.steps[-1] == step
        checkpoint = str(tmp_path / "broken" / "last.ckpt")
        rest, ended, resumed = run(tmp_path / "broken", Snapshots(2), checkpoint=checkpoint, **settings)
        assert first.batches + rest.batches == whole.batches, step
        assert first.rates + rest.rates == whole.rates, step
        assert sorted({*first.validated, *rest.validated}) == sorted({*whole.validated}), step
        assert load_checkpoint(ended.last).step == last
        assert all(map(torch.equal, module.parameters(), resumed.parameters()))
        again, expected = ([*of.items()] for of in (snapshots(tmp_path / "broken"), saved))
        torch.testing.assert_close(again, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("settings", "batches", "distinct", "validated"),
    [
        ({"limit_train_batches": 0.8}, 8, 8, [2, 4, 6, 8]),  # of the five batches of an epoch, four
        ({"limit_train_batches": 0.8, "accumulate_grad_batches": 2}, 8, 8, [1, 2, 3, 4]),
        ({"overfit_batches": 0.5, "batch_size": 1}, 20, 10, [5, 10, 15, 20]),
    ],
)
def test_a_fraction_of_an_epoch_is_taken_once(tmp_path, settings, batches, distinct, validated):
    trace, _, _ = run(tmp_path, max_epochs=2, **HALF | settings)
    read = [inputs for inputs, _ in trace.batches]
    assert (len(read), len({*read}), trace.validated) == (batches, distinct, validated)


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


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"batch_size": 8}, 3 + 1 + 2),  # 3 of 5 batches are 1 of 2, rounded down
        pytest.param({"max_epochs": -1, "max_steps": 4}, 4, marks=pytest.mark.slow),
        pytest.param({"batch_size": 2}, 3 + 4 + 10, marks=pytest.mark.slow),
        pytest.param({"accumulate_grad_batches": 3}, 3 + math.ceil(7 / 3), marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_may_change_its_length_and_its_batches(tmp_path, settings, steps):
    """It was stopped after 3 of 10 batches."""
    run(tmp_path, interrupt(3), max_epochs=2)
    last = str(tmp_path / "last.ckpt")
    trace, checkpoints, _ = run(tmp_path, checkpoint=last, **{"max_epochs": 2} | settings)
    assert trace.steps[-1] == trace.validated[-1] == load_checkpoint(checkpoints.last).step == steps
    # The first epoch is read to its end, without a window that was read before.
    assert len({batch for batch, _ in trace.batches[:2]}) == min(2, len(trace.batches))
