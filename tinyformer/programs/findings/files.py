"""The file of a finding, which is loaded and checked before anything is computed."""

import inspect
import itertools
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import pydantic
import yaml

from tinyformer.config.admission import NotAdmittedError, admit_override
from tinyformer.config.conf import config_dir, load_plain_yaml, readable
from tinyformer.config.errors import ConfigError
from tinyformer.programs.findings.quantities import LINES, QUANTITIES, SOURCES, Line, function_of
from tinyformer.programs.findings.records import Records

CONFIG_NAMES = {"train": "train", "costs": "card"}  # the primary config of each program that takes overrides
QUIET = ("trainer.enable_progress_bar=false",)  # overrides of every training run that do not change its results


QUESTIONS = {
    "cost": "What do heads cost?",
    "learn": "What do heads learn?",
    "remove": "What can be removed?",
    "positions": "What do positions do?",
    "training": "What does training need?",
    "identities": "What holds by construction?",
    "own": "Findings of your own",
}
"""The questions by which findings are grouped, by the names that the files use."""


class _Checked(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)


class Paper(_Checked):
    """The source of a claim: authors and year, such as "Olsson et al. 2022", and the id, such as "2209.11895"."""

    name: str
    arxiv: str = pydantic.Field(pattern=r"^\d{4}\.\d{4,5}$")

    def __str__(self) -> str:
        return f"{self.name}, arXiv {self.arxiv}"


class Check(_Checked):
    """A measured quantity and the band in which the claim expects it."""

    name: str  # a name for the quantity, with its unit
    quantity: str  # a name in `QUANTITIES`
    of: dict[str, Any]  # the arguments of the quantity
    clause: str | None = None  # the clause of the claim that it decides
    at_least: float | None = None  # the lower end of the band
    at_most: float | None = None  # the upper end. Without either, the quantity is reported and decides nothing
    premise: bool = False  # whether the clause, or without it the claim, is testable only if this holds
    scale: Literal["linear", "log", "share"] = "linear"  # the scale of the mean and its interval

    @property
    def has_band(self) -> bool:
        return self.at_least is not None or self.at_most is not None

    def contains(self, value: float) -> bool:
        """Return True if a value lies in the band; nan and infinity do not."""
        low = -float("inf") if self.at_least is None else self.at_least
        high = float("inf") if self.at_most is None else self.at_most
        return math.isfinite(value) and low <= value <= high


class Picture(_Checked):
    """A picture that a run or its analysis wrote, shown above the curves."""

    run: str
    file: str = pydantic.Field(pattern=r"^\w[\w*/]*\.png$")  # the last file of a pattern such as attention/step_*.png
    name: str


class Curve(_Checked):
    """A panel of the figure, which shows lines."""

    name: str  # the quantity on the y-axis, with its unit
    of: dict[str, Any]  # the arguments of a function in `LINES`, which one of their names selects
    along: str = "step"  # the quantity on the x-axis, with its unit
    runs: list[str] | None = None  # the runs that have lines; all by default
    log: list[Literal["x", "y"]] = []  # the axes that are logarithmic

    @pydantic.model_validator(mode="after")
    def _fits(self) -> "Curve":
        function_of("a curve", self.of, LINES)
        inner = [self.of[name] for name in ("series", "against", "source") if name in self.of] or [self.of]
        for source in [] if "table" in self.of else inner:
            function_of("a source", source, SOURCES)
        return self

    def drawn_runs(self, runs: Iterable[str]) -> list[str]:
        """Select the runs that the panel needs from all `runs` of a finding."""
        of_points = [run for of_label in self.of.get("points", {}).values() for run in of_label]
        return of_points or self.runs or list(runs)

    def lines(self, records: Sequence[Records]) -> dict[str, list[Line]]:
        """The lines of all seeds, by their label in the legend, given the records of each seed."""
        function, lines = function_of("a curve", self.of, LINES), dict[str, list[Line]]()
        for of_seed in records:
            drawn = {run: of_seed[run] for run in self.drawn_runs(of_seed)}
            for label, line in function(drawn, **self.of).items():
                lines.setdefault(label, []).append(line)
        return lines


