"""The `match` group: find a size with which the network has as many parameters or FLOPs as a reference network.

`tinyformer card` uses this module without a training library.
"""

import bisect
import copy
import functools
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from tinyformer.config.conf import format_value
from tinyformer.config.errors import ConfigError, cause_of
from tinyformer.config.launch import CommandLine, compose_run
from tinyformer.costs.network import count_costs
from tinyformer.errors import ArgumentError, require_at_least, require_choice

AXES = ("attention", "cross_attention", "position", "block", "feed_forward", "norm")
"""The axes whose defaults define the reference network."""

QUANTITIES = {"num_parameters": "parameters", "flops_per_token": "FLOPs per token"}
"""The quantities that can be matched: fields of `Costs`, each with its name in messages."""

LARGEST = 2**18  # the largest size that is tried, in units of `multiple_of`


@dataclass(frozen=True)
class Match:
    """The quantity to match, and the config key of the size that is solved for; see `conf/match/_shared.yaml`."""

    quantity: str
    by: str
    to: int | None = None
    multiple_of: int = 1

    def __post_init__(self) -> None:
        require_choice("quantity", self.quantity, QUANTITIES)
        require_at_least(1, {"to": 800_000, "multiple_of": 8}, to=self.to, multiple_of=self.multiple_of)


@dataclass(frozen=True)
class Matched:
    """A size that `match_size` has found."""

    quantity: str  # the matched quantity, as in `Match`
    by: str  # the config key of the size, as in `Match`
    size: int
    target: int  # the value of the quantity to match
    number: int  # the value of the quantity at this size

    def __str__(self) -> str:
        difference = self.number - self.target
        apart = f"{abs(difference):,} {'more' if difference > 0 else 'fewer'} than" if difference else "as many as"
        return (
            f"{self.by}={self.size}: {self.number:,} {QUANTITIES[self.quantity]}, {apart} the {self.target:,} to match"
        )


def match_size(config: DictConfig, invocation: CommandLine, vocab_size: int, program: str = "train") -> Matched:
    """Solve for the size that `match` names, and set it in a config; a `ConfigError` if no value reaches the target.

    The reference network has the overrides of the invocation, except overrides of `AXES`. `vocab_size` is used if
    `model.vocab_size` is null.
    """
    match: Match = instantiate(config.match)
    held = OmegaConf.select(config, match.by, default=...)
    if held is ... or isinstance(held, bool) or not isinstance(held, int | None):
        raise ConfigError(
            f"match.by={format_value(match.by)}: must be a config key whose value is a whole number; "
            "match.by=model.d_ff works."
        )

    sized = copy.deepcopy(config)

    @functools.cache
    def count(factor: int) -> int:
        size = factor * match.multiple_of
        OmegaConf.update(sized, match.by, size)
        try:
            return _count(copy.deepcopy(sized), match.quantity, vocab_size)
        except (ArgumentError, InstantiationException) as error:
            cause = cause_of(error)
            if not isinstance(cause, ArgumentError):
                raise
            raise ConfigError(f"match.by={match.by}: {size} does not work: {cause} Set match.multiple_of.") from error

    target = match.to
    if target is None:
        target = _count(_reference(config, invocation, match.by, program), match.quantity, vocab_size)
    factor = _solve(count, target)
    if factor is None:
        least, most = count(1), count(LARGEST)
        raise ConfigError(
            f"match.by={match.by}: no value of it gives {target:,} {QUANTITIES[match.quantity]}, only {least:,} to "
            f"{most:,}; match.to={least} works."
        )
    size = factor * match.multiple_of
    OmegaConf.update(config, match.by, size)
    return Matched(match.quantity, match.by, size, target, count(factor))


def _solve(count: Callable[[int], int], target: int) -> int | None:
    """The positive integer at which an increasing function is nearest to a target; None for a target out of range."""
    low = high = 1
    while count(high) < target:
        low, high = high, 8 * high
        if high > LARGEST or count(high) == count(low):
            return None
    if count(1) > target:
        return None
    above = low + bisect.bisect_left(range(low, high), target, key=count)
    return min((max(above - 1, 1), above), key=lambda number: abs(count(number) - target))


def _count(config: DictConfig, quantity: str, vocab_size: int) -> int:
    """The quantity of a config's network; a `model.vocab_size` of null is set to `vocab_size`."""
    if config.model.vocab_size is None:
        config.model.vocab_size = vocab_size
    with torch.device("meta"):
        network = instantiate(config.network, _convert_="all")
    return network.num_parameters() if quantity == "num_parameters" else getattr(count_costs(network), quantity)


def _reference(config: DictConfig, invocation: CommandLine, by: str, program: str) -> DictConfig:
    """The config of a run without its overrides of `AXES` and of the key `by`, whose value is solved for."""
    keys = ((word, word.lstrip("+~").partition("=")[0]) for word in invocation.overrides)
    kept = [word for word, key in keys if key != by and re.split(r"[./@]", key)[0] not in (*AXES, "match", "resume")]
    reference, _ = compose_run(program, kept)
    reference.task.labels = config.task.labels
    return reference
