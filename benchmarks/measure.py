"""Two sides in turn, in one process, and the ratio of their times.

Our training step is that of a real run: Lightning's Trainer with all callbacks, `metrics.csv`, checkpoints and an
animated progress bar, reading its batches from the run's loader. Only telemetry is off; `benchmarks/telemetry.py`
measures it. A peer's step is the shortest loop that trains: it receives the batches that our loader has read and logs
nothing, so the work that it skips counts in its favour.
"""

import contextlib
import copy
import io
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import torch
import torch.nn.functional as F
from here import with_config
from omegaconf import DictConfig
from peers import Peer, Shape, num_parameters
from torch import Tensor, nn

from tinyformer.config.launch import CommandLine
from tinyformer.costs.network import count_costs
from tinyformer.data.batches.windows import Batch
from tinyformer.hardware import compute_dtype
from tinyformer.nn import AttentionMask
from tinyformer.nn.maps import running_kernel
from tinyformer.run.pipeline import set_up
from tinyformer.run.run import Run, fit
from tinyformer.run.trainer import closing
from tinyformer.training.callbacks.metrics import StepProgress

PLAIN = "plain PyTorch loop, our network"
CLOSE_LOSSES = 0.02
"""The largest relative difference between the losses of two sides."""
LOSS_STEPS, LOSS_WINDOW = 50, 5
"""The number of steps after which losses are compared, and the number of last steps that they are averaged over."""

Clock = Callable[[], float]


