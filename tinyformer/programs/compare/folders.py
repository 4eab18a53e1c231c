"""Functions that find and load the folders of runs, as `train.py` writes them."""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tinyformer.config.conf import load_plain_yaml
from tinyformer.errors import ArgumentError

A_SWEEP = "a sweep is in multirun/DATE/TIME"
ABSENT = object()  # the value of a key that a config does not have; null is a value


@dataclass(frozen=True)
class Run:
    """A finished run."""

    path: Path  # the folder of the run, as a user would type it
    results: dict[str, Any]  # the contents of `results.json`
    config: dict[str, Any]  # the resolved config
    written: dict[str, Any]  # the unresolved config, in which derived values are equal in all runs
    choices: dict[str, Any]  # the choice on each axis, such as `attention: gqa`
    typed: tuple[str, ...]  # the keys that its command line sets

    def value(self, key: str) -> Any:
        """The choice on the axis `key`, or the value or node at the dotted key; `ABSENT` if there is none."""
        return self.choices[key] if key in self.choices else select(self.config, key)


@dataclass
class RunFolders:
    """Folders of runs with and without a `results.json`."""

    finished: list[Path] = field(default_factory=list)
    unfinished: list[Path] = field(default_factory=list)


def find_runs(folders: Sequence[Path]) -> RunFolders:
    """Find all runs in and below some folders, without duplicates; an error if none of them is finished."""
    runs, seen = RunFolders(), set()
    for folder in folders:
        if not folder.is_dir():
            raise ArgumentError("folders", folder, f"does not exist; {A_SWEEP}")
        for path in _folders_in(folder):
            if path.resolve() not in seen:
                seen.add(path.resolve())
                _sort_in(path, runs)
    if not runs.finished:
        others = f", but {len(runs.unfinished)} unfinished" if runs.unfinished else ""
        reason = f"has no finished run (with a results.json){others}"
        raise ArgumentError("folders", folders[0] if len(folders) == 1 else folders, f"{reason}; {A_SWEEP}")
    return runs


def read_run(path: Path) -> Run:
    """Read the folder of a run."""
    config = _read(path / "config.yaml")
    # With `hydra.output_subdir=null` Hydra writes no files of its own.
    written, hydra, overrides = (
        _read(file) if (file := path / ".hydra" / name).exists() else None
        for name in ("config.yaml", "hydra.yaml", "overrides.yaml")
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
    """A folder and its subfolders in the order of a sweep (2 before 10), without subfolders of finished runs."""
    yield folder
    for parent, names, files in os.walk(folder):
        names[:] = [] if "results.json" in files else sorted(names, key=lambda name: (len(name), name))
        yield from (Path(parent, name) for name in names)


def _sort_in(path: Path, runs: RunFolders) -> None:
    """Add the folder of a training run to the finished or the unfinished runs; ignore any other folder."""
    overrides, is_finished = path / ".hydra" / "overrides.yaml", (path / "results.json").is_file()
    if overrides.is_file() and any(str(entry).startswith("checkpoint=") for entry in _read(overrides)):
        return
    if is_finished or overrides.is_file():
        (runs.finished if is_finished else runs.unfinished).append(path)


def _read(path: Path) -> Any:
    """The contents of a JSON or YAML file."""
    text = path.read_text(encoding="utf-8")
    return json.loads(text) if path.suffix == ".json" else load_plain_yaml(text)
