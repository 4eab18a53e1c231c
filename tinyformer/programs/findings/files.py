"""The file of a finding: read, and checked before anything is computed."""

import difflib
import inspect
import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pydantic
import yaml

from tinyformer.config.admission import NotAdmittedError, admit_override
from tinyformer.config.errors import ConfigError
from tinyformer.config.invocation import config_dir
from tinyformer.config.keys import readable
from tinyformer.files import load_plain_yaml
from tinyformer.programs.findings.curves import Curve
from tinyformer.programs.findings.quantities import QUANTITIES
from tinyformer.programs.findings.records import Plain, require_source

CONFIG_NAMES = {"train": "train", "costs": "card"}
"""The primary config of the programs whose words are overrides."""

PROGRAM_NAMES = (*CONFIG_NAMES, "kernels")

QUIET = ("trainer.enable_progress_bar=false",)
"""Overrides of every training run that change nothing about it."""


class _Checked(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)


class Paper(_Checked):
    """Where the claim was made.

    Args:
        name: authors and year, such as "Olsson et al. 2022".
        arxiv: the id, such as "2209.11895".
    """

    name: str
    arxiv: str = pydantic.Field(pattern=r"^\d{4}\.\d{4,5}$")


class Check(_Checked):
    """A measured quantity and the band in which the claim expects it.

    Args:
        name: what is measured, with its unit.
        quantity: a name in `QUANTITIES`.
        of: the arguments of that function.
        at_least: the lower end of the band.
        at_most: the upper end. Without either, the quantity is reported and decides nothing.
        premise: whether the claim is about what is measured only where this holds: without it, it is not testable here.
    """

    name: str
    quantity: str
    of: dict[str, Any]
    at_least: float | None = None
    at_most: float | None = None
    premise: bool = False

    @property
    def decides(self) -> bool:
        """Whether it has a band."""
        return self.at_least is not None or self.at_most is not None

    def contains(self, value: float) -> bool:
        """Whether a value lies in the band; nan does not."""
        return value >= (self.at_least if self.at_least is not None else -float("inf")) and value <= (
            self.at_most if self.at_most is not None else float("inf")
        )


class Finding(_Checked):
    """A claim and its protocol.

    Args:
        name: the name of its file.
        title: a line.
        paper: where the claim was made.
        claim: the claim in a sentence, with its figure.
        baseline: overrides of every run, which state each choice that matters.
        runs: the overrides of each run beside the baseline, by name.
        seeds: the seeds of each run.
        program: what makes a run: `train`, or one that computes without training.
        evaluate: overrides of `evaluate`, which analyses every run that was trained; null for none.
        checks: the measured quantities and their bands.
        curves: panels of the figure with lines, above those of the checks.
        why: why these bands.
        refuted_by: what would refute the claim.
        cost: what it costs.
        notes: what was tried and learnt, after the first run.
        trusted: overrides in the file that the command line repeats, since they are more than data.
    """

    name: str
    title: str
    paper: Paper
    claim: str
    baseline: list[str]
    runs: dict[str, list[str]] = pydantic.Field(min_length=1)
    seeds: list[int] = pydantic.Field(min_length=1, max_length=10)
    program: str = "train"
    evaluate: list[str] | None = None
    checks: list[Check] = pydantic.Field(min_length=1)
    curves: list[Curve] = []
    why: str
    refuted_by: str
    cost: str
    notes: str = ""
    trusted: list[str] = []

    def words(self, run: str) -> list[str]:
        """The overrides of a run, but for its seed."""
        return [*self.baseline, *self.runs[run]]

    @pydantic.model_validator(mode="after")
    def _fits(self) -> "Finding":
        if self.program not in PROGRAM_NAMES:
            raise ValueError(f"program={self.program}: must be one of {', '.join(PROGRAM_NAMES)}")
        if not any(check.decides and not check.premise for check in self.checks):
            raise ValueError("checks: at least one that is no premise must have at_least or at_most")
        for check in self.checks:
            _require_arguments(check, self.runs)
        for curve in self.curves:
            _require_runs(curve.name, curve.drawn_runs(self.runs), self.runs)
        return self


def trust(findings: Sequence[Finding], trusted: Sequence[str]) -> list[Finding]:
    """Findings whose overrides are data, as those of a run folder are, or repeated on the command line (`trusted`).

    Raises:
        ConfigError: an override does more and is not repeated, or no file has what is repeated.
    """
    of_all: set[str] = set()
    for finding in findings:
        words = [*finding.baseline, *itertools.chain(*finding.runs.values()), *(finding.evaluate or [])]
        of_all.update(words)
        for word in words if finding.program in CONFIG_NAMES else ():
            try:
                if word not in trusted:
                    admit_override(readable([word])[0])
            except NotAdmittedError as error:
                told = f"says {word}, which {error}; if you trust it, add it to the command"
                raise ConfigError(f"{finding.name}.yaml: {told}.") from error
    if foreign := [word for word in trusted if word not in of_all]:
        raise ConfigError(f"{foreign[0]}: no file of these findings has this override.")
    return [finding.model_copy(update={"trusted": list(trusted)}) for finding in findings]


def _require_arguments(check: Check, runs: dict[str, list[str]]) -> None:
    """Refuse an unknown quantity, arguments that it does not take, and runs that the finding does not make."""
    if check.quantity not in QUANTITIES:
        raise ValueError(f"quantity={check.quantity}: must be one of {', '.join(QUANTITIES)}")
    try:
        inspect.signature(QUANTITIES[check.quantity]).bind({}, **check.of)
    except TypeError as error:
        raise ValueError(f"quantity={check.quantity}: {error}") from error
    named: list[Plain] = [check.of[key] for key in ("run", "than") if key in check.of]
    named += [*check.of.get("points", {}), *check.of.get("to", [])]
    _require_runs(check.name, named, runs)
    for source in (check.of[key] for key in ("source", "other") if key in check.of):
        try:
            require_source(source)
        except ValueError as error:
            raise ValueError(f"{check.name}: {error}") from error


def _require_runs(name: str, named: Iterable[str], runs: Iterable[str]) -> None:
    """Refuse runs that the finding does not make."""
    for run in named:
        if run not in runs:
            raise ValueError(f"{name}: there is no run {run}; the runs are {', '.join(runs)}")


def finding_names(folder: Path | None = None) -> list[str]:
    """The names of all findings in a folder, by default `conf/finding`."""
    return sorted(path.stem for path in (folder or config_dir() / "finding").glob("*.yaml"))


def read_finding(name: str, folder: Path | None = None) -> Finding:
    """Read a finding from a folder, by default `conf/finding`.

    Raises:
        ConfigError: there is no such finding, or its file is malformed.
    """
    folder = folder or config_dir() / "finding"
    names = finding_names(folder)
    if name not in names:
        close = difflib.get_close_matches(name, names, n=1)
        hint = f"Did you mean {close[0]}? " if close else ""
        raise ConfigError(f"findings {name}: there is no such finding. {hint}Findings: {', '.join(names)}.")
    try:
        values = load_plain_yaml((folder / f"{name}.yaml").read_text(encoding="utf-8"))
        return Finding.model_validate({**values, "name": name, "trusted": []})
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where, problem = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{folder.name}/{name}.yaml: {where}{': ' if where else ''}{problem}.") from error
    except (yaml.YAMLError, TypeError) as error:
        raise ConfigError(f"{folder.name}/{name}.yaml: {str(error).splitlines()[0]}.") from error
