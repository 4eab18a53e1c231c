"""Validation metrics, learning rates, and the options of a resumed run."""

import pytest
import torch

from tinyformer.training import AdamW, MuonWithAdamW, WarmupCosine
from training.runs import QUIET, fit, make_data, make_module, make_trainer

pytestmark = pytest.mark.filterwarnings(*QUIET)


def scores(trainer, module):
    trainer.validate(module, module.data.evaluation_dataloader("validation"), verbose=False)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


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
    scores(make_trainer(tmp_path, precision=precision, limit_val_batches=1.0), module)
    assert len(scored) > 3
    nats, tokens = (sum(batch[name].double() for batch in scored) for name in ("nats", "tokens"))
    assert module.metrics["loss"] == pytest.approx(float(nats / tokens), rel=1e-12)
    assert float(module.sums["tokens"]) == float(tokens)


def test_learning_rates_follow_the_schedule_and_the_loss_falls(tmp_path):
    rates, schedule = [], WarmupCosine(warmup_steps=4, final_factor=0.1)
    module = make_module(make_data(tmp_path), MuonWithAdamW(lr=0.02, adamw_lr=0.01), schedule)
    module.on_before_optimizer_step = lambda optimizer: rates.append([group["lr"] for group in optimizer.param_groups])
    trainer = make_trainer(tmp_path, max_steps=20, limit_val_batches=1.0)
    before = scores(trainer, module)["val/loss"]
    trainer.fit(module, datamodule=module.data)
    factors = [schedule.factor(step, 20) for step in range(20)]
    assert [muon for muon, _ in rates] == pytest.approx([0.02 * f for f in factors])
    assert [adamw for _, adamw in rates] == pytest.approx([0.01 * f for f in factors])
    assert float(trainer.callback_metrics["val/loss"]) < before - 1
    assert module.step == 20


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (AdamW(), AdamW(lr=3e-4, betas=(0.5, 0.6), weight_decay=0.3)),
        (MuonWithAdamW(), MuonWithAdamW(lr=3e-3, momentum=0.8, weight_decay=0.3, adamw_lr=1e-4)),
    ],
)
def test_a_resumed_run_has_the_options_that_it_is_given(first, second, tmp_path):
    path = tmp_path / "last.ckpt"
    fit(tmp_path, optimizer=first, max_steps=4)[0].save_checkpoint(path)
    trainer, module = fit(tmp_path, optimizer=second, max_steps=5, checkpoint=path)
    scale = module.schedule.factor(5, 5)
    for group, expected in zip(trainer.optimizers[0].param_groups, second(module.network).param_groups, strict=True):
        options = {"lr": expected["lr"] * scale, "params": group["params"]}
        assert {name: group[name] for name in expected} == expected | options
