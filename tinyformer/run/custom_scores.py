"""Attention scores of the user's own; a module that imports no training library, since the card needs none."""

import pydoc
from collections.abc import Mapping
from typing import Any

from tinyformer.config.admission import SCORE_KEYS, leaves
from tinyformer.errors import ArgumentError
from tinyformer.nn import SCORES, ScaledDotScore


def register_score(config: Mapping[str, Any]) -> None:
    """Import the user's classes that `attention.score` names, if any, and add them to `SCORES`.

    The config is unresolved, since the target of an interpolation was not admitted as the name of a class.
    """
    values = dict(leaves(config))
    for key in SCORE_KEYS:
        name = values.get(key)
        if not isinstance(name, str) or "." not in name or "${" in name:
            continue
        score: Any = pydoc.locate(name)
        if not (isinstance(score, type) and issubclass(score, ScaledDotScore)):
            known = ", ".join(SCORES)
            reason = f"must be one of {known}, or PACKAGE.CLASS of a subclass of tinyformer.nn.ScaledDotScore"
            raise ArgumentError(key, name, reason)
        SCORES[name] = score
