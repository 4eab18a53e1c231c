"""The config keys that set the arguments of classes and functions, and values as they are typed on a command line."""

import contextlib
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

MAX_LENGTH = 120
"""Maximum number of characters of a value that an error shows."""


def key_of(written: Any, path: str | Sequence[str]) -> str:
    """The key under which the user sets a value: interpolations such as `${model.d_model}` are followed.

    Args:
        written: the config as plain containers, its interpolations unresolved.
        path: the path of the value from the root, as keys or joined by dots.

    Raises:
        KeyError: the config has no such node.
    """
    keys = path.split(".") if isinstance(path, str) else path
    node = written
    for index, key in enumerate(keys):
        if not isinstance(node, Mapping):
            raise KeyError(".".join(keys))
        node = node[key]
        if isinstance(node, str) and (reference := re.fullmatch(r"\$\{([\w.]+)\}", node)):
            return key_of(written, [*reference[1].split("."), *keys[index + 1 :]])
    return ".".join(keys)


def key_of_argument(written: Any, path: Sequence[str]) -> str:
    """The key that sets an argument; the argument's own name where the config has no key for it.

    An argument that the object's own node does not set was passed on by an enclosing object, as an encoder passes
    `num_layers` on to its blocks; the nearest enclosing node with that name sets it.

    Args:
        written: see `key_of`.
        path: the nodes that lead to the object, and the name of its argument.
    """
    *owner, name = path
    for depth in range(len(owner), min(len(owner), 1) - 1, -1):
        with contextlib.suppress(KeyError):
            return key_of(written, [*owner[:depth], name])
    return name


def format_value(value: Any, max_length: int | None = MAX_LENGTH) -> str:
    """A value as the command line takes it, such as `[16,16,null]`; a long one is cut."""
    text = _format(value)
    return text if max_length is None or len(text) <= max_length else f"{text[:max_length]}…"


def _format(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_format(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ",".join(map(_format, value)) + "]"
    if isinstance(value, str):
        return value if _is_plain(value) else quoted(value)
    return str(value) if isinstance(value, int | float | PurePath) else type(value).__name__


def quoted(text: str) -> str:
    """A text in the quotes of Hydra's grammar, where a backslash stands for itself, except before a quote."""
    escaped = re.sub(r"(\\*)('|\Z)", lambda found: 2 * found[1] + ("\\'" if found[2] else ""), text)
    return f"'{escaped}'"


def _is_plain(text: str) -> bool:
    """Whether Hydra reads a text as itself without quotes."""
    return bool(re.fullmatch(r"[\w./:@%+*?|$-]+( +[\w./:@%+*?|$-]+)*", text, re.ASCII)) and not re.fullmatch(
        r"(?i)null|true|false|[+-]?(\d[\d_]*\.?|(\d[\d_]*)?\.\d[\d_]*)(e[+-]?[\d_]+)?|[+-]?(inf|nan)", text
    )
