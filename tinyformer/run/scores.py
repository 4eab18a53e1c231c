"""`attention.score=PACKAGE.CLASS`: a user's score function, registered for attention layers under its dotted name."""

import pydoc
from collections.abc import Mapping
from typing import Any

from tinyformer.config.admission import SCORE_KEYS, leaves
from tinyformer.errors import ArgumentError
from tinyformer.nn import SCORES, ScaledDotScore


def register_score(config: Mapping[str, Any]) -> None:
    """Import the classes that the config names as score functions, if any, and add them to `SCORES`.

    Args:
        config: the unresolved config, since the target of an interpolation was not checked as the name of a class.

    Raises:
        ArgumentError: one of them is not a score function.
    """
    values = dict(leaves(config))
    for key in SCORE_KEYS:
        name = values.get(key)
        if not isinstance(name, str) or "." not in name or "${" in name:
            continue
        found: Any = pydoc.locate(name)
        if not (isinstance(found, type) and issubclass(found, ScaledDotScore)):
            known = ", ".join(SCORES)
            reason = f"must be one of {known}, or PACKAGE.CLASS of a subclass of tinyformer.nn.ScaledDotScore"
            raise ArgumentError(key, name, reason)
        SCORES[name] = found
