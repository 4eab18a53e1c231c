"""The config and the network of a model family."""

from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from tinyformer.config.admission import Plain, composed
from tinyformer.config.errors import config_keys
from tinyformer.interop import FAMILIES
from tinyformer.interop.family import Depths, Family
from tinyformer.nn import Network

EMBEDDING, OUTPUT = "encoder.token_embedding.weight", "readout.proj.weight"
DECODER_EMBEDDING = "decoder.token_embedding.weight"

FAMILY_NAMES = f"{', '.join(family.name for family in FAMILIES[:-1])} and {FAMILIES[-1].name}"


def compose_family(family: Family, settings: Plain) -> Plain:
    """Our unresolved config of a family's model, as a checkpoint stores it.

    Args:
        family: the family, which determines the choice on each axis.
        settings: values by config key.
    """
    config = OmegaConf.create(composed(family.groups)[0])
    OmegaConf.set_struct(config, True)
    for key, value in settings.items():
        OmegaConf.update(config, key, value)
    plain: Any = OmegaConf.to_container(config, resolve=False)
    return plain


def network_class(family: Family) -> str:
    """The class of a family's network."""
    return str(composed(family.groups)[0]["network"]["_target_"])


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
