"""What a run changes in its process, restored for a caller in Python."""

import contextlib
import copy
import logging
import os
import warnings
from collections.abc import Iterator

from hydra.core.global_hydra import GlobalHydra
from hydra.version import VersionBase


@contextlib.contextmanager
def keep_hydra() -> Iterator[None]:
    """Give the block a Hydra of its own: the caller may be a program of Hydra, or have initialised it in a notebook."""
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
def keep_process() -> Iterator[None]:
    """Restore at the end of the block what training sets for a whole process.

    These are the states of random number generators, torch's flags, the current GPU, environment variables, filters of
    warnings, and levels of loggers. Lightning restores the handlers of signals.
    """
    import torch

    from tinyformer.checkpoint.file import random_state, restore_random_state

    random, precision = random_state(), torch.get_float32_matmul_precision()
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn = (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic)
    gpu = torch.cuda.current_device() if torch.cuda.is_available() else None
    environment = dict(os.environ)
    with warnings.catch_warnings(), _keep_levels():
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


@contextlib.contextmanager
def _keep_levels() -> Iterator[None]:
    def loggers() -> dict[str, logging.Logger]:
        known = logging.Logger.manager.loggerDict.items()
        return {"": logging.root, **{name: logger for name, logger in known if isinstance(logger, logging.Logger)}}

    before = {name: logger.level for name, logger in loggers().items()}
    try:
        yield
    finally:
        for name, logger in loggers().items():
            logger.setLevel(before.get(name, logger.level))
