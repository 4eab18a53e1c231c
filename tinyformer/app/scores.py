"""`attention.score=PACKAGE.CLASS`: a score function of the user's, known to attention layers by its dotted name."""

import pydoc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from tinyformer.checkpoint import UntrustedTargetError, is_our_class
from tinyformer.errors import ArgumentError
from tinyformer.nn import SCORES, ScaledDotScore


def register_score(config: DictConfig) -> None:
    """Import the class that the config names as its score function, if it names one, and add it to `SCORES`.

    Raises:
        ArgumentError: it is not a score function.
    """
    name = _class_name(OmegaConf.to_container(config, resolve=False))
    if name is None or name in SCORES:
        return
    found: Any = pydoc.locate(name)
    if not (isinstance(found, type) and issubclass(found, ScaledDotScore)):
        known = ", ".join(SCORES)
        reason = f"must be one of {known}, or PACKAGE.CLASS of a subclass of tinyformer.nn.ScaledDotScore"
        raise ArgumentError("attention.score", name, reason)
    SCORES[name] = found


def require_trusted_score(config: Any, path: Path, trusted: frozenset[str]) -> None:
    """Refuse a checkpoint's config whose score function `register_score` would import from another package.

    Args:
        config: of the checkpoint, as plain containers.
        path: the checkpoint.
        trusted: classes that the user has named.

    Raises:
        UntrustedTargetError: the score function is a class that is not trusted.
    """
    name = _class_name(config)
    if name is not None and name not in trusted and not is_our_class(name):
        raise UntrustedTargetError(path, "attention.score", name)


def _class_name(config: Any) -> str | None:
    """The literal text of `attention.score` if it has a dot; interpolations are not resolved."""
    attention = config.get("attention") if isinstance(config, Mapping) else None
    score = attention.get("score") if isinstance(attention, Mapping) else None
    return score if isinstance(score, str) and "." in score and "${" not in score else None
