"""From a checkpoint of an earlier version to one in the current format."""

from pathlib import Path

from tinyformer.app.stored_config import admit_config, describe_again
from tinyformer.checkpoint import load_checkpoint, rewrite_checkpoint
from tinyformer.errors import ArgumentError


def upgrade(old: Path, new: Path) -> list[str]:
    """Write a checkpoint in the current format, with its weights and its training state.

    Args:
        old: the checkpoint.
        new: the file to write.

    Returns:
        A report of what was done, as lines to print.

    Raises:
        ArgumentError: the checkpoint cannot be read, its config is not admitted, or the new file exists.
    """
    if new.exists():
        raise ArgumentError("new", new, "exists already")
    if not new.absolute().parent.is_dir():
        raise ArgumentError("new", new, "is in a folder that does not exist")
    checkpoint = load_checkpoint(old)
    config = admit_config(checkpoint, lambda key, name: True)  # names of classes are kept, never instantiated
    rewrite_checkpoint(old, new, describe_again(config, checkpoint))
    return [f"{old}, written in the current format as {new}."]
