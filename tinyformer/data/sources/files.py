"""Local text files, read without changing a character."""

import contextlib
import csv
import io
import json
import re
import shlex
import unicodedata
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tinyformer.errors import ArgumentError

_ROWS = 1024  # of a parquet file that are decoded at a time

_MANY_BYTES, _MANY_TIMES = 2**27, 100
"""Decoded text must not exceed both this size and this multiple of the size of its parquet file: a file of a megabyte
may hold one text a million times. Prose is compressed to a third."""

DELIMITERS = (",", ";", "\t", "|")
"""What may separate the fields of .csv and .tsv files."""

MARKS = {b"\xff\xfe\0\0": "UTF-32", b"\0\0\xfe\xff": "UTF-32", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
"""Byte-order marks, and the encoding by which `iconv` reads each."""

CONTROL = re.compile(rb"[\0-\x08\x0e-\x1a\x1c-\x1f]")
"""Bytes that hardly occur in text whose characters have one byte each, or that is UTF-8."""

SURROGATE = re.compile("[\ud800-\udfff]")
"""Half of a character, which JSON can spell and UTF-8 cannot."""


def _error(file: Path, reason: str, **works: Any) -> ArgumentError:
    return ArgumentError("files", str(file), reason, works)


@dataclass(frozen=True)
class Layout:
    """The columns to read from a file, and the dialect of .csv and .tsv files.

    If quotation marks enclose fields, these may contain the delimiter and line ends. If not, the marks are plain
    characters, and a line is a row.
    """

    text_columns: Sequence[str]
    label_column: str | None = None
    columns: Sequence[str] | None = None  # of .csv and .tsv files without a header; None: their first line names them
    quoted: bool = True
    arguments: Sequence[str] = ()  # that name each of `text_columns`, for errors; by default `text_column`

    @property
    def selected(self) -> list[str]:
        """The columns to read: those of the text, then that of the label."""
        return [*self.text_columns, *([] if self.label_column is None else [self.label_column])]

    def require_columns(self, place: Path | str, existing: Sequence[str], from_header: bool = False) -> None:
        """Refuse a file or row that lacks a column; its columns may come `from_header`, which may be a row of data."""
        missing = [column for column in self.selected if column not in existing]
        if not missing:
            return
        others = [column for column in existing if column not in self.selected]
        works: dict[str, Any] = {}
        is_suspect = from_header and missing == self.selected
        if len(self.text_columns) == 1 and len(missing) <= len(others) <= (2 if is_suspect else len(missing)):
            names = ["label_column" if column == self.label_column else "text_column" for column in missing]
            works = dict(zip(names, others, strict=False))
        which = ": its first row, which names the columns, is" if is_suspect else "; it has"
        reason = f"{place} has no such column{which} {', '.join(existing)[:500]}"
        if is_suspect:
            if len(existing) == 1:
                reason += "; if these are several fields, write one of , ; | or a tab between them"
            if len(existing) >= len(self.selected):
                reason += "; for a file without a header row"
                if not self.arguments and all(map(str.isidentifier, existing)):  # names, not texts
                    reason += ", set `columns`"
                else:
                    unread = [f"column_{number + 1}" for number in range(len(self.selected), len(existing))]
                    works = {"columns": [*self.selected, *unread]}
        raise self.error(missing[0], reason, works)

    def error(self, column: str, reason: str, works: Mapping[str, Any] | None = None) -> ArgumentError:
        """An error about the argument that names a column."""
        arguments = dict(zip(self.text_columns, self.arguments, strict=False)) | {self.label_column: "label_column"}
        return ArgumentError(arguments.get(column, "text_column"), column, reason, works)


def read_rows(file: Path, layout: Layout) -> Iterator[Sequence[Any]]:
    """The rows of one file, each as its values in the selected columns."""
    if file.stat().st_size == 0:
        raise _error(file, "the file is empty")
    yield from READERS[file.suffix.lower()](file, layout)


def _decode(file: Path) -> str:
    """A file's text, with its line ends unchanged and without a byte-order mark."""
    data = file.read_bytes()
    encoding = _wide_encoding(data)
    problem = f"{encoding}, not UTF-8; convert it"
    if encoding is None:
        try:
            return data.decode().removeprefix("\ufeff")
        except UnicodeDecodeError as error:
            # Windows has letters and quotation marks where Latin-1 has control characters.
            encoding = "cp1252" if re.search(rb"[\x80-\x9f]", data) else "latin1"
            problem = f"not UTF-8, at byte {error.start}; convert it, e.g."
    old, new = (shlex.quote(str(path)) for path in (file, file.with_suffix(f".utf8{file.suffix}")))
    raise _error(file, f"{problem} with `iconv -f {encoding} -t utf-8 {old} > {new}`")


def _wide_encoding(data: bytes) -> str | None:
    """UTF-16 or UTF-32, as `iconv` names it, if a file is in one of these, with or without a byte-order mark."""
    for mark, encoding in MARKS.items():
        if data.startswith(mark):
            return encoding
    sample, texts = data[: 2**16], {}
    if len(CONTROL.findall(sample)) > len(sample) / 50:
        for encoding in ("UTF-32LE", "UTF-32BE", "UTF-16LE", "UTF-16BE"):
            with contextlib.suppress(UnicodeDecodeError):
                text = getincrementaldecoder(encoding)().decode(sample)
                if all(c.isspace() or unicodedata.category(c) not in ("Cc", "Cn", "Co") for c in text):
                    texts[encoding] = text
    # With its bytes swapped, the characters of a text are spread over many more blocks of 256.
    return min(texts, key=lambda encoding: len({ord(c) >> 8 for c in texts[encoding]}), default=None)


def _read_text(file: Path, layout: Layout) -> Iterator[Sequence[Any]]:
    """One row with one column, whatever the column's name."""
    for column in layout.selected[1:]:
        raise layout.error(column, f"{file} has no columns; .csv, .tsv, .jsonl and .parquet files do")
    yield (_decode(file),)


def _find_delimiter(text: str, layout: Layout, usual: str, **dialect: Any) -> str:
    """The first delimiter by which a table has its columns, beginning with the usual one of its format.

    The columns to read are then among those of the first row; without a header, the first hundred rows have as many
    fields as there are columns. If none does: the first that gives all these rows equally many fields, for the error.
    """
    plausible = []
    for delimiter in dict.fromkeys((usual, *DELIMITERS)):
        try:
            lines = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, **dialect)
            rows = list(islice(filter(None, lines), 100))
        except csv.Error:
            continue
        sizes = {*map(len, rows)}
        if {*layout.selected} <= {*chain(*rows[:1])} if layout.columns is None else sizes == {len(layout.columns)}:
            return delimiter
        plausible += [delimiter] if len(sizes) == 1 and sizes != {1} else []
    return next(iter(plausible), usual)


