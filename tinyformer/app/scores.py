"""`attention.score=PACKAGE.CLASS`: a user's score function, registered for attention layers under its dotted name."""

import pydoc
from collections.abc import Mapping
from typing import Any

from tinyformer.app.plain_values import SCORE_KEYS
from tinyformer.errors import ArgumentError
from tinyformer.nn import SCORES, ScaledDotScore


def register_score(config: Mapping[str, Any]) -> None:
    """Import the classes that the config names as score functions, if any, and add them to `SCORES`.

    Args:
        config: the unresolved config, since the target of an interpolation was not checked as the name of a class.

    Raises:
        ArgumentError: one of them is not a score function.
    """
    for key in SCORE_KEYS:
        name = _class_name(config, key.partition(".")[0])
        if name is None:
            continue
        found: Any = pydoc.locate(name)
        if not (isinstance(found, type) and issubclass(found, ScaledDotScore)):
            known = ", ".join(SCORES)
            reason = f"must be one of {known}, or PACKAGE.CLASS of a subclass of tinyformer.nn.ScaledDotScore"
            raise ArgumentError(key, name, reason)
        SCORES[name] = found


def _class_name(config: Any, axis: str) -> str | None:
    """The literal text of an axis's score if it has a dot; interpolations are not resolved."""
    attention = config.get(axis) if isinstance(config, Mapping) else None
    score = attention.get("score") if isinstance(attention, Mapping) else None
    return score if isinstance(score, str) and "." in score and "${" not in score else None
