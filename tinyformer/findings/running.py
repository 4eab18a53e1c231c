"""The runs of a finding: made once, kept by their composed config, and gone on with after an interruption."""

import contextlib
import hashlib
import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lightning
import torch
from omegaconf import OmegaConf

import tinyformer
from tinyformer.app.isolation import keep_hydra
from tinyformer.app.sweep import compose_run
from tinyformer.doctor.machine import describe_machine
from tinyformer.files import relative_path
from tinyformer.findings.files import Finding
from tinyformer.findings.programs import CONFIG_NAMES, PROGRAMS, analyse
from tinyformer.findings.quantities import Records
from tinyformer.findings.records import read_record

ENDED = "ended.json"
"""Written last: a folder with it is never made again."""

QUIET = ("trainer.enable_progress_bar=false",)
"""Overrides of every training run that change nothing about it."""


@dataclass(frozen=True)
class PlannedRun:
    """A run that a finding needs.

    Args:
        name: its name in the finding.
        seed: its seed.
        program: what makes it, a name in `PROGRAMS`.
        words: its overrides.
        folder: where it is kept.
        evaluate: overrides of `evaluate`, which analyses it; None for none.
    """

    name: str
    seed: int
    program: str
    words: list[str]
    folder: Path
    evaluate: list[str] | None

    @property
    def analysed(self) -> Path | None:
        """The folder of its analysis."""
        return self.folder / f"evaluate-{_digest(self.evaluate)}" if self.evaluate else None

    @property
    def has_ended(self) -> bool:
        """Whether the run, and its analysis, were made."""
        return all((folder / ENDED).exists() for folder in (self.folder, self.analysed) if folder)


def plan(finding: Finding, kept: Path) -> list[PlannedRun]:
    """The runs of a finding, those of the first seed first; each is composed, so that a mistake is found at once.

    Args:
        finding: the finding.
        kept: the folder of all runs.

    Raises:
        Exception: what Hydra raises about overrides that do not compose.
    """
    planned = []
    for seed in finding.seeds:
        for name, own in finding.runs.items():
            words = [*finding.baseline, *own]
            config_name = CONFIG_NAMES.get(finding.program)
            described: Any = words
            if config_name:  # the others take plain arguments
                words = [*words, f"seed={seed}", *(QUIET if finding.program == "train" else ())]
                with keep_hydra():
                    described = OmegaConf.to_container(compose_run(config_name, words)[0], resolve=False)
            folder = kept / f"{finding.program}-{_digest(described)}"
            planned.append(PlannedRun(name, seed, finding.program, words, folder, finding.evaluate))
    return planned


def run_all(planned: list[PlannedRun], report: Callable[[str], None]) -> list[Records]:
    """Make the runs that were not made before.

    A run that was killed goes on from its last checkpoint, or begins anew if it has none. A second process that needs
    the same run is refused by the lock of the run's folder.

    Args:
        planned: the runs.
        report: is given a line about each.

    Returns:
        What they left behind: for each seed, by name.
    """
    by_seed: dict[int, dict[str, Any]] = {}
    for number, run in enumerate(planned, 1):
        label = f"[{number}/{len(planned)}] {run.name}, seed {run.seed}"
        if run.has_ended:
            report(f"{label}: kept in {relative_path(run.folder)}")
        else:
            start = time.perf_counter()
            _make(run)
            report(f"{label}: {time.perf_counter() - start:.0f} s, {relative_path(run.folder)}")
        by_seed.setdefault(run.seed, {})[run.name] = read_record(run.folder, run.analysed)
    return list(by_seed.values())


def facts_of(planned: list[PlannedRun]) -> list[dict[str, Any]]:
    """When, where and by which code each run was made."""
    return [
        {"run": run.name, "seed": run.seed, "folder": run.folder.name, **json.loads((run.folder / ENDED).read_text())}
        for run in planned
    ]


def _make(run: PlannedRun) -> None:
    run.folder.parent.mkdir(parents=True, exist_ok=True)
    if not (run.folder / ENDED).exists():
        with _quiet(run.folder.with_suffix(".txt")), _ending(run.folder, run.words):
            PROGRAMS[run.program](run.words, run.folder)
    if run.analysed and not (run.analysed / ENDED).exists():
        shutil.rmtree(run.analysed, ignore_errors=True)  # an analysis that was killed takes seconds
        with _quiet(run.analysed.with_suffix(".txt")), _ending(run.analysed, run.evaluate or []):
            analyse(run.folder / "checkpoints" / "last.ckpt", run.evaluate or [], run.analysed)


@contextlib.contextmanager
def _quiet(path: Path) -> Iterator[None]:
    """Send what is printed in the block to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file, contextlib.redirect_stdout(file):
        yield


@contextlib.contextmanager
def _ending(folder: Path, words: list[str]) -> Iterator[None]:
    """Write down that what the block makes in a folder has ended."""
    start = time.perf_counter()
    yield
    facts = {"overrides": words, "seconds": round(time.perf_counter() - start, 1), **surroundings()}
    unfinished = folder / f".{ENDED}"
    unfinished.write_text(json.dumps(facts, indent=1))
    unfinished.rename(folder / ENDED)


def surroundings() -> dict[str, Any]:
    """Machine, versions, time and commit."""
    machine = describe_machine(torch.device("cuda" if torch.cuda.is_available() else "cpu"), full=False)
    return {
        "machine": {key: machine[key] for key in ("name", "cpus", "threads", "system")},
        "versions": {
            "tinyformer": version("tinyformer"),
            "python": machine["python"],
            "torch": torch.__version__,
            "lightning": lightning.__version__,
        },
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": _commit(),
    }


def _commit() -> str | None:
    """The commit of a checkout; None where the package is installed."""
    root = Path(tinyformer.__file__).parents[1]
    if not (root / ".git").exists():
        return None
    try:
        words = ["git", "-C", str(root), "rev-parse", "--short", "HEAD"]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _digest(described: Any) -> str:
    return hashlib.sha256(json.dumps(described, sort_keys=True, default=str).encode()).hexdigest()[:12]
