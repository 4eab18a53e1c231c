"""The folders that `train.py` leaves behind: found, and read without torch."""

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tinyformer.app.sweep import count_jobs

ABSENT = object()
"""What a config says of a key that it does not have; null is a value."""

_FAST_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # a sweep has hundreds of these files


@dataclass(frozen=True)
class Run:
    """A run that has ended.

    Attributes:
        path: its folder, as the user would type it.
        results: of `results.json`.
        config: every value that it ran with.
        written: the same before `${…}` was filled in, so that what only follows from another key is the same text.
        choices: what was chosen on each axis, such as `attention: gqa`.
        typed: the keys on its command line.
    """

    path: Path
    results: dict[str, Any]
    config: dict[str, Any]
    written: dict[str, Any]
    choices: dict[str, Any]
    typed: tuple[str, ...]

    def value(self, key: str) -> Any:
        """What the run was configured with: a choice, a value, a node, or `ABSENT`."""
        return self.choices[key] if key in self.choices else select(self.config, key)


@dataclass
class Found:
    """What lies below some folders.

    Attributes:
        finished: folders of runs with a `results.json`.
        unfinished: folders of runs without.
        evaluations: folders that `evaluate.py` left.
        not_started: by sweep, how many of its jobs have no folder.
    """

    finished: list[Path] = field(default_factory=list)
    unfinished: list[Path] = field(default_factory=list)
    evaluations: list[Path] = field(default_factory=list)
    not_started: dict[Path, int] = field(default_factory=dict)


def find_runs(folders: Sequence[Path], config_dir: Path) -> Found:
    """Look for runs in folders and all that is below them; a run that is found twice counts once.

    Args:
        folders: of runs, of sweeps, or of many of them.
        config_dir: where the config files are, which a sweep's command line refers to.

    Raises:
        ValueError: a folder does not exist, or no run in it has ended.
    """
    found, seen = Found(), set()
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"{folder}: there is no such folder.{_newest_sweep()}")
        for path in [folder, *(Path(parent, name) for parent, names, _ in _walk(folder) for name in names)]:
            if path.resolve() not in seen:
                seen.add(path.resolve())
                _sort_in(path, found, config_dir)
    if not found.finished:
        places = ", ".join(map(str, folders))
        others = f", but {len(found.unfinished)} unfinished" if found.unfinished else ""
        raise ValueError(f"{places}: there is no results.json, which a run writes at its end{others}.{_newest_sweep()}")
    return found


def read_run(path: Path) -> Run:
    """Read a run's folder.

    Raises:
        ValueError: a file is damaged or missing.
    """
    config = _read(path / "config.yaml")
    # `hydra.output_subdir=null` leaves none of Hydra's own.
    written, hydra, overrides = (
        _read(file, expected) if (file := path / ".hydra" / name).exists() else None
        for name, expected in (("config.yaml", dict), ("hydra.yaml", dict), ("overrides.yaml", list))
    )
    choices = select(hydra or {}, "hydra.runtime.choices")
    typed = [str(entry).lstrip("+~").partition("=")[0] for entry in overrides or ()]
    return Run(
        path=path,
        results=_read(path / "results.json"),
        config=config,
        written=config if written is None else written,
        choices=choices if isinstance(choices, dict) else {},
        typed=tuple(dict.fromkeys(typed)),
    )


def select(config: Any, key: str) -> Any:
    """The value of a dotted key, or `ABSENT`."""
    for part in key.split("."):
        if not isinstance(config, dict) or part not in config:
            return ABSENT
        config = config[part]
    return config


def leaves(config: dict[str, Any], prefix: str = "") -> Iterable[str]:
    """The dotted keys of all values, in their order; a list is one value."""
    for key, value in config.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def _walk(folder: Path) -> Iterable[tuple[str, list[str], list[str]]]:
    """As `os.walk`, in the order of a sweep: 2 before 10. What is inside of a run is left alone."""
    for parent, names, files in os.walk(folder):
        names[:] = [] if "results.json" in files else sorted(names, key=lambda name: (len(name), name))
        yield parent, names, files


def _sort_in(path: Path, found: Found, config_dir: Path) -> None:
    overrides, sweep = path / ".hydra" / "overrides.yaml", path / "multirun.yaml"
    is_finished = (path / "results.json").is_file()
    if overrides.is_file() and any(str(entry).startswith("checkpoint=") for entry in _read(overrides, list)):
        found.evaluations.append(path)
    elif is_finished or overrides.is_file():
        (found.finished if is_finished else found.unfinished).append(path)
    elif sweep.is_file():
        started = sum(1 for _ in path.glob("*/.hydra"))
        asked_for = _num_jobs(_read(sweep), config_dir)
        if asked_for > started:
            found.not_started[path] = asked_for - started


def _num_jobs(multirun: dict[str, Any], config_dir: Path) -> int:
    """How many jobs a sweep was asked for; 0 where its `multirun.yaml` does not tell."""
    # Another sweeper, such as one that searches, chooses its jobs itself.
    makes_all = str(select(multirun, "hydra.sweeper._target_")).endswith(".BasicSweeper")
    arguments = select(multirun, "hydra.overrides.task")
    return count_jobs(config_dir, arguments) if makes_all and isinstance(arguments, list) else 0


def _read(path: Path, expected: type = dict) -> Any:
    """The contents of a JSON or YAML file.

    Raises:
        ValueError: it cannot be read, or holds something else than expected.
    """
    try:
        text = path.read_text(encoding="utf-8")
        contents = json.loads(text) if path.suffix == ".json" else yaml.load(text, Loader=_FAST_LOADER)
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(getattr(error, "strerror", None) or error).split())
        raise ValueError(_unreadable(path, reason)) from error
    if not isinstance(contents, expected):
        raise ValueError(_unreadable(path, f"it holds no {expected.__name__}"))  # noqa: TRY004 - the user's file
    return contents


def _unreadable(path: Path, reason: str) -> str:
    return f"{path} cannot be read: {reason}. Move its folder away, or name the other runs one by one."


def _newest_sweep() -> str:
    sweeps = sorted(Path("multirun").glob("*/*/multirun.yaml"))
    return f" The newest sweep is {sweeps[-1].parent}." if sweeps else " A sweep is in multirun/DATE/TIME."
