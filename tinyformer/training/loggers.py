"""The loggers of a run: `metrics.csv`, Weights & Biases, and functions that log pictures and results of analyses."""

import contextlib
import csv
import io
import json
import netrc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import numpy as np
from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only
from PIL import Image

from tinyformer.errors import relative_path
from tinyformer.files import write_whole
from tinyformer.report import AnalysisResult

MIN_SECRET = 8  # smallest number of characters of an environment variable, such as HF_TOKEN, that is not logged


def _read_rows(path: Path) -> dict[int, dict[str, Any]]:
    """The rows of a `metrics.csv` by step."""
    # A last line without a newline was cut short when the machine went down.
    whole, _, _ = path.read_text(encoding="utf-8").rpartition("\n")
    rows = [{k: v for k, v in row.items() if v != ""} for row in csv.DictReader(whole.splitlines())]
    return {int(row["step"]): row for row in rows}


def _as_csv(columns: list[str], rows: list[dict[str, Any]]) -> str:
    text = io.StringIO()
    csv.DictWriter(text, columns, lineterminator="\n").writerows(rows)
    return text.getvalue()


class RunCSVLogger(Logger):
    """Writes `metrics.csv`: a row for each step at which something was logged, a column for each metric.

    Unlike Lightning's CSVLogger, it continues the file of a resumed run, and saves it with each checkpoint. Rows of new
    steps are appended, so that a long run with many heads does not rewrite its first steps a thousand times; the whole
    file is rewritten only for a new column or a changed row.

    Args:
        path: the file.
        first_step: the step that a resumed run starts from; rows of later steps are dropped.
    """

    def __init__(self, path: str | Path, first_step: int = 0) -> None:
        super().__init__()
        self.path = Path(path)
        self.rows: dict[int, dict[str, Any]] = {}
        self._columns: list[str] = []
        self._last_written = -1
        if self.path.exists():
            self.rows = {step: row for step, row in _read_rows(self.path).items() if step <= first_step}

    @property
    def name(self) -> str:
        return "csv"

    @property
    def version(self) -> str:
        return ""  # a folder holds one run

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        step = step or 0
        row = self.rows.setdefault(step, {"step": step})
        if step <= self._last_written:
            self._columns = []  # the row in the file is out of date
        row.update({name: float(value) for name, value in metrics.items() if name != "epoch"})

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the run folder contains `config.yaml`."""

    @rank_zero_only
    def save(self) -> None:
        new, known = [step for step in sorted(self.rows) if step > self._last_written], set(self._columns)
        if known and all(self.rows[step].keys() <= known for step in new):
            text = _as_csv(self._columns, [self.rows[step] for step in new])
            with self.path.open("a", encoding="utf-8") as file:
                file.write(text)
        elif self.rows:  # Lightning also saves before the first row
            columns = ["step", *sorted({name for row in self.rows.values() for name in row} - {"step"})]
            header = dict(zip(columns, columns, strict=True))
            write_whole(self.path, _as_csv(columns, [header, *(self.rows[step] for step in sorted(self.rows))]))
            self._columns = columns
        self._last_written = max(self.rows, default=-1)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        if status == "success" or max(self.rows, default=0):  # a run that is refused before its first step has no row
            self.save()


def map_texts(function: Callable[[str], str], value: Any) -> Any:
    """Apply a function to each string in a nested plain value, and return the new value."""
    if isinstance(value, dict):
        return {key: map_texts(function, entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [map_texts(function, entry) for entry in value]
    return function(value) if isinstance(value, str) else value


def public(text: str) -> str:
    """The text, or "…" if it contains the value of an environment variable of at least `MIN_SECRET` characters."""
    return "…" if any(len(value) >= MIN_SECRET and value in text for value in os.environ.values()) else text


def has_wandb_key() -> bool:
    """Return True if there is an API key for Weights & Biases, in the environment or in ~/.netrc."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    hosts = [urlparse(wandb_url()).hostname or ""]
    if not os.environ.get("WANDB_BASE_URL"):
        hosts.append("api.wandb.ai")  # the server's older name, which wandb looks up as well
    try:
        logins = netrc.netrc(os.environ.get("NETRC"))
        return any(logins.authenticators(host) for host in hosts)
    except (OSError, netrc.NetrcParseError):
        return False


def wandb_url() -> str:
    """The server of Weights & Biases."""
    import wandb  # noqa: PLC0415 -- importing it takes half a second

    return os.environ.get("WANDB_BASE_URL") or str(wandb.Settings().base_url)


