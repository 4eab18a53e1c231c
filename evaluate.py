"""Evaluate a checkpoint: `python evaluate.py checkpoint=outputs/…/last.ckpt`, which is `tinyformer evaluate`."""

import sys

from tinyformer.programs.train_evaluate import evaluate_program

if __name__ == "__main__":
    sys.exit(evaluate_program(sys.argv[1:], "python evaluate.py"))
