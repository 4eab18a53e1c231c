"""Mistakes that a config alone shows, reported before torch and Lightning are imported, which takes seconds."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError

from tinyformer.config.checks import check_value, targets
from tinyformer.config.errors import ConfigError
from tinyformer.config.invocation import config_dir
from tinyformer.config.keys import key_of
from tinyformer.data.sources.text_paths import find_files
from tinyformer.errors import argument_path
from tinyformer.nn.sizes import head_dim_of, require_sizes


def check_early(config: DictConfig, choices: Mapping[str, Any] | None = None) -> None:
    """Refuse a missing axis, sizes of the network that do not fit together, and text files that do not exist.

    Args:
        config: the whole config.
        choices: the choice of each axis; errors name the default of its file.

    Raises:
        ConfigError: an axis was deleted, or a value has another type.
        ArgumentError: a value cannot work.
    """
    for axis, choice in _needed_axes():
        if config.get(axis) is None:
            raise ConfigError(f"~{axis}: a run needs this axis; leave ~{axis} out, or choose, as in {axis}={choice}.")
    written = OmegaConf.to_container(config, resolve=False)
    for part in PARTS:
        if not OmegaConf.is_dict(OmegaConf.select(config, part, throw_on_resolution_failure=False)):
            continue
        for path, node in _complete_targets(config, part):
            target = node["_target_"]
            check = CHECKS.get(target) if isinstance(target, str) else None  # others are refused later
            if check is None:
                continue
            parameters = inspect.signature(check).parameters.values()
            arguments = {parameter.name: node[parameter.name] for parameter in parameters if parameter.name in node}
            if any(each.default is each.empty and each.name not in arguments for each in parameters):
                continue  # a factory, which gets the others later
            for name, value in arguments.items():
                check_value(check, name, value, key_of(written, f"{path}.{name}"), choices)
            with argument_path(*path.split(".")):
                check(**arguments)


def _needed_axes() -> Iterator[tuple[str, str]]:
    """The axes of a run that have a default choice, with that choice."""
    for node in OmegaConf.load(config_dir() / "train.yaml").defaults:
        if OmegaConf.is_dict(node):
            yield from ((axis, choice) for axis, choice in node.items() if choice and not axis.startswith("override "))


def _complete_targets(config: DictConfig, part: str) -> list[tuple[str, dict[str, Any]]]:
    """`targets`; none where a key that they refer to is missing, which is reported when the part is made."""
    try:
        return list(targets(config, part))
    except InterpolationKeyError:
        return []


def _require_heads(d_model: int, num_heads: int, num_kv_heads: int | None = None, head_dim: int | None = None) -> None:
    """Refuse numbers of heads that do not fit the width; see `head_dim_of`."""
    head_dim_of(d_model, num_heads, num_heads if num_kv_heads is None else num_kv_heads, head_dim)


def _require_files(files: str | list[str] | None) -> None:
    """Refuse files that do not exist; None stands for a data set of the Hub."""
    find_files([files] if isinstance(files, str) else files or [])


PARTS = ("network", "datamodule")
"""The nodes whose classes are checked."""

CHECKS: dict[str, Callable[..., None]] = {
    **dict.fromkeys(("tinyformer.nn.Encoder", "tinyformer.nn.Decoder"), require_sizes),
    **dict.fromkeys(
        ("tinyformer.nn.Attention", "tinyformer.nn.LatentAttention", "tinyformer.nn.DifferentialAttention"),
        _require_heads,
    ),
    **dict.fromkeys(
        ("tinyformer.data.TextFiles", "tinyformer.data.SquadFiles", "tinyformer.data.LocalOrHub"), _require_files
    ),
}
"""The function that checks the arguments of a class, by the dotted name of the class."""
