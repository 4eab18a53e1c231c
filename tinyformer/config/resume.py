"""The overrides that replace `resume=FOLDER`: the overrides of the stored run or sweep, then the new overrides."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from tinyformer.checkpoint.paths import newest_checkpoint
from tinyformer.config.admission import NotAdmittedError, admit_override, is_swept, leaves
from tinyformer.config.conf import (
    NEVER_SET,
    choices_of,
    files,
    format_value,
    hydra_value,
    is_multirun,
    key_of_word,
    load_plain_yaml,
    quoted,
    text_of,
    values_of_keys,
)
from tinyformer.config.errors import ConfigError, printable
from tinyformer.config.folder import has_checkpoint, is_first_process, is_in_slurm, is_in_torchrun, refuse_foreign_files
from tinyformer.config.launch import compose_whole

OF_SWEEPS = ("hydra.mode=", "hydra.sweep.dir=", "hydra/launcher=", "hydra.output_subdir=null")
"""Prefixes of the overrides of Hydra itself that are accepted from the folder of a resumed sweep."""


def expand_resume(arguments: Sequence[str]) -> list[str]:
    """Replace `resume=RUN new=…` by the overrides that started the run, the new overrides, and the run's folder.

    With `-m`, RUN is the folder of a sweep; `continue_job` resumes, starts or skips each job. `resume=auto` is replaced
    if the run has a checkpoint. (An interpolation could not insert overrides: it is resolved too late.)
    """
    given = [argument for argument in arguments if argument.startswith("resume=")]
    folder = text_of(given[-1]) if given else ""
    is_sweep = is_multirun(arguments)
    key = "hydra.sweep.dir" if is_sweep else "hydra.run.dir"
    has_folder = any(argument.startswith(f"{key}=") for argument in arguments)
    if folder == "auto" and not has_folder and (is_sweep or not (is_in_slurm() or is_in_torchrun())):
        raise ConfigError(
            f"resume=auto: needs a folder, in which it starts a run or continues it; {key}=outputs/run works."
        )
    # argparse takes the overrides as one block, so options (`--cfg job`) come first, with their values.
    options = [argument for argument in arguments if argument.startswith("-") or not re.search(r"=|^~", argument)]
    words = [argument for argument in arguments if argument not in options]
    if folder == "auto" and not is_sweep and has_checkpoint(Path(run := compose_whole("train", words).hydra.run.dir)):
        folder = run
    if folder in ("", "null", "auto"):
        return list(arguments)
    new = [word for word in words if not word.startswith(("resume=", f"{key}="))]
    saved = Path(folder) / ("multirun.yaml" if is_sweep else ".hydra/overrides.yaml")
    stored = _overrides_of_sweep(saved, new) if is_sweep else _overrides_of_run(saved)
    last = {key_of_word(entry): entry for entry in stored}
    typed = [key_of_word(word) for word in new if last.get(key_of_word(word)) != word]
    stored, new = _without_deleted([entry for entry in stored if not entry.startswith("resume=")], new)
    had = [entry for entry in stored if entry not in new]
    if text_of(given[-1]) == "auto":
        _tell(f"{folder}, with other settings:", [word for word in new if key_of_word(word) in typed])
        _tell(f"{folder} was started with these settings, which are kept unless they are given again:", had)
    overrides = _admitted(had, saved, folder, new, is_sweep)
    started = [*overrides, *(entry for entry in stored if entry in new)]
    held = _admitted(_held(Path(folder), started, typed), saved.parent, folder, new, is_sweep)
    _tell(f"{folder} keeps values that are no longer the defaults:", held)
    # Hydra would replace the stored overrides before the new ones are accepted; see `pipeline.keep_overrides`.
    own = [given[-1], f"{key}={quoted(str(Path(folder)))}", "hydra.output_subdir=null"]
    return [*options, *held, *overrides, *new, *own]


def _tell(what: str, words: Sequence[str]) -> None:
    if words and is_first_process():
        print(what, printable(" ".join(word.removeprefix("++") for word in words)[:2000]))


def _admitted(entries: Sequence[str], saved: Path, folder: str, new: Sequence[str], in_sweep: bool) -> list[str]:
    """Check the overrides in a file; one that is not admitted is dropped if `new` sets the same key, else refused."""
    overrides = []
    for entry in entries:
        try:
            overrides.append(admit_override(entry, in_sweep))
        except NotAdmittedError as error:
            if (key := key_of_word(entry)) in map(key_of_word, new):
                continue
            cure = f"give {key}= again" if "${" in entry or key in files() else "if you trust it, add it to the command"
            raise ConfigError(f"resume={folder}: {saved} says {entry[:200]}, which {error}; {cure}.") from error
    return overrides


def _held(folder: Path, started: Sequence[str], typed: Sequence[str]) -> list[str]:
    """Overrides that restore values of a run which the overrides `started` no longer give, except at `typed` keys."""

    def read(*names: str) -> dict[str, Any]:
        paths = (folder / name for name in names)
        return dict(leaf for path in paths if path.is_file() for leaf in leaves(_read(path)))

    def composed(overrides: list[str]) -> dict[str, Any]:
        return dict(leaves(OmegaConf.to_container(compose_whole("train", overrides), resolve=False)))

    was, computed = read("multirun.yaml", ".hydra/config.yaml", ".hydra/hydra.yaml"), read("config.yaml")
    free = (*NEVER_SET, *typed, *(key_of_word(word) for word in started if is_swept(word)))
    fixed = [word for word in started if not is_swept(word)]
    now, held, lost = composed(fixed), list[str](), list[str]()
    for axis in (axis for axis in files() if axis not in (*free, *map(key_of_word, fixed))):
        default = now.get(key := f"hydra.runtime.choices.{axis}")
        if (choice := was.get(key, default)) != default and choice in (None, *choices_of(axis)):
            held.append(f"{axis}={hydra_value(choice)}")
    now = composed([*held, *fixed]) if held else now
    for key, value in was.items():
        if now.get(key, ...) != value and not any(f"{key}.".startswith(f"{name}.") for name in free):
            used = computed.get(key, value) if "${" in str(value) else value
            (lost if "${" in str(used) or key not in values_of_keys() else held).append(f"++{key}={hydra_value(used)}")
    _tell(f"{folder} had values that this version has no keys for:", lost)
    return held


def _without_deleted(stored: list[str], new: list[str]) -> tuple[list[str], list[str]]:
    """Remove stored overrides that a new `~KEY` deletes, and `~KEY` itself if only a stored `+KEY` added the key."""
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
    return _texts(saved)


def _overrides_of_sweep(saved: Path, new: Sequence[str]) -> list[str]:
    sweep = saved.parent
    if not saved.is_file():
        raise ConfigError(f"resume={sweep}: the folder contains no sweep; leave -m out to resume a run.")
    refuse_foreign_files(sweep)
    entries, of_hydra = (_texts(saved, f"hydra.overrides.{kind}") for kind in ("task", "hydra"))
    for entry in of_hydra:
        if not entry.startswith(OF_SWEEPS) and entry not in new:
            raise ConfigError(f"resume={sweep}: {saved} says {entry[:200]}; if you trust it, add it to the command.")
    swept = {entry.partition("=")[0] for entry in entries if is_swept(entry)}
    has_ended = any(sweep.glob("*/results.json"))
    for argument in new:
        key = argument.partition("=")[0]
        if key in swept or is_swept(argument):
            raise ConfigError(f"{argument}: a resumed sweep keeps the swept values that it began with.")
        if has_ended and "=" in argument and not (argument in entries or key.startswith(("trainer.max_", "hydra"))):
            one = format_value(f"{sweep}/N")
            raise ConfigError(
                f"{argument}: finished jobs of the sweep ran without it; resume={one} resumes one job with it."
            )
    return entries


def _read(saved: Path) -> Any:
    return load_plain_yaml(saved.read_text(encoding="utf-8"))


def _texts(saved: Path, key: str = "") -> list[str]:
    return dict(leaves(_read(saved)))[key]


def _what_is_missing(run: Path, saved: Path) -> str:
    if not run.is_dir():
        newest = newest_checkpoint()
        hint = f" The newest run is resume={format_value(newest.parent.parent)}." if newest else ""
        return f"the folder does not exist.{hint}"
    if not saved.is_file():
        return "the folder contains no run; add -m to resume all jobs of a sweep."
    return "the run stopped before it wrote a checkpoint; start it again without resume."
