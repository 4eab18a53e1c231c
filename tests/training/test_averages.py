"""Means over targets: accumulated batches and processes take the steps of one batch; sums of scores are fp64."""

from functools import partial

import lightning as L
import pytest
import torch
from analysis.pair_subjects import loud_encoder_decoder
from nn.model_cases import make_encoder, make_transformer

from tinyformer.batch import IGNORED
from tinyformer.data.batches.loader import EpochLoader
from tinyformer.nn import SpanReadout, Transformer
from tinyformer.tasks import CausalLM, Seq2Seq, SpanExtraction
from tinyformer.training import AdamW, FiniteCheck, TrainingModule, WarmupCosine
from tinyformer.training.callbacks.report import Report
from training.runs import QUIET, make_data, make_module, make_trainer

pytestmark = pytest.mark.filterwarnings(*QUIET, "ignore:.*fork", "ignore:You defined a .validation_step")

ROWS, SEQ, STEPS = 8, 12, 12


class OwnTask(CausalLM):
    """A task that defines the loss alone, here with a penalty."""

    def loss(self, network, batch):
        penalty = network.readout.proj.weight.square().mean()
        return super().loss(network, batch) + penalty


TASKS = {
    "causal_lm": (CausalLM(), make_transformer),
    "seq2seq": (Seq2Seq(label_smoothing=0.1), lambda: loud_encoder_decoder().train()),
    "span": (SpanExtraction(), lambda: Transformer(make_encoder(), SpanReadout)),
    "own": (OwnTask(), make_transformer),
}


def rows_of(name, step):
    """A batch of rows with different numbers of targets; some have none."""
    draw = partial(torch.randint, generator=torch.Generator().manual_seed(step))
    batch = {"inputs": draw(50, (ROWS, SEQ)), "lengths": draw(3, SEQ + 1, (ROWS,))}
    if name == "span":
        contexts = torch.full((ROWS,), 2)
        return batch | {"contexts": contexts, "starts": contexts, "ends": batch["lengths"] - 1}
    is_target = torch.arange(SEQ) < draw(0 if name == "own" else 1, SEQ, (ROWS, 1))
    batch["targets"] = torch.where(is_target, draw(50, (ROWS, SEQ)), IGNORED)
    if name == "seq2seq":
        batch |= {"source": draw(50, (ROWS, SEQ)), "source_lengths": batch["lengths"]}
    return batch


class Given(EpochLoader):
    """The rows of each step, as one batch or several of a size; processes take turns."""

    def __init__(self, name, size, world_size=1):
        self.batches, self.world_size = [], world_size
        for step in range(STEPS):
            parts = {key: value.split(size) for key, value in rows_of(name, step).items()}
            self.batches += [dict(zip(parts, values, strict=True)) for values in zip(*parts.values(), strict=True)]
        super().__init__(len(self.batches) // world_size, 0, False)

    def __getitems__(self, indices):
        return self.batches[indices[0]]

    def _epoch(self, epoch):
        rank = torch.distributed.get_rank() if self.world_size > 1 else 0
        return self, [[index] for index in range(rank, len(self.batches), self.world_size)]


class Gradients(L.Callback):
    """Writes the gradients of each step, as a callback sees them before clipping, and the mean loss."""

    def __init__(self, path):
        self.path, self.steps = path, []

    def on_before_optimizer_step(self, trainer, module, optimizer):
        gradients = [weight.grad.flatten() for weight in module.parameters() if weight.grad is not None]
        self.steps.append(torch.cat(gradients).clone())

    def on_train_end(self, trainer, module):
        report = next(each for each in trainer.callbacks if isinstance(each, Report))
        weights = torch.cat([weight.detach().flatten() for weight in module.parameters()])
        if trainer.is_global_zero:
            total = report.total.tokens, report.total.flops
            torch.save((torch.stack(self.steps), weights, report.latest["train/loss"], total), self.path)


LAYOUTS = {
    "accumulated unequally": (1, 3, 3),
    "processes unequally": (2, 1, 5),
    "accumulated in processes": (2, 2, 2),
}
"""Processes, accumulated batches, and the rows of each; the last batch of a step may have fewer."""


def trained(folder, name, layout=(1, 1, ROWS)):
    processes, accumulated, size = layout
    task, network = TASKS[name]
    torch.manual_seed(0)
    module = TrainingModule(network(), task, None, AdamW(), WarmupCosine(2))
    settings = {"accumulate_grad_batches": accumulated, "limit_val_batches": 0, "max_steps": STEPS}
    if processes > 1:
        settings |= {"strategy": "ddp_fork", "devices": processes}
    callbacks = [Gradients(folder / "found.pt"), Report(), FiniteCheck()]
    settings |= {"precision": "64-true", "gradient_clip_val": 1.0, "log_every_n_steps": STEPS}
    trainer = make_trainer(folder, callbacks, **settings)
    trainer.fit(module, train_dataloaders=Given(name, size, processes))
    return torch.load(folder / "found.pt")


def off(found, expected):
    return float((found - expected).norm() / expected.norm())


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
