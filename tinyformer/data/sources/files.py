"""Local text files, read without changing a character."""

import contextlib
import csv
import io
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice, product
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq

from tinyformer.data.sources.text_paths import COMPRESSIONS, stem_and_format
from tinyformer.errors import ArgumentError

_ROWS = 1024  # rows of a parquet file that are decoded at a time

DELIMITERS = (",", ";", "\t", "|")
"""The delimiters of .csv and .tsv files that are detected."""


def _error(file: Path, reason: str, **works: Any) -> ArgumentError:
    return ArgumentError("files", str(file), reason, works)


@dataclass(frozen=True)
class Layout:
    """The columns to read from a file, and the dialect of .csv and .tsv files.

    If `quoted`, a field in quotation marks may contain the delimiter and line ends. Otherwise, quotation marks are
    plain characters, and each line is a row.
    """

    text_columns: Sequence[str]
    label_column: str | None = None
    columns: Sequence[str] | None = None  # of .csv and .tsv files without a header; None: their first line names them
    quoted: bool = True
    arguments: Sequence[str] = ()  # names of the arguments of `text_columns`, for errors; by default `text_column`
    optional: Sequence[str] = ()  # the columns that may be missing; their values are then null
    whole: bool = False  # whether to load all columns of a .parquet file, not only the needed columns

    @property
    def needed(self) -> list[str]:
        """The text columns, then the label column."""
        return [*self.text_columns, *([] if self.label_column is None else [self.label_column])]

    def require_columns(self, place: Path | str, existing: Sequence[str], from_header: bool = False) -> None:
        """Refuse a file or row that lacks a needed column or has it twice; `from_header`: a header gave the columns."""
        for column in self.needed:
            if existing.count(column) > 1:
                raise self.error(column, f"{place} has {existing.count(column)} columns of this name; rename one")
        missing = [column for column in self.needed if column not in (*existing, *self.optional)]
        if not missing:
            return
        reason = f"{place} has no such column; it has {', '.join(existing)[:500]}"
        if from_header and not {*self.needed} & {*existing}:
            reason += ", its first row; for a file without a header row, set `columns`"
        raise self.error(missing[0], reason)

    def error(self, column: str, reason: str) -> ArgumentError:
        """An error about a column and the argument that chose it."""
        arguments = dict(zip(self.text_columns, self.arguments, strict=False)) | {self.label_column: "label_column"}
        return ArgumentError(arguments.get(column, "text_column"), column, reason)


def read_rows(file: Path, layout: Layout) -> Iterator[list[Any]]:
    """The rows of one file, each as a list of its values in the needed columns."""
    needed = layout.needed
    return ([row.get(column) for column in needed] for row in read_whole_rows(file, layout))


def read_whole_rows(file: Path, layout: Layout) -> Iterator[dict[str, Any]]:
    """The rows of one file, each as a dictionary from column to value."""
    _require_no_pointer(file)
    yield from READERS[stem_and_format(file)[1]](file, layout)


def _require_no_pointer(file: Path) -> None:
    """Refuse a pointer of Git LFS: a short text that replaces a file until it is downloaded."""
    with file.open("rb") as opened:
        if opened.read(64).startswith(b"version https://git-lfs.github.com/spec/"):
            raise _error(file, "is a pointer of Git LFS, not the file itself; `git lfs pull` downloads the file")


def _decode(file: Path) -> str:
    """A file's text, with its line ends unchanged and without a byte-order mark."""
    with file.open("rb") as opened, pa.input_stream(opened, COMPRESSIONS.get(file.suffix.lower())) as stream:
        data = bytes(stream.read())
    if b"\0" in data[: 2**16]:  # valid UTF-8, but never part of a text
        raise _error(file, "contains NUL bytes: it is not text, or UTF-16, which `iconv -f UTF-16 -t utf-8` converts")
    try:
        return data.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        reason = f"is not UTF-8 at byte {error.start}; convert it: for text of Windows, `iconv -f cp1252 -t utf-8`"
        raise _error(file, reason) from error


def _read_text(file: Path, layout: Layout) -> Iterator[dict[str, Any]]:
    """The whole text of a file as one row with one column, which has the requested name."""
    if lacking := [column for column in layout.needed[1:] if column not in layout.optional]:
        raise layout.error(lacking[0], f"{file} has no columns; .csv, .tsv, .jsonl and .parquet files do")
    yield {layout.needed[0]: _decode(file)}


def _find_dialect(text: str, layout: Layout, usual: str) -> dict[str, Any]:
    """Find the first dialect that fits a table; the usual delimiter of the file's format is tried first.

    A dialect fits if the first row has all needed columns; without a header, if the first hundred rows have as many
    fields as there are columns. If no dialect fits, the usual delimiter is used. Spaces after delimiters are
    dropped only if a quotation mark follows a space, or if the header would otherwise lack a needed column.
    """
    # Without strict, a stray quotation mark at the beginning of a field would open a field that ends many lines later.
    common = {"quoting": csv.QUOTE_MINIMAL if layout.quoted else csv.QUOTE_NONE, "strict": True}
    names = {*layout.needed}
    for needed, delimiter in product((names, names - {*layout.optional}), dict.fromkeys((usual, *DELIMITERS))):
        found = []
        for skips in (False, True):
            dialect = common | {"delimiter": delimiter, "skipinitialspace": skips}
            with contextlib.suppress(csv.Error):
                lines = filter(None, csv.reader(io.StringIO(text, newline=""), **dialect))
                rows = list(islice(lines, 100))
                sizes = {*map(len, rows)}
                has = needed <= {*chain(*rows[:1])} if layout.columns is None else sizes == {len(layout.columns)}
                fields = chain.from_iterable(chain(rows, lines)) if has and layout.quoted and ' "' in text else ()
                unread = sum(re.match(' +"', field) is not None for field in fields)  # marks without a field
                found += [(unread, skips, dialect)] if has else []
        if found:
            return min(found)[-1]
    return common | {"delimiter": usual}


