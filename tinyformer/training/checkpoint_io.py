"""How Lightning writes checkpoints: whole or not at all, whenever the process is killed."""

import errno
import os
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from tinyformer.checkpoint import LAST, PREVIOUS
from tinyformer.files import atomic_write


class WholeCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint beside its place, flushes it and renames it; the `last.ckpt` before it is `previous.ckpt`.

    Lightning's own holds a second copy in memory and writes through the system's temporary folder, from which it copies
    where that is another file system: a process that is killed meanwhile leaves a part of a checkpoint.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write a checkpoint, with torch's checksum of each of its parts."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path, path.with_name(PREVIOUS) if path.name == LAST else None) as temporary:
            try:
                torch.save(checkpoint, temporary)
            except RuntimeError as error:  # torch tells of a full disk in words of its own
                if "PytorchStreamWriter" not in str(error) and "unexpected pos" not in str(error):
                    raise
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error
