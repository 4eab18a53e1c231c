"""The config files: where they are, which functions they call, and what a command line adds to them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from tinyformer.config.keys import shell_word


@dataclass(frozen=True)
class Invocation:
    """What the command line of a run says in addition to its config.

    Args:
        overrides: its arguments, such as "attention=gqa".
        choices: the choice of each axis, such as {"attention": "gqa"}.
        is_sweep: whether the run is one of the jobs of a `--multirun`.
        command: the program as the user called it, for hints.
        in_python: whether `command` is a function that was called in Python.
    """

    overrides: Sequence[str] = ()
    choices: Mapping[str, Any] = field(default_factory=dict)
    is_sweep: bool = False
    command: str = "tinyformer train"
    in_python: bool = False

    def call(self, *words: str) -> str:
        """The command with some words, as in `tinyformer train resume=outputs/run`."""
        if self.in_python:
            return f"{self.command}({json.dumps(words, ensure_ascii=False)})"
        return " ".join((self.command, *map(shell_word, words)))

    def overridden(self, *prefixes: str) -> list[str]:
        """The overrides whose keys start with one of the prefixes."""
        return [override for override in self.overrides if override.startswith(prefixes)]


def config_dir() -> Path:
    """The folder of the config files: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).parents[1]
    return next(folder for folder in (package / "conf", package.parent / "conf") if folder.is_dir())


def register_resolvers(config_dir: Path, command: str = "tinyformer") -> None:
    """Register the functions that the config files call.

    Args:
        config_dir: the folder of the config files, whose choices `${axes:}` lists.
        command: the program as the user called it, for `${command:}`.
    """
    register_head_resolver()
    OmegaConf.register_new_resolver("axes", lambda *names: describe_axes(config_dir, names), replace=True)
    OmegaConf.register_new_resolver("command", lambda: command, replace=True)
    OmegaConf.register_new_resolver("original_peak_rate", original_peak_rate, replace=True)


def register_head_resolver() -> None:
    """Register `${default_num_kv_heads:…}`, the only function that a stored config calls."""
    OmegaConf.register_new_resolver("default_num_kv_heads", default_num_kv_heads, replace=True)


def default_num_kv_heads(num_heads: Any) -> Any:
    """The largest divisor of a number of heads that is at most half of it; 1 for a single head."""
    if not isinstance(num_heads, int) or num_heads < 2:
        return num_heads  # refused by the check of model.num_heads
    if num_heads > 2**20:
        return 1  # refused there, too; finding its divisors would take forever
    return next(n for n in range(num_heads // 2, 0, -1) if num_heads % n == 0)


def original_peak_rate(d_model: Any, warmup_steps: Any) -> float:
    """d_model^-0.5 · warmup_steps^-0.5, the highest rate of the original transformer (arXiv 1706.03762, §5.3)."""
    sizes = (d_model, warmup_steps)
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return 1e-3  # the check of these keys refuses them
    return float((d_model * warmup_steps) ** -0.5)


NO_AXES = ("finding",)
"""Folders of `conf` that are not axes of any program."""


def describe_axes(config_dir: Path, names: Sequence[str] = ()) -> str:
    """The axes for `--help`: each with its choices, and the first comment line of each choice's file.

    Args:
        config_dir: the folder of the config files.
        names: the axes to list; all by default.
    """
    lines = []
    for group in sorted(path for path in config_dir.iterdir() if path.is_dir() and path.name not in NO_AXES):
        if names and group.name not in names:
            continue
        lines.append(group.name)
        for choice in sorted(group.glob("[!_]*.yaml")):
            lines.append(f"  {choice.stem:<16} {_first_comment(choice)}".rstrip())
    return "\n".join(lines)


def _first_comment(path: Path) -> str:
    """The first comment of a file, except "# @package", which is for Hydra."""
    comments = (line.removeprefix("#").strip() for line in path.read_text().splitlines() if line.startswith("#"))
    return next((comment for comment in comments if not comment.startswith("@package")), "")
