"""Atomic writing of Lightning's checkpoints: whole or not at all, even if the process is killed."""

import errno
import os
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from tinyformer.checkpoint.file import LAST, PREVIOUS
from tinyformer.files import atomic_write


class WholeCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint to a temporary file beside it and renames that; the last `last.ckpt` becomes `previous.ckpt`.

    Lightning's own class holds a second copy in memory and writes through the system's temporary folder, from which it
    copies the file if that is another file system; a process that is killed meanwhile leaves a part of a checkpoint.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write a checkpoint, with torch's checksum of each of its parts."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path, path.with_name(PREVIOUS) if path.name == LAST else None) as temporary:
            try:
                torch.save(checkpoint, temporary)
            except RuntimeError as error:  # how torch reports a full disk
                if "PytorchStreamWriter" not in str(error) and "unexpected pos" not in str(error):
                    raise
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error
