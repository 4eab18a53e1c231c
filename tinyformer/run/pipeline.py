"""A run, from its config to its summary: `train` fits a network, `evaluate` scores or analyses one that was trained."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from hydra.utils import instantiate
from lightning.pytorch.callbacks import ProgressBar
from omegaconf import DictConfig, OmegaConf

from tinyformer.analysis import caption
from tinyformer.checkpoint.file import FORMAT, Checkpoint, copy_with
from tinyformer.checkpoint.snapshots import load_step
from tinyformer.config.admission import Plain
from tinyformer.config.compose import Invocation, compose_run, offer_stored_run
from tinyformer.config.conf import AXES
from tinyformer.config.errors import config_keys, in_sentences, say
from tinyformer.config.folder import has_checkpoint, is_first_process
from tinyformer.config.keys import format_value, hydra_value, key_of_argument
from tinyformer.config.process import keep_hydra, keep_process
from tinyformer.config.stored import describe_config, require_readable
from tinyformer.data import DataModule, QuestionSplit
from tinyformer.errors import ArgumentError, argument_path
from tinyformer.files import import_matplotlib, write_whole
from tinyformer.hardware import describe_device, free_memory
from tinyformer.nn import AttentionMask, Network
from tinyformer.run.analysis_run import analyse, describe_subject, write_predictions
from tinyformer.run.backends import choose_kernels, training_kernels
from tinyformer.run.compiling import compile_network, decide_compiling
from tinyformer.run.data import evaluation_data, training_data
from tinyformer.run.fitting import ending_in_a_queue, fit, leaving_no_group
from tinyformer.run.loggers import closing, log_hyperparameters, make_loggers
from tinyformer.run.match import match_size, set_size
from tinyformer.run.parts import (
    Options,
    check_config,
    evaluation_mask,
    make_callbacks,
    make_data,
    make_network,
    prepare_task,
    require_known_tokens,
    require_monitored,
    set_labels,
)
from tinyformer.run.results import has_test, score_evaluation, score_training, summarise_evaluation, summarise_training
from tinyformer.run.run import Run
from tinyformer.run.sample import Generation, make_generation
from tinyformer.run.starting_checkpoint import Start, load_start, refuse_finished, starting_network
from tinyformer.run.trainer import (
    Settings,
    make_settings,
    require_one_process,
    scoring_trainer,
    set_up_process,
    training_trainer,
)
from tinyformer.training import TrainingModule
from tinyformer.training.callbacks.checkpoints import Checkpoints
from tinyformer.training.callbacks.progress import StepProgress
from tinyformer.training.callbacks.report import Report
from tinyformer.training.processes import has_processes
from tinyformer.training.weights_memory import find_memory_shortage


def train(config: DictConfig, folder: Path, invocation: Invocation | None = None) -> dict[str, Any]:
    """Train the model that a config describes; write checkpoints, metrics, pictures and `results.json` into a folder.

    Returns the contents of `results.json`; nothing in processes other than the first. The caller has locked the
    folder.

    Raises:
        ConfigError: something in the config cannot work; nothing was computed or written.
        ArgumentError: the same, in the names of Python arguments; `config_keys` turns them into keys.
        SystemExit: a signal stopped the run, with 128 + its number as the code, after its state was saved.
    """
    if config.resume == "auto":
        config.resume = str(folder) if has_checkpoint(folder) else None
    run = set_up(config, folder, invocation or Invocation())
    with ending_in_a_queue(run), closing(run.loggers), leaving_no_group():
        fit(run)
        with run.module.whole_network():
            run.network = run.module.network
            if has_processes():
                torch.distributed.destroy_process_group()
            run.data.trainer = None  # it divided each batch among the processes; the first alone scores the run
            return summarise_training(run, *score_training(run)) if is_first_process() else {}


def evaluate(
    config: DictConfig, folder: Path, invocation: Invocation | None = None, checkpoint: Checkpoint | None = None
) -> dict[str, Any]:
    """Score a checkpoint on a split and sample text, or analyse it; write `results.json` and pictures into a folder.

    The config is composed on top of that of the checkpoint, which is loaded unless it is given. Returns the contents of
    `results.json`; errors are those of `train`.
    """
    if config.step == "all" and (config.score or config.analysis is None):
        reason = "analyses each snapshot, and scores none"
        works = {"analysis": "heads"} if config.analysis is None else {"score": False}
        raise ArgumentError("step", "all", reason, works)
    run = set_up_evaluation(config, folder, invocation or Invocation(), checkpoint)
    facts = describe_subject(run.checkpoint.path, run.checkpoint.step, run.data, run.split)
    say(caption(facts | {"device": describe_device(run.settings.device)}), flush=True)
    with closing(run.loggers):
        # First, so that a mistake in the analysis is refused before anything is scored or written.
        findings = write_predictions(run) if run.config.predict else analyse(run)
        (folder / "results.json").unlink(missing_ok=True)  # of an earlier evaluation, which had other settings
        return summarise_evaluation(run, findings, score_evaluation(run, findings) if run.is_scored else None)


def set_up(config: DictConfig, folder: Path, invocation: Invocation) -> Run:
    """Make the parts of a training run, each checked as it is made."""
    written, config = config, copy.deepcopy(config)
    set_up_process()
    check_config(config, invocation.choices)
    values: Any = OmegaConf.to_container(config, resolve=True)
    options, generation = Options.of(values), make_generation(values["generate"])
    settings = make_settings(values["trainer"], options)
    config.trainer.precision = settings.precision
    start = load_start(options.resume, options.init_from, folder)
    if start is not None:
        if start.is_resumed:
            refuse_finished(start, folder, settings.arguments["max_steps"])
        else:
            start.require_class(config.network._target_)
        if config.model.vocab_size is None:
            config.model.vocab_size = start.larger_vocabulary
    # Now, since Hydra's `instantiate` resolves, in place, the nodes that its node refers to.
    stored: Any = OmegaConf.to_container(config, resolve=False)
    optimizer, schedule = instantiate(config.optimizer, _convert_="all"), instantiate(config.schedule)
    chosen = make_callbacks(config.callbacks)
    inherits_tokenizer = options.init_from is not None and not invocation.overridden("tokenizer")
    data = training_data(partial(make_data, config, invocation), start, inherits_tokenizer, settings.device)
    stored["task"] |= {"labels": data.labels, "num_texts": data.num_texts}
    set_labels(config.task, data)
    task = instantiate(config.task.objective, _convert_="all")
    prepare_task(task, config, data, generation)
    matched = match_size(config, invocation, data.tokenizer.vocab_size)
    set_size(stored, matched)
    network = starting_network(partial(make_network, config, data.tokenizer), options, start, stored["task"])
    require_known_tokens(task, network)
    mask = evaluation_mask(task, data, "validation", settings.limit)
    if has_test(task, data):
        evaluation_mask(task, data, "test", settings.limit)  # refuses what would end the run after its training
    require_monitored(chosen, task, network, data)
    kernels, measured = training_kernels(network, settings, mask, task, data, start)
    settings = decide_compiling(settings, options, network, data, start)
    module = TrainingModule(network, task, data, optimizer, schedule)
    first_step = start.checkpoint.step if start is not None and start.is_resumed else 0
    contents = checkpoint_contents(stored, invocation.choices, settings, data, measured)
    loggers = make_loggers(config.logger, folder, invocation.is_sweep, first_step)
    saver = Checkpoints(
        *(folder / "checkpoints", contents, f"val/{task.monitor}", task.higher_is_better),
        accept=partial(keep_overrides, config, written, folder, invocation),
    )
    callbacks = [report := Report(), *chosen.values(), saver]
    if settings.arguments["enable_progress_bar"] and not any(isinstance(each, ProgressBar) for each in callbacks):
        callbacks.append(StepProgress(report))
    trainer = training_trainer(settings, folder, loggers, callbacks)
    compile_network(network, settings, data.row_format.varying_length, mask, trainer.world_size)
    if invocation.in_python:
        require_one_process(trainer)
    parts = (settings, data, "validation", task, generation, network, kernels, module, loggers, trainer)
    run = Run(
        *(config, folder, invocation, start, stored, *parts),
        matched=matched,
        warning=memory_warning(stored, network, kernels, settings, mask, data),
        backends=measured,
        is_compiled=settings.compile_mode is not None,
    )
    log_hyperparameters(run.loggers, stored, run.network)
    return run


def set_up_evaluation(
    config: DictConfig, folder: Path, invocation: Invocation, checkpoint: Checkpoint | None = None
) -> Run:
    """Make the parts of an evaluation, each checked as it is made; see `evaluate`."""
    config = copy.deepcopy(config)
    set_up_process()
    check_config(config, invocation.choices)
    values: Any = OmegaConf.to_container(config, resolve=True)
    options, generation = Options.of(values), make_generation(values["generate"])
    with argument_path(passed={"path": "checkpoint"}):
        path = checkpoint.path if checkpoint else options.checkpoint
        start = Start(load_step(path, options.step, checkpoint), "checkpoint")
    if values["trainer"].get("precision") == "auto":
        config.trainer.precision = values["trainer"]["precision"] = start.checkpoint.facts.get("precision", "32-true")
    settings = make_settings(values["trainer"], options)
    is_scored = check_score(options, config.get("analysis") is not None, generation)
    own: Any = OmegaConf.to_container(config, resolve=False)
    # What the network is may be changed, its data and tokenizer are those of the run.
    stored = start.stored | {name: own[name] for name in AXES[:-2] if name in own}
    make = partial(make_data, config, invocation)
    data, split = evaluation_data(make, start, options.split, values["data"], options.predict)
    set_labels(config.task, data)
    task = instantiate(config.task.objective, _convert_="all")
    prepare_task(task, config, data, generation)
    network = starting_network(partial(make_network, config, data.tokenizer), options, start, stored["task"])
    require_known_tokens(task, network)
    mask = evaluation_mask(task, data, split, settings.limit)
    analysis = instantiate(config.analysis, _convert_="all") if config.get("analysis") else None
    kernels = choose_kernels(network, settings, mask, training=analysis is not None and analysis.needs_gradient)
    step, path = start.checkpoint.step, start.checkpoint.path
    module = TrainingModule(network, task, data, evaluated=split, first_step=step, checkpoint=path)
    loggers = make_loggers(config.logger, folder, invocation.is_sweep)
    callbacks = [*make_callbacks(config.callbacks).values()]
    trainer = scoring_trainer(settings, folder, loggers, callbacks, settings.arguments.get("profiler"))
    parts = (settings, data, split, task, generation, network, kernels, module, loggers, trainer)
    run = Run(config, folder, invocation, start, stored, *parts, analysis=analysis, is_scored=is_scored)
    log_hyperparameters(run.loggers, own, run.network)
    return run


def check_score(options: Options, is_analysed: bool, generation: Generation) -> bool:
    """Whether the split of an evaluation is scored: `score`; where that is null, whether there is no analysis.

    Nothing to do is refused, and a prompt that would be ignored.
    """
    if options.predict and (is_analysed or options.score or options.split or generation.has_prompt):
        reason = "predicts all rows of the files, without a score, a split, an analysis or a prompt"
        raise ArgumentError("predict", True, reason, {"predict": False})
    if options.score is False and not is_analysed:
        raise ArgumentError("score", False, "leaves nothing to do without an analysis", {"score": True})
    is_scored = not (is_analysed or options.predict) if options.score is None else options.score
    if not is_scored:
        with argument_path("generate"):
            generation.refuse_prompt("is not read by an analysis alone; add score=true")
    return is_scored


def memory_warning(
    stored: Plain, network: Network, kernels: list[str], settings: Settings, mask: AttentionMask, data: DataModule
) -> str | None:
    """A sentence if the attention weights of a training step will not fit into memory."""
    free, split = free_memory(settings.device), data.splits["train"]
    lengths = split.sizes if isinstance(split, QuestionSplit) else getattr(split, "lengths", None)
    longest = None if lengths is None else int(lengths.max(initial=1))
    facts = (settings.device, settings.dtype, mask, data.batch_size, free, longest)
    shortage = find_memory_shortage(network, kernels, *facts)
    return shortage.describe(partial(key_of_argument, stored), format_value) if shortage else None


def checkpoint_contents(
    stored: Plain, choices: Mapping[str, Any], settings: Settings, data: DataModule, backends: str | None
) -> dict[str, Any]:
    """What a checkpoint has for an evaluation in addition to the weights."""
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


def keep_overrides(config: DictConfig, written: DictConfig, folder: Path, invocation: Invocation) -> None:
    """Save what `resume` needs: the config of the run, as Hydra has `written` it, its choices and typed overrides.

    Results of an earlier part of the run, which had another number of steps or other settings, are removed.
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
    """The evaluation of a model in Python, which stays on its device and keeps what the caller has changed in it.

    It was loaded from `stored`, which is not read again; `overrides` are further words of `tinyformer evaluate`.
    """
    device = next(network.parameters()).device.type
    words = [f"checkpoint={hydra_value(str(stored.path))}", f"trainer.accelerator={device}", *overrides]
    with TemporaryDirectory() as unkept, keep_hydra(), in_sentences("evaluate"), keep_process():
        import_matplotlib()
        is_other = any(word.startswith("step=") for word in overrides)  # of the run, as it is on disk
        loaded = offer_stored_run(words, trusted, None if is_other else stored)
        config, invocation = compose_run("evaluate", words)
        with config_keys(config):
            run = set_up_evaluation(config, Path(folder or unkept), invocation, loaded)
            run.network = network if config.step is None else copy_with(network, run.checkpoint)
            with closing(run.loggers):
                yield run
