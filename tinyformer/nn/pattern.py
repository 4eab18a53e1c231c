"""Kinds of attention and of positions that differ between layers, in a pattern that repeats over the layers."""

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from tinyformer.errors import ArgumentError, argument_path

T = TypeVar("T")


def of_layer(argument: str, pattern: Sequence[T], layer_index: int, works: Any) -> T:
    """The value of one layer, given a pattern that repeats over the layers.

    An empty pattern raises an `ArgumentError` with the name of the argument and a value that works.
    """
    if not pattern:
        raise ArgumentError(argument, pattern, "must have a value for at least one layer", {argument: works})
    return pattern[layer_index % len(pattern)]


def by_layer(pattern: Sequence[str], kinds: Mapping[str, Any], layer_index: int = 0, **given: Any) -> Any:
    """Make the attention or the relative position of one layer, of the kind `pattern[layer_index % len(pattern)]`.

    For example, SmolLM3 rotates queries and keys in three of four layers (after Yang et al. 2025, arXiv 2501.18795):

        kinds = {"rope": partial(RotaryPosition, 256), "nope": RelativePosition}
        position = partial(by_layer, ["rope", "rope", "rope", "nope"], kinds)

    Args:
        pattern: the kinds of the first layers, which repeat over the other layers.
        kinds: the factory of each kind.
        layer_index: index of the layer, from 0.
        given: further arguments, for kinds that accept them; the keywords of a kind's factory take precedence.
    """
    works = next(iter(kinds))
    kind = of_layer("pattern", pattern, layer_index, [works])
    if kind not in kinds:
        reason = f"must be a list of the kinds {', '.join(kinds)}"
        raise ArgumentError("pattern", pattern, reason, {"pattern": [works]})
    with argument_path("kinds", kind):
        return call_accepted(kinds[kind], **{"layer_index": layer_index, **given})


def call_accepted(factory: Callable[..., Any], **arguments: Any) -> Any:
    """Call a factory with the arguments that it accepts; its own keywords take precedence."""
    maker = factory if isinstance(factory, partial) else partial(factory)
    named, given = inspect.signature(maker.func).parameters, arguments | maker.keywords
    if not any(each.kind is each.VAR_KEYWORD for each in named.values()):
        for name in list(named)[len(maker.args) :]:
            if name not in given and named[name].default is inspect.Parameter.empty:
                reason = f"is required by {maker.func.__name__}; on a command line, +KEY=VALUE with this key sets it"
                raise ArgumentError(name, None, reason)
        given = {name: value for name, value in given.items() if name in named}
    bare: Any = copy.copy(maker)  # of Hydra's class of partials, which checks what it calls
    bare.__setstate__((maker.func, maker.args, {}, vars(maker)))
    return bare(**given)
