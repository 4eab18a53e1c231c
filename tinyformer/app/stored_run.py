"""`checkpoint=FILE`: the config of the checkpoint's run, as the base of an evaluation's."""

import difflib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hydra.core.config_store import ConfigStore

from tinyformer.app.errors import ConfigError
from tinyformer.errors import ArgumentError, argument_path

if TYPE_CHECKING:
    from tinyformer.checkpoint import Checkpoint

NOT_INHERITED = ("trainer", "logger", "callbacks", "generate", "resume", "init_from", "compile", "hydra")
"""Groups and keys that an evaluation does not take from the run: its own defaults stand instead."""


def offer_stored_run(arguments: Sequence[str]) -> "Checkpoint | None":
    """Load the checkpoint of `checkpoint=`, and register its config with Hydra as `stored_run`.

    Args:
        arguments: the overrides, which then act on it as on a config file.

    Returns:
        The checkpoint; None with options such as `--help` and no checkpoint.

    Raises:
        ConfigError: no checkpoint is named.
        ArgumentError: it cannot be read, or its config would call what is not ours.
    """
    paths = [argument.partition("=")[2] for argument in arguments if argument.startswith("checkpoint=")]
    if not paths and not any(argument.startswith("-") for argument in arguments):
        keys = [argument.partition("=")[0] for argument in arguments]
        for misspelt in difflib.get_close_matches("checkpoint", keys, n=1):
            raise ConfigError(f"{misspelt}: there is no such key. Did you mean checkpoint?")
        raise ConfigError("checkpoint is needed, such as checkpoint=outputs/2026-01-31/12-00-00/checkpoints/last.ckpt.")
    checkpoint, config = None, {"seed": 0, "deterministic": False}  # for the defaults that --help shows
    if paths:
        # Torch takes seconds to import: not for --help.
        from tinyformer.checkpoint import load_checkpoint

        with argument_path(passed={"path": "checkpoint"}):
            checkpoint = load_checkpoint(_unquoted(paths[-1]))
            config = _inherited(checkpoint, arguments)
    ConfigStore.instance().store(name="stored_run", node=config, package="_global_")
    return checkpoint


def _inherited(checkpoint: "Checkpoint", arguments: Sequence[str]) -> dict[str, Any]:
    """The part of a checkpoint's config that an evaluation inherits; it names our classes and the user's only."""
    from tinyformer.app.scores import require_trusted_score
    from tinyformer.checkpoint import UntrustedTargetError, require_trusted

    overrides = [argument.partition("=") for argument in arguments]
    # A group that is chosen replaces the run's: merged with it, the run's own keys would be left over.
    chosen = {key for key, _, _ in overrides if isinstance(checkpoint.config.get(key), dict)}
    config = {key: value for key, value in checkpoint.config.items() if key not in (*NOT_INHERITED, *chosen)}
    allowed = frozenset(
        _unquoted(value) for key, _, value in overrides if key.endswith(("_target_", "attention.score"))
    )
    try:
        require_trusted(config, checkpoint.path, allowed)
        require_trusted_score(config, checkpoint.path, allowed)
    except UntrustedTargetError as error:
        problem = f"would call {error.target!r}, which is not a class of tinyformer and could run any code"
        reason = f"{problem}; if you trust it, add {error.location}={error.target}"
        raise ArgumentError("checkpoint", str(checkpoint.path), reason) from error
    return config


def _unquoted(text: str) -> str:
    return text.strip("'\"")
