"""Steps of given rows, as one batch, as accumulated ones, and in several processes."""

from functools import partial

import lightning as L
import torch
from analysis.contexts import loud_encoder_decoder
from nn.model_cases import make_encoder, make_transformer
from nn.variants import mha, network

from tinyformer.data.batches.loader import EpochLoader
from tinyformer.data.batches.windows import IGNORED
from tinyformer.nn import ClassReadout, PreNormBlock, Residual, SpanReadout, Transformer
from tinyformer.tasks import CausalLM, Classification, MaskedLM, Seq2Seq, SpanExtraction
from tinyformer.training import AdamW, FiniteCheck, TrainingModule, WarmupCosine
from tinyformer.training.callbacks.metrics import Report
from tinyformer.training.sharding import whole
from training.runs import make_trainer, strategy_of

ROWS, SEQ, STEPS = 8, 12, 12
LABELS = ["bad", "good", "neither"]


class OwnTask(CausalLM):
    """A task that defines the loss alone, here with a penalty."""

    def loss(self, network, batch):
        penalty = network.readout.proj.weight.square().mean()
        return super().loss(network, batch) + penalty


MIXED = partial(mha, value_residual=0.5, value_embedding=True, vocab_size=50)
LEARNED = partial(PreNormBlock, attention_residual=partial(Residual, learned=True, embedding=True))
TASKS = {
    "causal_lm": (CausalLM(), make_transformer),
    "seq2seq": (Seq2Seq(label_smoothing=0.1), lambda: loud_encoder_decoder().train()),
    "masked_lm": (MaskedLM(), lambda: network(MIXED, kind=LEARNED).train()),
    "classification": (
        Classification(LABELS, label_smoothing=0.1),
        lambda: Transformer(make_encoder(), partial(ClassReadout, labels=LABELS)),
    ),
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
    if name == "classification":
        return batch | {"labels": draw(len(LABELS), (ROWS,))}
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
        super().__init__(len(self.batches) // world_size, False)

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
        gradients = [whole(weight.grad, True).flatten() for weight in module.parameters() if weight.grad is not None]
        self.steps.append(torch.cat(gradients).clone())

    def on_train_end(self, trainer, module):
        report = next(each for each in trainer.callbacks if isinstance(each, Report))
        weights = torch.cat([whole(weight.detach(), True).flatten() for weight in module.parameters()])
        if trainer.is_global_zero:
            total = report.total.tokens, report.total.flops
            torch.save((torch.stack(self.steps), weights, report.latest["train/loss"], total), self.path)


LAYOUTS = {
    "accumulated unequally": (1, 3, 3),
    "processes unequally": (2, 1, 5),
    "four processes": (4, 1, 2),
    "accumulated in processes": (2, 2, 2),
}
"""Processes, accumulated batches, and the rows of each; the last batch of a step may have fewer."""


def trained(
    folder, name, layout=(1, 1, ROWS), optimizer=None, callbacks=(), strategy="ddp", precision="64-true", **changes
):
    """The gradients of each step, the weights after the last, the loss, and the work."""
    processes, accumulated, size = layout
    task, network = TASKS[name]
    torch.manual_seed(0)
    module = TrainingModule(network(), task, None, optimizer or AdamW(), WarmupCosine(2))
    settings = {"accumulate_grad_batches": accumulated, "limit_val_batches": 0, "max_steps": STEPS}
    settings |= strategy_of(strategy, processes, precision)
    callbacks = [Gradients(folder / "found.pt"), Report(), FiniteCheck(), *callbacks]
    settings |= {"gradient_clip_val": 1.0, "log_every_n_steps": STEPS}
    trainer = make_trainer(folder, callbacks, **settings | changes)
    trainer.fit(module, train_dataloaders=Given(name, size, processes))
    return torch.load(folder / "found.pt")


def off(found, expected):
    return float((found - expected).norm() / expected.norm())
