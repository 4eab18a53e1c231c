"""The examination for the eye: a row for each attention and dtype, in it a letter for each mask."""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from tinyformer.doctor.cases import MASKS
from tinyformer.doctor.verdict import Cell

LETTERS = {
    "flash": "F",
    "efficient": "E",
    "cudnn": "C",
    "varlen": "V",
    "triton": "T",
    "fa3": "3",
    "fa4": "4",
    "math": "M",
}
MEANINGS = {
    "F": "flash",
    "E": "memory-efficient",
    "C": "cuDNN",
    "V": "flash, packed",
    "T": "Triton",
    "3": "FlashAttention 3",
    "4": "FlashAttention 4",
    "M": "matrix products",
}
WIDTH = 112
MEMORY_WIDTH = 6


def print_report(cells: Sequence[Cell], machine: dict[str, Any], seconds: float) -> None:
    """Print all of it to stdout."""
    console = Console(highlight=False)
    # A table whose columns are cut is of no use: wide terminals are taken as they are, narrow ones wrap.
    with_memory = bool(machine["full"])
    console.width = max(console.width, WIDTH + (4 * MEMORY_WIDTH if with_memory else 0))
    console.print(Group(_heading(machine), _table(cells, with_memory), *_legend(cells, with_memory), *_refusals(cells)))
    for cell in cells:
        if cell.failure:
            console.print(Text(f"✗ {cell}: {cell.failure}", "red"))
    console.print(_verdict(cells, seconds))


def _heading(machine: dict[str, Any]) -> Text:
    return Text(
        f"{machine['name']} ({machine['device']}), torch {machine['torch']}, Python {machine['python']}", "bold"
    )


def _table(cells: Sequence[Cell], with_memory: bool) -> Table:
    masks = [mask for mask in MASKS if any(cell.mask == mask for cell in cells)]
    backends = [name for name in _unique(cell.backend for cell in cells) if not _refuses_all(cells, name)]
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("attention", "dtype", *backends, "auto"):
        table.add_column(name, no_wrap=True)
    for name in ("×", "output", "gradient"):
        table.add_column(name, justify="right", no_wrap=True)
    for variant, dtype in _unique((cell.variant, cell.dtype) for cell in cells):
        row = [cell for cell in cells if (cell.variant, cell.dtype) == (variant, dtype)]
        entries = (_backend_entry(row, name, masks, with_memory) for name in backends)
        table.add_row(variant, dtype, *entries, *_row_summary(row))
    return table


def _backend_entry(row: Sequence[Cell], backend: str, masks: Sequence[str], with_memory: bool) -> Text:
    """Letters, the milliseconds that the median mask takes, and the MiB."""
    found = {cell.mask: cell for cell in row if cell.backend == backend}
    times = [cell.seconds for cell in found.values() if cell.seconds is not None]
    peaks = [cell.peak_memory / 2**20 for cell in found.values() if cell.peak_memory is not None]
    entry = Text.assemble(*(_letter(found.get(mask)) for mask in masks))
    entry.append(f" {1e3 * statistics.median(times):5.1f}" if times else "", "dim")
    return entry.append(f" {statistics.median(peaks):4.0f}M" if peaks and with_memory else "", "dim")


def _letter(cell: Cell | None) -> tuple[str, str]:
    if cell is None:
        return " ", ""
    if cell.failure is not None:
        return "✗", "bold red"
    if cell.kernel is None:
        return "·", "dim"
    letter = LETTERS[cell.kernel]
    return (letter if cell.has_backward else letter.lower()), ("bold green" if cell.auto else "")


def _row_summary(row: Sequence[Cell]) -> tuple[str, ...]:
    """Auto's choices, its worst slowdown, and the largest errors."""
    worst = (
        [cell.slowdown for cell in row if cell.slowdown is not None],
        [cell.output_error for cell in row if cell.output_error is not None],
        [cell.gradient_error for cell in row if cell.gradient_error is not None],
    )
    formats = ("{:.2f}", "{:.0e}", "{:.0e}")
    numbers = (form.format(max(values)) if values else "" for form, values in zip(formats, worst, strict=True))
    return ", ".join(_unique(cell.backend for cell in row if cell.auto)), *numbers


def _legend(cells: Sequence[Cell], with_memory: bool) -> list[RenderableType]:
    masks = [mask for mask in MASKS if any(cell.mask == mask for cell in cells)]
    letters = _unique(LETTERS[cell.kernel] for cell in cells if cell.kernel)
    kernels = ", ".join(f"{letter} {MEANINGS[letter]}" for letter in letters)
    memory = ", and the MiB that this holds at most" if with_memory else ""
    return [
        Text(),
        Text(
            f"A letter for each mask ({', '.join(masks)}): the kernel that ran, {kernels}; small: forward only; "
            "· refused; ✗ fails. Then the milliseconds that the heads take for the median mask, forward and "
            f"backward{memory}. "
            "×: auto's time over the fastest's, at most. output, gradient: the largest error of all backends and "
            "masks, max|a - b| / max|b| against eager in float64."
        ),
    ]


def _refusals(cells: Sequence[Cell]) -> list[RenderableType]:
    """Each reason once for a backend, and where it holds."""
    where: dict[tuple[str, str], list[str]] = defaultdict(list)
    for cell in cells:
        if cell.reason and cell.failure is None:
            # attention.backend=flash cannot compute …; attention.backend=auto or eager can. -> cannot compute …
            reason = cell.reason.removeprefix(f"attention.backend={cell.backend} ").partition(";")[0]
            where[cell.backend, reason].append(cell.variant)
    total, order = len(_unique(cell.variant for cell in cells)), _unique(cell.backend for cell in cells)
    lines = []
    for backend, reason in sorted(where, key=lambda key: order.index(key[0])):
        names = _unique(where[backend, reason])
        lines.append(Text(f"{backend} {reason}: {'all' if len(names) == total else ', '.join(names)}", "dim"))
    return [Text(), *lines] if lines else []


def _verdict(cells: Sequence[Cell], seconds: float) -> Text:
    ran = [cell for cell in cells if cell.status == "ran"]
    forward_only = sum(not cell.has_backward for cell in ran)
    refused = sum(cell.status == "refused" for cell in cells)
    failed = sum(cell.failure is not None for cell in cells)
    counts = f"{len(cells)} cells in {seconds:.0f} s: {len(ran)} ran ({forward_only} forward only), {refused} refused. "
    verdict = f"{failed} fail." if failed else "All do what the table says."
    return Text.assemble("\n", counts, (verdict, "bold red" if failed else "bold green"))


def _refuses_all(cells: Sequence[Cell], backend: str) -> bool:
    mine = [cell for cell in cells if cell.backend == backend]
    return all(cell.status == "refused" and cell.failure is None for cell in mine)


def _unique(items: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(items))
