"""A small table of heads: a list of dictionaries that prints as a table."""

import html
import math
from collections.abc import Iterable, Mapping
from io import StringIO
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table as RichTable


class Table(list[dict[str, Any]]):
    """Rows as dictionaries with the same keys, which `pandas.DataFrame` accepts; None where a value is not defined.

    It prints as a table in a terminal and shows as one in a notebook.

    Args:
        rows: the rows.
        meanings: the meanings of columns, which a notebook shows as tooltips of their names.
    """

    def __init__(self, rows: Iterable[Mapping[str, Any]], meanings: Mapping[str, str] | None = None) -> None:
        super().__init__(map(dict, rows))
        self.meanings = dict(meanings or {})

    @property
    def columns(self) -> list[str]:
        """The names of the columns."""
        return list(self[0]) if self else []

    def __repr__(self) -> str:
        table = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
        for column in self.columns:
            table.add_column(column, justify="right", no_wrap=True)
        for row in self:
            table.add_row(*map(_shown, row.values()))
        lines = StringIO()
        # Not the width of the terminal: a folded table cannot be read. In a notebook, rich would display it itself.
        Console(file=lines, width=10_000, color_system=None, highlight=False, markup=False, force_jupyter=False).print(
            table
        )
        return "\n".join(stripped for line in lines.getvalue().splitlines() if (stripped := line.rstrip()))

    def _repr_html_(self) -> str:
        def cell(tag: str, text: str, title: str = "") -> str:
            hint = f' title="{html.escape(title)}"' if title else ""
            return f'<{tag}{hint} style="text-align:right">{html.escape(text)}</{tag}>'

        head = "".join(cell("th", column, self.meanings.get(column, "")) for column in self.columns)
        rows = ("".join(cell("td", _shown(value)) for value in row.values()) for row in self)
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        return f'<div style="overflow-x:auto"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _shown(value: Any) -> str:
    """A value as shown in a cell: floats with three decimals, integers with thousands separators."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "–"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
