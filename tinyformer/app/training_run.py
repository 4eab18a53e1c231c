"""A training run, from its config to its summary; `train` and `set_up` name its steps."""

import copy
import functools
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from hydra.utils import instantiate
from lightning.pytorch.loggers import Logger
from omegaconf import DictConfig, OmegaConf

from tinyformer.analysis import Findings
from tinyformer.app.analysis_run import examine, keep_findings
from tinyformer.app.checks import check_types
from tinyformer.app.config import Invocation
from tinyformer.app.errors import OUT_OF_MEMORY, ConfigError, config_keys
from tinyformer.app.keys import format_value, key_of_argument
from tinyformer.app.lock import locked
from tinyformer.app.loggers import closing, make_loggers, wandb_location
from tinyformer.app.parts import (
    evaluation_mask,
    make_task,
    require_cross_attention,
    require_known_tokens,
    require_network_of,
)
from tinyformer.app.resume import is_first_process
from tinyformer.app.sample import check_generation, describe_prompts, print_generated, refuse_prompts
from tinyformer.app.scores import register_score
from tinyformer.app.start import Start, keep_vocabulary, load_start, make_starting_network, prepare_data
from tinyformer.app.stored_config import describe_config
from tinyformer.app.summary import (
    describe_events,
    describe_non_finite,
    describe_profile,
    describe_skipped,
    describe_speed,
    describe_split,
    describe_telemetry,
    describe_too_long,
    print_summary,
    relative_path,
    speed_results,
    split_results,
    telemetry_results,
    write_results,
)
from tinyformer.app.trainer import (
    Settings,
    choose_kernels,
    compile_arguments,
    forward_context,
    make_callbacks,
    make_settings,
    scoring_trainer,
    set_up_process,
    training_trainer,
)
from tinyformer.checkpoint import FORMAT, load_checkpoint, load_weights
from tinyformer.data import DataModule, QuestionSplit
from tinyformer.errors import ArgumentError
from tinyformer.hardware import describe_device, free_memory
from tinyformer.nn import AttentionMask, Network
from tinyformer.tasks import Task
from tinyformer.training import AttentionTelemetry, TrainingModule
from tinyformer.training.callbacks import Checkpoints, FiniteCheck, Interrupted, NonFiniteStep, Report, StepProgress
from tinyformer.training.weights_memory import find_memory_shortage


def train(config: DictConfig, folder: Path, invocation: Invocation | None = None) -> dict[str, Any]:
    """Train the model that a config describes; leave checkpoints, metrics, pictures and `results.json` in a folder.

    Args:
        config: of `train`, as `compose_run("train", ["attention=gqa"])` gives it.
        folder: for the files of the run.
        invocation: what the command line says beside the config.

    Returns:
        The contents of `results.json`; empty in processes other than the first.

    Raises:
        ConfigError: something in the config cannot work; nothing was computed or written.
        SystemExit: a signal stopped the run, with 128 + its number as the code, after its state was saved.
    """
    with config_keys(config), locked(folder):
        run = set_up(config, folder, invocation or Invocation())
        with closing(run.loggers):
            fit(run)
            leave_process_group(run)
            return summarise(run, score(run)) if is_first_process() else {}


def set_up(config: DictConfig, folder: Path, invocation: Invocation) -> "Run":
    """Make the parts of a run, each checked as it is made."""
    config = copy.deepcopy(config)
    set_up_process()
    start = load_start(config, folder)
    keep_vocabulary(config, start)
    stored = check_config(config, invocation.choices)
    settings = make_settings(config)
    compiled = compile_arguments(config, settings)
    data = prepare_data(config, start, invocation, settings.device)
    stored["task"]["labels"] = data.labels
    task = make_task(config, data)
    require_network_of(task, config)
    refuse_prompts(config.generate, task)
    network = make_starting_network(config, data.tokenizer, start)
    require_known_tokens(task, network)
    mask = evaluation_mask(task, data, "validation")
    kernels = choose_kernels(network, settings, mask, training=True)
    warning = memory_warning(stored, network, kernels, settings, mask, data)
    if compiled is not None:
        # Else torch compiles each graph twice: first for the length of the first batch, and at the second for any.
        network.compile(**compiled, dynamic=data.varying_length or None)
    module = make_module(config, network, task, data)
    loggers = make_loggers(config, folder, invocation.is_sweep, start.first_step if start else 0)
    callbacks = [
        *make_callbacks(config),
        make_checkpoints(describe_config(stored, invocation.choices), folder, settings, data, task),
    ]
    report = Report()
    progress = [StepProgress(report)] if settings.arguments["enable_progress_bar"] else []
    trainer = training_trainer(settings, folder, loggers, [report, *callbacks, *progress])
    kernel = ", ".join(sorted(set(kernels)))
    command = invocation.command
    return Run(config, folder, command, start, settings, data, task, network, kernel, warning, module, loggers, trainer)


