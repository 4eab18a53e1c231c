"""Search for the text files that a user names by paths, patterns and folders."""

import glob
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from tinyformer.errors import ArgumentError

FORMATS = (".txt", ".csv", ".tsv", ".json", ".jsonl", ".parquet")
"""The formats of text files, by suffix."""

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
"""The compression of a file by its last suffix, which follows the suffix of the format."""

_NAMES = ", ".join((*FORMATS, *COMPRESSIONS))


def stem_and_format(file: Path) -> tuple[str, str]:
    """A file's name without suffixes, and its format's suffix in lower case: "rows" and ".jsonl" for rows.jsonl.gz."""
    plain = file.with_suffix("") if file.suffix.lower() in COMPRESSIONS else file
    return plain.stem, plain.suffix.lower()


def find_files(files: Sequence[str]) -> list[Path]:
    """The files that paths, glob patterns and folders match, without duplicates; the files of a folder are sorted.

    In a folder, hidden files, files in hidden folders such as .ipynb_checkpoints, and files of unknown formats are
    ignored; see `unread_files`. A name that matches no file is refused, and so is a named file of an unknown format.
    """
    found: list[Path] = []
    for name in files:
        path, matches = Path(name).expanduser(), _by_kind(name)[""]
        if not matches and os.path.isdir(path):
            raise ArgumentError("files", name, f"the folder contains no {_NAMES} file that is not hidden")
        if not matches:
            raise ArgumentError("files", name, "the file does not exist")
        found += matches
    for file in found:
        if stem_and_format(file)[1] not in FORMATS:
            raise ArgumentError("files", str(file), f"the format '{file.suffix}' is not supported; {_NAMES} are")
    return list(dict.fromkeys(found))


def unread_files(files: Sequence[str]) -> Counter[str]:
    """The number of files that `find_files` ignores, by reason: "hidden file", "other file" or "broken link"."""
    unread = ((file, kind) for name in files for kind, found in _by_kind(name).items() if kind for file in found)
    return Counter({(os.path.realpath(file.parent), file.name): kind for file, kind in unread}.values())


def folder_of(name: str) -> Path:
    """The absolute path of a folder; for a file or a pattern, of the innermost folder above it without a wildcard."""
    path = Path(os.path.abspath(Path(name).expanduser()))
    return path if os.path.isdir(path) else next(parent for parent in path.parents if not glob.has_magic(str(parent)))


def _by_kind(name: str) -> dict[str, list[Path]]:
    """The files that a path, a glob pattern or a folder matches, by the reason to ignore them; "" for files to load."""
    path, kinds = Path(name).expanduser(), defaultdict[str, list[Path]](list)
    if is_folder := os.path.isdir(path):  # `Path.is_dir` raises an error for a name that is too long
        matches = [*_walk(path)]
    else:
        found = [str(path)] if os.path.isfile(path) else glob.glob(str(path), recursive=True)
        matches = sorted(Path(match) for match in found if not os.path.isdir(match))
    for file in matches:
        kind = "other file" if is_folder and stem_and_format(file)[1] not in FORMATS else ""
        if is_folder and any(part.startswith(".") for part in file.relative_to(path).parts):
            kind = "hidden file"
        elif not os.path.isfile(file):
            kind = "broken link"
        kinds[kind].append(file)
    return kinds


def _walk(path: Path, above: Sequence[str] = ()) -> Iterator[Path]:
    """The files below a folder, sorted; links are followed, except links to a folder that contains them."""
    if not os.path.isdir(path):
        yield path
    elif (real := os.path.realpath(path)) not in above:
        for child in sorted(path.iterdir()):
            yield from _walk(child, (*above, real))
