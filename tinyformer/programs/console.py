"""Tables that the programs print."""

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from tinyformer.config.errors import printable


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], num_left: int = 1, title: str = "", show_header: bool = True
) -> None:
    """Print rows of text below the names of their columns; the first `num_left` columns are aligned to the left."""
    table = Table(title=title, box=box.SIMPLE_HEAD, show_header=show_header)
    for index, column in enumerate(columns):
        table.add_column(_cell(column), justify="left" if index < num_left else "right")
    for row in rows:
        table.add_row(*map(_cell, row))
    # As wide as the table: a terminal may wrap lines, but no digit is cut off. Brackets in overrides are not markup.
    Console(width=10_000, markup=False, highlight=False).print(table)


def _cell(text: str) -> str:
    return "\n".join(map(printable, text.split("\n")))
