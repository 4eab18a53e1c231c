"""The format of a checkpoint: a safetensors file whose header holds, as JSON, all that is not a tensor.

The JSON is Lightning's checkpoint. In place of a tensor, it holds the tensor's name in the file and a checksum. A value
of a type that JSON lacks becomes an object with one key, such as `{"$tuple": [1, 2]}`. Loading runs no code.
"""

import base64
import errno
import json
import os
import re
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tinyformer.files import atomic_write

KEY, FORMAT = "tinyformer", 2
"""The key of tinyformer's entries in Lightning's checkpoint, and of the JSON in the header; the format's version."""

STATE_DICT = "state_dict"
"""The key of the weights, which keep their names in the file; other tensors are named by the keys that lead to them."""


def write_raw(path: Path, raw: Mapping[str, Any], previous: Path | None = None) -> None:
    """Atomically write a checkpoint that `read_raw` can load, see `atomic_write`; make its folder if needed.

    Raises:
        TypeError: a value, such as the state of a user-defined callback, is neither a plain value nor a tensor.
    """
    tensors, header = encode(raw)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path, previous) as temporary:
        temporary.touch()
        mode = temporary.stat().st_mode  # set by the umask; `save_file` would let only the owner read the file
        try:
            save_file(tensors, temporary, header)
            temporary.chmod(mode)
        except SafetensorError as error:
            code = re.search(r"os error (\d+)", str(error))  # such as that of a full disk
            number = int(code[1]) if code else errno.EIO
            raise OSError(number, os.strerror(number), str(path)) from error


def encode(raw: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a checkpoint by name, and the header of its file."""
    writer = _Writer()
    header = {KEY: json.dumps(writer.plain(raw, ()))}
    return writer.tensors, header


class _Writer:
    """Turns a checkpoint into JSON, and collects its tensors by name; a tensor that occurs twice is stored once."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.known: dict[Any, dict[str, Any]] = {}  # the JSON of each tensor, by its memory location

    def plain(self, value: Any, path: tuple[Any, ...]) -> Any:
        """Convert a value to JSON; `path` has the keys that lead to the value."""
        if isinstance(value, Tensor):
            return self._tensor(value.detach(), path)
        if isinstance(value, Mapping):
            parts = {key: self.plain(part, (*path, key)) for key, part in value.items()}
            is_object = all(isinstance(key, str) and not key.startswith("$") for key in parts)
            return parts if is_object else {"$dict": [[self.plain(key, path), part] for key, part in parts.items()]}
        if isinstance(value, list | tuple | set | frozenset):
            items = [self.plain(part, (*path, index)) for index, part in enumerate(value)]
            return items if isinstance(value, list) else {"$tuple" if isinstance(value, tuple) else "$set": items}
        if isinstance(value, bytes):
            return {"$bytes": base64.b64encode(value).decode()}
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise TypeError(f"{'.'.join(map(str, path))} is a {type(value).__name__}, which no checkpoint can hold")

    def _tensor(self, tensor: Tensor, path: tuple[Any, ...]) -> dict[str, Any]:
        place = (tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() == 0 or place not in self.known:
            name = ".".join(map(str, path[1:] if path[0] == STATE_DICT else path))
            stored = tensor.cpu().contiguous()
            is_part = stored.untyped_storage().nbytes() != stored.nbytes
            self.tensors[name] = stored.clone() if is_part else stored
            self.known[place] = {"$tensor": name, "checksum": _checksum(self.tensors[name])}
        return self.known[place]


KINDS: dict[str, Callable[[Any], Any]] = {
    "$dict": dict,
    "$tuple": tuple,
    "$set": set,
    "$bytes": base64.b64decode,
}
"""For each type that JSON lacks, the function that rebuilds a value."""


def read_raw(path: Path, prefixes: str | tuple[str, ...] = "") -> dict[str, Any]:
    """The contents of a checkpoint, on the CPU.

    Without prefixes, all tensors are loaded and compared with their checksums. With prefixes, tensors whose names begin
    with a prefix are memory-mapped from the file, without this comparison, and all other tensors are None.

    Raises:
        ValueError: the file is damaged, or is not a checkpoint of this format.
        SafetensorError: the file is not a safetensors file.
    """
    with safe_open(path, framework="pt") as file:
        found: dict[str, Tensor] = {}

        def tensor(name: str, checksum: int) -> Tensor | None:
            if name.startswith(prefixes) and name not in found:
                mapped = file.get_tensor(name)
                # A state of training is copied, since the order of sums in kernels depends on a tensor's alignment.
                found[name] = mapped if prefixes else mapped.clone()
                if not prefixes and _checksum(found[name]) != checksum:
                    raise ValueError(f"{name} is damaged")
            return found.get(name)

        def value(read: dict[str, Any]) -> Any:
            if "$tensor" in read:
                return tensor(read["$tensor"], read["checksum"])
            kind = next(iter(read), "")
            return KINDS[kind](read[kind]) if kind in KINDS else read

        header = file.metadata() or {}
        contents = json.loads(header.get(KEY, "null"), object_hook=value)
    return contents if isinstance(contents, dict) else {}


def is_archive(path: Path) -> bool:
    """Return True if a file is a zip archive, the format that `torch.save` writes."""
    return zipfile.is_zipfile(path)


def _checksum(tensor: Tensor) -> int:
    """The CRC-32 of the bytes of a contiguous tensor on the CPU."""
    return zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data)
