"""Telemetry: exact measures of every attention head while a fused kernel trains."""

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn

from tinyformer.analysis import (
    CROSS_MEANINGS,
    MEANINGS,
    EventDetector,
    HeadMeasures,
    ablated_maps,
    head_label,
    head_traits,
    layer_label,
    measure_maps,
    split_name,
)
from tinyformer.data.module import count
from tinyformer.errors import ArgumentError, require_at_least, require_at_most
from tinyformer.nn import EncoderDecoder
from tinyformer.nn.maps import NoMapsError
from tinyformer.training.callbacks.head_log import HeadLog
from tinyformer.training.callbacks.probing import PairProbing, Sizes, TextProbing
from tinyformer.training.callbacks.report import Report
from tinyformer.training.module import TrainingModule


class AttentionTelemetry(L.Callback):
    """Measures each head every `every_n_steps` steps and at each validation, and plots all heads at validation.

    `MEASURES` are computed on windows of the evaluated split, and `PATTERNS` on repeated sequences of random tokens. In
    an encoder–decoder, `MEASURES` (for cross-attention, `CROSS_MEASURES`) are computed on pairs of the split. These
    inputs stay the same throughout the run. The first measurement precedes the first step. Training is unaffected: its
    random number generators are not used, and only the first process measures. `HeadLog` lists the files.

    Args:
        every_n_steps: optimizer steps between measurements.
        num_windows: number of windows of the evaluated split, drawn at random, over which measures are averaged.
        num_rows: number of queries of each window that are measured, each with all of its keys.
        num_sequences: number of sequences of random tokens.
        period: number of random tokens before they repeat; at most half of the context.
        thresholds: thresholds of traits by name, in place of those in `TRAITS`.
        hysteresis: fraction of a threshold by which a measure must fall short of it to end the trait.
        probe_text: the text of the plotted attention maps; by default the beginning of the split.
        num_tokens: number of tokens of this text in the plot.

    Attributes:
        seconds: time spent on measuring, plotting and logging, including the time before a resumption.
        paths: plots of attention maps.
        refusal: why there is nothing to measure, where the attention of the network is of a class without maps.

    Raises:
        ArgumentError: a value is out of range.
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
        require_at_least(
            1,
            every_n_steps=every_n_steps,
            num_windows=num_windows,
            num_rows=num_rows,
            num_sequences=num_sequences,
            period=period,
            num_tokens=num_tokens,
        )
        works = {"num_windows": 4, "num_sequences": 4}
        require_at_most(4096, works, num_windows=num_windows, num_sequences=num_sequences)
        if not 0 <= hysteresis < 1:
            raise ArgumentError("hysteresis", hysteresis, "must be at least 0 and below 1", {"hysteresis": 0.2})
        if probe_text == "":
            raise ArgumentError("probe_text", probe_text, "must not be empty", {"probe_text": "A cat."})
        self.every_n_steps = every_n_steps
        self.sizes = Sizes(num_windows, num_rows, num_sequences, period, probe_text, num_tokens)
        self.detector = EventDetector(head_traits(thresholds), hysteresis)
        self.seconds = 0.0
        self.num_measurements = 0
        self.paths: list[Path] = []
        self.latest: tuple[int, bool, HeadMeasures] | None = None
        self.refusal = ""

    def state_dict(self) -> dict[str, Any]:
        """The counts and events so far, which a resumed run continues."""
        counts = {"seconds": self.seconds, "num_measurements": self.num_measurements}
        return {**counts, "detector": self.detector.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved run."""
        self.seconds, self.num_measurements = float(state_dict["seconds"]), int(state_dict["num_measurements"])
        self.detector.load_state_dict(state_dict["detector"])

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Choose the windows and the probe text."""
        assert isinstance(pl_module, TrainingModule)
        kind = PairProbing if isinstance(pl_module.network, EncoderDecoder) else TextProbing
        self.probing = kind(pl_module.data, pl_module.evaluated, self.sizes)
        data = f"{pl_module.data.title}, {pl_module.evaluated} split"
        self.log = HeadLog(Path(trainer.default_root_dir), trainer.loggers, data, pl_module.checkpoint)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Measure before the first step."""
        if trainer.global_step == 0 and trainer.is_global_zero and not self.refusal:
            with self._timed(trainer, pl_module):
                self._measure(trainer, pl_module, costly=True)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Measure every `every_n_steps` optimizer steps."""
        due = trainer.global_step and trainer.global_step % self.every_n_steps == 0
        if due and trainer.is_global_zero and not self.refusal:
            with self._timed(trainer, pl_module):
                self._measure(trainer, pl_module)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Measure, plot, and write tables."""
        if trainer.sanity_checking or not trainer.is_global_zero or self.refusal:
            return
        assert isinstance(pl_module, TrainingModule)
        with self._timed(trainer, pl_module):
            measures, step = self._measure(trainer, pl_module, costly=True), pl_module.step
            for name, picture in self.probing.pictures(trainer, pl_module).items():
                self.paths.append(self.log.picture(step, "maps" if name == "step" else name, name, picture))
            picture = measure_maps(
                measures.values,
                MEANINGS | CROSS_MEANINGS,
                [list(map(head_label, layer)) for layer in measures.names],
                f"Measures of each head after {count(step, 'step')}",
                list(map(layer_label, measures.layers)),
                self.probing.num_keys,
                ablated_maps(pl_module.network),
            )
            self.log.picture(step, "measures", "measures", picture)
            self.log.heads(step, measures, self.detector.traits)
            if trainer.state.fn == TrainerFn.FITTING:
                self.log.events(step, self.detector.events)

    def _measure(self, trainer: L.Trainer, pl_module: L.LightningModule, costly: bool = False) -> HeadMeasures:
        """Measure and log once for each step; a second time if only then the costly measures are asked for."""
        assert isinstance(pl_module, TrainingModule)
        step = pl_module.step
        if self.latest is not None and self.latest[0] == step and self.latest[1] >= costly:
            return self.latest[2]
        measures = self.probing.measure(trainer, pl_module, costly)
        self.latest, self.num_measurements = (step, costly, measures), self.num_measurements + 1
        self.log.scalars(step, measures)
        places = [split_name(layer) for layer in measures.layers]
        self.detector.observe(step, measures.names, measures.values, places)
        return measures

    @contextmanager
    def _timed(self, trainer: L.Trainer, pl_module: L.LightningModule) -> Iterator[None]:
        """Add the time of the block to `seconds`, and exclude it from the training speed.

        A network without attention maps is measured no more.
        """
        _synchronize(pl_module.device)
        start = time.perf_counter()
        try:
            yield
        except NoMapsError as error:
            self.refusal = str(error)
            print(f"No attention heads are measured: {error}", file=sys.stderr)
        _synchronize(pl_module.device)
        spent = time.perf_counter() - start
        self.seconds += spent
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, Report):
                callback.exclude(spent)


def _synchronize(device: torch.device) -> None:
    """Wait until a device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
