"""The paths of checkpoints as a user types them: a file, the folder of a run, or "last"."""

import os
from pathlib import Path


def find_checkpoint(path: str | Path) -> Path:
    """The checkpoint file of a path: of a run's folder, its last checkpoint; of "last", if no such file, the newest."""
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
