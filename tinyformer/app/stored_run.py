"""`checkpoint=FILE`: the config of the checkpoint's run, on which that of an evaluation is composed."""

import difflib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hydra.core.config_store import ConfigStore

from tinyformer.app.errors import ConfigError
from tinyformer.app.keys import format_value, text_of
from tinyformer.errors import ArgumentError, argument_path

if TYPE_CHECKING:
    from tinyformer.checkpoint import Checkpoint


def offer_stored_run(arguments: Sequence[str], trusted: Sequence[str] = ()) -> "Checkpoint | None":
    """Load the checkpoint of `checkpoint=`, and register its config with Hydra as `stored_run`.

    Args:
        arguments: the overrides, which then act on it as on a config file.
        trusted: classes that the checkpoint may use beside those of this package and of the overrides.

    Returns:
        The checkpoint; None with options such as `--help` and no checkpoint.

    Raises:
        ConfigError: no checkpoint is named.
        ArgumentError: it cannot be read, or its config is not admitted; see `admit_config`.
    """
    paths = [text_of(argument) for argument in arguments if argument.startswith("checkpoint=")]
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
            checkpoint = load_checkpoint(paths[-1])
            config = _inherited(checkpoint, arguments, trusted)
    ConfigStore.instance().store(name="stored_run", node=config, package="_global_")
    return checkpoint


def _inherited(checkpoint: "Checkpoint", arguments: Sequence[str], trusted: Sequence[str]) -> dict[str, Any]:
    """The config of a checkpoint's run without what the command line replaces.

    Raises:
        ArgumentError: see `admit_config`; or the run read a path that the command line does not repeat.
    """
    from tinyformer.app.stored_config import admit_config, recorded_sources, repeatable_classes

    given = {argument.partition("=")[0].lstrip("+"): text_of(argument) for argument in arguments}
    with repeatable_classes():
        config = admit_config(checkpoint, lambda key, name: given.get(key) == name or name in trusted)
    missing = {key: value for key, value in recorded_sources(checkpoint).items() if key not in given}
    if missing and "data" not in given:
        words = " ".join(f"{key}={format_value(value)}" for key, value in missing.items())
        reason = f"its run read {words}, and a checkpoint's paths are not followed; add {words}, or choose data="
        raise ArgumentError("path", str(checkpoint.path), reason)
    # A group that the command line chooses replaces the run's; merging would leave keys of the run's choice behind.
    return {key: value for key, value in config.items() if key not in given or not isinstance(value, dict)}
