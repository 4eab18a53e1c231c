"""Comparison of the networks that two configs describe."""

import inspect
import pydoc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Difference:
    """A value in which two configs differ."""

    path: str  # of the node, dotted
    name: str  # of the value in the node
    value: Any  # in the first config
    other: Any  # in the second config


def find_differences(node: dict[str, Any], other: dict[str, Any], path: str = "") -> Iterator[Difference]:
    """The differences between two resolved nodes at a dotted path; arguments that are not given have their defaults.

    The other node is trusted; targets of the first one are imported only if the other has the same ones.
    """
    if node.get("_target_") != other.get("_target_"):
        yield Difference(path, "_target_", node.get("_target_"), other.get("_target_"))
        return
    node, other = _with_defaults(node), _with_defaults(other)
    for name in sorted(node.keys() | other.keys()):
        value, other_value = node.get(name), other.get(name)
        if isinstance(value, dict) and isinstance(other_value, dict):
            yield from find_differences(value, other_value, f"{path}.{name}" if path else name)
        elif value != other_value:
            yield Difference(path, name, value, other_value)


def _with_defaults(node: dict[str, Any]) -> dict[str, Any]:
    """A node with all arguments of its class, so that an explicit default does not count as a difference."""
    target = pydoc.locate(node["_target_"]) if "_target_" in node else None
    if not inspect.isclass(target):
        return node
    defaults = {
        name: parameter.default
        for kind in reversed(target.__mro__[:-1])  # all but `object`
        if "__init__" in kind.__dict__
        for name, parameter in inspect.signature(kind).parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }
    # Configs hold lists, not tuples.
    full: dict[str, Any] = {
        name: list(value) if isinstance(value, tuple) else value for name, value in (defaults | node).items()
    }
    if full.get("head_dim", 0) is None and full.get("num_heads") and full.get("d_model"):
        full["head_dim"] = full["d_model"] // full["num_heads"]
    if full.get("v_head_dim", 0) is None:
        full["v_head_dim"] = full["head_dim"]
    return full
