"""Telemetry: exact measures of every attention head on fixed inputs, while a fused kernel trains."""

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any, cast

import lightning as L
import torch
from lightning.pytorch.loggers import Logger, WandbLogger
from lightning.pytorch.trainer.states import TrainerFn

from tinyformer import measures, report
from tinyformer.data import DataModule, Pairs, PairSplit
from tinyformer.data.module import count
from tinyformer.errors import ArgumentError, relative_path, require_at_least
from tinyformer.files import write_table
from tinyformer.generation.generation import Beam
from tinyformer.hardware import synchronize
from tinyformer.nn import EncoderDecoder, Transformer
from tinyformer.nn.heads import layer_title
from tinyformer.nn.maps import NoMapsError
from tinyformer.training.callbacks.metrics import Report
from tinyformer.training.loggers import log_picture
from tinyformer.training.module import TrainingModule


@dataclass(frozen=True)
class Sizes:
    """The amounts that are measured and plotted; see `AttentionTelemetry`."""

    num_windows: int
    num_rows: int
    num_sequences: int
    period: int
    probe_text: str | None
    num_tokens: int


class TextProbing:
    """Measures and plots the heads of a transformer, on windows of a split and on repeated random tokens."""

    def __init__(self, data: DataModule, split: str, sizes: Sizes) -> None:
        self.sizes = sizes
        self.windows = measures.of_one_length(data.sample(split, sizes.num_windows))
        shown, text = slice(min(sizes.num_tokens, data.seq_len)), sizes.probe_text
        ids = data.tokenizer.read([text])[0][shown] if text else data.splits[split].ids[shown].tolist()
        self.probe, self.axes = torch.tensor([ids]), measures.axes_of({"": (ids, ids)}, data.tokenizer)
        self.probes: list[measures.Probe] | None = None
        self.num_keys = self.windows["inputs"].shape[1]  # of a measured map, at most

    def measure(self, trainer: L.Trainer, module: TrainingModule, costly: bool) -> measures.HeadMeasures:
        if self.probes is None:
            windows, tokenizer = trainer.strategy.batch_to_device(self.windows), module.data.tokenizer
            numbers = tokenizer.vocab_size, module.data.seq_len, self.sizes.num_sequences, self.sizes.period
            self.probes = measures.make_probes(module.task, [windows], tokenizer, *numbers)
        context, rows = trainer.precision_plugin.forward_context(), self.sizes.num_rows
        return measures.measure_heads(cast(Transformer, module.network), self.probes, rows, context, costly)

    def pictures(self, trainer: L.Trainer, module: TrainingModule) -> dict[str, report.Picture]:
        """The attention maps of the probe text, by the name of their file."""
        tokens = trainer.strategy.batch_to_device(self.probe)
        mask = module.task.mask({"inputs": tokens})
        with trainer.precision_plugin.forward_context():
            maps = measures.capture_weights(cast(Transformer, module.network), tokens, mask)
        title = f"attention maps after {count(module.step, 'step')}"
        return {"step": report.maps_by_kind({"": maps}, self.axes, title)[""]}


class PairProbing:
    """Measures and plots the three kinds of attention of an encoder–decoder, on pairs of a split."""

    def __init__(self, data: DataModule, split: str, sizes: Sizes) -> None:
        pairs = cast(PairSplit, data.splits[split])
        self.sizes, self.tokenizer, self.tokens = sizes, data.tokenizer, pairs.tokens
        self.pairs = [pair for batch in data.sample(split, sizes.num_windows) for pair in measures.pairs_of(batch)]
        self.num_keys = max(max(pair.source.shape[1], pair.target.shape[1]) for pair in self.pairs)
        longest = pairs.lengths.max(axis=1)
        # The first pair that fits, or else the shortest.
        fits = longest <= sizes.num_tokens
        (self.shown,) = measures.pairs_of(Pairs(pairs)[int(fits.argmax() if fits.any() else longest.argmin())])

    def measure(self, trainer: L.Trainer, module: TrainingModule, costly: bool) -> measures.HeadMeasures:
        """The measures of every head, cross-attention included; always with the costly ones."""
        network, pairs = cast(EncoderDecoder, module.network), [pair.to(module.device) for pair in self.pairs]
        return measures.measure_pairs(network, pairs, trainer.precision_plugin.forward_context())

    def pictures(self, trainer: L.Trainer, module: TrainingModule) -> dict[str, report.Picture]:
        """The attention maps of each kind for one pair, by the name of their file.

        The target of a probe text is what greedy search finds.
        """
        network, text = cast(EncoderDecoder, module.network), self.sizes.probe_text
        with trainer.precision_plugin.forward_context():
            if text is None:
                pair = self.shown.to(module.device)
            else:
                (source,) = self.tokenizer.read([text], around=False)
                pair = measures.decoded_pair(network, source, self.tokens, Beam(1), self.sizes.num_tokens)
            captured = measures.capture_pair(network, pair)
        axes = measures.axes_of(pair.ids_by_kind(), self.tokenizer)
        return report.maps_by_kind(captured, axes, f"attention maps after {count(module.step, 'step')}")


