"""Train a small transformer: `python train.py attention=gqa`, which is `tinyformer train` for a checkout."""

import sys

from tinyformer.programs.train_evaluate import train_program

if __name__ == "__main__":
    sys.exit(train_program(sys.argv[1:], "python train.py"))
