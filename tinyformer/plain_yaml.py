"""YAML from strangers, bounded in size and depth: without aliases, with which a few lines make a billion values."""

from typing import Any

import yaml

MAX_DEPTH = 100
"""Maximum levels of nesting."""

FAST_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""LibYAML's loader where there is one, since a sweep has hundreds of files."""


def load_plain_yaml(text: str, loader: Any = FAST_LOADER) -> Any:
    """The value of a YAML text.

    Args:
        text: the text.
        loader: a safe loader of PyYAML; the loaders read some texts differently.

    Raises:
        ValueError: it is nested too deeply.
        yaml.YAMLError: it is not YAML, or has aliases.
    """
    depth = 0
    for event in yaml.parse(text, Loader=loader):  # the fast loader crashes the process beyond some depth
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise ValueError(f"more than {MAX_DEPTH} levels")
        if isinstance(event, yaml.AliasEvent):
            raise yaml.YAMLError("YAML aliases (& and *) are not read")
    return yaml.load(text, Loader=loader)
