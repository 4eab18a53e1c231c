"""Lists of choices for the layers, as in `attention=[mha,mla]`, which become values of the choice `by_layer`."""

from collections.abc import Sequence
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from omegaconf import DictConfig, OmegaConf

from tinyformer.config.conf import AXES, choices_of, format_value, hydra_value, key_of_word, parsed, read
from tinyformer.config.errors import ConfigError

NODES = {"attention": "attention", "position": "position.relative"}
"""The axes that take a list, each with the key of the pattern's node in the choice `by_layer`."""

ARCHITECTURE = AXES[: AXES.index("network")]
"""The axes that determine a network's function, which `init_from=` inherits."""


def with_patterns(words: Sequence[str]) -> list[str]:
    """Replace a list of choices, as in `attention=[mha,mla]`, by `attention=by_layer attention.pattern=[mha,mla]`.

    The words are in Hydra's grammar; a swept word stays unchanged until Hydra has made a job of each of its values. A
    `ConfigError` is raised for a list of an axis that is the same in all layers, and for an unknown kind.
    """
    return [part for word in words for part in _with_pattern(word)]


def _with_pattern(word: str) -> list[str]:
    axis, kinds = key_of_word(word), None
    if axis in ARCHITECTURE and "=[" in word:
        kinds = parsed(word).value()
    if not isinstance(kinds, list):
        return [word]
    if axis not in NODES:
        one = f"{axis}={format_value(kinds[0])} works" if kinds else "leave it out"
        raise ConfigError(f"{word}: only {' and '.join(NODES)} take a list of choices for the layers; {one}.")
    node = OmegaConf.create({axis: read("by_layer", axis)})
    known: Any = OmegaConf.select(node, f"{NODES[axis]}.kinds")
    for kind in kinds:
        if kind in choices_of(axis) and kind not in known:
            one = f"{axis}={kind} works"
            raise ConfigError(f"{word}: {kind} is the same for all layers, since the embeddings have it; {one}.")
    return [f"{axis}=by_layer", f"{NODES[axis]}.pattern={hydra_value(kinds)}"]


class ConfigLoader(ConfigLoaderImpl):
    """Hydra's loader of config files, which also replaces the lists in the jobs of a sweep by `with_patterns`."""

    def load_sweep_config(self, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        return super().load_sweep_config(master_config, with_patterns(sweep_overrides))
