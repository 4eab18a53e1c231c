"""The process of a program: its changes to libraries, its output and exit code, and the folder that ranks share."""

import contextlib
import copy
import importlib
import io
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from datetime import datetime
from typing import TextIO


def name_of_run(resume: str | None = None) -> str:
    """The folder of a run below `outputs`, named by its start time or its Slurm job; equal in all of its processes.

    With torchrun, it is the start time of the first process, which stays the same if torchrun restarts the processes.
    """
    now, environment = datetime.now().strftime("%Y-%m-%d/%H-%M-%S"), os.environ
    if _is_named_by_slurm(resume):
        return f"slurm-{environment['SLURM_JOB_ID']}.{environment['SLURM_STEP_ID']}"
    if is_in_torchrun():
        from torch.distributed import TCPStore

        store = TCPStore(environment["MASTER_ADDR"], int(environment["MASTER_PORT"]), is_master=False)
        return store.compare_set("tinyformer/run", "", now).decode()
    return now


def is_named_by_job(resume: str | None) -> bool:
    """Return True if a Slurm job or torchrun determines the name of a run's folder for all of its processes."""
    return is_in_torchrun() or _is_named_by_slurm(resume)


def _is_named_by_slurm(resume: str | None) -> bool:
    return is_in_slurm() and (resume == "auto" or int(os.environ.get("SLURM_NTASKS", "1")) > 1)


def is_in_slurm() -> bool:
    """Return True if `srun` has started this process in a job, rather than a shell in which commands are typed."""
    # The script of a job has no step; it may run several commands one after another.
    return "SLURM_STEP_ID" in os.environ and os.environ.get("SLURM_JOB_NAME") not in ("bash", "interactive")


def is_in_torchrun() -> bool:
    """Return True if torchrun has started this process; the store of its agent outlives restarts of the processes."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


@contextlib.contextmanager
def isolated_hydra() -> Iterator[None]:
    """Use a separate Hydra inside a `with` statement, since the caller may have initialised Hydra, as in a notebook."""
    from hydra.core.global_hydra import GlobalHydra
    from hydra.version import VersionBase

    hydra, version = GlobalHydra.instance(), VersionBase.instance()
    GlobalHydra.set_instance(GlobalHydra.__new__(GlobalHydra))
    GlobalHydra.instance().clear()
    VersionBase.set_instance(copy.copy(version))
    try:
        yield
    finally:
        GlobalHydra.set_instance(hydra)
        VersionBase.set_instance(version)


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


def guard_imports() -> None:
    """Prevent processes that libraries start from importing modules of the current folder.

    By default, Python searches it first under `-c` or `-m`; instead, it now searches this process's first folder.
    """
    if os.environ.get("PYTHONSAFEPATH") != "1":
        path = [*sys.path[:1], *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ.update(PYTHONSAFEPATH="1", PYTHONPATH=os.pathsep.join(path))


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


def import_matplotlib() -> None:
    """Import matplotlib without the current folder's `matplotlibrc`, which it executed until 3.10.8 and still reads."""
    logging.getLogger("matplotlib.font_manager").setLevel(logging.WARNING)  # hides its message about a list of fonts
    with contextlib.chdir("/"):
        importlib.import_module("matplotlib")
