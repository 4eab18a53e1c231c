"""Evaluate a checkpoint: `python evaluate.py checkpoint=outputs/…/checkpoints/last.ckpt`; see `--help`."""

import sys
from pathlib import Path

from omegaconf import DictConfig

from tinyformer.app import compose_on_checkpoint, run_program


def evaluate(config: DictConfig) -> None:
    """Score the checkpoint that a config names."""
    # Torch and Lightning take seconds to import: not before the config is known to be sound.
    from tinyformer.app.evaluation_run import EvaluationRun

    EvaluationRun(config).evaluate()


if __name__ == "__main__":
    sys.exit(run_program(evaluate, Path(__file__).parent / "conf", "evaluate", prepare=compose_on_checkpoint))