class AttentionTelemetry(L.Callback):
    """Measures each head every `every_n_steps` steps and at each validation, and plots all heads at validation.

    `MEASURES` are computed on windows of the evaluated split, and `PATTERNS` on repeated sequences of random tokens. In
    an encoder–decoder, `MEASURES` (for cross-attention, `CROSS_MEASURES`) are computed on pairs of the split. These
    inputs stay the same throughout the run. The first measurement precedes the first step. Training is unaffected: its
    random number generators are not used, and only the first process measures. For the files see `HeadLog`.

    Args:
        every_n_steps: optimizer steps between measurements.
        num_windows: number of windows of the evaluated split, drawn at random, over which measures are averaged.
        num_rows: number of queries of each window that are measured, each with all of its keys.
        period: number of random tokens before they repeat; less than half of the context.
        thresholds: by trait, a threshold in place of that in `TRAITS`.
        hysteresis: fraction of a threshold by which a measure must fall short of it to end the trait.
        probe_text: the text of the plotted attention maps; by default the beginning of the split.
        num_tokens: number of tokens of this text in the plot.
    """

    def __init__(
        self,
        every_n_steps: int = 100,
        num_windows: int = 4,
        num_rows: int = 64,
        num_sequences: int = 4,
        period: int = 32,
        thresholds: Mapping[str, float] | None = None,
        hysteresis: float = 0.2,
        probe_text: str | None = None,
        num_tokens: int = 24,
    ) -> None:
        require_at_least(1, every_n_steps=every_n_steps, num_windows=num_windows)
        if not 0 <= hysteresis < 1:
            raise ArgumentError("hysteresis", hysteresis, "must be at least 0 and below 1", {"hysteresis": 0.2})
        self.every_n_steps = every_n_steps
        self.sizes = Sizes(num_windows, num_rows, num_sequences, period, probe_text, num_tokens)
        self.detector = measures.EventDetector(measures.head_traits(thresholds), hysteresis)
        self.seconds, self.num_measurements = 0.0, 0  # spent on measuring and plotting, also before a resumption
        self.paths: list[Path] = []  # of plots of attention maps
        self.latest: tuple[int, bool, measures.HeadMeasures] | None = None
        self.refusal = ""  # why there is nothing to measure, where attention is of a class without maps

    def state_dict(self) -> dict[str, Any]:
        counts = {"seconds": self.seconds, "num_measurements": self.num_measurements}
        return {**counts, "detector": self.detector.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seconds, self.num_measurements = float(state_dict["seconds"]), int(state_dict["num_measurements"])
        self.detector.load_state_dict(state_dict["detector"])

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        assert isinstance(pl_module, TrainingModule)
        kind = PairProbing if isinstance(pl_module.network, EncoderDecoder) else TextProbing
        self.probing = kind(pl_module.data, pl_module.evaluated, self.sizes)
        data = f"{pl_module.data.title}, {pl_module.evaluated} split"
        self.log = HeadLog(Path(trainer.default_root_dir), trainer.loggers, data, pl_module.checkpoint)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.global_step == 0:
            self._run(trainer, pl_module, costly=True)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if trainer.global_step and trainer.global_step % self.every_n_steps == 0:
            self._run(trainer, pl_module)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.sanity_checking:
            self._run(trainer, pl_module, costly=True, plots=True)

    def _run(self, trainer: L.Trainer, pl_module: L.LightningModule, costly: bool = False, plots: bool = False) -> None:
        """Measure, and plot if asked to, in the first process; the time does not count as training time.

        A network without attention maps is measured no more.
        """
        assert isinstance(pl_module, TrainingModule)
        with pl_module.whole_network():
            if self.refusal or not trainer.is_global_zero:
                return
            synchronize(pl_module.device)
            start = time.perf_counter()
            try:
                measures = self._measure(trainer, pl_module, costly)
                if plots:
                    self._write(trainer, pl_module, measures)
            except NoMapsError as error:
                self.refusal = str(error)
                print(f"No attention heads are measured: {error}", file=sys.stderr)
            synchronize(pl_module.device)
            spent = time.perf_counter() - start
        self.seconds += spent
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, Report):
                callback.exclude(spent)

    def _measure(self, trainer: L.Trainer, module: TrainingModule, costly: bool) -> measures.HeadMeasures:
        """Measure and log once for each step; a second time if only then the costly measures are asked for."""
        step = module.step
        if self.latest is not None and self.latest[0] == step and self.latest[1] >= costly:
            return self.latest[2]
        measures = self.probing.measure(trainer, module, costly)
        self.latest, self.num_measurements = (step, costly, measures), self.num_measurements + 1
        self.log.scalars(step, measures)
        self.detector.observe(step, measures.names, measures.values, measures.addresses)
        return measures

    def _write(self, trainer: L.Trainer, module: TrainingModule, measured: measures.HeadMeasures) -> None:
        step = module.step
        for name, picture in self.probing.pictures(trainer, module).items():
            self.paths.append(self.log.picture(step, "maps" if name == "step" else name, name, picture))
        picture = report.measure_maps(
            measured.values,
            [list(map(measures.head_label, layer)) for layer in measured.names],
            f"Measures of each head after {count(step, 'step')}",
            list(map(layer_title, measured.addresses)),
            self.probing.num_keys,
            measures.ablated_maps(module.network),
        )
        self.log.picture(step, "measures", "measures", picture)
        self.log.heads(step, measured, self.detector.traits)
        if trainer.state.fn == TrainerFn.FITTING:
            self.log.events(step, self.detector.events)