def _read_table(file: Path, layout: Layout, usual: str) -> Iterator[dict[str, Any]]:
    # pandas is not used, since it would parse texts such as "None" and "NA" as missing values.
    csv.field_size_limit(2**31 - 1)
    # newline="" leaves line ends within quotes as they are; splitlines would also split at U+2028 and others.
    text, end = io.StringIO(_decode(file), newline=""), 0
    lines = csv.reader(text, **_find_dialect(text.getvalue(), layout, usual))
    try:
        names = layout.columns or next(filter(None, lines), [])
        layout.require_columns(file, names, from_header=layout.columns is None)
        end = lines.line_num
        for line in lines:
            begin, end = end + 1, lines.line_num
            if layout.columns and begin == len(line) == 1 < len(names):
                reason = f"its first row is one field, {line[0]:.500}, but there are {len(names)} columns "
                raise _error(file, f"{reason}({', '.join(names)}); write one of , ; | or a tab between fields")
            if begin == 1 and line == layout.columns:
                reason = f"{file} has a header row of these names; leave out `columns`, to use this row as header"
                raise ArgumentError("columns", line, reason, {"columns": None})
            if len(line) > len(names):
                reason = f"line {begin} has {len(line)} fields, but there are {len(names)} columns ({', '.join(names)})"
                raise _error(file, f"{reason}; put texts that contain the delimiter in quotation marks")
            if line:
                yield dict(zip(names, line, strict=False))
    except csv.Error as error:
        reason = f"a quotation mark in the row that begins on line {end + 1} opens or closes no field ({error}), "
        raise _error(file, f"{reason}so that it may be a plain character", quoted=False) from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a dictionary of a JSON object; raise a ValueError for repeated keys, of which Python keeps the last."""
    if len(values := dict(pairs)) < len(pairs):
        raise ValueError(f"the keys {', '.join(key for key, _ in pairs)[:200]} are not all different")
    return values


_read_value = json.JSONDecoder(object_pairs_hook=_object).decode


def json_values(file: Path) -> list[Any]:
    """The values in a JSON file: the entries of one list, a single value, or one value on each line."""
    _require_no_pointer(file)
    text = _decode(file)
    try:
        value = _read_value(text)
    except ValueError as error:  # not only JSONDecodeError: a number may have too many digits
        if getattr(error, "msg", None) != "Extra data":  # the error for text after the first value
            raise _not_json(file, str(error)) from error
    else:
        return value if isinstance(value, list) else [value]
    values = []
    for number, line in enumerate(text.split("\n"), start=1):  # not splitlines: strings may hold U+2028 and others
        try:
            values += [_read_value(line)] if line.strip() else []
        except ValueError as error:
            raise _not_json(file, f"line {number}: {error}".replace(": line 1 column", ", column")) from error
    return values


def _not_json(file: Path, problem: str) -> ArgumentError:
    return _error(file, f"is not JSON ({problem}); must be a list of objects, or an object on each line")


def flatten(row: dict[str, Any], columns: Sequence[str]) -> dict[str, Any]:
    """Flatten the nested values of a row to paths such as `translation.en`, to the depth of the deepest column."""
    for _ in range(max(column.count(".") for column in columns)):
        nested = ((key, value) for key, value in row.items() if isinstance(value, dict))
        row = {f"{key}.{name}": value for key, inner in nested for name, value in inner.items()} | row
    return row


def _read_json(file: Path, layout: Layout) -> Iterator[dict[str, Any]]:
    """The rows of a list of objects, or of an object on each line."""
    for number, row in enumerate(json_values(file), start=1):
        if not isinstance(row, dict):
            raise _error(file, f"row {number} is {row!r:.60}; must be an object with a key '{layout.needed[0]}'")
        values = flatten(row, layout.needed)
        layout.require_columns(f"row {number} of {file}", list(values))
        yield values


def _read_parquet(file: Path, layout: Layout) -> Iterator[dict[str, Any]]:
    table = pq.ParquetFile(file)
    schema, needed = table.schema_arrow, layout.needed
    chosen = [field for field in schema if any(f"{column}.".startswith(f"{field.name}.") for column in needed)]
    features = datasets.Features.from_arrow_schema(pa.schema(chosen, schema.metadata)).flatten()
    layout.require_columns(file, [*schema.names, *(name for name in features if name not in schema.names)])
    labels = {name: feature for name, feature in features.items() if isinstance(feature, datasets.ClassLabel)}
    for batch in table.iter_batches(batch_size=_ROWS, columns=None if layout.whole else needed):
        for row in batch.to_pylist():
            values = flatten(row, needed)
            for name in labels.keys() & values.keys():
                values[name] = None if values[name] in (None, -1) else labels[name].int2str(values[name])
            yield values


READERS: dict[str, Callable[[Path, Layout], Iterator[dict[str, Any]]]] = {
    ".txt": _read_text,
    ".csv": partial(_read_table, usual=","),
    ".tsv": partial(_read_table, usual="\t"),
    ".json": _read_json,
    ".jsonl": _read_json,
    ".parquet": _read_parquet,
}
"""The function that reads each of `FORMATS`."""
