"""Several configs from one command line, as Hydra's `--multirun` makes them, without running anything."""

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig

from tinyformer.app.config import register_resolvers


def compose_sweep(
    config_dir: Path, config_name: str, arguments: Sequence[str]
) -> list[tuple[tuple[str, ...], DictConfig]]:
    """Every combination of the alternatives on a command line: `attention=mha,gqa seed=1` makes two.

    Args:
        config_dir: where the config files are.
        config_name: the primary one.
        arguments: overrides, any of them with alternatives in Hydra's grammar (`1,2`, `range(1,4)`, `glob(*)`).

    Returns:
        The overrides of each combination, and the config that they make, its `hydra` node included.
    """
    register_resolvers(config_dir)
    with _hydra(config_dir) as parser:
        combinations = list(itertools.product(*map(_alternatives, parser.parse_overrides(list(arguments)))))
        return [(chosen, compose(config_name, list(chosen), return_hydra_config=True)) for chosen in combinations]


def count_jobs(config_dir: Path, arguments: Sequence[str]) -> int:
    """How many jobs a command line asks Hydra's own sweeper for.

    Args:
        config_dir: where the config files are.
        arguments: overrides, as of `compose_sweep`.
    """
    with _hydra(config_dir) as parser:
        return math.prod(len(_alternatives(override)) for override in parser.parse_overrides(list(arguments)))


@contextlib.contextmanager
def _hydra(config_dir: Path) -> Iterator[OverridesParser]:
    """Hydra at a folder of config files, and its grammar."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(config_dir), version_base=None):
        yield OverridesParser.create(GlobalHydra.instance().config_loader())


def _alternatives(override: Override) -> list[str]:
    if not override.is_sweep_override():
        return [str(override.input_line)]
    return [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]
