"""The programs `train` and `evaluate`: `tinyformer train`, and `python train.py` in a checkout."""

import contextlib
import io
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from tinyformer.config.by_layer import with_patterns
from tinyformer.config.checks import check_early
from tinyformer.config.conf import is_multirun, readable
from tinyformer.config.errors import exit_code_of
from tinyformer.config.folder import has_checkpoint, is_first_process, process_number
from tinyformer.config.launch import CommandLine, launch, offer_stored_run, training_words, with_last
from tinyformer.errors import relative_path

# Torch and Lightning take seconds to import: the jobs import them once the config is composed.


def train_program(words: Sequence[str], command: str) -> int:
    """Train the model that the words of a command line describe; returns the exit code."""

    def job(config: DictConfig, folder: Path, invocation: CommandLine) -> None:
        if config.resume == "auto" and not has_checkpoint(folder):
            config.resume = None
        may_have_ended = config.resume == "auto" or (invocation.is_sweep and config.resume is not None)
        if not may_have_ended:  # such a run is skipped, even if its text files no longer exist
            check_early(config)
        from tinyformer.run.pipeline import train
        from tinyformer.run.starting_checkpoint import continue_job

        if not may_have_ended or continue_job(config, folder):
            run_job(partial(train, config, folder, invocation), folder, invocation)

    def start() -> int:
        expanded = training_words(words)
        sys.argv[len(sys.argv) - len(words) :] = expanded  # Lightning starts other processes with it
        return launch(expanded, "train", job, command)

    return _run_program(start, "train")


def evaluate_program(words: Sequence[str], command: str) -> int:
    """Evaluate the checkpoint that the words of a command line name; returns the exit code."""

    def start() -> int:
        arguments = with_last(with_patterns(readable(words, is_multirun(words))))
        checkpoint = offer_stored_run(arguments)

        def job(config: DictConfig, folder: Path, invocation: CommandLine) -> None:
            from tinyformer.run.pipeline import evaluate

            run_job(partial(evaluate, config, folder, invocation, checkpoint), folder, invocation)

        return launch(arguments, "evaluate", job, command)

    return _run_program(start, "evaluate")


def _run_program(start: Callable[[], int | None], program: str) -> int:
    """Run a program and return its exit code; Ctrl-C prints no error, since a run prints that it has stopped."""

    def checked() -> int | None:
        process_number()  # refuses a variable of a launcher that was left in the environment
        return start()

    guard_imports()
    return exit_code_of(checked, program)


def guard_imports() -> None:
    """Prevent processes that libraries start from importing modules of the current folder.

    With `-c` or `-m`, Python searches the current folder first; these processes search our `sys.path[0]` instead.
    """
    if os.environ.get("PYTHONSAFEPATH") != "1":
        path = [*sys.path[:1], *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ.update(PYTHONSAFEPATH="1", PYTHONPATH=os.pathsep.join(path))


def run_job(run: Callable[[], dict[str, Any]], folder: Path, invocation: CommandLine) -> None:
    """Start a run. A run of a sweep prints only its scores and folder, and all other output only if it fails."""
    if not (invocation.is_sweep and is_first_process()):
        run()
        return
    captured = io.StringIO()
    try:
        with contextlib.redirect_stdout(captured):
            results = run()
    except BaseException:
        if printed := captured.getvalue():
            print(f"\n{printed}", end="")
        raise
    monitored = [key.removeprefix("best/") for key in results if key.startswith("best/")]
    keys = dict.fromkeys(["val/loss", "test/loss", "all/loss", *monitored])
    scored = [key for key in keys if results.get(key) is not None]
    print("  ".join([*(f"{key} {results[key]:.4f}" for key in scored), relative_path(folder)]))
