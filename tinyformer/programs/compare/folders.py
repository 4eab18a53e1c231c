"""Finding and reading run folders, as `train.py` writes them."""

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tinyformer.config.admission import alternatives
from tinyformer.errors import ArgumentError
from tinyformer.files import load_plain_yaml

ABSENT = object()  # the value of a key that a config does not have; null is a value


@dataclass(frozen=True)
class Run:
    """A finished run."""

    path: Path  # its folder, as a user would type it
    results: dict[str, Any]  # the contents of `results.json`
    config: dict[str, Any]  # the resolved config
    written: dict[str, Any]  # with interpolations, so that a value derived from another key is alike in all runs
    choices: dict[str, Any]  # the choice on each axis, such as `attention: gqa`
    typed: tuple[str, ...]  # the keys that its command line sets

    def value(self, key: str) -> Any:
        """The choice on an axis, a value, a node, or `ABSENT`."""
        return self.choices[key] if key in self.choices else select(self.config, key)


@dataclass
class RunFolders:
    """Folders of runs with and without a `results.json`, and of evaluations; and how many jobs of a sweep have none."""

    finished: list[Path] = field(default_factory=list)
    unfinished: list[Path] = field(default_factory=list)
    evaluations: list[Path] = field(default_factory=list)
    not_started: dict[Path, int] = field(default_factory=dict)


def find_runs(folders: Sequence[Path]) -> RunFolders:
    """Find all runs in and below some folders, at least one finished; a run that is found twice counts once."""
    runs, seen = RunFolders(), set()
    for folder in folders:
        if not folder.is_dir():
            raise _nothing_to_compare(folder, "does not exist")
        for path in _folders_in(folder):
            if path.resolve() not in seen:
                seen.add(path.resolve())
                _sort_in(path, runs)
    if not runs.finished:
        others = f", but {len(runs.unfinished)} unfinished" if runs.unfinished else ""
        reason = f"has no finished run (which has a results.json){others}"
        raise _nothing_to_compare(folders[0] if len(folders) == 1 else folders, reason)
    return runs


def read_run(path: Path) -> Run:
    """Read the folder of a run; an `ArgumentError` names a file that is damaged or missing."""
    config = _read(path / "config.yaml")
    # With `hydra.output_subdir=null` Hydra writes no files of its own.
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


def _folders_in(folder: Path) -> Iterator[Path]:
    """A folder and all below it, in the order of a sweep (2 before 10), but none in that of a finished run."""
    yield folder
    for parent, names, files in os.walk(folder):
        names[:] = [] if "results.json" in files else sorted(names, key=lambda name: (len(name), name))
        yield from (Path(parent, name) for name in names)


def _sort_in(path: Path, runs: RunFolders) -> None:
    """Add a folder to the list that it belongs to, if it is one of a run or a sweep."""
    overrides, sweep = path / ".hydra" / "overrides.yaml", path / "multirun.yaml"
    is_finished = (path / "results.json").is_file()
    if overrides.is_file() and any(str(entry).startswith("checkpoint=") for entry in _read(overrides, list)):
        runs.evaluations.append(path)
    elif is_finished or overrides.is_file():
        (runs.finished if is_finished else runs.unfinished).append(path)
    elif sweep.is_file():
        num_started = sum(1 for _ in path.glob("*/.hydra"))
        num_jobs = _num_jobs(_read(sweep))
        if num_jobs > num_started:
            runs.not_started[path] = num_jobs - num_started


def _num_jobs(multirun: dict[str, Any]) -> int:
    """The number of jobs of a sweep; 0 where its `multirun.yaml` does not determine it."""
    # Other sweepers, such as those that search, choose their jobs themselves.
    is_basic = str(select(multirun, "hydra.sweeper._target_")).endswith(".BasicSweeper")
    arguments = select(multirun, "hydra.overrides.task")
    is_list = isinstance(arguments, list) and all(isinstance(argument, str) for argument in arguments)
    return math.prod(len(alternatives(word)) for word in arguments) if is_basic and is_list else 0


def _read(path: Path, expected: type = dict) -> Any:
    """The contents of a JSON or YAML file; an `ArgumentError` where it cannot be read or holds another type."""
    try:
        text = path.read_text(encoding="utf-8")
        contents = json.loads(text) if path.suffix == ".json" else load_plain_yaml(text)
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        reason = " ".join(str(getattr(error, "strerror", None) or error).split())
        raise _unreadable(path, reason) from error
    if not isinstance(contents, expected):
        raise _unreadable(path, f"expected a {expected.__name__}")
    return contents


def _unreadable(path: Path, reason: str) -> ArgumentError:
    cure = "move the folder of this run away, or name the other runs one by one"
    return ArgumentError("folders", path, f"cannot be read ({reason}); {cure}")


def _nothing_to_compare(folders: Any, reason: str) -> ArgumentError:
    """The error where a folder holds nothing to compare, which suggests the newest sweep."""
    sweeps = sorted(Path("multirun").glob("*/*/multirun.yaml"))
    if sweeps:
        return ArgumentError("folders", folders, reason, {"folders": sweeps[-1].parent})
    return ArgumentError("folders", folders, f"{reason}; a sweep is in multirun/DATE/TIME")