def _read_table(file: Path, layout: Layout, usual: str) -> Iterator[Sequence[Any]]:
    # Not with pandas, which takes texts such as "None" and "NA" for missing values.
    csv.field_size_limit(2**31 - 1)
    # newline="" leaves line ends within quotes as they are; splitlines would also split at U+2028 and others.
    # Without strict, a stray quotation mark at the beginning of a field would open a field that ends many lines later.
    text, quoting = _decode(file), csv.QUOTE_MINIMAL if layout.quoted else csv.QUOTE_NONE
    dialect: dict[str, Any] = {"quoting": quoting, "strict": True}
    delimiter = _find_delimiter(text, layout, usual, **dialect)
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, **dialect)
    try:
        names = layout.columns or next(lines, [])
        layout.require_columns(file, names, from_header=layout.columns is None)
        selected = [names.index(column) for column in layout.selected]
        for number, line in enumerate(filter(None, lines), start=1):
            if layout.columns and number == len(line) == 1 < len(names):
                reason = f"its first row is one field, {line[0]:.500}, but there are {len(names)} columns "
                raise _error(file, f"{reason}({', '.join(names)}); write one of , ; | or a tab between fields")
            if len(line) > len(names):
                raise _error(
                    file,
                    f"row {number} has {len(line)} fields, but there are {len(names)} columns ({', '.join(names)}); "
                    "put texts that contain the delimiter in quotation marks",
                )
            yield [line[column] if column < len(line) else None for column in selected]
    except csv.Error as error:
        raise _error(
            file,
            f"a quotation mark near line {lines.line_num} opens or closes no field ({error}); to read quotation marks "
            "as plain characters",
            quoted=False,
        ) from error


def parse_json(file: Path) -> Any:
    """The one value of a JSON file."""
    return _parse(file, _decode(file))


def _parse(file: Path, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # a number of thousands of digits is no JSONDecodeError
        raise _error(file, f"not JSON ({error}); must be a list of objects, or an object on each line") from error


def _read_json(file: Path, layout: Layout) -> Iterator[Sequence[Any]]:
    """The rows of a list of objects, or of an object on each line."""
    text = _decode(file)
    # split, not splitlines: JSON allows U+2028 and others within a string
    lines = text.split("\n") if not text.lstrip().startswith("[") else []
    rows = [_parse(file, line) for line in lines if line.strip()] if lines else _parse(file, text)
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise _error(file, f"row {number} is {row!r:.60}; must be an object with a key '{layout.selected[0]}'")
        layout.require_columns(f"row {number} of {file}", list(row))
        for column in layout.selected:
            if isinstance(row[column], str) and SURROGATE.search(row[column]):
                raise layout.error(column, f"row {number} of {file} holds half of a surrogate pair, which is no text")
        yield [row[column] for column in layout.selected]


def _read_parquet(file: Path, layout: Layout) -> Iterator[Sequence[Any]]:
    try:
        table = pq.ParquetFile(file)
        layout.require_columns(file, table.schema_arrow.names)
        size, read = file.stat().st_size, 0
        for batch in table.iter_batches(batch_size=_ROWS, columns=layout.selected):
            read += sum(map(_decoded_bytes, batch.columns))
            if read > max(_MANY_BYTES, _MANY_TIMES * size):
                raise _error(file, f"its {size:,} bytes contain more than {_MANY_TIMES} times as much text")
            # By name: the batch has the columns in the order of the file.
            yield from zip(*(batch.column(column).to_pylist() for column in layout.selected), strict=True)
    except (ArgumentError, MemoryError):
        raise
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        raise _error(file, f"cannot be read as parquet ({error})") from error


def _decoded_bytes(column: pa.Array) -> int:
    """The size of the values of a column, of which one that refers to a dictionary holds each only once."""
    if not pa.types.is_dictionary(column.type):
        return column.nbytes
    return pc.sum(pc.binary_length(column.dictionary).take(column.indices)).as_py() or 0


READERS: dict[str, Callable[[Path, Layout], Iterator[Sequence[Any]]]] = {
    ".txt": _read_text,
    ".csv": partial(_read_table, usual=","),
    ".tsv": partial(_read_table, usual="\t"),
    ".json": _read_json,
    ".jsonl": _read_json,
    ".parquet": _read_parquet,
}
"""The function that reads each of `FORMATS`."""