def wall_clock() -> float:
    """The time in seconds, after a GPU has finished its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


class Ratio(NamedTuple):
    """The time of the others in multiples of ours: the median over the rounds, and the quartiles."""

    ratio: float
    low: float
    high: float


def compare(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """The ratios of the times of two sides within each round, so that a slow phase of the machine cancels out."""
    ratios = [their / our for our, their in zip(ours, theirs, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return Ratio(middle, low, high)


def alternate(
    passes: Mapping[str, Callable[[], Any]], rounds: int, clock: Clock = wall_clock
) -> dict[str, list[float]]:
    """The times of passes that alternate in each round; the first round warms up and is left out."""
    times: dict[str, list[float]] = {name: [] for name in passes}
    for round_ in range(rounds + 1):
        for name in sorted(passes, reverse=bool(round_ % 2)):
            begun = clock()
            passes[name]()
            times[name].append(clock() - begun)
    return {name: measured[1:] for name, measured in times.items()}


@dataclass
class Rival:
    """A model with its optimizer, and a plain loop that trains it.

    Args:
        name: the name in the table.
        model: the model to train.
        optimizer: the optimizer of its parameters.
        loss: the loss of a batch.
        precision: the precision, as Lightning names it.
        max_norm: the norm to which the gradient is clipped.
        losses: the losses of the steps so far.
    """

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[nn.Module, Batch], Tensor]
    precision: str
    max_norm: float
    losses: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rates = [group["lr"] for group in self.optimizer.param_groups]

    def step(self, batch: Batch, factor: float) -> None:
        """Train on a batch, at a factor of the learning rate."""
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * factor
        with self.autocast(batch):
            loss = self.loss(self.model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.detach())

    def autocast(self, batch: Batch) -> contextlib.AbstractContextManager:
        """The context in which a forward pass has the precision that Lightning would give it."""
        device, dtype = batch["inputs"].device.type, compute_dtype(self.precision)
        return torch.autocast(device, dtype, enabled="mixed" in self.precision)

    def kernel(self, batch: Batch) -> str:
        """The attention kernel that a forward pass runs."""
        with torch.no_grad(), self.autocast(batch), torch.compiler.set_stance("force_eager"):
            return running_kernel(lambda: self.loss(self.model, batch))


class InTurn(L.Callback):
    """Alternates blocks of our steps with blocks of each rival's steps on the same batches.

    Args:
        rivals: the models that take turns with ours.
        steps_per_block: number of steps that are timed together.
        clock: returns the time in seconds.
        factor: the factor of the learning rate at a step.

    Attributes:
        times: the times of each side's blocks, ours under "ours"; the first block warms up and is left out.
        losses: the losses of our steps.
        kernels: the kernels that compute attention for each rival.
        peak_memory: the most bytes of a GPU that our first block takes, without what was there before it.
    """

    def __init__(
        self, rivals: Sequence[Rival], steps_per_block: int, clock: Clock, factor: Callable[[int], float]
    ) -> None:
        self.rivals, self.steps_per_block, self.clock, self.factor = rivals, steps_per_block, clock, factor
        self.times: dict[str, list[float]] = {"ours": [], **{rival.name: [] for rival in rivals}}
        self.losses: list[Tensor] = []
        self.kernels: dict[str, str] = {}
        self.peak_memory = 0
        self._batches: list[Batch] = []
        self._since = 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clock."""
        self._since, self._before = self.clock(), torch.cuda.memory_allocated()  # 0 on a CPU
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """At the end of our block, run those of the rivals."""
        self._batches.append(batch)
        self.losses.append(outputs["loss"].detach().clone())  # CUDA graphs write the next one into the same memory
        if len(self._batches) < self.steps_per_block:
            return
        self.times["ours"].append(self.clock() - self._since)
        if not self.peak_memory and torch.cuda.is_available():
            weights = sum(weight.nbytes for weight in pl_module.parameters())
            self.peak_memory = torch.cuda.max_memory_allocated() - self._before + weights
        with _bar_stopped(trainer):
            first = trainer.global_step - self.steps_per_block
            for rival in self.rivals[:: 1 if len(self.times["ours"]) % 2 else -1]:
                if rival.name not in self.kernels:
                    self.kernels[rival.name] = rival.kernel(batch)
                begun = self.clock()
                for step, again in enumerate(self._batches, first):
                    rival.step(again, self.factor(step))
                self.times[rival.name].append(self.clock() - begun)
        self._batches = []
        self._since = self.clock()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Leave out the blocks that warmed up."""
        self.times = {name: measured[1:] for name, measured in self.times.items()}


@contextlib.contextmanager
def _bar_stopped(trainer: L.Trainer) -> Iterator[None]:
    """Our progress bar is drawn by a thread of its own, which is not to slow down others."""
    bars = [c.progress for c in trainer.callbacks if isinstance(c, StepProgress) and c.progress is not None]
    for bar in bars:
        bar.stop()
    yield
    for bar in bars:
        bar.start()


class Terminal(io.StringIO):
    """Stands in for a terminal, so that a run draws the progress bar that users see."""

    def isatty(self) -> bool:
        """Yes."""
        return True


@dataclass(frozen=True)
class Effort:
    """The amount of measuring: the number of rounds, and of steps in each block."""

    steps_per_block: int
    rounds: int

    @property
    def steps(self) -> int:
        """Of each side, the block that warms up included."""
        return self.steps_per_block * (self.rounds + 1)


@dataclass(frozen=True)
class Trained:
    """The results of training a peer and our network in turn.

    Args:
        peer: the name of the peer.
        ours: the seconds of our blocks.
        theirs: the seconds of the peer's blocks.
        our_loss: the mean of our last losses, for the comparison.
        loss: the same of the peer.
        loss_steps: number of steps after which losses are compared.
        our_parameters: number of parameters of our network.
        parameters: number of parameters of the peer.
        kernel: the kernel that computes the peer's attention.
        our_peak_memory: the most bytes of a GPU that our steps take; 0 on a CPU.
        our_flops_per_token: those of our forward and backward pass.
    """

    peer: str
    ours: list[float]
    theirs: list[float]
    our_loss: float
    loss: float
    loss_steps: int
    our_parameters: int
    parameters: int
    kernel: str
    our_peak_memory: int
    our_flops_per_token: float


def settings(shape: Shape, like: Sequence[str], effort: Effort, precision: str) -> list[str]:
    """Overrides of a run that is measured: characters, AdamW, no dropout, nothing compiled, telemetry off."""
    return [
        "experiment=gpt2",
        "data=pydoc",
        "tokenizer=char",
        *like,
        *shape.overrides,
        f"trainer.precision={precision}",
        f"trainer.max_steps={effort.steps}",
        f"trainer.val_check_interval={10 * effort.steps}",
        "trainer.limit_val_batches=1",
        "schedule.warmup_steps=10",
        "generate.num_tokens=1",
        "callbacks.attention=null",
        "compile=false",
    ]


def train_in_turn(
    peers: Sequence[Peer],
    overrides: Sequence[str],
    shape: Shape,
    effort: Effort,
    theirs: str,
    clock: Clock = wall_clock,
    plain: bool = True,
    compiled: bool = False,
) -> list[Trained]:
    """Train our network by a real run, in turn with peers and with the same network in a plain loop.

    Args:
        peers: the peers to train.
        overrides: the overrides of our run, see `settings`.
        shape: the shape of all models and batches.
        effort: how much is measured.
        theirs: the precision of the peers; ours is in the overrides.
        clock: returns the time in seconds.
        plain: whether to train our network in a plain loop, too.
        compiled: whether to compile the peers, and the network in a plain loop.
    """

    def job(config: DictConfig, folder: Path, invocation: CommandLine) -> list[Trained]:
        with contextlib.redirect_stdout(Terminal()):
            run = set_up(config, folder, invocation)
            in_turn = InTurn(
                list(_rivals(run, peers, shape, theirs, plain, compiled)),
                effort.steps_per_block,
                clock,
                lambda step: run.module.schedule.factor(step, effort.steps),
            )
            run.trainer.callbacks.append(in_turn)
            with closing(run.loggers):
                fit(run)
        last = min(LOSS_STEPS, effort.steps)
        return [
            Trained(
                rival.name,
                in_turn.times["ours"],
                in_turn.times[rival.name],
                _mean_loss(in_turn.losses[:last]),
                _mean_loss(rival.losses[:last]),
                last,
                run.network.num_parameters(),
                num_parameters(rival.model),
                in_turn.kernels[rival.name],
                in_turn.peak_memory,
                count_costs(run.network).training_flops_per_token,
            )
            for rival in in_turn.rivals
        ]

    return with_config(job, overrides)


def _rivals(
    run: Run, peers: Sequence[Peer], shape: Shape, precision: str, plain: bool, compiled: bool
) -> Iterator[Rival]:
    max_norm = run.trainer.gradient_clip_val
    # All are copied before the first step, and have the optimizer that our run makes for our network.
    loops: list[tuple[str, nn.Module, Callable[[nn.Module, Batch], Tensor]]] = []
    if plain:
        network = copy.deepcopy(run.network)
        # Which kernel is the fastest depends on the precision, and that of our run may be another.
        network.resolve_backends(run.settings.device, compute_dtype(precision), AttentionMask(causal=True))
        loops.append((PLAIN, network, run.task.loss))
    loops += [(peer.name, peer.build(shape, run.network), loss_of(peer)) for peer in peers]
    for name, model, loss in loops:
        model.to(run.trainer.strategy.root_device)
        if compiled:
            model.compile()
        yield Rival(name, model, run.module.make_optimizer(model), loss, precision, max_norm)


def loss_of(peer: Peer) -> Callable[[nn.Module, Batch], Tensor]:
    """Mean cross-entropy of a peer's scores of a batch, in nats."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(peer.logits(model, batch["inputs"]).flatten(0, 1), batch["targets"].flatten())

    return loss


def _mean_loss(losses: Sequence[Tensor]) -> float:
    return float(torch.stack(list(losses[-LOSS_WINDOW:])).mean())
