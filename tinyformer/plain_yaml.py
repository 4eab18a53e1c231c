"""YAML of strangers: read without aliases, of which a few lines make a billion values, and without depth."""

from typing import Any

import yaml

MAX_DEPTH = 100
"""Levels of nesting."""

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # a sweep has hundreds of files


def load_plain_yaml(text: str) -> Any:
    """The value of a YAML text.

    Raises:
        ValueError: it is nested too deeply.
        yaml.YAMLError: it is not YAML, or has aliases.
    """
    depth = 0
    for event in yaml.parse(text, Loader=_LOADER):  # the fast loader would end the process at some depth
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise ValueError(f"more than {MAX_DEPTH} levels")
        if isinstance(event, yaml.AliasEvent):
            raise yaml.YAMLError("aliases, of which a few lines make a billion values")
    return yaml.load(text, Loader=_LOADER)
