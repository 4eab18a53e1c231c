"""`checkpoint=FILE`: the run's own config as the ground of an evaluation's."""

import difflib
from collections.abc import Sequence
from typing import Any

from hydra.core.config_store import ConfigStore

CHOSEN_ANEW = ("trainer", "logger", "callbacks", "generate", "resume", "init_from", "compile", "hydra")
"""What an evaluation does not take from the run: its own defaults stand instead."""


def compose_on_checkpoint(arguments: Sequence[str]) -> list[str]:
    """Offer a checkpoint's config to Hydra as `stored_run`, so that overrides act on it like on a file.

    Raises:
        ValueError: there is no checkpoint, or it cannot be read, or its config would call what is not ours.
    """
    given = [argument for argument in arguments if argument.startswith("checkpoint=")]
    if not given and not any(argument.startswith("-") for argument in arguments):
        keys = [argument.partition("=")[0] for argument in arguments]
        for misspelt in difflib.get_close_matches("checkpoint", keys, n=1):
            raise ValueError(f"{misspelt}: there is no such key. Did you mean checkpoint?")
        raise ValueError("checkpoint is needed, such as checkpoint=outputs/2026-01-31/12-00-00/checkpoints/last.ckpt.")
    config: dict[str, Any] = {"seed": 0, "deterministic": False}  # what --help shows the defaults with
    if given:
        # Torch takes seconds to import: not for --help.
        from tinyformer.checkpoint import CALLED, UntrustedTargetError, load_checkpoint, require_trusted
        from tinyformer.errors import ArgumentError, argument_path

        with argument_path(passed={"path": "checkpoint"}):
            checkpoint = load_checkpoint(given[-1].partition("=")[2].strip("'\""))
        overrides = [argument.partition("=") for argument in arguments]
        # A group that is chosen anew replaces the run's; merged into it, the run's own keys would be left over.
        chosen = {key for key, _, _ in overrides if isinstance(checkpoint.config.get(key), dict)}
        config = {
            key: value for key, value in checkpoint.config.items() if key not in CHOSEN_ANEW and key not in chosen
        }
        named = frozenset(value.strip("'\"") for key, _, value in overrides if key.endswith(CALLED))
        try:
            with argument_path(passed={"path": "checkpoint"}):
                require_trusted(config, checkpoint.path, named)
        except UntrustedTargetError as error:
            problem = f"would call {error.target!r}, which is not a class of tinyformer and could run any code"
            reason = f"{problem}; if you trust it, add {error.key}={error.target}"
            raise ArgumentError("checkpoint", str(checkpoint.path), reason) from error
    ConfigStore.instance().store(name="stored_run", node=config, package="_global_")
    return list(arguments)
