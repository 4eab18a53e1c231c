"""Functions that restore a process's state after a run in Python, and that begin printed lines with a job's name."""

import contextlib
import io
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from typing import TextIO


@contextlib.contextmanager
def isolated_process() -> Iterator[None]:
    """Restore process-wide state that training changes, at the end of a `with` statement.

    This state consists of random number generators, torch's flags, the current GPU, environment variables, filters of
    warnings, and levels of loggers. Lightning itself restores signal handlers.
    """
    import torch

    from tinyformer.checkpoint.file import random_state, restore_random_state

    random, precision = random_state(), torch.get_float32_matmul_precision()
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn = (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic)
    gpu = torch.cuda.current_device() if torch.cuda.is_available() else None
    environment = dict(os.environ)
    levels = {name: logger.level for name, logger in _loggers().items()}
    with warnings.catch_warnings():
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(environment)
            if gpu is not None:
                torch.cuda.set_device(gpu)
            torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = cudnn
            torch.use_deterministic_algorithms(is_deterministic, warn_only=only_warns)
            torch.set_float32_matmul_precision(precision)
            restore_random_state(random)
            for name, logger in _loggers().items():
                logger.setLevel(levels.get(name, logger.level))


def _loggers() -> dict[str, logging.Logger]:
    known = logging.Logger.manager.loggerDict.items()
    return {"": logging.root, **{name: logger for name, logger in known if isinstance(logger, logging.Logger)}}


class NamedLines(io.TextIOBase):
    """A stream that writes whole lines, each after a job's name, so that the lines of several processes do not mix."""

    def __init__(self, stream: io.TextIOBase | TextIO, name: str) -> None:
        self.stream, self.name = stream, name
        self.unfinished = ""

    def write(self, text: str) -> int:
        """Write the complete lines, and keep an unfinished last line for the next call."""
        *lines, self.unfinished = (self.unfinished + text).split("\n")
        self.stream.write("".join(f"{self.name} {line}\n" if line else "\n" for line in lines))
        self.stream.flush()
        return len(text)

    def end(self) -> None:
        if self.unfinished:
            self.write("\n")


@contextlib.contextmanager
def named_lines(name: str) -> Iterator[None]:
    """Prefix each line that is printed inside a `with` statement with a name."""
    out, err = NamedLines(sys.stdout, name), NamedLines(sys.stderr, name)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            yield
    finally:
        out.end()
        err.end()
