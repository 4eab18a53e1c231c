"""`resume=RUN`: the run's own overrides, followed by the new ones."""

import os
from collections.abc import Sequence
from pathlib import Path

import yaml

from tinyformer.app.errors import ConfigError
from tinyformer.app.keys import quoted
from tinyformer.app.override_check import problem_of_override


def expand_resume(arguments: Sequence[str]) -> list[str]:
    """Turn `resume=RUN new=…` into the overrides that the run was started with, the new ones, and its folder.

    This happens before Hydra starts: a resolver would be called when the config is composed already.

    Raises:
        ConfigError: the folder contains no run, or a sweep is asked for.
    """
    given = [argument for argument in arguments if argument.startswith("resume=")]
    folder = given[-1].partition("=")[2].strip("'\"") if given else ""
    if folder in ("", "null"):
        # Before Hydra writes its overrides over those that the run in the folder is resumed with.
        for argument in arguments:
            if argument.startswith("hydra.run.dir="):
                require_unused(argument.partition("=")[2].strip("'\""))
        return list(arguments)
    if any(argument in ("-m", "--multirun") for argument in arguments):
        raise ConfigError(f"resume={folder}: a sweep cannot resume a run; leave -m out.")
    run = Path(folder)
    saved = run / ".hydra" / "overrides.yaml"
    if not saved.is_file() or not _has_checkpoint(run):
        raise ConfigError(f"resume={folder}: {_what_is_missing(run, saved)}")
    for path in sorted(run.rglob("*")):  # wandb makes links of its own
        if path.is_symlink() and path.relative_to(run).parts[0] != "wandb":
            raise ConfigError(f"resume={folder}: {path} is a symbolic link, which a run does not make; remove it.")
    new = [argument for argument in arguments if argument not in given]
    overrides = [entry for entry in _stored_overrides(folder, saved) if not entry.startswith("resume=")]
    overrides = [entry for entry in overrides if entry not in new]
    for entry in overrides:
        if problem := problem_of_override(entry):
            raise ConfigError(
                f"resume={folder}: {saved} says {entry[:200]}, which {problem}; if you trust it, add it to the command."
            )
    return [*overrides, *new, f"resume={given[-1].partition('=')[2]}", f"hydra.run.dir={quoted(str(run))}"]


def _stored_overrides(folder: str, saved: Path) -> list[str]:
    try:
        # The base loader makes texts and lists alone: no numbers, dates or merged mappings.
        entries = yaml.load(saved.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"resume={folder}: {saved} cannot be read; a run writes it as a list of texts.") from error
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise ConfigError(f"resume={folder}: {saved} contains no list of overrides; a run writes one.")
    return entries


def require_unused(folder: str | Path) -> None:
    """Refuse to start a run in the folder of another.

    Raises:
        ConfigError: the folder contains a run.
    """
    if is_first_process() and _has_checkpoint(Path(folder)):
        raise ConfigError(
            f"hydra.run.dir={folder}: this folder contains a run; resume={folder} continues it, and "
            f"hydra.run.dir={folder}-2 starts another."
        )


def is_first_process() -> bool:
    """Whether this process writes files and prints: the first of several."""
    # torchrun and most clusters set RANK; Lightning, when it starts the processes itself, sets the other two.
    names = ("RANK",) if "RANK" in os.environ else ("LOCAL_RANK", "NODE_RANK")
    return all(int(os.environ.get(name, "0")) == 0 for name in names)


def _has_checkpoint(run: Path) -> bool:
    return any((run / "checkpoints" / f"{name}.ckpt").is_file() for name in ("last", "previous", "best"))


def _what_is_missing(run: Path, saved: Path) -> str:
    if not run.is_dir():
        runs = sorted(Path("outputs").glob("*/*/checkpoints/last.ckpt"))
        newest = f" The newest run is resume={runs[-1].parent.parent}." if runs else ""
        return f"the folder does not exist.{newest}"
    if not saved.is_file():
        return "the folder contains no run; a run's folder looks like outputs/2026-01-31/12-00-00."
    return "the run stopped before it wrote a checkpoint; start it again without resume."
