"""Archives of `torch.save` from strangers: one that could fill the memory is refused before torch reads it."""

import codecs
import encodings
import pickletools
import re
import zipfile
from pathlib import Path

from tinyformer.errors import ArgumentError

CALLED = re.compile(
    r"collections (OrderedDict|Counter)|__builtin__ set|_codecs encode|torch\._utils _rebuild_(tensor_v[23]|parameter)"
    r"|torch\.storage UntypedStorage|torch (Size|\w+Storage|b?float\d*\w*|double|half|u?int\d+|bool|complex\d+|strided)"
)
"""The globals that the pickle of a run may name: functions, classes and dtypes."""

PLAIN_CODECS = {"iso8859-1", "utf-8", "ascii"}
"""Codecs whose output is about as long as the text. Pickles hold bytes as text, which is encoded with iso8859-1."""


def require_plain(path: Path) -> None:
    """Refuse an archive with a wrong checksum, or one that would be larger in memory than it is on disk.

    Torch writes checksums but does not check them, and compresses nothing.

    Raises:
        ArgumentError: its pickle names a global that no run writes.
        ValueError: it is damaged (also as `zipfile.BadZipFile`), is compressed, or has two lists of entries.
    """
    with path.open("rb") as file, zipfile.ZipFile(file) as archive:
        # Python takes the list of entries that precedes the end record, torch the one that the end record points to.
        end = zipfile._EndRecData(file)  # type: ignore[attr-defined]
        if end[zipfile._ECD_OFFSET] != archive.start_dir or archive.comment:  # type: ignore[attr-defined]
            raise ValueError("two lists of entries")
        file.seek(0)
        if file.read(4) != b"PK\x03\x04":  # else torch reads the file as a pickle, whatever archive it ends with
            raise ValueError("no archive of torch")
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
            raise ValueError("compressed")
        if (damaged := archive.testzip()) is not None:
            raise ValueError(damaged)
        for entry in archive.infolist():
            if entry.filename.lower().endswith("data.pkl") and (foreign := _foreign_call(archive.read(entry))):
                raise ArgumentError("path", str(path), f"is malformed: it contains {foreign}, which no run writes")


def _foreign_call(pickled: bytes) -> str | None:
    """The first thing that a pickle would call and that no run writes; None if there is none.

    `weights_only=True` runs no code, but it calls functions that can make large tensors out of small files.
    """
    encodes, texts = False, []
    for operation, argument, _ in pickletools.genops(pickled):
        if operation.name == "STACK_GLOBAL":
            return "a pickle of protocol 4"
        if operation.name == "GLOBAL":
            encodes |= argument == "_codecs encode"
            if not CALLED.fullmatch(str(argument)):
                return str(argument)
        elif isinstance(argument, str):
            texts.append(argument)
    codec = next(filter(_is_other_codec, texts), None) if encodes else None
    return None if codec is None else f"the codec {codec[:100]}"


def _is_other_codec(text: str) -> bool:
    name = encodings.normalize_encoding(text)  # as Python does first: hex-------- is hex, however long
    try:
        return len(name) < 30 and codecs.lookup(name).name not in PLAIN_CODECS
    except (LookupError, ValueError):
        return False
