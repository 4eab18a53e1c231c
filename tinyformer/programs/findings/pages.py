"""What a finding leaves: a table, a figure and JSON, and the page of all findings."""

import csv
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from tinyformer.analysis import save_png
from tinyformer.config.errors import ConfigError
from tinyformer.config.keys import format_value
from tinyformer.programs.findings.figure import CAPTION, draw
from tinyformer.programs.findings.files import QUIET, Finding
from tinyformer.programs.findings.quantities import Records
from tinyformer.programs.findings.verdicts import HOLDS, Measured, measure, verdict

COLUMNS = ("measured", "band", "mean", "95 % interval", "seeds", "in the band")

PAGE = "findings.md"  # the page of all findings, beside the folder of tables and figures

INTERVAL = "the 95 % t-interval of the mean over seeds"

SPLIT = "2026-11-25T11:00:00Z"
"""When the splits changed: what is held out of a text, and that `seed` no longer determines it."""

BEFORE = "before the split of November 2026"

CHANGED = "**Its runs, quantities or bands were changed after this measurement.**"

Outcome: TypeAlias = dict[str, Any]  # the contents of `NAME.json`


def write_outcome(finding: Finding, records: Sequence[Records], runs: list[dict[str, Any]], folder: Path) -> Outcome:
    """Measure a finding on the records of each seed; write `NAME.csv`, `NAME.png` and, last, `NAME.json`."""
    measured = measure(finding, records)
    folder.mkdir(parents=True, exist_ok=True)
    outcome = outcome_of(finding, measured, runs)
    with (folder / f"{finding.name}.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([COLUMNS, *rows_of(outcome)])
    figure, caption = draw(measured, finding.curves, records), f"{finding.name}: {verdict_of(outcome)} · {CAPTION}"
    save_png(figure, folder / f"{finding.name}.png", caption)
    (folder / f"{finding.name}.json").write_text(json.dumps(outcome, indent=1, ensure_ascii=False) + "\n")
    return outcome


def outcome_of(finding: Finding, measured: Sequence[Measured], runs: list[dict[str, Any]]) -> Outcome:
    """A finding, what was measured, and when, where and by which code each of its runs was made, as plain values."""
    return {
        "name": finding.name,
        "title": finding.title,
        "paper": finding.paper.model_dump(),
        "claim": finding.claim,
        "verdict": verdict(measured),
        "measured": [
            {
                **quantity.check.model_dump(include={"name", "at_least", "at_most", "premise"}),
                "values": [value if math.isfinite(value) else str(value) for value in quantity.values],
                "mean": quantity.mean if math.isfinite(quantity.mean) else str(quantity.mean),
                "interval": quantity.interval,
                "holds": quantity.holds,
                "clear": quantity.is_clear,
            }
            for quantity in measured
        ],
        "interval": INTERVAL,
        "seconds": round(sum(run["seconds"] for run in {run["folder"]: run for run in runs}.values()), 1),
        "runs": runs,
    }


def read_outcomes(folder: Path, names: Sequence[str]) -> dict[str, Outcome]:
    """What was measured last, by the name of the finding; a file that `write_outcome` did not write is refused."""
    outcomes: dict[str, Outcome] = {}
    for name in names:
        if not (path := folder / f"{name}.json").exists():
            continue
        try:
            outcome = json.loads(path.read_text(encoding="utf-8"))
            rows_of(outcome), verdict_of(outcome), _made_by(outcome)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            works = f"remove it, and `tinyformer findings {name}` measures it again"
            raise ConfigError(
                f"--results={format_value(folder)}: {path} is no result of a finding; {works}."
            ) from error
        outcomes[name] = outcome
    return outcomes


def refuse_links(folder: Path, names: Sequence[str]) -> None:
    """Refuse links in place of the files that findings write: they lead anywhere, in the folder of a stranger."""
    files = [folder / f"{name}.{suffix}" for name in names for suffix in ("csv", "png", "json")]
    for path in (folder, folder.parent / PAGE, *files):
        if path.is_symlink():
            raise ConfigError(f"--results={format_value(folder)}: {path} is a symbolic link; remove it.")


def rows_of(outcome: Outcome) -> list[list[str]]:
    """The table of a finding, by `COLUMNS`."""
    return [
        [
            quantity["name"] + (" (premise)" if quantity["premise"] else ""),
            band(quantity),
            shown(float(quantity["mean"])),
            "" if quantity["interval"] is None else " to ".join(map(shown, quantity["interval"])),
            " ".join(shown(float(value)) for value in quantity["values"]),
            {None: "", True: "yes", False: "no"}[quantity["holds"]]
            + (", not clearly" if quantity["clear"] is False else ""),
        ]
        for quantity in outcome["measured"]
    ]


def band(check: Mapping[str, Any]) -> str:
    """The band of a check, or of what was measured: "≥ 0.9", "0.01 to 0.06", "= 1", or "reported" without one."""
    low, high = (None if check[key] is None else f"{check[key]:g}" for key in ("at_least", "at_most"))
    if low is None or high is None:
        return f"≥ {low}" if low else f"≤ {high}" if high else "reported"
    return f"= {low}" if low == high else f"{low} to {high}"


def shown(value: float) -> str:
    """A number in four digits; "never" for a level that was not reached."""
    return "never" if value == math.inf else f"{value:.4g}"


def verdict_of(outcome: Outcome) -> str:
    """The verdict; "holds, not clearly" where the interval of a quantity that decides crosses an end of its band.

    A finding fails clearly if one quantity is clearly outside of its band.
    """
    decisive = [quantity for quantity in outcome["measured"] if quantity["holds"] is not None]
    if outcome["verdict"] == HOLDS:
        is_clear = all(quantity["clear"] is not False for quantity in decisive)
    else:
        is_clear = any(quantity["holds"] is False and quantity["clear"] is not False for quantity in decisive)
    return outcome["verdict"] + ("" if is_clear else ", not clearly")


def is_before_split(outcome: Outcome) -> bool:
    """Whether a run was trained before `SPLIT`."""
    return any(run["folder"].startswith("train-") and run["time"] < SPLIT for run in outcome["runs"])


def is_current(finding: Finding, outcome: Outcome) -> bool:
    """Whether an outcome is that of the runs, seeds, quantities and bands which the finding's file has now."""
    # As sets: a run that two findings share has its overrides in the order of one of them.
    runs = {(name, seed): {*finding.words(name)} for name in finding.runs for seed in finding.seeds}
    made = {
        (run["run"], run["seed"]): {
            word for word in run["overrides"] if word not in QUIET and not word.startswith("seed=")
        }
        for run in outcome["runs"]
    }
    keys = ("name", "at_least", "at_most", "premise")
    checks = [[getattr(check, key) for key in keys] for check in finding.checks]
    return runs == made and checks == [[quantity[key] for key in keys] for quantity in outcome["measured"]]


def page(findings: Sequence[Finding], outcomes: Mapping[str, Outcome], folder: str) -> str:
    """The page of all findings, in Markdown, with the folder of tables and figures relative to it."""
    sections = [_section(finding, outcomes.get(finding.name), folder) for finding in findings]
    return "\n".join([HEAD, *overview(findings, outcomes, "[{0}](#{0})"), "", *sections])


def overview(findings: Sequence[Finding], outcomes: Mapping[str, Outcome], name: str = "{}") -> list[str]:
    """The table of all findings and verdicts, in lines of Markdown; `name` formats a name."""
    verdicts = {key: verdict_of(outcome) for key, outcome in outcomes.items()}
    rows = [[name.format(of.name), of.title, verdicts.get(of.name, "unmeasured")] for of in findings]
    return _table(["finding", "claim", "verdict"], rows)


HEAD = """\
# Findings

Claims of papers about attention, tested on small models. Each finding is a file of plain values in `conf/finding`: the
claim, the runs, the measured quantities, and the band in which the claim expects each of them. Bands were written down
before the first run. Where a protocol or a quantity was changed after it, the finding says so; no band was moved.

```bash
tinyformer findings
tinyformer findings cost
tinyformer findings cost --launcher joblib
```

The first command lists them with what was measured last; the second makes the runs of one that were not made before,
and prints its table and verdict. `tinyformer findings all` does so for every finding and writes this page; after an
interruption it continues where it stopped. A verdict compares the mean over seeds with the band. The table also gives
the 95 % t-interval of the mean, and says "not clearly" where that crosses an end of the band. A quantity without a band
is reported only; where a premise does not hold, the claim is not testable.

Runs are made one after the other; the third command makes them in parallel, by Hydra's joblib launcher
(`pip install 'tinyformer[sweep]'`): as many at a time as there are cores, or two with `--launcher joblib n_jobs=2`,
with the threads of the machine divided among them. Any other launcher of Hydra that is installed can be named. A run
that fails is reported by name and does not stop the others.

Runs are cached in `outputs/findings` by their config, not by the version of the code: after changing the model's code,
delete that folder.
"""

SECTION = """\
## {name}

{claim} ([{paper.name}](https://arxiv.org/abs/{paper.arxiv}))

{result}

*Why these bands:* {why}

*What would refute it:* {refuted_by}
"""


def _section(finding: Finding, outcome: Outcome | None, folder: str) -> str:
    if outcome is None:
        rows = [[check.name, band(check.model_dump())] for check in finding.checks]
        table = "\n".join(_table(["to be measured", "band"], rows))
        result = f"**Unmeasured.** It costs {finding.cost.strip()}.\n\n{table}"
    else:
        before = f", measured {BEFORE}" if is_before_split(outcome) else ""
        parts = [
            f"**{verdict_of(outcome).capitalize()}{before}.**",
            "\n".join(_table(COLUMNS, rows_of(outcome))),
            f"![{finding.title}]({folder}/{finding.name}.png)",
            _made_by(outcome),
            *([] if is_current(finding, outcome) else [CHANGED]),
        ]
        result = "\n\n".join(parts)
    texts = {key: getattr(finding, key).strip() for key in ("name", "claim", "why", "refuted_by", "notes")}
    section = SECTION.format(**texts, paper=finding.paper, result=result)
    return f"{section}\n{texts['notes']}\n" if texts["notes"] else section


def _made_by(outcome: Outcome) -> str:
    """When, where and by which code its runs were made."""
    last = outcome["runs"][-1]
    machine, commits = last["machine"], dict.fromkeys(str(run["commit"]) for run in outcome["runs"])
    return (
        f"{len(outcome['runs'])} runs, {outcome['seconds']:.0f} s in all, on {machine['name']} with "
        f"{machine['threads']} thread(s) of {machine['cpus']} cores; torch {last['versions']['torch']}, "
        f"{last['time']}, commit {', '.join(commits)}."
    )


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    head, *body = (f"| {' | '.join(cells)} |" for cells in (columns, *rows))
    return [head, "|" + "---|" * len(columns), *body]
