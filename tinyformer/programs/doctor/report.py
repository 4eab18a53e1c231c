"""The printed report: one row per variant and dtype, with one letter per mask."""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from rich import progress
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from tinyformer.programs.doctor.cases import MASKS
from tinyformer.programs.doctor.verdict import Cell

KERNELS = {
    "flash": ("F", "flash"),
    "efficient": ("E", "memory-efficient"),
    "cudnn": ("C", "cuDNN"),
    "varlen": ("V", "flash, packed"),
    "triton": ("T", "Triton"),
    "fa3": ("3", "FlashAttention 3"),
    "fa4": ("4", "FlashAttention 4"),
    "math": ("M", "matrix products"),
}
"""The letter and the description of each kernel."""
WIDTH = 112
MEMORY_WIDTH = 6


def track(rows: Iterable[list[Cell]], total: int) -> Iterable[list[Cell]]:
    """Pass rows on, with a progress bar on stderr if it is a terminal."""
    console = Console(stderr=True)
    return progress.track(
        rows, "examining", total=total, console=console, transient=True, disable=not console.is_terminal
    )


def print_report(cells: Sequence[Cell], machine: dict[str, Any], seconds: float) -> None:
    """Print the report to stdout.

    Args:
        cells: all cells, in order.
        machine: the description of the machine.
        seconds: how long the examination took.
    """
    console = Console(highlight=False)
    # A terminal that is narrower than the table wraps its lines; no column is cut off.
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
    """The letters of the masks, the milliseconds of the median mask, and the MiB."""
    by_mask = {cell.mask: cell for cell in row if cell.backend == backend}
    times = [cell.seconds for cell in by_mask.values() if cell.seconds is not None]
    peaks = [cell.peak_memory / 2**20 for cell in by_mask.values() if cell.peak_memory is not None]
    entry = Text.assemble(*(_letter(by_mask.get(mask)) for mask in masks))
    entry.append(f" {1e3 * statistics.median(times):5.1f}" if times else "", "dim")
    return entry.append(f" {statistics.median(peaks):4.0f}M" if peaks and with_memory else "", "dim")


def _letter(cell: Cell | None) -> tuple[str, str]:
    if cell is None:
        return " ", ""
    if cell.failure is not None:
        return "✗", "bold red"
    if cell.kernel is None:
        return "·", "dim"
    letter, _ = KERNELS[cell.kernel]
    return (letter if cell.has_backward else letter.lower()), ("bold green" if cell.auto else "")


def _row_summary(row: Sequence[Cell]) -> tuple[str, ...]:
    """Auto's choices, its largest slowdown, and the largest errors."""
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
    kernels = ", ".join(" ".join(KERNELS[kernel]) for kernel in _unique(cell.kernel for cell in cells if cell.kernel))
    memory = ", and the MiB held at once" if with_memory else ""
    return [
        Text(),
        Text(
            f"One letter per mask ({', '.join(masks)}): the kernel that ran ({kernels}); lower case: forward only; "
            "·: refused; ✗: failed. Then the milliseconds of the heads for the median mask, forward and "
            f"backward{memory}. ×: auto's time relative to the fastest backend's, at most. output, gradient: the "
            "largest error of all backends and masks, max|a - b| / max|b| against eager in float64."
        ),
    ]


def _refusals(cells: Sequence[Cell]) -> list[RenderableType]:
    """The reasons of each backend, each with the variants that it applies to."""
    variants_by_reason: dict[tuple[str, str], list[str]] = defaultdict(list)
    for cell in cells:
        if cell.reason and cell.failure is None:
            variants_by_reason[cell.backend, cell.reason].append(cell.variant)
    total, order = len(_unique(cell.variant for cell in cells)), _unique(cell.backend for cell in cells)
    lines = []
    for backend, reason in sorted(variants_by_reason, key=lambda key: order.index(key[0])):
        names = _unique(variants_by_reason[backend, reason])
        lines.append(Text(f"{backend} {reason}: {'all' if len(names) == total else ', '.join(names)}", "dim"))
    return [Text(), *lines] if lines else []


def _verdict(cells: Sequence[Cell], seconds: float) -> Text:
    ran = [cell for cell in cells if cell.status == "ran"]
    forward_only = sum(not cell.has_backward for cell in ran)
    refused = sum(cell.status == "refused" for cell in cells)
    failed = sum(cell.failure is not None for cell in cells)
    counts = f"{len(cells)} cells in {seconds:.0f} s: {len(ran)} ran ({forward_only} forward only), {refused} refused. "
    verdict = f"{failed} failed." if failed else "All do what the table says."
    return Text.assemble("\n", counts, (verdict, "bold red" if failed else "bold green"))


def _refuses_all(cells: Sequence[Cell], backend: str) -> bool:
    return all(cell.status == "refused" and cell.failure is None for cell in cells if cell.backend == backend)


def _unique(items: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(items))
