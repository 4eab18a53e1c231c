"""Validation metrics, learning rates and accumulated gradients."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from tinyformer.data import CharTokenizer, TokenSplit
from tinyformer.tasks import CausalLM
from tinyformer.training import AdamW, MuonWithAdamW, RunCSVLogger, WarmupCosine
from tinyformer.training.callbacks.report import Report
from training.runs import QUIET, make_data, make_module, make_trainer

pytestmark = pytest.mark.filterwarnings(*QUIET)

GREEK = "Μῆνιν ἄειδε, θεά, Πηληϊάδεω Ἀχιλῆος 🙂🚀 οὐλομένην. " * 60


def split_of(num_tokens, num_bytes, num_unknown=0):
    ids = np.zeros(num_tokens + 1, np.uint16)
    return TokenSplit(ids, np.array([0, num_tokens + 1]), num_bytes, num_bytes, num_unknown)


def metrics_of(sums, split):
    return CausalLM().metrics({name: torch.tensor(value) for name, value in sums.items()}, split)


# Metrics.


def test_metrics_by_hand():
    sums = {"nats": 120.0, "tokens": 60.0, "top1": 15.0, "top5": 45.0}
    metrics = metrics_of(sums, split_of(num_tokens=60, num_bytes=240))
    assert metrics == pytest.approx(
        {
            "loss": 2.0,
            "perplexity": math.e**2,
            "bits_per_byte": 2.0 * 60 / (math.log(2) * 240),
            "accuracy": 0.25,
            "accuracy_top5": 0.75,
        }
    )
    # A part of the split stands for all of it.
    part = {"nats": 20.0, "tokens": 10.0, "top1": 5.0, "top5": 10.0}
    bits = metrics_of(part, split_of(num_tokens=60, num_bytes=240))["bits_per_byte"]
    assert bits == pytest.approx(2.0 * 60 / (math.log(2) * 240))
    # Unknown characters, or tokens without a score, leave no bits per byte.
    assert metrics_of(part, split_of(10, 10, num_unknown=1))["bits_per_byte"] is None
    partly_scored = metrics_of(part, replace(split_of(20, 20), scored=np.arange(21) > 10))
    assert (partly_scored["bits_per_byte"], partly_scored["loss"], partly_scored["accuracy"]) == (None, 2.0, 0.5)
    assert math.isfinite(metrics_of(part | {"nats": 1e6}, split_of(10, 10))["perplexity"])


# Validation.


def scores(trainer, module, data):
    trainer.validate(module, data.evaluation_dataloader("validation"), verbose=False)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def validate(tmp_path, text, tokenizer, batches=1.0, **data):
    data = make_data(tmp_path, text, tokenizer, **data)
    module = make_module(data, tied=False, first_step=7)
    torch.nn.init.zeros_(module.network.readout.proj.weight)  # all tokens are equally probable
    logger = RunCSVLogger(tmp_path / "metrics.csv")
    trainer = make_trainer(tmp_path, loggers=[logger], limit_val_batches=batches)
    return data, scores(trainer, module, data), logger


def test_a_uniform_model_has_the_loss_log_vocab_size(tmp_path):
    data, metrics, logger = validate(tmp_path, GREEK, CharTokenizer())
    split, vocab_size = data.splits["validation"], data.tokenizer.vocab_size
    text = GREEK[int(len(GREEK) * 0.95) :]
    assert (split.num_tokens, split.num_bytes) == (len(text), len(text.encode()))
    assert split.num_bytes > 1.5 * split.num_tokens  # Greek and emoji take several bytes each
    expected = math.log2(vocab_size) * len(text) / len(text.encode())
    assert metrics["val/bits_per_byte"] == pytest.approx(expected, rel=1e-6)
    assert metrics["val/loss"] == pytest.approx(math.log(vocab_size), rel=1e-6)
    assert metrics["val/perplexity"] == pytest.approx(vocab_size, rel=1e-5)
    assert logger.rows[7]["val/loss"] == pytest.approx(metrics["val/loss"])  # at the step of the weights


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_scores_are_summed_in_fp64_whatever_the_precision(tmp_path, precision):
    """bf16 has 8 bits and fp32 has 24: from 2^24 on it does not count single tokens."""
    data = make_data(tmp_path, validation_fraction=0.21)
    module = make_module(data)
    first = {"nats": 3.0 * 2**24, "tokens": 2.0**24, "top1": 0.0, "top5": 0.0}
    scored, score = [], module.task.score

    def large_score(*args):
        scored.append(score(*args) if scored else {name: torch.tensor(value) for name, value in first.items()})
        return scored[-1]

    module.task.score = large_score
    scores(make_trainer(tmp_path, precision=precision, limit_val_batches=1.0), module, data)
    assert len(scored) > 3
    nats, tokens = (sum(batch[name].double() for batch in scored) for name in ("nats", "tokens"))
    assert module.metrics["loss"] == pytest.approx(float(nats / tokens), rel=1e-12)
    assert float(module.sums["tokens"]) == float(tokens)


# Training.


def test_learning_rates_follow_the_schedule_and_the_loss_falls(tmp_path):
    data, rates = make_data(tmp_path), []
    schedule = WarmupCosine(warmup_steps=4, final_factor=0.1)
    module = make_module(data, MuonWithAdamW(lr=0.02, adamw_lr=0.01), schedule)
    module.on_before_optimizer_step = lambda optimizer: rates.append([group["lr"] for group in optimizer.param_groups])
    trainer = make_trainer(tmp_path, max_steps=20, limit_val_batches=1.0)
    before = scores(trainer, module, data)["val/loss"]
    trainer.fit(module, datamodule=data)
    factors = [schedule.factor(step, 20) for step in range(20)]
    assert [muon for muon, _ in rates] == pytest.approx([0.02 * f for f in factors])
    assert [adamw for _, adamw in rates] == pytest.approx([0.01 * f for f in factors])
    assert float(trainer.callback_metrics["val/loss"]) < before - 1
    assert module.step == 20


def test_accumulated_gradients_are_those_of_one_large_batch(tmp_path):
    """The same windows in the same order, in batches of 8 or in parts of them: the same steps."""
    weights, losses = [], []
    for size, accumulated in ((8, 1), (2, 4)):
        folder = tmp_path / str(size)
        folder.mkdir()
        data = make_data(folder, batch_size=size)
        module = make_module(data, optimizer=lambda network: torch.optim.SGD(network.parameters(), lr=0.5))
        logger = RunCSVLogger(folder / "metrics.csv")
        settings = {"max_steps": 6, "accumulate_grad_batches": accumulated, "val_check_interval": 1000}
        trainer = make_trainer(folder, [Report()], [logger], gradient_clip_val=1.0, **settings)
        trainer.fit(module, datamodule=data)
        assert trainer.global_step == 6
        weights.append(module.network.state_dict())
        losses.append({step: row["train/loss"] for step, row in logger.rows.items() if "train/loss" in row})
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=1e-5)
    assert losses[0].keys() == {2, 4, 6}
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (AdamW(), AdamW(lr=3e-4, betas=(0.5, 0.6), weight_decay=0.3)),
        (MuonWithAdamW(), MuonWithAdamW(lr=3e-3, momentum=0.8, weight_decay=0.3, adamw_lr=1e-4)),
    ],
)
def test_a_resumed_run_has_the_options_that_it_is_given(first, second, tmp_path):
    checkpoint = tmp_path / "last.ckpt"
    for optimizer, steps, path in ((first, 4, None), (second, 5, checkpoint)):
        module = make_module(make_data(tmp_path), optimizer, WarmupCosine(0, final_factor=1.0))
        trainer = make_trainer(tmp_path, max_steps=steps)
        trainer.fit(module, datamodule=module.data, ckpt_path=path, weights_only=True)
        trainer.save_checkpoint(checkpoint)
    fresh = second(module.network).param_groups
    for group, expected in zip(trainer.optimizers[0].param_groups, fresh, strict=True):
        assert {name: group[name] for name in expected} == {**expected, "params": group["params"]}
