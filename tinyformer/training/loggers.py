"""Where metrics go: a CSV file always, Weights & Biases on request."""

import csv
import io
import netrc
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from lightning.pytorch.loggers import Logger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only

from tinyformer.analysis import Findings


class RunCSVLogger(Logger):
    """Writes `metrics.csv`: a row for each step that logged something, a column for each metric.

    Lightning's own deletes what an earlier run wrote; this one goes on with it, from the step at which a resumed run
    starts. It is saved at each checkpoint. Rows of new steps are appended, so that a long run with many heads does not
    write its first steps a thousand times; the whole is written where there is a new column, or an old row has changed.

    Args:
        path: the file.
        first_step: rows of later steps are dropped, since a resumed run makes these steps again.
    """

    def __init__(self, path: str | Path, first_step: int = 0) -> None:
        super().__init__()
        self.path = Path(path)
        self.rows: dict[int, dict[str, Any]] = {}
        self._columns: list[str] = []
        self._last_written = -1
        if self.path.exists():
            # A line without an end was being appended when the machine went down.
            whole, _, _ = self.path.read_text().rpartition("\n")
            rows = [{k: v for k, v in row.items() if v != ""} for row in csv.DictReader(whole.splitlines())]
            self.rows = {int(row["step"]): row for row in rows if int(row["step"]) <= first_step}

    @property
    def name(self) -> str:
        """Of the logger."""
        return "csv"

    @property
    def version(self) -> str:
        """Of the run: there is one in a folder."""
        return ""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Add metrics to the row of a step."""
        row = self.rows.setdefault(step or 0, {"step": step or 0})
        if (step or 0) <= self._last_written:
            self._columns = []  # what is written of it no longer holds
        row.update({name: float(value) for name, value in metrics.items() if name != "epoch"})

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Nothing: the run folder has its `config.yaml`."""

    @rank_zero_only
    def save(self) -> None:
        """Append what is new, or write the file anew, whole or not at all."""
        new, known = [step for step in sorted(self.rows) if step > self._last_written], set(self._columns)
        if known and all(self.rows[step].keys() <= known for step in new):
            text = self._text(new, self._columns)
            with self.path.open("a") as file:
                file.write(text)
        else:
            columns = ["step", *sorted({name for row in self.rows.values() for name in row} - {"step"})]
            temporary = self.path.with_suffix(".csv.partial")
            temporary.write_text(self._text(sorted(self.rows), columns, header=True))
            temporary.replace(self.path)
            self._columns = columns
        self._last_written = max(self.rows, default=-1)

    def _text(self, steps: Iterable[int], columns: list[str], header: bool = False) -> str:
        text = io.StringIO()
        writer = csv.DictWriter(text, columns, lineterminator="\n")
        if header:
            writer.writeheader()
        writer.writerows(self.rows[step] for step in steps)
        return text.getvalue()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Write what is left."""
        self.save()


def has_wandb_key() -> bool:
    """Whether Weights & Biases would find an API key without asking: in the environment or in ~/.netrc."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


class RunWandbLogger(WandbLogger):
    """Weights & Biases, online where there is an API key, else offline; it never asks.

    Args:
        run_dir: the run's folder; wandb's files go to `wandb/` in it.
        run_id: the same for a run and its resumption, so that they are one run in the browser.
        project: of the run.
        name: of the run; the folder's unless given.
        group: that the run belongs to: the runs of a sweep are one.
        tags: of the run.
        entity: the team that the project belongs to.
    """

    def __init__(
        self,
        run_dir: str | Path,
        run_id: str,
        project: str = "tinyformer",
        name: str | None = None,
        group: str | None = None,
        tags: list[str] | None = None,
        entity: str | None = None,
    ) -> None:
        import wandb  # noqa: PLC0415 -- half a second, for which other runs need not wait

        mode = os.environ.get("WANDB_MODE", "")  # "dryrun" is what Lightning sets it to for an offline run
        self.is_offline = mode in ("offline", "dryrun") or (mode == "" and not has_wandb_key())
        super().__init__(
            name=name or "/".join(Path(run_dir).parts[-2:]),
            save_dir=run_dir,
            id=run_id,
            project=project,
            offline=self.is_offline,
            group=group,
            tags=list(tags or []),
            entity=entity,
            resume=None if self.is_offline else "allow",
            settings=wandb.Settings(silent=True, console="off"),
        )
        del self._wandb_init["anonymous"]  # Lightning passes what wandb has come to warn about

    def log_findings(self, findings: Findings) -> None:
        """Log what an analysis found: numbers, tables, figures and pages."""
        import wandb  # noqa: PLC0415

        # The atlas's policy refuses an injected style.
        pages = {
            path.stem: wandb.Html(path.read_text(encoding="utf-8"), inject=False)
            for path in findings.files
            if path.suffix == ".html"
        }
        tables = {name: wandb.Table(list(columns), rows) for name, (columns, rows) in findings.tables.items()}
        images = {f"{path.stem}_figure": wandb.Image(str(path)) for path in findings.files if path.suffix == ".png"}
        self.experiment.log({f"analysis/{name}": value for name, value in {**tables, **images, **pages}.items()})
        self.experiment.summary.update(findings.scalars)

    def whereabouts(self) -> str:
        """Where the run can be seen, or how it is sent there."""
        if not self.is_offline:
            return str(self.experiment.url)
        folder = Path(self.experiment.dir).parent
        here = Path.cwd()
        shown = folder.relative_to(here) if folder.is_relative_to(here) else folder
        return f"offline; `wandb sync {shown}` sends it (a resumed run's folders share the id {self.experiment.id})"

    def finish(self, failed: bool) -> None:
        """End the run, so that the next job of a sweep starts one of its own."""
        self.experiment.finish(exit_code=1 if failed else 0)
