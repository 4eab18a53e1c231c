"""Finding and reading local text files, every character as it is."""

import csv
import glob
import io
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq


def find_files(patterns: Sequence[str]) -> list[Path]:
    """The files that paths, patterns and folders name, each once; within a folder they are sorted.

    Raises:
        ValueError: If one of them names nothing that can be read, or a file of an unknown kind.
    """
    files: list[Path] = []
    for pattern in patterns:
        path = Path(pattern).expanduser()
        if path.is_dir():
            found = sorted(file for file in path.rglob("*") if file.suffix.lower() in READERS and file.is_file())
            problem = f"the folder holds no {_KINDS} file"
        elif path.is_file():
            found = [path]
        else:
            found = sorted(Path(match) for match in glob.glob(str(path), recursive=True) if Path(match).is_file())
            problem = "there is no such file"
        if not found:
            raise ValueError(f"data.files={pattern}: {problem}; name a text file, for instance data.files=book.txt.")
        files += found
    for file in files:
        if file.suffix.lower() not in READERS:
            raise ValueError(f"data.files={file}: unknown kind of file '{file.suffix}'; {_KINDS} can be read.")
    return list(dict.fromkeys(files))


def read_documents(file: Path, text_column: str) -> Iterator[str]:
    """The documents of one file.

    Raises:
        ValueError: If the file holds no text, is not UTF-8, or a row's text is missing or not a text.
    """
    if file.stat().st_size == 0:
        raise ValueError(f"data.files={file}: the file is empty; name one that holds text.")
    for text in READERS[file.suffix.lower()](file, text_column):
        if text is None:
            continue
        if not isinstance(text, str):
            raise ValueError(  # noqa: TRY004 -- what a user can get wrong is a ValueError
                f"data.text_column={text_column}: {file} holds {text!r} there, not text; name another column."
            )
        yield text


def _decode(file: Path) -> str:
    """A file's text, with its line ends as they are and without a byte-order mark."""
    try:
        return file.read_bytes().decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"data.files={file}: not UTF-8, at byte {error.start}; convert it, for instance with "
            f"`iconv -f latin1 -t utf-8 {file.name}`."
        ) from error


def _check_column(file: Path, column: str, columns: Sequence[str]) -> None:
    if column not in columns:
        raise ValueError(f"data.text_column={column}: {file} has no such column; it has {', '.join(columns)}.")


def _read_text(file: Path, _: str) -> Iterator[str]:
    yield _decode(file)


def _read_table(file: Path, column: str, delimiter: str) -> Iterator[Any]:
    # Not with pandas, which takes texts such as "None" and "NA" for missing values.
    csv.field_size_limit(2**31 - 1)
    # newline="" leaves line ends within quotes as they are; splitlines would also split at U+2028 and others.
    rows = csv.DictReader(io.StringIO(_decode(file), newline=""), delimiter=delimiter)
    _check_column(file, column, rows.fieldnames or [])
    yield from (row[column] for row in rows)


def _read_csv(file: Path, column: str) -> Iterator[Any]:
    return _read_table(file, column, ",")


def _read_tsv(file: Path, column: str) -> Iterator[Any]:
    return _read_table(file, column, "\t")


def _read_json(file: Path, column: str) -> Iterator[Any]:
    """A list of objects, or an object on each line."""
    text = _decode(file)
    try:
        # split, not splitlines: JSON allows U+2028 and others within a string
        lines = text.split("\n") if not text.lstrip().startswith("[") else []
        rows = [json.loads(line) for line in lines if line.strip()] if lines else json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"data.files={file}: no JSON ({error}); a list of objects, or an object on each line can be read."
        ) from error
    for row in rows:
        if not isinstance(row, dict):
            raise ValueError(  # noqa: TRY004
                f"data.files={file}: holds {row!r:.60}; each row must be an object with a key '{column}'."
            )
        _check_column(file, column, list(row))
        yield row[column]


def _read_parquet(file: Path, column: str) -> Iterator[Any]:
    try:
        table = pq.ParquetFile(file)
    except pa.ArrowInvalid as error:
        raise ValueError(f"data.files={file}: no parquet file ({error}); write it again.") from error
    _check_column(file, column, table.schema_arrow.names)
    for batch in table.iter_batches(columns=[column]):
        yield from batch.column(0).to_pylist()


READERS: dict[str, Callable[[Path, str], Iterator[Any]]] = {
    ".txt": _read_text,
    ".csv": _read_csv,
    ".tsv": _read_tsv,
    ".json": _read_json,
    ".jsonl": _read_json,
    ".parquet": _read_parquet,
}
_KINDS = ", ".join(READERS)
