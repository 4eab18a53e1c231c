"""The checkpoint that a run begins with: it is continued (`resume`), trained further (`init_from`) or evaluated."""

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from tinyformer.checkpoint.file import EMBEDDING, LAST, Checkpoint, load_checkpoint, load_newest
from tinyformer.config.admission import Plain, admit_config, never_instantiated
from tinyformer.config.conf import format_value
from tinyformer.config.errors import ConfigError
from tinyformer.config.folder import has_checkpoint, is_first_process
from tinyformer.data import TextTokenizer
from tinyformer.errors import ArgumentError, argument_path, relative_path


@dataclass(frozen=True)
class InitialCheckpoint:
    """The checkpoint that a run begins with."""

    checkpoint: Checkpoint
    key: str  # the config key that names it: "resume", "init_from" or "checkpoint"

    @property
    def is_resumed(self) -> bool:
        """Return True if the checkpoint's own run continues, with its optimizer state and step count."""
        return self.key == "resume"

    @functools.cached_property
    def tokenizer(self) -> TextTokenizer:
        return tokenizer_of(self.checkpoint, self.key)

    @functools.cached_property
    def stored(self) -> Plain:
        """The unresolved config of the checkpoint's run; any class is admitted, as nothing is instantiated."""
        with argument_path(passed={"path": self.key}):
            return admit_config(self.checkpoint, never_instantiated)

    @property
    def larger_vocabulary(self) -> int | None:
        """The number of rows of the embedding, if the tokenizer has fewer tokens (T5: 32,128 and 32,100); else None."""
        embedding = self.checkpoint.weights.get(EMBEDDING)
        num_rows = len(embedding) if embedding is not None and embedding.ndim else 0
        return num_rows if num_rows > self.tokenizer.vocab_size else None

    def require_class(self, name: str) -> None:
        """Refuse a checkpoint whose network is not of the class `name`, which the run trains."""
        names = (self.stored["network"]["_target_"], name)
        if names[0] != names[1]:
            reason = "is of class {}, and this run trains {}; start from a checkpoint of the same kind of task"
            reason = reason.format(*(each.rpartition(".")[2] for each in names))
            raise ArgumentError(self.key, str(self.checkpoint.path), reason)

    def has_same_readout(self, task: Mapping[str, Any]) -> bool:
        """Return True if the checkpoint's network has the readout class and the class labels of a `task` group."""
        own = self.stored["task"]
        return (own["readout"]["_target_"], own["labels"]) == (task["readout"]["_target_"], task["labels"])

    def require_same_vocabulary(self, tokenizer: TextTokenizer) -> None:
        own = self.tokenizer.for_training()
        if tokenizer.fingerprint not in (own.fingerprint, own.with_mask().fingerprint):
            reason = (
                f"its vocabulary of {own.vocab_size} tokens differs from this run's vocabulary of "
                f"{tokenizer.vocab_size}; without tokenizer=, the checkpoint's tokenizer is used"
            )
            raise ArgumentError(self.key, self.checkpoint.path, reason)


def load_start(resume: str | None, init_from: str | None) -> InitialCheckpoint:
    """Load the checkpoint that a training run begins with."""
    if resume is not None:
        # A resumed run has a checkpoint of its own, and the one that it began with may no longer exist.
        with argument_path(passed={"path": "resume"}):
            return InitialCheckpoint(load_newest(Path(resume) / "checkpoints"), "resume")
    assert init_from is not None
    with argument_path(passed={"path": "init_from"}):
        return InitialCheckpoint(load_checkpoint(init_from), "init_from")


def refuse_finished(start: InitialCheckpoint, folder: Path, max_steps: int) -> None:
    """Refuse to resume a run that has made all its steps and was scored; print a line if `last.ckpt` is unusable."""
    step, path, key = start.checkpoint.step, start.checkpoint.path, format_value(relative_path(folder))
    if 0 <= max_steps <= step == _scored_steps(folder):  # a run that was killed after its last step has no score
        raise ConfigError(
            f"resume={key}: the run has completed its {step} steps; trainer.max_steps={2 * step} continues it."
        )
    if path.name != LAST and is_first_process():
        print(f"{LAST} is missing or damaged: the run continues from {path.name}, step {step}.")
        if (last := path.with_name(LAST)).exists():  # otherwise the next save would rename it to previous.ckpt
            last.rename(path.with_name("damaged.ckpt"))


def continue_job(config: DictConfig, folder: Path) -> bool:
    """Set `resume` to the run's folder, or to None if this has no checkpoint; return False if the run is complete.

    The run is a job of a resumed sweep, or has `resume=auto`. It is complete if it has made all steps and was scored.
    """
    config.resume, steps = str(folder) if has_checkpoint(folder) else None, _scored_steps(folder)
    max_steps = config.trainer.max_steps
    if config.resume is None or steps is None or not (isinstance(max_steps, int) and 0 <= max_steps <= steps):
        return True
    if is_first_process():
        print(f"{relative_path(folder)} has completed its {steps} steps.")
    return False


def _scored_steps(folder: Path) -> int | None:
    """The number of steps in the results of a run; None if it was not scored, or was killed while sampling."""
    try:
        results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
        steps = results["steps"] if "sample" in results else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    return steps if isinstance(steps, int) else None


def tokenizer_of(checkpoint: Checkpoint, key: str = "path") -> TextTokenizer:
    """The tokenizer of a checkpoint; an `ArgumentError` about `key` is raised if the checkpoint has none."""
    if checkpoint.tokenizer is None:
        reason = "has no tokenizer; add a tokenizer.json to the Hugging Face folder and convert it again"
        raise ArgumentError(key, checkpoint.path, reason)
    try:
        return TextTokenizer.from_json(checkpoint.tokenizer)
    except ArgumentError as error:
        raise ArgumentError(key, str(checkpoint.path), f"its tokenizer {error.reason}") from error
