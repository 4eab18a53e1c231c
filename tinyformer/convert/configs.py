"""The config and the network of a model family."""

import functools
from pathlib import Path
from typing import Any, TypeAlias

import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from tinyformer.app.errors import config_keys
from tinyformer.app.sweep import compose_sweep
from tinyformer.interop import FAMILIES
from tinyformer.interop.family import Depths, Family
from tinyformer.nn import Network

Plain: TypeAlias = dict[str, Any]
"""A config as plain containers."""

EMBEDDING, OUTPUT = "encoder.token_embedding.weight", "readout.proj.weight"
DECODER_EMBEDDING = "decoder.token_embedding.weight"

FAMILY_NAMES = f"{', '.join(family.name for family in FAMILIES[:-1])} and {FAMILIES[-1].name}"


def compose_family(config_dir: Path, family: Family, settings: Plain) -> Plain:
    """Our unresolved config of a family's model, as a checkpoint stores it.

    Args:
        config_dir: the folder of the config files.
        family: the family, which determines the choice on each axis.
        settings: values by config key.
    """
    choices = tuple(f"{group}={choice}" for group, choice in family.groups.items())
    config = OmegaConf.create(_base_config(config_dir, choices))
    OmegaConf.set_struct(config, True)
    for key, value in settings.items():
        OmegaConf.update(config, key, value)
    plain: Any = OmegaConf.to_container(config, resolve=False)
    return plain


def network_class(config_dir: Path, family: Family) -> str:
    """The class of a family's network."""
    file = config_dir / "network" / f"{family.groups.get('network', 'transformer')}.yaml"
    node: Any = OmegaConf.load(file)
    return str(node["_target_"])


@functools.cache
def _base_config(config_dir: Path, overrides: tuple[str, ...]) -> Plain:
    (_, config), *_ = compose_sweep(config_dir, "train", overrides)
    plain: Any = OmegaConf.to_container(config, resolve=False)
    del plain["hydra"]
    return plain


def depths_of(model: Plain) -> Depths:
    """The number of layers of each stack, given the values of the `model` group."""
    depth, encoder = model["num_layers"], model.get("num_encoder_layers")
    return {"encoder": encoder if isinstance(encoder, int) else depth, "decoder": depth}


def meta_network(config: Plain) -> Network:
    """The network of a config on the meta device, which allocates no memory for weights.

    Raises:
        ConfigError: a class refuses its arguments.
    """
    created = OmegaConf.create(config)
    with torch.device("meta"), config_keys(created):
        return instantiate(created.network, _convert_="all")
