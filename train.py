"""Train a small transformer: `python train.py attention=gqa`. `python train.py --help` lists the axes."""

import sys
from pathlib import Path

from omegaconf import DictConfig

from tinyformer.app import expand_resume, run_program


def train(config: DictConfig) -> None:
    """Make the run that a config describes, and make its steps."""
    # Torch and Lightning take seconds to import: not before the config is known to be sound.
    from tinyformer.app.training_run import TrainingRun

    TrainingRun(config).fit()


if __name__ == "__main__":
    sys.exit(run_program(train, Path(__file__).parent / "conf", "train", prepare=expand_resume))
