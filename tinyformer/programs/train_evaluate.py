"""The programs `train` and `evaluate`: `tinyformer train`, and `python train.py` in a checkout."""

import contextlib
import io
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from tinyformer.config.checks import check_early
from tinyformer.config.compose import Invocation, inherit_architecture, offer_stored_run, with_last
from tinyformer.config.errors import indent
from tinyformer.config.folder import has_checkpoint, is_first_process
from tinyformer.config.process import ending_at_ctrl_c
from tinyformer.config.resume import expand_resume
from tinyformer.config.run_program import run_program
from tinyformer.files import import_matplotlib, relative_path

if TYPE_CHECKING:
    from tinyformer.checkpoint.file import Checkpoint

# Torch and Lightning take seconds to import: the jobs import them once the config is composed.


def train_program(command: str, num_words: int = 0) -> int:
    """Train the model that the command line describes; see `run_program`."""

    def job(config: DictConfig, folder: Path, invocation: Invocation) -> None:
        if config.resume == "auto" and not has_checkpoint(folder):
            config.resume = None
        may_have_ended = config.resume == "auto" or (invocation.is_sweep and config.resume is not None)
        if not may_have_ended:  # such a run is skipped, even if its text files no longer exist
            check_early(config, invocation.choices)
        with ending_at_ctrl_c():
            import_matplotlib()
            from tinyformer.run.pipeline import train
            from tinyformer.run.starting_checkpoint import continue_job

        if not may_have_ended or continue_job(config, folder):
            run_job(partial(train, config, folder, invocation), folder, invocation)

    return run_program(job, "train", command, lambda words: inherit_architecture(expand_resume(words)), num_words)


def evaluate_program(command: str, num_words: int = 0) -> int:
    """Evaluate the checkpoint that the command line names; see `run_program`."""
    checkpoints: list[Checkpoint | None] = []

    def keep_checkpoint(arguments: Sequence[str]) -> Sequence[str]:
        arguments = with_last(arguments)
        checkpoints.append(offer_stored_run(arguments))
        return arguments

    def job(config: DictConfig, folder: Path, invocation: Invocation) -> None:
        with ending_at_ctrl_c():
            import_matplotlib()
            from tinyformer.run.pipeline import evaluate

        run_job(partial(evaluate, config, folder, invocation, checkpoints[0]), folder, invocation)

    return run_program(job, "evaluate", command, keep_checkpoint, num_words)


def run_job(run: Callable[[], dict[str, Any]], folder: Path, invocation: Invocation) -> None:
    """Start a run. One of a sweep prints its scores and folder, after its overrides, and all else only if it fails."""
    if not (invocation.is_sweep and is_first_process()):
        run()
        return
    captured = io.StringIO()
    try:
        with contextlib.redirect_stdout(captured):
            results = run()
    except BaseException:
        print(f"\n{captured.getvalue()}", end="")
        raise
    monitored = [key.removeprefix("best/") for key in results if key.startswith("best/")]
    keys = dict.fromkeys(["val/loss", "test/loss", "all/loss", *monitored])
    scored = [key for key in keys if results.get(key) is not None]
    print("  ".join([*(f"{key} {results[key]:.4f}" for key in scored), relative_path(folder)]))
    if invocation.overridden("generate.prompt") and (sample := results.get("sample")):
        print(indent(sample if isinstance(sample, str) else "\n".join(sample)))
