"""YAML from strangers: of bounded depth, and without aliases, with which a few lines can make a billion values."""

from typing import Any

import yaml

MAX_DEPTH = 100
"""Maximum number of levels of nesting."""

FAST_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The loader in C where there is one: a sweep has hundreds of files."""


def load_plain_yaml(text: str, loader: Any = FAST_LOADER) -> Any:
    """The value of a YAML text.

    Args:
        text: the text.
        loader: a safe loader of PyYAML; the one in C and the one in Python read some texts differently.

    Raises:
        ValueError: it is nested too deeply.
        yaml.YAMLError: it is not YAML, or has aliases.
    """
    depth = 0
    for event in yaml.parse(text, Loader=loader):  # the loader in C would crash at some depth
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise ValueError(f"more than {MAX_DEPTH} levels")
        if isinstance(event, yaml.AliasEvent):
            raise yaml.YAMLError("YAML aliases (& and *) are not read")
    return yaml.load(text, Loader=loader)
