"""The text files that a run reads, found by their names."""

import glob
from collections.abc import Sequence
from pathlib import Path

from tinyformer.errors import ArgumentError

FORMATS = (".txt", ".csv", ".tsv", ".json", ".jsonl", ".parquet")
"""The formats of text files, by suffix."""

_NAMES = ", ".join(FORMATS)


def find_files(files: Sequence[str]) -> list[Path]:
    """The files that paths, glob patterns and folders match, without duplicates; those of a folder are sorted.

    Raises:
        ArgumentError: a name matches no file, or a file has an unknown format.
    """
    found: list[Path] = []
    for name in files:
        path = Path(name).expanduser()
        if path.is_dir():
            matches = sorted(file for file in path.rglob("*") if file.suffix.lower() in FORMATS and file.is_file())
            reason = f"the folder contains no {_NAMES} file"
        elif path.is_file():
            matches = [path]
        else:
            matches = sorted(Path(match) for match in glob.glob(str(path), recursive=True) if Path(match).is_file())
            reason = "the file does not exist; name a text file, e.g. book.txt"
        if not matches:
            raise ArgumentError("files", name, reason)
        found += matches
    for file in found:
        if file.suffix.lower() not in FORMATS:
            raise ArgumentError("files", str(file), f"the format '{file.suffix}' is not supported; {_NAMES} are")
    return list(dict.fromkeys(found))
