"""A run, from its config to its summary: `train` fits a network, `evaluate` scores or analyses a trained network."""

import copy
import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import lightning as L
import numpy as np
import torch
from hydra.utils import instantiate
from lightning.pytorch.callbacks import ProgressBar
from omegaconf import DictConfig, OmegaConf

from tinyformer.analysis import Analysis
from tinyformer.checkpoint.file import Checkpoint, copy_with
from tinyformer.checkpoint.format import FORMAT
from tinyformer.config.admission import Plain, describe_config, require_readable
from tinyformer.config.conf import AXES, hydra_value
from tinyformer.config.errors import config_keys, in_sentences, say
from tinyformer.config.folder import has_checkpoint, is_first_process
from tinyformer.config.launch import CommandLine, compose_run, isolated_hydra, offer_stored_run
from tinyformer.config.process import isolated_process
from tinyformer.data import DataModule
from tinyformer.errors import ArgumentError
from tinyformer.files import write_whole
from tinyformer.hardware import describe_device
from tinyformer.nn import Network
from tinyformer.report import caption
from tinyformer.run.data import make_data_and_task
from tinyformer.run.evaluation import analyse, describe_context, score_evaluation, score_training, write_predictions
from tinyformer.run.match import match_size
from tinyformer.run.network import choose_kernels, compile_network, decide_compiling, starting_network, training_kernels
from tinyformer.run.results import summarise_evaluation, summarise_training
from tinyformer.run.run import Run, destroy_process_group_on_exit, fit, requeue_on_exit
from tinyformer.run.settings import Settings, read_settings
from tinyformer.run.starting_checkpoint import InitialCheckpoint
from tinyformer.run.trainer import (
    closing,
    log_hyperparameters,
    make_callbacks,
    make_loggers,
    require_one_process,
    scoring_trainer,
    set_up_process,
    training_trainer,
)
from tinyformer.training import TrainingModule
from tinyformer.training.callbacks.checkpoints import Checkpoints
from tinyformer.training.callbacks.metrics import Report, StepProgress
from tinyformer.training.step import has_processes


def train(config: DictConfig, folder: Path, invocation: CommandLine | None = None) -> dict[str, Any]:
    """Train the model that a config describes; write checkpoints, metrics, pictures and `results.json` into a folder.

    Returns the contents of `results.json`, or {} in a process other than the first. The caller has to lock the folder.

    Raises:
        ConfigError: a value of the config cannot work; nothing was computed or written.
        ArgumentError: the same, but the error names a Python argument; `config_keys` turns it into a config key.
        SystemExit: a signal stopped the run, with 128 + its number as the code, after its state was saved.
    """
    if config.resume == "auto":
        config.resume = str(folder) if has_checkpoint(folder) else None
    run = set_up(config, folder, invocation or CommandLine())
    with requeue_on_exit(run), closing(run.loggers), destroy_process_group_on_exit():
        fit(run)
        with run.module.whole_network():
            run.network = run.module.network
            if has_processes():
                torch.distributed.destroy_process_group()
            run.data.trainer = None  # so that batches are not divided: only the first process scores
            return summarise_training(run, *score_training(run)) if is_first_process() else {}


def evaluate(
    config: DictConfig, folder: Path, invocation: CommandLine | None = None, checkpoint: Checkpoint | None = None
) -> dict[str, Any]:
    """Score a checkpoint on a split and sample text, or analyse it; write `results.json` and pictures into a folder.

    The config is the config of the checkpoint's run with overrides. The checkpoint is loaded if `checkpoint` is None.
    Returns the contents of `results.json`, and raises the errors of `train`.
    """
    if config.step == "all" and (config.score or config.analysis is None):
        reason = "analyses each snapshot, and scores none"
        works = {"analysis": "heads"} if config.analysis is None else {"score": False}
        raise ArgumentError("step", "all", reason, works)
    run = set_up(config, folder, invocation or CommandLine(), is_training=False, checkpoint=checkpoint)
    facts = describe_context(run.checkpoint.path, run.checkpoint.step, run.data, run.split)
    say(caption(facts | {"device": describe_device(run.settings.device)}), flush=True)
    with closing(run.loggers):
        # First, so that a mistake in the analysis is refused before anything is scored or written.
        findings = write_predictions(run) if run.config.predict else analyse(run)
        (folder / "results.json").unlink(missing_ok=True)  # written by an earlier evaluation
        return summarise_evaluation(run, findings, score_evaluation(run, findings) if run.settings.is_scored else None)


