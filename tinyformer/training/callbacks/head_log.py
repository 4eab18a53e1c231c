"""Where measures, pictures and events of heads are kept: the run's folder, its loggers, Weights & Biases."""

import csv
from collections.abc import Iterable, Sequence
from dataclasses import astuple, fields
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger, WandbLogger

from tinyformer.analysis import Event, HeadMeasures, Picture, save_png


class HeadLog:
    """Writes what telemetry finds.

    - each measurement: a number for each head and measure, `attention/layer_00/head_00/entropy`, to all loggers;
    - each validation: `attention/step_000100.png` and `attention/measures_000100.png`, and
      `attention/heads.csv` and `events.csv` anew; in Weights & Biases the pictures `attention/maps` and
      `attention/measures` and the tables `attention/heads` and `attention/events`.

    All heads share a picture and a table: Weights & Biases shows at most 108 images under one key.

    Args:
        folder: of the run.
        loggers: of the run.
    """

    def __init__(self, folder: Path, loggers: Sequence[Logger]) -> None:
        self.folder, self.loggers = folder, loggers
        self.wandb = [logger for logger in loggers if isinstance(logger, WandbLogger)]
        self.num_events: int | None = None

    def scalars(self, step: int, measures: HeadMeasures) -> None:
        """Log the number of each head and measure."""
        numbers = measures.scalars()
        for logger in self.loggers:
            logger.log_metrics(numbers, step=step)

    def picture(self, step: int, key: str, file: str, picture: Picture) -> Path:
        """Keep a picture of all heads."""
        path = save_png(picture, self.folder / "attention" / f"{file}_{step:06d}.png")
        for logger in self.wandb:
            logger.log_image(f"attention/{key}", [str(path)], step=step)
        return path

    def heads(self, step: int, measures: HeadMeasures) -> None:
        """Keep the latest number of each head and measure as a table."""
        columns, rows = measures.table()
        _write_csv(self.folder / "attention" / "heads.csv", columns, rows)
        for logger in self.wandb:
            logger.log_table("attention/heads", columns, rows, step=step)

    def events(self, step: int, events: Sequence[Event]) -> None:
        """Keep all events so far, if there are others than before."""
        if self.num_events == len(events):
            return
        self.num_events = len(events)
        columns = [field.name for field in fields(Event)]
        rows = [list(astuple(event)) for event in events]
        _write_csv(self.folder / "events.csv", columns, rows)
        for logger in self.wandb if events else ():
            texts = [[*row, str(event)] for row, event in zip(rows, events, strict=True)]
            logger.log_table("attention/events", [*columns, "text"], texts, step=step)


def _write_csv(path: Path, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write a table, whole or not at all."""
    temporary = path.with_suffix(".csv.partial")
    with temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(rows)
    temporary.replace(path)