class HeadLog:
    """Writes the results of telemetry.

    - At each measurement: a number for each head and measure, `attention/layer_00/head_00/entropy`, to all loggers.
    - At each validation: `attention/step_000100.png` and `attention/measures_000100.png`; `attention/heads.csv` and
      `events.csv`, overwritten; the images `attention/maps` and `attention/measures` in the loggers of `log_picture`,
      and in Weights & Biases the tables `attention/heads` and `attention/events`.

    All heads share an image and a table: Weights & Biases shows at most 108 images per key. Plots name the data and the
    evaluated checkpoint, or the folder of the run where there is none.
    """

    def __init__(self, folder: Path, loggers: Sequence[Logger], data: str, checkpoint: Path | None = None) -> None:
        self.folder, self.loggers, self.data = folder, loggers, data
        self.source = {"checkpoint": checkpoint} if checkpoint else {"run": folder}
        self.wandb = [logger for logger in loggers if isinstance(logger, WandbLogger)]
        self.num_events: int | None = None

    def scalars(self, step: int, measures: measures.HeadMeasures) -> None:
        numbers = measures.scalars()
        for logger in self.loggers:
            logger.log_metrics(numbers, step=step)

    def picture(self, step: int, name: str, file: str, picture: report.Picture) -> Path:
        """Save and log a plot of all heads, with its source, the step and the data in a line above it."""
        source = {name: relative_path(path) for name, path in self.source.items()}
        facts = source | {"step": f"{step:,}", "data": self.data}
        path = report.save_png(picture, self.folder / "attention" / f"{file}_{step:06d}.png", report.caption(facts))
        for logger in self.loggers:
            log_picture(logger, f"attention/{name}", path, step)
        return path

    def heads(self, step: int, measures: measures.HeadMeasures, traits: Mapping[str, measures.Trait]) -> None:
        """Save and log the latest measures of each head, and its label, as a table."""
        columns, rows = measures.table(traits)
        write_table(self.folder / "attention" / "heads.csv", columns, rows)
        for logger in self.wandb:
            logger.log_table("attention/heads", columns, rows, step=step)

    def events(self, step: int, events: Sequence[measures.Event]) -> None:
        """Save and log all events so far, if there are new ones."""
        if self.num_events == len(events):
            return
        self.num_events = len(events)
        names = [field.name for field in fields(measures.Event)]
        columns = names if any(event.kind for event in events) else names[:-1]  # without `kind`
        rows = [list(astuple(event))[: len(columns)] for event in events]
        write_table(self.folder / "events.csv", columns, rows)
        for logger in self.wandb if events else ():
            texts = [[*row, str(event)] for row, event in zip(rows, events, strict=True)]
            logger.log_table("attention/events", [*columns, "text"], texts, step=step)