def set_up(
    config: DictConfig,
    folder: Path,
    invocation: CommandLine,
    is_training: bool = True,
    checkpoint: Checkpoint | None = None,
) -> Run:
    """Make and check the objects of a run: its settings, data and task, network, and trainer.

    An evaluation loads the checkpoint if `checkpoint` is None.
    """
    written, config = config, copy.deepcopy(config)
    set_up_process()
    settings = read_settings(config, folder, invocation, is_training, checkpoint)
    # Before Hydra's `instantiate`, which resolves interpolations in place.
    stored: Any = OmegaConf.to_container(config, resolve=False)
    callbacks = make_callbacks(config.callbacks)
    groups = ("optimizer", "schedule") if is_training else ("analysis",)
    made = [None if config.get(group) is None else instantiate(config[group], _convert_="all") for group in groups]
    data, split, task, mask = make_data_and_task(config, invocation, settings)
    if is_training:
        stored["task"] |= {"labels": data.labels, "num_texts": data.num_texts}
    matched = None
    if is_training and config.get("match") is not None:
        matched = match_size(config, invocation, data.tokenizer.vocab_size)
        *path, last = matched.by.split(".")
        functools.reduce(dict.__getitem__, path, stored)[last] = matched.size
    network = starting_network(config, data.tokenizer, settings, task, stored["task"])
    run = Run(config, folder, invocation, stored, settings, data, split, task, network, mask, matched)
    if is_training:
        _add_trainer(run, written, callbacks, *made)
    else:
        _add_scoring_trainer(run, callbacks, *made)
    return run


def _add_trainer(
    run: Run, written: DictConfig, chosen: Mapping[str, L.Callback], optimizer: Any, schedule: Any
) -> None:
    """Choose the kernels of a training run, and make its Lightning module, loggers, callbacks and trainer."""
    config, folder, data, task, network = run.config, run.folder, run.data, run.task, run.network
    run.kernels, run.backends = training_kernels(network, run.settings, run.mask, task, data)
    run.settings = settings = decide_compiling(run.settings, network, data)
    run.module = TrainingModule(network, task, data, optimizer, schedule)
    contents = checkpoint_contents(run.stored, run.invocation.choices, settings, data, run.backends)
    first_step = run.checkpoint.step if settings.is_resumed else 0
    run.loggers = make_loggers(config.logger, folder, run.invocation.is_sweep, first_step)
    saver = Checkpoints(
        *(folder / "checkpoints", contents, f"val/{task.monitor}", task.higher_is_better),
        accept=partial(keep_overrides, config, written, folder, run.invocation),
    )
    callbacks = [report := Report(), *chosen.values(), saver]
    if settings.arguments["enable_progress_bar"] and not any(isinstance(each, ProgressBar) for each in callbacks):
        callbacks.append(StepProgress(report))
    run.trainer = training_trainer(settings, folder, run.loggers, callbacks)
    compile_network(network, settings, data.row_format.varying_length, run.mask, run.trainer.world_size)
    if run.invocation.in_python:
        require_one_process(run.trainer)
    log_hyperparameters(run.loggers, run.stored, network)


