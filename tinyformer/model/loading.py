"""`load` returns the trained model of a checkpoint, and `train` starts a training run from Python."""

import functools
import importlib
import signal
import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from tinyformer.checkpoint.file import load_step, require_fitting
from tinyformer.config.admission import SCORE_KEYS, admit_config, is_swept, leaves, register_score
from tinyformer.config.checks import check_early
from tinyformer.config.conf import is_multirun, readable
from tinyformer.config.errors import ConfigError, cause_of, in_sentences
from tinyformer.config.launch import CommandLine, launch, training_words
from tinyformer.config.process import isolated_process
from tinyformer.errors import ArgumentError, argument_path, relative_path
from tinyformer.model.model import Model, Origin
from tinyformer.model.notebook import Table
from tinyformer.nn.heads import plain_address
from tinyformer.nn.transformer import NoInitialisation
from tinyformer.run.importing import find_model
from tinyformer.run.network import make_network, require_known_tokens
from tinyformer.run.starting_checkpoint import tokenizer_of
from tinyformer.tasks import SpanExtraction

PROGRAM = "tinyformer.train"

_TRAINING = threading.RLock()


def load(
    checkpoint: str | Path,
    backend: str = "auto",
    device: str = "cpu",
    trusted: Sequence[str] = (),
    max_seq_len: int | None = None,
    step: int | None = None,
    revision: str | None = None,
) -> Model:
    """Load a checkpoint or a Hugging Face model, in evaluation mode and in the dtype of its weights.

        model = tinyformer.load("outputs/…/checkpoints/last.ckpt")
        model = tinyformer.load("openai-community/gpt2")

    As in `evaluate.py`, the file is not trusted: no code in it runs, and its config may name only classes of this
    package. A Hugging Face model is imported once, in fp32, into the cache that TINYFORMER_CACHE moves.

    Args:
        checkpoint: a file, such as `outputs/…/checkpoints/last.ckpt`, the folder of a run, or "last" for the newest; or
            a Hugging Face folder, a GGUF file, or the name "owner/name" of a model on the Hub.
        backend: attention backend, in place of the run's: "auto" or a name in `tinyformer.nn.BACKENDS`.
        device: the device, as in torch: "cpu", "cuda", …
        trusted: further classes that the checkpoint may use, such as "mine.Block".
        max_seq_len: the maximum length of a text in tokens, which may exceed the run's maximum; None for the run's
            maximum, the only value that learned positions support.
        step: an optimizer step: the run's snapshot at this step, see `tinyformer.training.Snapshots`, is loaded in
            place of the checkpoint.
        revision: a branch, a tag or a commit of a model on the Hub, such as "step1000" of Pythia; None for the main
            branch. Without a network, its last download is used.

    Raises:
        ArgumentError: the file cannot be read, the Hugging Face model is not supported or cannot be downloaded, or the
            backend does not exist or does not support the model.
    """
    with argument_path(passed=dict.fromkeys(("path", "source", "folder"), "checkpoint")):
        stored = load_step(find_model(checkpoint, revision), None if step is None else int(step))
        plain = admit_config(stored, lambda key, name: name in trusted, "name it in `trusted`")
        tokenizer = tokenizer_of(stored) if stored.tokenizer else None
    register_score(plain)
    config = OmegaConf.create(plain)
    for axis in ("attention", "cross_attention"):
        if config.get(axis) is not None:
            config[axis].backend = backend
    if max_seq_len is not None:
        (config.model.max_seq_len,) = plain_address([max_seq_len])
    try:
        with NoInitialisation():
            network = make_network(config, tokenizer)
    except InstantiationException as error:
        raise cause_of(error) from error
    require_fitting(network, stored)
    for name, own in network.state_dict(keep_vars=True).items():
        own.data = stored.weights[name].to(own.dtype)  # mapped from the file, not copied
    dtype = next(tensor.dtype for tensor in stored.weights.values() if tensor.is_floating_point())
    task = instantiate(config.task.objective, _convert_="all")
    network.to(device, dtype)
    kept = replace(stored, weights=network.state_dict())  # shares memory with the network
    require_known_tokens(task, network)
    for name in ("max_question_length", "stride") if isinstance(task, SpanExtraction) else ():
        if (value := OmegaConf.select(config, f"data.{name}")) is not None:  # as the run cut contexts into windows
            setattr(task, name, value)
    return Model(network, tokenizer, task, Origin(kept, trusted))


@dataclass(frozen=True, repr=False)
class TrainedRun:
    """A training run that has ended; made by `train`."""

    folder: Path  # the folder of the run, an absolute path
    results: dict[str, Any]  # the contents of its `results.json`: "val/loss", "num_parameters", "steps", …
    trusted: Sequence[str] = field(default=())  # the classes that its config names, which `model` may use

    @property
    def checkpoint(self) -> Path:
        """The checkpoint of the last weights, whose validation loss is `results["val/loss"]`."""
        return self.folder / "checkpoints" / "last.ckpt"

    @property
    def best_checkpoint(self) -> Path:
        """The checkpoint with the best validation metric."""
        return self.folder / "checkpoints" / "best.ckpt"

    @functools.cached_property
    def model(self) -> Model:
        """The trained model on the CPU, as `tinyformer.load(checkpoint)` returns it."""
        return load(self.checkpoint, trusted=self.trusted)

    def __repr__(self) -> str:
        return f"TrainedRun({', '.join(f'{name} {value}' for name, value in self._summary().items())})"

    def _repr_html_(self) -> str:
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
    working directory, or the folder given as `hydra.run.dir=FOLDER`. Afterwards, the random number generators of the
    process, torch's flags, loggers, environment variables and signal handlers have their former states again.

    Args:
        overrides: the arguments of the command line, such as ["attention=gqa", "trainer.max_steps=200"] or
            ["resume=outputs/…"].

    Raises:
        ConfigError: something in the overrides cannot work; nothing was computed or written. With HYDRA_FULL_ERROR=1
            in the environment, the error that caused it is shown, too.
        KeyboardInterrupt: Ctrl-C, or "Interrupt the kernel", stopped the run after its state was saved.
    """
    if not _TRAINING.acquire(blocking=False):
        raise ConfigError(f"{PROGRAM}: another thread is training; wait until it ends, as both share random numbers.")
    try:
        with in_sentences("train"):
            return launch(training_words(_checked(overrides)), "train", _job, PROGRAM, in_python=True)
    except SystemExit as end:  # raised by Lightning, or by a run that has saved its state
        if end.code == 128 + signal.SIGINT or isinstance(end.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from None
        raise
    finally:
        _TRAINING.release()


def _checked(overrides: Sequence[str]) -> Sequence[str]:
    """Return the overrides of one run, after checking that they are a list of words without command-line options."""
    if isinstance(overrides, str):
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
        check_early(config)
        from tinyformer.run.pipeline import train

        with isolated_process():
            return TrainedRun(folder, train(config, folder, invocation), tuple(_classes(config)))


def _classes(config: DictConfig) -> list[str]:
    """The names of the classes in a config; they are trusted, since the caller wrote the config."""
    values = leaves(OmegaConf.to_container(config, resolve=False))
    names = [value for key, value in values if key.endswith("_target_")]
    return list(filter(None, names + [OmegaConf.select(config, key) for key in SCORE_KEYS]))
