"""The runs of a finding: trained once, cached by their composed config, and continued after an interruption."""

import contextlib
import functools
import hashlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lightning
import torch
from omegaconf import OmegaConf

import tinyformer
from tinyformer.config.errors import report
from tinyformer.config.invocation import config_dir
from tinyformer.config.isolation import keep_hydra
from tinyformer.config.job_lines import named_lines
from tinyformer.config.sweep import compose_run
from tinyformer.files import relative_path
from tinyformer.programs.doctor.machine import describe_machine
from tinyformer.programs.findings.files import CONFIG_NAMES, QUIET, Finding
from tinyformer.programs.findings.launching import ONE_AFTER_THE_OTHER, launch
from tinyformer.programs.findings.programs import PROGRAMS, analyse
from tinyformer.programs.findings.quantities import Record, Records, read_record, read_results
from tinyformer.run.lock import held

ENDED = "ended.json"
"""Written last: a folder with it is never made again."""


@dataclass(frozen=True)
class PlannedRun:
    """A run that a finding needs: who needs it, what makes it of which overrides, and where it is kept.

    `program` is a name in `PROGRAMS`; `evaluate` are overrides of `evaluate`, which analyses the run, or None.
    """

    finding: str
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
    """The runs of a finding, those of the first seed first; each is composed, so that a mistake is found at once."""
    config_name = CONFIG_NAMES.get(finding.program)
    quiet = QUIET if finding.program == "train" else ()
    descriptions: dict[str, Any] = {}
    for name in finding.runs:
        descriptions[name] = words = finding.words(name)
        if config_name:  # the others take plain arguments
            with keep_hydra():
                config, _ = compose_run(config_name, [*words, *quiet])
            descriptions[name] = OmegaConf.to_container(config, resolve=False)
    planned = []
    for seed in finding.seeds:
        for name in finding.runs:
            words, description = finding.words(name), descriptions[name]
            if config_name:  # composing takes a second, so that it is not done for each seed
                words, description = [*words, f"seed={seed}", *quiet], description | {"seed": seed}
            folder = kept / f"{finding.program}-{_digest(description)}"
            repeated = [word for word in words if word in finding.trusted]
            evaluate = finding.evaluate and [*repeated, *finding.evaluate]
            planned.append(PlannedRun(finding.name, name, seed, finding.program, words, folder, evaluate))
    return planned


def run_all(planned: Sequence[PlannedRun], launcher: Sequence[str] = (ONE_AFTER_THE_OTHER,)) -> int:
    """Make the runs that were not made before, those that need the same training by one job; print a line about each.

    A run that was killed continues from its last checkpoint, or starts over if it has none. One that fails is reported,
    and the others are made. The launcher is that of `require_launcher`; returns the exit code.
    """
    labelled: dict[Path, list[tuple[str, PlannedRun]]] = {}
    for number, run in enumerate(planned, 1):
        label = f"[{number}/{len(planned)}] {run.finding}/{run.name}, seed {run.seed}:"
        labelled.setdefault(run.folder, []).append((label, run))
    jobs = []
    for runs in labelled.values():
        if all(run.has_ended for _, run in runs):
            _make_all(runs)  # which only says so
        else:
            jobs.append(functools.partial(_make_all, runs))
    return max(launch(jobs, launcher, planned[0].folder.parent)) if jobs else 0


def records_of(planned: Sequence[PlannedRun]) -> list[Records]:
    """What runs that have ended left behind: for each seed, by name."""
    by_seed: dict[int, dict[str, Record]] = {}
    for run in planned:
        by_seed.setdefault(run.seed, {})[run.name] = read_record(run.folder, run.analysed)
    return list(by_seed.values())


def facts_of(planned: Sequence[PlannedRun]) -> list[dict[str, Any]]:
    """When, where and by which code each run was made, and how long it and its analysis took."""
    facts = []
    for run in planned:
        made = json.loads((run.folder / ENDED).read_text())
        if run.analysed:
            made["seconds"] += json.loads((run.analysed / ENDED).read_text())["seconds"]
        facts.append({"run": run.name, "seed": run.seed, "folder": run.folder.name, **made})
    return facts


def _make_all(runs: Sequence[tuple[str, PlannedRun]]) -> int:
    """Make runs of one folder, each with its label, and report errors; returns the exit code."""
    codes = []
    for label, run in runs:
        with named_lines(label):
            try:
                if run.has_ended:
                    print(f"kept in {relative_path(run.folder)}")
                    continue
                start = time.perf_counter()
                _make(run)
                print(f"{time.perf_counter() - start:.0f} s, {relative_path(run.folder)}")
            except Exception as error:  # reported like an error of the program, so that the other runs are made
                codes.append(report(error, config_dir(), "train", os.environ.get("HYDRA_FULL_ERROR") == "1"))
    return max(codes, default=0)


def _make(run: PlannedRun) -> None:
    """Make a run and its analysis, unless another process makes it."""
    run.folder.parent.mkdir(parents=True, exist_ok=True)
    problem = "another process is making this run; run the same command again when it has ended"
    with held(run.folder.with_name(f".{run.folder.name}.ended.lock"), f"{relative_path(run.folder)}: {problem}."):
        if not (run.folder / ENDED).exists():
            with _made(run.folder, run.words):
                PROGRAMS[run.program](run.words, run.folder)
        if run.analysed and not (run.analysed / ENDED).exists():
            shutil.rmtree(run.analysed, ignore_errors=True)  # an analysis that was killed takes seconds
            with _made(run.analysed, run.evaluate or []):
                analyse(run.folder / "checkpoints" / "last.ckpt", run.evaluate or [], run.analysed)


@contextlib.contextmanager
def _made(folder: Path, words: list[str]) -> Iterator[None]:
    """Send what is printed in the block to a file beside the folder that it makes, and write `ENDED` there after it."""
    start = time.perf_counter()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".txt").open("a", encoding="utf-8") as printed, contextlib.redirect_stdout(printed):
        yield
    # The results of a resumed run include the time before its interruption.
    seconds = max(time.perf_counter() - start, read_results(folder).get("seconds", 0.0))
    facts = {"overrides": words, "seconds": round(seconds, 1), **_surroundings()}
    unfinished = folder / f".{ENDED}"
    unfinished.write_text(json.dumps(facts, indent=1))
    unfinished.rename(folder / ENDED)


def _surroundings() -> dict[str, Any]:
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
    if (root / ".git").exists():
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            words = ["git", "-C", str(root), "rev-parse", "--short", "HEAD"]
            return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    return None


def _digest(described: Any) -> str:
    return hashlib.sha256(json.dumps(described, sort_keys=True, default=str).encode()).hexdigest()[:12]