class Finding(_Checked):
    """A claim, its protocol, and the reasons for its bands."""

    name: str
    title: str
    question: str = "own"  # a key of `QUESTIONS`
    is_headline: bool = False  # whether it answers its question in the README
    paper: Paper
    clauses: dict[str, str] = pydantic.Field(min_length=1)  # the sentences of the claim, each with its own verdict
    baseline: list[str]  # overrides of every run, which state each choice that matters
    runs: dict[str, list[str]] = pydantic.Field(min_length=1)  # the overrides of each run on top of the baseline
    seeds: list[int] = pydantic.Field(min_length=1, max_length=10)
    program: Literal["train", "costs", "kernels"] = "train"  # the program that makes a run
    evaluate: list[str] = []  # overrides of the evaluation that analyses every trained run
    evaluations: dict[str, list[str]] = {}  # further overrides for a run's evaluation; equal runs are trained once
    checks: dict[str, Check] = pydantic.Field(min_length=1)
    curves: list[Curve] = []  # panels of the figure with lines, above those of the checks
    picture: Picture | None = None  # a picture of the first seed, above the curves
    why: str
    cost: str
    notes: str = ""  # a report on attempts and results, after the first run
    takeaway: str = ""  # a summary after a measurement, in which {key} is the mean of a check
    concluded: dict[str, str] = {}  # the verdict on each clause for which the takeaway was written
    published: str = ""  # the day and the commit of the project's measurement with these verdicts
    trusted: list[str] = []  # overrides with a user's class, which the command line repeats

    @property
    def is_exact(self) -> bool:
        """Return True if one seed suffices, since every seed gives the same values."""
        return self.question == "identities" and len(self.seeds) == 1

    @property
    def claim(self) -> str:
        return " ".join(sentence.strip() for sentence in self.clauses.values())

    def words(self, run: str) -> list[str]:
        """The overrides of a run, without its seed."""
        return [*self.baseline, *self.runs[run]]

    def evaluation(self, run: str) -> list[str]:
        """The overrides of the evaluation of a run; [] for no evaluation."""
        return [*self.evaluate, *self.evaluations.get(run, [])]

    @pydantic.model_validator(mode="after")
    def _fits(self) -> "Finding":
        if len({*self.seeds}) < len(self.seeds) or (self.program == "kernels" and len(self.seeds) > 1):
            raise ValueError("seeds: must differ, and program=kernels has one, since its runs do not use it")
        if self.question not in QUESTIONS:
            raise ValueError(f"question={self.question}: must be one of {', '.join(QUESTIONS)}")
        for key, check in self.checks.items():
            if check.clause not in (None, *self.clauses):
                raise ValueError(f"checks.{key}.clause={check.clause}: must be one of {', '.join(self.clauses)}")
            if (check.clause is not None or check.premise) and not check.has_band:
                raise ValueError(f"checks.{key}: decides a clause, or is a premise, and needs at_least or at_most")
        for clause in self.clauses:
            if not any(check.clause == clause and not check.premise for check in self.checks.values()):
                raise ValueError(f"clauses.{clause}: needs a check that names it and is no premise")
        named = [(key, run) for key, check in self.checks.items() for run in _runs_named_by(key, check)]
        named += [(curve.name, run) for curve in self.curves for run in curve.drawn_runs(self.runs)]
        named += [("picture", self.picture.run)] if self.picture else []
        named += [("evaluations", run) for run in self.evaluations]
        for name, run in named:
            if run not in self.runs:
                raise ValueError(f"{name}: there is no run {run}; the runs are {', '.join(self.runs)}")
        return self


def _runs_named_by(key: str, check: Check) -> list[str]:
    """Verify a check's quantity and its arguments, and return the names of the runs that the check needs."""
    if check.quantity not in QUANTITIES:
        raise ValueError(f"quantity={check.quantity}: must be one of {', '.join(QUANTITIES)}")
    try:
        inspect.signature(QUANTITIES[check.quantity]).bind({}, **check.of)
        for name in ("source", "other"):
            if name in check.of:
                function_of("a source", check.of[name], SOURCES)
    except (TypeError, ValueError) as error:
        raise ValueError(f"checks.{key}: quantity={check.quantity}: {error}") from error
    runs = [check.of[name] for name in ("run", "than") if name in check.of]
    return [*runs, *check.of.get("points", {})]


def trust(findings: Sequence[Finding], trusted: Sequence[str]) -> list[Finding]:
    """Let findings use `trusted` overrides, typed on the command line, and overrides that `admit_override` admits.

    A `ConfigError` is raised for any other override of a finding, and for a trusted override that no finding has.
    """
    known: set[str] = set()
    for finding in findings:
        words = [*finding.baseline, *finding.evaluate]
        words += itertools.chain(*finding.runs.values(), *finding.evaluations.values())
        known.update(words)
        for word in words if finding.program in CONFIG_NAMES else ():
            try:
                if word not in trusted:
                    admit_override(readable([word])[0])
            except NotAdmittedError as error:
                told = f"says {word}, which {error}; if you trust it, add it to the command"
                raise ConfigError(f"{finding.name}.yaml: {told}.") from error
    if foreign := [word for word in trusted if word not in known]:
        raise ConfigError(f"{foreign[0]}: no file of these findings has this override.")
    return [finding.model_copy(update={"trusted": list(trusted)}) for finding in findings]


def finding_names(folder: Path | None = None) -> list[str]:
    """The names of all findings in a folder, by default `conf/finding`."""
    return sorted(path.stem for path in (folder or config_dir() / "finding").glob("*.yaml"))


def read_finding(name: str, folder: Path | None = None) -> Finding:
    """Read a finding from a folder, by default `conf/finding`; a `ConfigError` if its file is missing or malformed."""
    folder = folder or config_dir() / "finding"
    names = finding_names(folder)
    if name not in names:
        raise ConfigError(f"findings {name}: there is no such finding. Findings: {', '.join(names)}.")
    try:
        values = load_plain_yaml((folder / f"{name}.yaml").read_text(encoding="utf-8"))
        return Finding.model_validate({**values, "name": name, "trusted": []})
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where, problem = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{folder.name}/{name}.yaml: {where}{': ' if where else ''}{problem}.") from error
    except (yaml.YAMLError, TypeError) as error:
        raise ConfigError(f"{folder.name}/{name}.yaml: {str(error).splitlines()[0]}.") from error
