"""Files and log entries of telemetry: measures, plots and events of heads."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, fields
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger, WandbLogger

from tinyformer.analysis import Event, HeadMeasures, Picture, Trait, caption, save_png
from tinyformer.files import atomic_write, relative_path


class HeadLog:
    """Writes the results of telemetry.

    - At each measurement: a number for each head and measure, `attention/layer_00/head_00/entropy`, to all loggers.
    - At each validation: `attention/step_000100.png` and `attention/measures_000100.png`; `attention/heads.csv` and
      `events.csv`, overwritten; in Weights & Biases the images `attention/maps` and `attention/measures` and the
      tables `attention/heads` and `attention/events`.

    All heads share an image and a table: Weights & Biases shows at most 108 images per key.

    Args:
        folder: the run's folder.
        loggers: the run's loggers.
        data: the name of the data and its split, for the plots.
        checkpoint: the evaluated checkpoint, which plots name; None to name the folder of the run instead.
    """

    def __init__(self, folder: Path, loggers: Sequence[Logger], data: str, checkpoint: Path | None = None) -> None:
        self.folder, self.loggers, self.data = folder, loggers, data
        self.source = {"checkpoint": checkpoint} if checkpoint else {"run": folder}
        self.wandb = [logger for logger in loggers if isinstance(logger, WandbLogger)]
        self.num_events: int | None = None

    def scalars(self, step: int, measures: HeadMeasures) -> None:
        """Log each measure of each head."""
        numbers = measures.scalars()
        for logger in self.loggers:
            logger.log_metrics(numbers, step=step)

    def picture(self, step: int, name: str, file: str, picture: Picture) -> Path:
        """Save and log a plot of all heads, with the run or checkpoint, the step and the data in a line above it."""
        source = {name: relative_path(path) for name, path in self.source.items()}
        facts = source | {"step": f"{step:,}", "data": self.data}
        path = save_png(picture, self.folder / "attention" / f"{file}_{step:06d}.png", caption(facts))
        for logger in self.wandb:
            logger.log_image(f"attention/{name}", [str(path)], step=step)
        return path

    def heads(self, step: int, measures: HeadMeasures, traits: Mapping[str, Trait]) -> None:
        """Save and log the latest measures of each head, and its label, as a table."""
        columns, rows = measures.table(traits)
        _write_csv(self.folder / "attention" / "heads.csv", columns, rows)
        for logger in self.wandb:
            logger.log_table("attention/heads", columns, rows, step=step)

    def events(self, step: int, events: Sequence[Event]) -> None:
        """Save and log all events so far, if there are new ones."""
        if self.num_events == len(events):
            return
        self.num_events = len(events)
        names = [field.name for field in fields(Event)]
        columns = names if any(event.kind for event in events) else names[:-1]  # without `kind`
        rows = [list(astuple(event))[: len(columns)] for event in events]
        _write_csv(self.folder / "events.csv", columns, rows)
        for logger in self.wandb if events else ():
            texts = [[*row, str(event)] for row, event in zip(rows, events, strict=True)]
            logger.log_table("attention/events", [*columns, "text"], texts, step=step)


def _write_csv(path: Path, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write a table atomically."""
    with atomic_write(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(rows)
