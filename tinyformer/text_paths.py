"""The text files that a run reads, found by their names."""

import glob
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tinyformer.errors import ArgumentError

FORMATS = (".txt", ".csv", ".tsv", ".json", ".jsonl", ".parquet")
"""The formats of text files, by suffix."""

_NAMES = ", ".join(FORMATS)


def find_files(files: Sequence[str]) -> list[Path]:
    """The files that paths, glob patterns and folders match, without duplicates; those of a folder are sorted.

    Of a folder, hidden files and files in hidden folders, such as .ipynb_checkpoints, are not read; see `not_read`.

    Raises:
        ArgumentError: a name matches no file, or a file has an unknown format.
    """
    found: list[Path] = []
    for name in files:
        path = Path(name).expanduser()
        if path.is_dir():
            matches = [file for file, why_not in _in_folder(path) if why_not is None]
            reason = f"the folder contains no {_NAMES} file that is not hidden"
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


def not_read(files: Sequence[str]) -> dict[str, int]:
    """The number of files in the named folders that `find_files` leaves out, by what they are."""
    folders = [folder for name in files if (folder := Path(name).expanduser()).is_dir()]
    return dict(Counter(why_not for folder in folders for _, why_not in _in_folder(folder) if why_not))


def _in_folder(folder: Path) -> list[tuple[Path, str | None]]:
    """The files of a folder, sorted, each with the reason why it is not read; None if it is."""
    found: list[tuple[Path, str | None]] = []
    for file in sorted(file for file in folder.rglob("*") if file.is_file()):
        is_text = file.suffix.lower() in FORMATS
        if any(part.startswith(".") for part in file.relative_to(folder).parts):
            found += [(file, "hidden")] if is_text else []
        else:
            found.append((file, None if is_text else "of another format"))
    return found
