"""The paths of checkpoints as a user types them: a file, the folder of a run, or "last"."""

import os
from pathlib import Path


def find_checkpoint(path: str | Path) -> Path:
    """Return the newest checkpoint for "last", the last checkpoint for a run's folder, and any other path unchanged.

    A file or folder with the name "last" takes precedence over the newest checkpoint.
    """
    path = Path(path)
    if path == Path("last") and not path.exists() and (newest := newest_checkpoint()):
        print(f"The last checkpoint is {newest}.")
        return newest
    last = path / "checkpoints" / "last.ckpt"
    return last if os.path.isfile(last) else path  # `Path.is_file` raises an error for too long a name


def newest_checkpoint() -> Path | None:
    """The `outputs/*/*/checkpoints/last.ckpt` that was written last; None if there is none."""
    found = Path("outputs").glob("*/*/checkpoints/last.ckpt")
    return max(found, key=lambda file: file.stat().st_mtime_ns, default=None)