class RunWandbLogger(WandbLogger):
    """Logs a run to Weights & Biases: online if there is an API key, else offline; it never asks for a key.

    It reads no Git repository that contains the run, and saves neither code nor the command line. Settings come from
    the user's configuration, not from the current folder.

    Args:
        run_dir: the run's folder; wandb writes to its subfolder `wandb`.
        run_id: the id of the run in Weights & Biases, which a resumed run keeps.
        name: the run's name; by default the last two parts of `run_dir`.
        group: the group of the run in Weights & Biases, such as its sweep.
        entity: the team that owns the project.
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
        import wandb  # noqa: PLC0415 -- importing it takes half a second

        mode = os.environ.get("WANDB_MODE", "")  # Lightning sets it to "dryrun" for an offline run
        self.is_offline = mode in ("offline", "dryrun") or (mode == "" and not has_wandb_key())
        super().__init__(
            name=name or "/".join(Path(run_dir).parts[-2:]),
            save_dir=Path(run_dir).absolute(),
            id=run_id,
            project=project,
            offline=self.is_offline,
            group=group,
            tags=list(tags or []),
            entity=entity,
            resume=None if self.is_offline else "allow",
            # Git would run commands that an untrusted repository around the run names in its configuration. With the
            # hardware, the metadata hold the command line, which may contain a secret, and absolute paths.
            settings=wandb.Settings(silent=True, console="off", disable_git=True, save_code=False, x_disable_meta=True),
            allow_val_change=True,  # a resumed run may change its config
        )
        del self._wandb_init["anonymous"]  # Lightning passes it, and wandb warns about it
        rank_zero_only(self._set_up)()

    def _set_up(self) -> None:
        """Make wandb read its settings outside of the current folder, which may be an untrusted run."""
        import wandb  # noqa: PLC0415

        if not os.environ.get("WANDB_MODE"):
            os.environ.pop("WANDB_MODE", None)  # wandb rejects an empty value
        settings = wandb.Settings()
        if self.is_offline:
            settings.mode = "offline"
        if os.environ.get("WANDB_BASE_URL"):
            settings.base_url = wandb_url()
        with contextlib.chdir("/"):  # not the current folder, whose settings may be untrusted
            wandb.setup(settings)

    @property
    def experiment(self) -> Any:
        """The run of wandb, which starts on first use, without the `config-defaults.yaml` of the current folder."""
        if self._experiment is not None:
            return super().experiment
        with contextlib.chdir("/"):  # not the current folder, whose settings may be untrusted
            return super().experiment

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Store the configuration, as nested mappings, for the start of the run in Weights & Biases."""
        self._wandb_init["config"] = params

    def log_findings(self, findings: AnalysisResult) -> None:
        """Log the results of an analysis: numbers, tables, figures and pages."""
        import wandb  # noqa: PLC0415

        found = [path for path in findings.files if path.suffix == ".html"]
        # The atlas's content security policy forbids injected styles.
        read = {path.stem: wandb.Html(path.read_text(encoding="utf-8"), inject=False) for path in found}
        pages = {f"{name}{'_page' * (name in findings.tables)}": page for name, page in read.items()}
        tables = {name: wandb.Table(list(columns), rows) for name, (columns, rows) in findings.tables.items()}
        images = {f"{path.stem}_figure": wandb.Image(str(path)) for path in findings.files if path.suffix == ".png"}
        self.experiment.log({f"analysis/{name}": value for name, value in {**tables, **images, **pages}.items()})
        self.experiment.summary.update(findings.scalars)

    def location(self) -> str:
        """The URL of the run, or the command that uploads an offline run."""
        run = self.experiment
        if not self.is_offline:
            return str(run.url)
        folder = relative_path(Path(run.dir).parent)
        return f"offline; `wandb sync {folder}` uploads it (the folders of a resumed run share the id {run.id})"

    def finish(self, failed: bool) -> None:
        """End the run in Weights & Biases with the results as its summary, so that the next job starts a new run."""
        results = Path(str(self.save_dir), "results.json")
        if self._experiment is not None:  # None if wandb could not start the run
            if not failed and results.exists():
                self.experiment.summary.update(map_texts(public, json.loads(results.read_text(encoding="utf-8"))))
            self.experiment.finish(exit_code=1 if failed else 0)


def log_picture(logger: Logger, name: str, path: Path, step: int) -> None:
    """Log a PNG file under a name such as "attention/maps" to Weights & Biases, TensorBoard or MLflow only."""
    if isinstance(logger, WandbLogger):
        logger.log_image(name, [str(path)], step=step)
    elif isinstance(logger, TensorBoardLogger):
        logger.experiment.add_image(name, np.asarray(Image.open(path).convert("RGB")), step, dataformats="HWC")
    elif isinstance(logger, MLFlowLogger):
        logger.experiment.log_artifact(logger.run_id, str(path), name)


def log_findings(logger: Logger, findings: AnalysisResult, step: int) -> None:
    """Log the results of an analysis: all of them to `RunWandbLogger`, only numbers and figures to other loggers."""
    if isinstance(logger, RunWandbLogger):
        logger.log_findings(findings)
        return
    logger.log_metrics({name: value for name, value in findings.scalars.items() if value is not None}, step)
    for path in findings.files:
        if path.suffix == ".png":
            log_picture(logger, f"analysis/{path.stem}", path, step)