def _add_scoring_trainer(run: Run, chosen: Mapping[str, L.Callback], analysis: Analysis | None) -> None:
    """Choose the kernels of an evaluation, and make its Lightning module, loggers and trainer."""
    settings, own, start = run.settings, run.stored, cast(InitialCheckpoint, run.settings.start)
    # Overrides may change the network; the data and tokenizer stored are those of the training run.
    run.stored = start.stored | {name: own[name] for name in AXES[:-2] if name in own}
    run.analysis = analysis
    needs_gradient = analysis is not None and analysis.needs_gradient
    run.kernels = choose_kernels(run.network, settings, run.mask, training=needs_gradient)
    step, path = run.checkpoint.step, run.checkpoint.path
    run.module = TrainingModule(run.network, run.task, run.data, evaluated=run.split, first_step=step, checkpoint=path)
    run.loggers = make_loggers(run.config.logger, run.folder, run.invocation.is_sweep)
    profiler = settings.arguments.get("profiler")
    run.trainer = scoring_trainer(settings, run.folder, run.loggers, list(chosen.values()), profiler)
    log_hyperparameters(run.loggers, own, run.network)


def checkpoint_contents(
    stored: Plain, choices: Mapping[str, Any], settings: Settings, data: DataModule, backends: str | None
) -> dict[str, Any]:
    """The contents of a checkpoint that an evaluation needs in addition to the weights."""
    require_readable(overrides := describe_config(stored, choices))
    return {
        "format": FORMAT,
        "overrides": overrides,
        "tokenizer": data.tokenizer.to_json(),
        "facts": {
            "precision": settings.precision,
            "is_compiled": settings.compile_mode is not None,
            "backends": backends,
            "data_fingerprint": data.fingerprint,
            "content": data.content,
            "lost_bytes": data.lost_bytes,
            "train/num_tokens": data.splits["train"].num_tokens,
            "inherited": 0 if data.without is None else len(data.without),
        },
        "trained_on": None if data.trained_on is None else torch.from_numpy(data.trained_on.view(np.int64)),
    }


def keep_overrides(config: DictConfig, written: DictConfig, folder: Path, invocation: CommandLine) -> None:
    """Save the files that `resume` needs: `config`, resolved; `written`, unresolved; choices on axes; and overrides.

    An earlier `results.json`, from another number of steps or other settings, is removed.
    """
    if not is_first_process():
        return
    (folder / "results.json").unlink(missing_ok=True)
    texts = {"config.yaml": OmegaConf.to_yaml(config, resolve=True)}
    if invocation.overrides:
        (folder / ".hydra").mkdir(exist_ok=True)
        texts[".hydra/hydra.yaml"] = OmegaConf.to_yaml({"hydra": {"runtime": {"choices": dict(invocation.choices)}}})
        texts[".hydra/config.yaml"] = OmegaConf.to_yaml(written)
        texts[".hydra/overrides.yaml"] = OmegaConf.to_yaml(list(invocation.overrides))
    for name, text in texts.items():
        write_whole(folder / name, text)


@contextmanager
def evaluation_in_python(
    stored: Checkpoint, network: Network, overrides: Sequence[str], folder: str | Path | None, trusted: Sequence[str]
) -> Iterator[Run]:
    """Set up the evaluation of a network in Python, on its device and with the changes that the caller has made to it.

    `stored` is the checkpoint of the network, and `overrides` are further arguments as for `tinyformer evaluate`.
    """
    device = next(network.parameters()).device.type
    words = [f"checkpoint={hydra_value(str(stored.path))}", f"trainer.accelerator={device}", *overrides]
    with TemporaryDirectory() as unkept, isolated_hydra(), in_sentences("evaluate"), isolated_process():
        is_other = any(word.startswith("step=") for word in overrides)  # a snapshot, loaded from disk
        loaded = offer_stored_run(words, trusted, None if is_other else stored)
        config, invocation = compose_run("evaluate", words)
        with config_keys(config):
            run = set_up(config, Path(folder or unkept), invocation, is_training=False, checkpoint=loaded)
            run.network = network if config.step is None else copy_with(network, run.checkpoint)
            with closing(run.loggers):
                yield run
