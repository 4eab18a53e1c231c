"""YAML of strangers, whose size and depth are bounded: without aliases, of which a few lines make a billion values."""

from typing import Any

import yaml

MAX_DEPTH = 100
"""Levels of nesting."""

FAST_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""For hundreds of files, as of a sweep."""


def load_plain_yaml(text: str, loader: Any = FAST_LOADER) -> Any:
    """The value of a YAML text.

    Args:
        text: the text.
        loader: a safe loader of PyYAML; they differ about some texts.

    Raises:
        ValueError: it is nested too deeply.
        yaml.YAMLError: it is not YAML, or has aliases.
    """
    depth = 0
    for event in yaml.parse(text, Loader=loader):  # the fast loader would end the process at some depth
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise ValueError(f"more than {MAX_DEPTH} levels")
        if isinstance(event, yaml.AliasEvent):
            raise yaml.YAMLError("YAML aliases (& and *) are not read")
    return yaml.load(text, Loader=loader)