@dataclass
class Run:
    """The parts of a training run before its first step.

    Args:
        config: the config, with what the run has set in it.
        folder: the folder of the run.
        command: the program as the user called it.
        start: the checkpoint that the run starts from, if any.
        settings: how it is computed.
        data: the tokens.
        task: the task.
        network: the model.
        kernel: the attention kernels of its layers.
        warning: a sentence where the attention weights will not fit into memory.
        module: Lightning's module.
        loggers: the loggers.
        trainer: Lightning's trainer, with all callbacks.
    """

    config: DictConfig
    folder: Path
    command: str
    start: Start | None
    settings: Settings
    data: DataModule
    task: Task
    network: Network
    kernel: str
    warning: str | None
    module: TrainingModule
    loggers: list[Logger]
    trainer: L.Trainer

    @property
    def callbacks(self) -> list[L.Callback]:
        """The callbacks of the trainer."""
        return self.trainer.callbacks  # type: ignore[attr-defined]

    @property
    def report(self) -> Report:
        """The callback that measures speed."""
        return next(callback for callback in self.callbacks if isinstance(callback, Report))

    @property
    def checkpoints(self) -> Checkpoints:
        """The callback that saves the run."""
        return next(callback for callback in self.callbacks if isinstance(callback, Checkpoints))

    @property
    def telemetry(self) -> list[AttentionTelemetry]:
        """The callbacks that measure heads."""
        return [callback for callback in self.callbacks if isinstance(callback, AttentionTelemetry)]

    @property
    def skipped(self) -> list[int]:
        """The steps that were not finite and were left out."""
        return [step for callback in self.callbacks if isinstance(callback, FiniteCheck) for step in callback.skipped]


@dataclass(frozen=True)
class Scores:
    """What is computed once, at the end of a run.

    Args:
        validation: metrics of the last weights.
        test: metrics of the best weights on the test split; empty if the task does not test.
        findings: the task's tables and figures.
    """

    validation: Mapping[str, float | None]
    test: Mapping[str, float | None]
    findings: Findings


def check_config(config: DictConfig, choices: Mapping[str, Any]) -> dict[str, Any]:
    """Check every value that a class or function gets.

    Returns:
        The config as plain containers and unresolved, so that overrides act on it when it is read from a checkpoint.
    """
    require_cross_attention(config)
    # First, since Hydra's `instantiate` resolves the nodes that its node refers to in place.
    unresolved: Any = OmegaConf.to_container(config, resolve=False)
    register_score(unresolved)
    check_types(config, choices=choices)
    check_generation(config.generate)
    return unresolved


def memory_warning(
    stored: dict[str, Any],
    network: Network,
    kernels: list[str],
    settings: Settings,
    mask: AttentionMask,
    data: DataModule,
) -> str | None:
    """A sentence where the attention weights of a step will not fit into memory."""
    free, split = free_memory(settings.device), data.splits["train"]
    lengths = split.sizes if isinstance(split, QuestionSplit) else getattr(split, "lengths", None)
    longest = None if lengths is None else int(lengths.max(initial=1))
    facts = (settings.device, settings.dtype, mask, data.batch_size, free, longest)
    shortage = find_memory_shortage(network, kernels, *facts)
    return shortage.describe(functools.partial(key_of_argument, stored), format_value) if shortage else None


def make_module(config: DictConfig, network: Network, task: Task, data: DataModule) -> TrainingModule:
    """Lightning's module, with optimizer and schedule."""
    optimizer, schedule = instantiate(config.optimizer, _convert_="all"), instantiate(config.schedule)
    return TrainingModule(network, task, data, optimizer, schedule)


def make_checkpoints(
    stored: dict[str, Any], folder: Path, settings: Settings, data: DataModule, task: Task
) -> Checkpoints:
    """The callback that saves the run, with what evaluation needs beside the weights."""
    facts = {
        "precision": settings.precision,
        "data_fingerprint": data.fingerprint,
        "train/num_tokens": data.splits["train"].num_tokens,
    }
    contents = {"format": FORMAT, **stored, "tokenizer": data.tokenizer.to_json(), "facts": facts}
    return Checkpoints(folder / "checkpoints", contents, f"val/{task.monitor}", task.higher_is_better)


def fit(run: Run) -> None:
    """Make the steps of a run.

    Raises:
        ConfigError: a step was not finite.
        SystemExit: see `train`.
    """
    if is_first_process():
        (run.folder / "config.yaml").write_text(OmegaConf.to_yaml(run.config, resolve=True))
        if run.warning:
            print(run.warning, file=sys.stderr)
    resumed = str(run.start.checkpoint.path) if run.start and run.start.is_resumed else None
    try:
        run.trainer.fit(run.module, datamodule=run.data, ckpt_path=resumed, weights_only=True)
    except (NonFiniteStep, Interrupted) as stop:
        if not is_first_process():  # the first one tells how the run has ended
            raise SystemExit(0) from stop
        folder, last = relative_path(run.folder), run.checkpoints.last
        if isinstance(stop, NonFiniteStep):
            raise ConfigError(describe_non_finite(stop, last, folder, run.command)) from stop
        print(f"\nStopped at step {run.trainer.global_step}. To continue: {run.command} resume={folder}")
        raise SystemExit(128 + stop.signal_number) from stop
    except (LookupError, ValueError, TypeError, AttributeError, RuntimeError, ArithmeticError) as error:
        is_explained = isinstance(error, ArgumentError | ConfigError) or OUT_OF_MEMORY.search(str(error))
        if resumed is None or run.checkpoints.num_begun > 1 or is_explained:
            raise
        problem = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        raise ConfigError(
            f"resume={run.config.resume}: the state in {relative_path(Path(resumed))} does not fit this run, or is "
            f"malformed ({problem}); optimizer, trainer and callbacks must be those of its run."
        ) from error


