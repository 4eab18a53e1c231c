"""The text files that a run reads, found by their names."""

import difflib
import glob
import os
from collections.abc import Sequence
from pathlib import Path

from tinyformer.errors import ArgumentError

FORMATS = (".txt", ".csv", ".tsv", ".json", ".jsonl", ".parquet")
"""The formats of text files, by suffix."""

_NAMES = ", ".join(FORMATS)


def find_files(files: Sequence[str]) -> list[Path]:
    """The files that paths, glob patterns and folders match, without duplicates; those of a folder are sorted.

    Of a folder, hidden files and files in hidden folders, such as .ipynb_checkpoints, are not read; see `hidden_files`.
    A name that matches no file, and a file of an unknown format, are refused.
    """
    found: list[Path] = []
    for name in files:
        path = Path(name).expanduser()
        if os.path.isdir(path):  # unlike `Path`, it takes a name that is too long for one that does not exist
            matches = _in_folder(path, hidden=False)
            reason = f"the folder contains no {_NAMES} file that is not hidden"
        elif os.path.isfile(path):
            matches = [path]
        else:
            matches = sorted(Path(match) for match in glob.glob(str(path), recursive=True) if Path(match).is_file())
            folder = next(parent for parent in path.parents if os.path.isdir(parent))
            names = [file.name for file in folder.iterdir() if file.suffix.lower() in FORMATS]
            similar = difflib.get_close_matches(path.name, names, n=3, cutoff=0.0)
            reason = f"the file does not exist; {folder.resolve()} has {', '.join(similar) or f'no {_NAMES} file'}"
        if not matches:
            raise ArgumentError("files", name, reason)
        found += matches
    for file in found:
        if file.suffix.lower() not in FORMATS:
            raise ArgumentError("files", str(file), f"the format '{file.suffix}' is not supported; {_NAMES} are")
    return list(dict.fromkeys(found))


def hidden_files(files: Sequence[str]) -> list[Path]:
    """The text files in folders among `files` that `find_files` leaves out."""
    return [file for name in files for file in _in_folder(Path(name).expanduser(), hidden=True)]


def _in_folder(folder: Path, hidden: bool) -> list[Path]:
    """The text files of a folder that are hidden or in a hidden folder, or those that are not, sorted."""
    found = (file for file in folder.rglob("*") if file.suffix.lower() in FORMATS and file.is_file())
    return sorted(file for file in found if hidden == any(n.startswith(".") for n in file.relative_to(folder).parts))
