"""`tinyformer.train`: a training run started from Python."""

import contextlib
import functools
import importlib
import signal
import threading
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from tinyformer.config.admission import SCORE_KEYS, is_swept, leaves
from tinyformer.config.checks import check_early
from tinyformer.config.compose import CommandLine
from tinyformer.config.errors import ConfigError, in_sentences
from tinyformer.config.keys import is_multirun, readable
from tinyformer.config.launch import launch
from tinyformer.config.process import isolated_process
from tinyformer.config.resume import training_words
from tinyformer.errors import ArgumentError
from tinyformer.files import import_matplotlib, relative_path

if TYPE_CHECKING:
    from tinyformer.model.model import Model

PROGRAM = "tinyformer.train"
_TRAINING = threading.RLock()


@dataclass(frozen=True, repr=False)
class TrainedRun:
    """A training run that has ended; made by `train`."""

    folder: Path  # the folder of the run, an absolute path
    results: dict[str, Any]  # the contents of its `results.json`: "val/loss", "num_parameters", "steps", …
    trusted: Sequence[str] = field(default=())  # the classes that its config names, which `model` may use

    @property
    def checkpoint(self) -> Path:
        """The checkpoint of the last weights, to which "val/loss" refers."""
        return self.folder / "checkpoints" / "last.ckpt"

    @property
    def best_checkpoint(self) -> Path:
        """The checkpoint with the best validation metric."""
        return self.folder / "checkpoints" / "best.ckpt"

    @functools.cached_property
    def model(self) -> "Model":
        """The trained model on the CPU, as `tinyformer.load` gives it for `checkpoint`."""
        from tinyformer.model.loading import load

        return load(self.checkpoint, trusted=self.trusted)

    def __repr__(self) -> str:
        facts = ", ".join(f"{name} {value}" for name, value in self._summary().items())
        return f"TrainedRun({facts})"

    def _repr_html_(self) -> str:
        from tinyformer.model.notebook import Table

        return Table([self._summary()])._repr_html_()

    def _summary(self) -> dict[str, str]:
        shown = {"folder": relative_path(self.folder)}
        for label, name in {"steps": "steps", "parameters": "num_parameters"}.items():
            if (number := self.results.get(name)) is not None:
                shown[label] = f"{number:,}"
        for name, value in self.results.items():
            if name.startswith(("val/", "test/")) and isinstance(value, float):
                shown[name] = f"{value:.4g}"
        return shown


def train(overrides: Sequence[str] = ()) -> TrainedRun:
    """Train the model that some overrides of the default config describe, as `tinyformer train` does.

    The run has the same config, checks and files as on the command line. Its folder is `outputs/DATE/TIME` in the
    working directory, or the one given as `hydra.run.dir=FOLDER`. When it returns, the random number generators of the
    process, torch's flags, loggers, environment variables and handlers of signals are as they were before.

    Args:
        overrides: the words of the command line, such as ["attention=gqa", "trainer.max_steps=200"] or
            ["resume=outputs/…"].

    Raises:
        ConfigError: something in the overrides cannot work; nothing was computed or written. With HYDRA_FULL_ERROR=1
            in the environment, the error that caused it is shown, too.
        KeyboardInterrupt: Ctrl-C, or "Interrupt the kernel", stopped the run after its state was saved.
    """
    with _alone(), in_sentences("train"):
        try:
            return launch(training_words(_checked(overrides)), "train", _job, PROGRAM, in_python=True)
        except SystemExit as end:  # raised by Lightning, or by a run that has saved its state
            if end.code == 128 + signal.SIGINT or isinstance(end.__context__, KeyboardInterrupt):
                raise KeyboardInterrupt from None
            raise


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Refuse a run while another thread trains."""
    if not _TRAINING.acquire(blocking=False):
        raise ConfigError(
            f"{PROGRAM}: another thread of this process is training, and threads share random number generators; "
            "another process, such as `tinyformer train`, trains at the same time."
        )
    try:
        yield
    finally:
        _TRAINING.release()


def _checked(overrides: Sequence[str]) -> Sequence[str]:
    """The overrides of one run, which must be a list of words without options of the command line."""
    if isinstance(overrides, str) or not all(isinstance(word, str) for word in overrides):
        raise ArgumentError("overrides", overrides, "must be a list of words", {"overrides": ["attention=gqa"]})
    for word in overrides:
        if word.startswith("-") and not is_multirun([word]):
            raise ConfigError(f"{word}: {PROGRAM} takes overrides only, such as attention=gqa.")
    for word, read in zip(overrides, readable(overrides), strict=True):
        if is_multirun([word]) or is_swept(read) or read.lstrip("+").startswith("hydra.mode="):
            one = "makes one run; call it in a loop, or run the sweep with `tinyformer train -m`"
            raise ConfigError(f"{word}: {PROGRAM} {one}.")
    return overrides


def _job(config: DictConfig, folder: Path, invocation: CommandLine) -> TrainedRun:
    with warnings.catch_warnings():
        importlib.invalidate_caches()  # a cell may just have written the file of a class
        check_early(config, invocation.choices)
        warnings.filterwarnings("ignore", message="IProgress not found")  # tqdm's, of a notebook without widgets
        import_matplotlib()
        from tinyformer.run.pipeline import train

        with isolated_process():
            return TrainedRun(folder, train(config, folder, invocation), tuple(_classes(config)))


def _classes(config: DictConfig) -> list[str]:
    """The names of the classes in a config; they are trusted, since the caller wrote it."""
    values = leaves(OmegaConf.to_container(config, resolve=False))
    names = [value for key, value in values if key.endswith("_target_")]
    return list(filter(None, names + [OmegaConf.select(config, key) for key in SCORE_KEYS]))
