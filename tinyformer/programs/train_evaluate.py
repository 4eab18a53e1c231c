"""The programs `train` and `evaluate`: `tinyformer train`, and `python train.py` in a checkout."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from tinyformer.config.checks import check_early
from tinyformer.config.compose import Invocation, inherit_architecture, offer_stored_run
from tinyformer.config.process import ending_at_ctrl_c
from tinyformer.config.resume import expand_resume
from tinyformer.config.run_program import run_program
from tinyformer.files import import_matplotlib

if TYPE_CHECKING:
    from tinyformer.checkpoint.file import Checkpoint

# Torch and Lightning take seconds to import: the jobs import them once the config is composed.


def train_program(command: str, num_words: int = 0) -> int:
    """Train the model that the command line describes; see `run_program`."""

    def job(config: DictConfig, folder: Path, invocation: Invocation) -> None:
        is_resumed_sweep = invocation.is_sweep and config.resume is not None
        if not is_resumed_sweep:  # a job that has ended is skipped, even if its text files no longer exist
            check_early(config, invocation.choices)
        with ending_at_ctrl_c():
            import_matplotlib()
            from tinyformer.run.pipeline import train
            from tinyformer.run.starting_checkpoint import continue_job

        if not is_resumed_sweep or continue_job(config, folder):
            train(config, folder, invocation)

    return run_program(job, "train", command, lambda words: inherit_architecture(expand_resume(words)), num_words)


def evaluate_program(command: str, num_words: int = 0) -> int:
    """Evaluate the checkpoint that the command line names; see `run_program`."""
    checkpoints: list[Checkpoint | None] = []

    def keep_checkpoint(arguments: Sequence[str]) -> Sequence[str]:
        checkpoints.append(offer_stored_run(arguments))
        return arguments

    def job(config: DictConfig, folder: Path, invocation: Invocation) -> None:
        with ending_at_ctrl_c():
            import_matplotlib()
            from tinyformer.run.pipeline import evaluate

        evaluate(config, folder, invocation, checkpoints[0])

    return run_program(job, "evaluate", command, keep_checkpoint, num_words)
