"""`attention.score=PACKAGE.CLASS`: a score function of the user's, known to attention layers by its dotted name."""

import pydoc
from collections.abc import Mapping
from typing import Any

from tinyformer.errors import ArgumentError
from tinyformer.nn import SCORES, ScaledDotScore


def register_score(config: Mapping[str, Any]) -> None:
    """Import the class that the config names as its score function, if it names one, and add it to `SCORES`.

    Args:
        config: the config as it was composed, since what an interpolation refers to was not checked as a name.

    Raises:
        ArgumentError: it is not a score function.
    """
    name = _class_name(config)
    if name is None or name in SCORES:
        return
    found: Any = pydoc.locate(name)
    if not (isinstance(found, type) and issubclass(found, ScaledDotScore)):
        known = ", ".join(SCORES)
        reason = f"must be one of {known}, or PACKAGE.CLASS of a subclass of tinyformer.nn.ScaledDotScore"
        raise ArgumentError("attention.score", name, reason)
    SCORES[name] = found


def _class_name(config: Any) -> str | None:
    """The literal text of `attention.score` if it has a dot; interpolations are not resolved."""
    attention = config.get("attention") if isinstance(config, Mapping) else None
    score = attention.get("score") if isinstance(attention, Mapping) else None
    return score if isinstance(score, str) and "." in score and "${" not in score else None
