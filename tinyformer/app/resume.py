"""`resume=RUN`: the run's own command line, and what is new on this one."""

import re
from collections.abc import Sequence
from pathlib import Path

import yaml


def expand_resume(arguments: Sequence[str]) -> list[str]:
    """Turn `resume=RUN new=…` into the overrides that the run was started with, the new ones, and its folder.

    It must happen before Hydra starts: what is resolved later finds the config composed already.

    Raises:
        ValueError: the folder holds no run, or a sweep is asked for.
    """
    given = [argument for argument in arguments if argument.startswith("resume=")]
    folder = given[-1].partition("=")[2].strip("'\"") if given else ""
    if folder in ("", "null"):
        return list(arguments)
    if any(argument in ("-m", "--multirun") for argument in arguments):
        raise ValueError(f"resume={folder} goes on with one run; leave -m out.")
    run = Path(folder)
    saved, checkpoint = run / ".hydra" / "overrides.yaml", run / "checkpoints" / "last.ckpt"
    if not saved.is_file() or not checkpoint.is_file():
        raise ValueError(f"resume={folder}: {_what_is_missing(run, saved, checkpoint)}")
    overrides = [entry for entry in yaml.safe_load(saved.read_text()) if not entry.startswith("resume=")]
    new = [argument for argument in arguments if argument not in given]
    return [*overrides, *new, f"resume={given[-1].partition('=')[2]}", f"hydra.run.dir={_quoted(run)}"]


def _quoted(path: Path) -> str:
    # Hydra reads a backslash as itself, unless a quote follows: also the one that ends the value.
    escaped = re.sub(r"(\\*)('|$)", lambda found: 2 * found[1] + ("\\'" if found[2] else ""), str(path))
    return f"'{escaped}'"


def _what_is_missing(run: Path, saved: Path, checkpoint: Path) -> str:
    if not run.is_dir():
        runs = sorted(Path("outputs").glob("*/*/checkpoints/last.ckpt"))
        newest = f" The newest is resume={runs[-1].parent.parent}." if runs else ""
        return f"there is no such folder.{newest}"
    if not saved.is_file():
        return "the folder holds no run; a run's folder looks like outputs/2026-01-31/12-00-00."
    return f"the run was stopped before its first {checkpoint.name} was written; start it anew."
