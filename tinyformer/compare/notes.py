"""Caveats of a comparison, one sentence each."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tinyformer.compare.folders import Found, Run
from tinyformer.compare.grouping import Comparison, as_typed, number

MOST_NAMED = 6


def notes_on(comparison: Comparison, found: Found) -> list[str]:
    """Notes on missing runs, missing numbers, repeated seeds and runs that are not comparable.

    Args:
        comparison: the comparison of the finished runs.
        found: all runs in the folders.
    """
    runs = [run for row in comparison.rows for run in row.runs]
    return [
        *_absent(found),
        *_without_number(comparison, runs),
        *_repeated(comparison),
        *_unlike(comparison, runs),
        *_matched(comparison),
    ]


def _absent(found: Found) -> Iterator[str]:
    num_runs = len(found.finished) + len(found.unfinished)
    if found.unfinished:
        yield (
            f"{len(found.unfinished)} of {num_runs} runs have no results.json (failed, stopped or still running): "
            f"{_named(found.unfinished)}."
        )
    for sweep, count in found.not_started.items():
        yield f"{count} more runs of {sweep}/multirun.yaml were not started."
    if found.evaluations:
        yield f"Evaluations are not runs and were left out: {_named(found.evaluations)}."


def _without_number(comparison: Comparison, runs: Sequence[Run]) -> Iterator[str]:
    without = [run.path for run in runs if number(run, comparison.metric) is None]
    if without:
        yield (
            f"{comparison.metric} is not a finite number in {len(without)} of {len(runs)} runs, which are left out of "
            f"the means: {_named(without)}."
        )


def _repeated(comparison: Comparison) -> Iterator[str]:
    for row in comparison.rows:
        by_seed: dict[str, list[Path]] = defaultdict(list)
        for run in row.scored:
            by_seed[as_typed(run.value(comparison.by))].append(run.path)
        for seed, paths in by_seed.items():
            if len(paths) > 1:
                yield (
                    f"{_named(paths)} have the same settings and {comparison.by}={seed}; each of them counts, so ± is "
                    f"not over {comparison.by} alone."
                )


def _unlike(comparison: Comparison, runs: Sequence[Run]) -> Iterator[str]:
    if len({run.results.get("data_fingerprint") for run in runs}) > 1:
        yield (
            "The runs have different data (data_fingerprint): losses are comparable on the same text and tokenizer, "
            "val/bits_per_byte on the same text."
        )
    steps = {steps for run in runs if (steps := number(run, "steps")) is not None}
    if len(steps) > 1 and "trainer.max_steps" not in comparison.columns:
        yield f"The runs made different numbers of steps: {min(steps):,} to {max(steps):,}."


def _matched(comparison: Comparison) -> Iterator[str]:
    for row in comparison.rows:
        found = [run.results["matched"] for run in row.runs if isinstance(run.results.get("matched"), dict)]
        solved = {
            (f"{one.get('by')}={one.get('size')}", own, str(one.get("quantity")), target)
            for one in found
            if isinstance(own := one.get("number"), int) and isinstance(target := one.get("target"), int)
        }
        for size, own, quantity, target in sorted(solved):
            setting = " ".join(f"{key}={value}" for key, value in row.settings.items()) or "all"
            name = quantity.removeprefix("num_").replace("_", " ").replace("flops", "FLOPs")
            yield f"{setting}: {size} was solved for {own:,} {name}, to match {target:,}."


def _named(paths: Iterable[Path]) -> str:
    names = [str(path) for path in paths]
    rest = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {rest} more" if rest > 0 else "")
