"""The config files in `conf`: where they are, their axes, choices and keys, and the functions that they call."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from tinyformer.config.run_name import name_of_run

AXES = (
    *("model", "attention", "cross_attention", "position", "block", "feed_forward", "norm", "network"),
    *("task", "data", "tokenizer"),
)
"""The axes that a checkpoint stores; an evaluation chooses trainer, logger, callbacks and the others itself."""

STORED = (*AXES, "datamodule", "seed", "deterministic")  # the top-level keys of a config that a checkpoint stores
NO_AXES = ("finding",)  # folders of `conf` that are not axes of any program
NEVER_SET = ("defaults", "hydra", "resume", "checkpoint")  # entries of our config files that are not values of a run


def config_dir() -> Path:
    """The folder of the config files: inside the installed package, or next to it in a checkout."""
    package = Path(__file__).parents[1]
    return next(folder for folder in (package / "conf", package.parent / "conf") if folder.is_dir())


@functools.cache
def files() -> dict[str, dict[str, Path]]:
    """The config files of each axis, by their names."""
    names = sorted(folder.name for folder in config_dir().iterdir() if folder.is_dir() and folder.name not in NO_AXES)
    axes = [*filter(names.__contains__, AXES), *(name for name in names if name not in AXES)]
    return {axis: {file.stem: file for file in sorted((config_dir() / axis).glob("*.yaml"))} for axis in axes}


@functools.cache
def programs() -> dict[str, Path]:
    """The primary config of each program, by its name."""
    return {file.stem: file for file in sorted(config_dir().glob("*.yaml"))}


def choices_of(axis: str) -> list[str]:
    """The choices of an axis: the names of its YAML files."""
    return [name for name in files()[axis] if not name.startswith("_")]


@functools.cache
def read(name: str, axis: str | None = None) -> dict[str, Any]:
    """The unresolved contents of a choice of an axis, or of a program, and of the files that it starts from; or {}."""
    file = (programs() if axis is None else files().get(axis, {})).get(name)
    if file is None:
        return {}
    contents: Any = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
    inherited: dict[str, Any] = {}
    for base in contents.get("defaults", []):
        if isinstance(base, str) and base != "_self_":
            # "_shared" is of the same axis, "/attention/gqa@_here_" of another.
            *other, stem = base.partition("@")[0].strip("/").split("/")
            inherited |= read(stem, other[0] if other else axis)
    return inherited | contents


def axes_of(program: str) -> dict[str, str | None]:
    """The axes of a program, such as "train", each with its default choice."""
    axes: dict[str, str | None] = {}
    for node in read(program).get("defaults", []):
        axes |= axes_of(node) if isinstance(node, str) else node
    return {axis: choice for axis, choice in axes.items() if not axis.startswith("override ")}


@functools.cache
def values_of_keys() -> dict[str, list[Any]]:
    """The dotted keys of the programs' configs, nodes included, each with its values in the config files."""
    values: dict[str, list[Any]] = {axis: [{}] for axis in files()}

    def add(node: Any, key: str) -> None:
        values.setdefault(key, []).append(node)
        for name, entry in node.items() if isinstance(node, dict) else ():
            add(entry, f"{key}.{name}")

    for axis, names in {None: programs(), **files()}.items():
        for name, file in names.items():
            is_global = axis is None or "# @package _global_" in file.read_text(encoding="utf-8").splitlines()
            for key, node in read(name, axis).items():
                if key not in NEVER_SET:
                    add(node, key if is_global else f"{axis}.{key}")
    return values


def register_resolvers(command: str = "tinyformer") -> None:
    """Register the functions that the config files call; `${command:}` is the program as the user called it."""
    functions: dict[str, Callable[..., Any]] = {
        "default_num_kv_heads": default_num_kv_heads,
        "original_peak_rate": original_peak_rate,
        "axes": lambda *names: describe_axes(names).replace("$", "$$"),  # which Hydra's template reads
        "command": lambda: command,
        "name_of_run": name_of_run,
    }
    for name, function in functions.items():
        OmegaConf.register_new_resolver(name, function, replace=True, use_cache=name == "name_of_run")


def default_num_kv_heads(num_heads: Any) -> Any:
    """The largest divisor of a number of heads that is at most half of it; 1 for a single head."""
    if not isinstance(num_heads, int) or num_heads < 2:
        return num_heads  # refused by the check of model.num_heads
    if num_heads > 2**20:
        return 1  # refused there, too; finding its divisors would take forever
    return next(n for n in range(num_heads // 2, 0, -1) if num_heads % n == 0)


def original_peak_rate(d_model: Any, warmup_steps: Any) -> float:
    """d_model^-0.5 · warmup_steps^-0.5, the highest rate of the original transformer (arXiv 1706.03762, §5.3)."""
    if not all(isinstance(size, int) and size > 0 for size in (d_model, warmup_steps)):
        return 1e-3  # the check of these keys refuses them
    return float((d_model * warmup_steps) ** -0.5)


def describe_axes(axes: Sequence[str] = ()) -> str:
    """Axes for `--help`, by default those of `train`: each with its choices and the first comment of each file."""
    lines = []
    for axis in axes or sorted(axes_of("train")):
        lines.append(axis)
        lines += [f"  {choice:<16} {_first_comment(files()[axis][choice])}".rstrip() for choice in choices_of(axis)]
    return "\n".join(lines)


def _first_comment(path: Path) -> str:
    """The first comment of a file, except "# @package", which is for Hydra."""
    comments = (line[1:].strip() for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#"))
    return next((comment for comment in comments if not comment.startswith("@package")), "")
