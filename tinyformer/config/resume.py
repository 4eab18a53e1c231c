"""`resume=FOLDER`: the overrides of a run, or of all jobs of a sweep, followed by the new ones."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from tinyformer.checkpoint.paths import newest_checkpoint
from tinyformer.config.admission import MAX_JOBS, NotAdmittedError, admit_override, alternatives, is_swept
from tinyformer.config.conf import values_of_keys
from tinyformer.config.errors import ConfigError
from tinyformer.config.folder import has_checkpoint, refuse_foreign_files
from tinyformer.config.keys import format_value, quoted, text_of
from tinyformer.config.run_name import is_in_slurm, is_in_torchrun

OF_SWEEPS = ("hydra.mode=", "hydra.sweep.dir=", "hydra/launcher=", "hydra.output_subdir=null")
"""Overrides of Hydra itself that a resumed sweep may have been started with."""


def expand_resume(arguments: Sequence[str]) -> list[str]:
    """Turn `resume=RUN new=…` into the overrides that the run was started with, the new ones, and its folder.

    With `-m`, the folder is that of a sweep, whose jobs `continue_job` resumes, starts or skips. This happens before
    Hydra starts: a resolver would only be called once the config is composed.
    """
    given = [argument for argument in arguments if argument.startswith("resume=")]
    folder = text_of(given[-1]) if given else ""
    is_sweep = any(argument in ("-m", "--multirun") for argument in arguments)
    key = "hydra.sweep.dir" if is_sweep else "hydra.run.dir"
    has_folder = any(argument.startswith(f"{key}=") for argument in arguments)
    if folder == "auto" and not has_folder and (is_sweep or not (is_in_slurm() or is_in_torchrun())):
        raise ConfigError(
            f"resume=auto: needs a folder, in which it starts a run or continues it; {key}=outputs/run works."
        )
    if folder in ("", "null", "auto"):
        return list(arguments)
    new = [argument for argument in arguments if argument not in given]
    saved = Path(folder) / ("multirun.yaml" if is_sweep else ".hydra/overrides.yaml")
    stored = _overrides_of_sweep(saved, new) if is_sweep else _overrides_of_run(saved)
    stored, new = _without_deleted(stored, new)
    overrides, num_jobs = [], 1
    for entry in stored:
        if entry.startswith("resume=") or entry in new:
            continue
        try:
            overrides.append(admit_override(entry, in_sweep=is_sweep))
        except NotAdmittedError as error:
            raise ConfigError(
                f"resume={folder}: {saved} says {entry[:200]}, which {error}; if you trust it, add it to the command."
            ) from error
        num_jobs *= len(alternatives(overrides[-1]))
        if num_jobs > MAX_JOBS:
            raise ConfigError(f"resume={folder}: {saved} makes more than {MAX_JOBS:,} jobs.")
    # argparse takes the overrides as one block, so options (`--cfg job`) come first, with their values.
    options = [argument for argument in new if argument.startswith("-") or not re.search(r"=|^~", argument)]
    new = [argument for argument in new if argument not in options]
    own = [f"resume={given[-1].partition('=')[2]}", f"{key}={quoted(str(Path(folder)))}"]
    # Hydra would replace the stored overrides before the new ones are accepted; see `pipeline.keep_overrides`.
    return [*options, *overrides, *new, *own, "hydra.output_subdir=null"]


def _without_deleted(stored: list[str], new: list[str]) -> tuple[list[str], list[str]]:
    """Leave out what a new `~KEY` deletes, and `~KEY` itself if only a stored `+KEY` has added the key."""
    kept = new.copy()
    for word in new:
        key = word.removeprefix("~")
        rest = [entry for entry in stored if not re.match(rf"\+*{re.escape(key)}[.=]", entry)]
        if word.startswith("~") and len(rest) < len(stored):
            stored = rest
            if key not in values_of_keys():
                kept.remove(word)
    return stored, kept


def _overrides_of_run(saved: Path) -> list[str]:
    run = saved.parents[1]
    if not saved.is_file() or not has_checkpoint(run):
        raise ConfigError(f"resume={run}: {_what_is_missing(run, saved)}")
    refuse_foreign_files(run)
    return _texts(run, saved, _read(run, saved))


def _overrides_of_sweep(saved: Path, new: Sequence[str]) -> list[str]:
    sweep = saved.parent
    if not saved.is_file():
        if has_checkpoint(sweep):
            raise ConfigError(f"resume={sweep}: a sweep cannot resume a run; leave -m out.")
        example = "multirun/2026-01-31/12-00-00"
        raise ConfigError(f"resume={sweep}: the folder contains no sweep; a sweep's folder looks like {example}.")
    refuse_foreign_files(sweep)
    contents = _read(sweep, saved)
    try:
        stored = contents["hydra"]["overrides"]
        entries, of_hydra = _texts(sweep, saved, stored["task"]), _texts(sweep, saved, stored["hydra"])
    except (KeyError, TypeError):
        return _texts(sweep, saved, None)
    for entry in of_hydra:
        if not entry.startswith(OF_SWEEPS) and entry not in new:
            raise ConfigError(f"resume={sweep}: {saved} says {entry[:200]}; if you trust it, add it to the command.")
    swept = {entry.partition("=")[0] for entry in entries if is_swept(entry)}
    has_ended = any(sweep.glob("*/results.json"))
    for argument in new:
        key = argument.partition("=")[0]
        if key in swept or is_swept(argument):
            raise ConfigError(f"{argument}: the sweep has values of its own; its jobs are resumed with these.")
        if has_ended and "=" in argument and not key.startswith(("trainer.max_", "hydra")):
            one = format_value(f"{sweep}/N")
            raise ConfigError(f"{argument}: jobs of the sweep have ended without it; resume={one} resumes one job.")
    return entries


def _read(folder: Path, saved: Path) -> Any:
    try:
        # The base loader makes only texts, lists and mappings: no numbers, dates or merged mappings.
        return yaml.load(saved.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"resume={folder}: {saved} cannot be read; a run writes it as a list of texts.") from error


def _texts(folder: Path, saved: Path, entries: Any) -> list[str]:
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise ConfigError(f"resume={folder}: {saved} contains no list of overrides; a run writes one.")
    return entries


def _what_is_missing(run: Path, saved: Path) -> str:
    if not run.is_dir():
        newest = newest_checkpoint()
        hint = f" The newest run is resume={format_value(newest.parent.parent)}." if newest else ""
        return f"the folder does not exist.{hint}"
    if (run / "multirun.yaml").is_file():
        return "the folder contains a sweep; add -m to resume all of its jobs."
    if not saved.is_file():
        return "the folder contains no run; a run's folder looks like outputs/2026-01-31/12-00-00."
    return "the run stopped before it wrote a checkpoint; start it again without resume."
