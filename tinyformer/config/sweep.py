"""Configs composed in Python as Hydra composes them from a command line, without running anything."""

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, open_dict

from tinyformer.config.admission import inherit_architecture
from tinyformer.config.invocation import Invocation, config_dir, register_resolvers
from tinyformer.config.keys import readable


def compose_run(config_name: str, overrides: Sequence[str] = ()) -> tuple[DictConfig, Invocation]:
    """The config of one run and its invocation: arguments of `train`.

    Args:
        config_name: the primary config, such as "train".
        overrides: arguments of the program, such as "attention=gqa".
    """
    register_resolvers(config_dir())
    overrides = readable(overrides)
    if config_name == "train":
        overrides = inherit_architecture(overrides)
    with hydra_parser(config_dir()):
        config = compose(config_name, list(overrides), return_hydra_config=True)
    choices = dict(config.hydra.runtime.choices)
    with open_dict(config):
        del config["hydra"]
    return config, Invocation(list(overrides), choices)


def compose_sweep(
    config_dir: Path, config_name: str, arguments: Sequence[str]
) -> list[tuple[tuple[str, ...], DictConfig]]:
    """Every combination of the alternatives on a command line; `attention=mha,gqa seed=1` has two.

    Args:
        config_dir: the folder of the config files.
        config_name: the primary config.
        arguments: overrides, each of which may list alternatives in Hydra's grammar (`1,2`, `range(1,4)`, `glob(*)`).

    Returns:
        The overrides of each combination and the config composed from them, including its `hydra` node.
    """
    register_resolvers(config_dir)
    with hydra_parser(config_dir) as parser:
        overrides = parser.parse_overrides(readable(arguments, is_sweep=True))
        combinations = list(itertools.product(*map(_alternatives, overrides)))
        return [(chosen, compose(config_name, list(chosen), return_hydra_config=True)) for chosen in combinations]


@contextlib.contextmanager
def hydra_parser(config_dir: Path) -> Iterator[OverridesParser]:
    """Initialise Hydra with a folder of config files, and yield its parser of overrides."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(config_dir), version_base=None):
        yield OverridesParser.create(GlobalHydra.instance().config_loader())


def _alternatives(override: Override) -> Iterator[str]:
    if override.is_sweep_override():
        yield from (f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator())
    else:
        yield str(override.input_line)
