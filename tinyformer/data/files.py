"""Finding and reading local text files, every character as it is."""

import csv
import glob
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

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


@dataclass(frozen=True)
class Layout:
    """Which columns of a file to read, and how the lines of a .csv or .tsv file make them.

    Args:
        wanted: The columns to read; the value is the config key that names it.
        names: All columns, where the file has no header; None: its first line names them.
        quoted: Whether quotation marks enclose fields, which then may hold the delimiter and line ends. If not,
            they are characters like any other, and a line is a row.
    """

    wanted: Mapping[str, str]
    names: Sequence[str] | None = None
    quoted: bool = True


def read_rows(file: Path, layout: Layout) -> Iterator[Sequence[Any]]:
    """The rows of one file: of each, what it has in the columns that are wanted.

    Raises:
        ValueError: If the file is empty, is not UTF-8, is not laid out like that, or lacks a column.
    """
    if file.stat().st_size == 0:
        raise ValueError(f"data.files={file}: the file is empty; name one that holds text.")
    yield from READERS[file.suffix.lower()](file, layout)


def _decode(file: Path) -> str:
    """A file's text, with its line ends as they are and without a byte-order mark."""
    try:
        return file.read_bytes().decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"data.files={file}: not UTF-8, at byte {error.start}; convert it, for instance with "
            f"`iconv -f latin1 -t utf-8 {file.name}`."
        ) from error


def _check_columns(place: Path | str, layout: Layout, columns: Sequence[str]) -> None:
    for column, key in layout.wanted.items():
        if column not in columns:
            raise ValueError(f"{key}={column}: {place} has no such column; it has {', '.join(columns)}.")


def _read_text(file: Path, layout: Layout) -> Iterator[Sequence[Any]]:
    """One row of one column, whatever the column's name."""
    for column, key in list(layout.wanted.items())[1:]:
        raise ValueError(f"{key}={column}: {file} has no columns; name a .csv, .tsv, .jsonl or .parquet file.")
    yield (_decode(file),)


def _read_table(file: Path, layout: Layout, delimiter: str) -> Iterator[Sequence[Any]]:
    # Not with pandas, which takes texts such as "None" and "NA" for missing values.
    csv.field_size_limit(2**31 - 1)
    quoting: Literal[0, 3] = csv.QUOTE_MINIMAL if layout.quoted else csv.QUOTE_NONE
    # newline="" leaves line ends within quotes as they are; splitlines would also split at U+2028 and others.
    # Not strict, the reader would take a lone quotation mark at the beginning of a field for the beginning of one
    # that ends many lines later.
    lines = csv.reader(io.StringIO(_decode(file), newline=""), delimiter=delimiter, quoting=quoting, strict=True)
    try:
        names = layout.names or next(lines, [])
        _check_columns(file, layout, names)
        wanted = [names.index(column) for column in layout.wanted]
        for number, line in enumerate(filter(None, lines), start=1):
            if len(line) > len(names):
                raise ValueError(
                    f"data.files={file}: row {number} has {len(line)} fields, and there are {len(names)} columns "
                    f"({', '.join(names)}); put texts that hold the delimiter in quotation marks."
                )
            yield [line[column] if column < len(line) else None for column in wanted]
    except csv.Error as error:
        raise ValueError(
            f"data.files={file}: a quotation mark near line {lines.line_num} opens or closes no field ({error}); "
            "data.quoted=false takes them for plain characters, and each line for a row."
        ) from error


def _read_csv(file: Path, layout: Layout) -> Iterator[Sequence[Any]]:
    return _read_table(file, layout, ",")


def _read_tsv(file: Path, layout: Layout) -> Iterator[Sequence[Any]]:
    return _read_table(file, layout, "\t")


def _read_json(file: Path, layout: Layout) -> Iterator[Sequence[Any]]:
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
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise ValueError(  # noqa: TRY004
                f"data.files={file}: holds {row!r:.60}; each row must be an object with a key "
                f"'{next(iter(layout.wanted))}'."
            )
        _check_columns(f"row {number} of {file}", layout, list(row))
        yield [row[column] for column in layout.wanted]


def _read_parquet(file: Path, layout: Layout) -> Iterator[Sequence[Any]]:
    try:
        table = pq.ParquetFile(file)
    except pa.ArrowInvalid as error:
        raise ValueError(f"data.files={file}: no parquet file ({error}); write it again.") from error
    _check_columns(file, layout, table.schema_arrow.names)
    for batch in table.iter_batches(columns=list(layout.wanted)):
        # By name: the batch has the columns in the order of the file.
        yield from zip(*(batch.column(column).to_pylist() for column in layout.wanted), strict=True)


READERS: dict[str, Callable[[Path, Layout], Iterator[Sequence[Any]]]] = {
    ".txt": _read_text,
    ".csv": _read_csv,
    ".tsv": _read_tsv,
    ".json": _read_json,
    ".jsonl": _read_json,
    ".parquet": _read_parquet,
}
_KINDS = ", ".join(READERS)