def leave_process_group(run: Run) -> None:
    """Let the processes of a run part: the first one alone scores it, on one device."""
    if run.trainer.world_size > 1:
        torch.distributed.destroy_process_group()
    run.data.trainer = None  # by which the data of a batch were divided among the processes


def score(run: Run) -> Scores:
    """Score the last weights on the validation split and, if the task tests, the best weights on the test split."""
    data, task = run.data, run.task
    if not run.module.metrics:  # the run had made all its steps before it was killed
        scoring_trainer(run.settings, run.folder).validate(run.module, data.val_dataloader(), verbose=False)
    trainer, split, test = scoring_trainer(run.settings, run.folder), "validation", {}
    with forward_context(trainer, run.network):
        final = task.final_metrics(run.network, run.settings.decoded_part(data, "validation"), data.tokenizer)
    validation = run.module.metrics | final
    if task.tests_best and "test" in data.splits:
        load_weights(run.network, load_checkpoint(run.checkpoints.best))
        module, split = TrainingModule(run.network, task, data, evaluated="test"), "test"
        trainer.validate(module, data.test_dataloader(), verbose=False)
        with forward_context(trainer, run.network):
            part = run.settings.decoded_part(data, "test")
            test = module.metrics | task.final_metrics(run.network, part, data.tokenizer)
    findings = examine(task, run.network, data, split, trainer)
    keep_findings(findings, run.folder, run.loggers)
    return Scores(validation, test, findings)


def make_results(run: Run, scores: Scores) -> dict[str, Any]:
    """The contents of `results.json`, but for the sample."""
    splits, limit = run.data.splits, run.settings.limit
    test = split_results(scores.test, splits["test"], "test", limit) if scores.test else {}
    return {
        **split_results(scores.validation, splits["validation"], "val", limit),
        f"best/val/{run.task.monitor}": run.checkpoints.best_value,
        **test,
        "train/num_tokens": splits["train"].num_tokens,
        "train/num_unknown": splits["train"].num_unknown,
        "train/loss": run.report.latest.get("train/loss"),
        **speed_results(run.report),
        "num_parameters": run.network.num_parameters(),
        "device": describe_device(run.settings.device),
        "precision": run.settings.precision,
        "attention_backend": run.config.attention.backend,
        "attention_kernel": run.kernel,
        "steps": run.trainer.global_step,
        "skipped_steps": run.skipped,
        **telemetry_results(run.telemetry, run.report.total.seconds),
        "data_fingerprint": run.data.fingerprint,
    }


def summarise(run: Run, scores: Scores) -> dict[str, Any]:
    """Write `results.json`, print the summary and a text sample."""
    results, splits, limit = make_results(run, scores), run.data.splits, run.settings.limit
    path, folder = run.folder / "results.json", relative_path(run.folder)
    write_results(path, results | {"sample": None})
    pictures = [picture for callback in run.telemetry for picture in callback.paths]
    events = [event for callback in run.telemetry for event in callback.detector.events]
    max_seq_len = run.network.max_seq_len
    print_summary(
        {
            "parameters": f"{results['num_parameters']:,}",
            "device": f"{results['device']}, {results['precision']}",
            "attention": f"{run.kernel} kernel (attention.backend={results['attention_backend']})",
            "warning": run.warning,
            "speed": describe_speed(run.report, run.trainer.global_step),
            "telemetry": describe_telemetry(results, run.telemetry),
            "data": f"{run.data.name}, {results['train/num_tokens']:,} training tokens"
            f"{describe_too_long(splits['train'])}, fingerprint {run.data.fingerprint[:12]}",
            **describe_split(run.task, scores.validation, splits["validation"], "val", limit),
            **(describe_split(run.task, scores.test, splits["test"], "test", limit) if scores.test else {}),
            "examples": ", ".join(map(relative_path, scores.findings.files)) or None,
            "checkpoints": f"{folder}/checkpoints/last.ckpt, best.ckpt",
            "attention maps": relative_path(pictures[-1]) if pictures else None,
            "events": describe_events(events, run.folder),
            "not finite": describe_skipped(run.skipped),
            "logs": f"{folder}/metrics.csv, attention/heads.csv, results.json",
            "prompt": describe_prompts(run.config.generate, run.data.tokenizer, max_seq_len, run.task),
            "profile": describe_profile(run.folder) if run.settings.arguments.get("profiler") else None,
            "wandb": wandb_location(run.loggers),
        }
    )
    if run.task.generates:
        with forward_context(run.trainer, run.network):
            results["sample"] = print_generated(run.config.generate, run.task, run.network, run.data.tokenizer)
        write_results(path, results)
    return results
