"""Caveats of a comparison, one sentence each."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tinyformer.programs.compare.folders import Run, RunFolders
from tinyformer.programs.compare.grouping import Comparison, as_typed, number

MOST_NAMED = 6


def notes_on(comparison: Comparison, folders: RunFolders) -> list[str]:
    """Notes on missing runs, missing numbers, repeated seeds and runs that are not comparable.

    Args:
        comparison: the comparison of the finished runs.
        folders: the folders of all runs, those without results included.
    """
    runs = [run for row in comparison.rows for run in row.runs]
    return [
        *_absent(folders),
        *_without_number(comparison, runs),
        *_repeated(comparison),
        *_unlike(comparison, runs),
        *_matched(comparison),
    ]


def _absent(folders: RunFolders) -> Iterator[str]:
    num_runs = len(folders.finished) + len(folders.unfinished)
    if folders.unfinished:
        yield (
            f"{len(folders.unfinished)} of {num_runs} runs have no results.json (failed, stopped or still running): "
            f"{_named(folders.unfinished)}."
        )
    for sweep, count in folders.not_started.items():
        yield f"{count} more runs of {sweep}/multirun.yaml were not started."
    if folders.evaluations:
        yield f"Evaluations are not runs and were left out: {_named(folders.evaluations)}."


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
        matches = [run.results["matched"] for run in row.runs if isinstance(run.results.get("matched"), dict)]
        solved = {
            (f"{match.get('by')}={match.get('size')}", count, str(match.get("quantity")), target)
            for match in matches
            if isinstance(count := match.get("number"), int) and isinstance(target := match.get("target"), int)
        }
        for size, count, quantity, target in sorted(solved):
            setting = " ".join(f"{key}={value}" for key, value in row.settings.items()) or "all"
            name = quantity.removeprefix("num_").replace("_", " ").replace("flops", "FLOPs")
            yield f"{setting}: {size} was solved for {count:,} {name}, to match {target:,}."


def _named(paths: Iterable[Path]) -> str:
    names = [str(path) for path in paths]
    rest = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {rest} more" if rest > 0 else "")
