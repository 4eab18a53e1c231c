"""A training run, from its config to its summary; `train` and `set_up` name its steps."""

import copy
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from tinyformer.checkpoint.file import FORMAT
from tinyformer.config.admission import describe_config
from tinyformer.config.errors import OUT_OF_MEMORY, ConfigError, config_keys
from tinyformer.config.invocation import Invocation
from tinyformer.config.keys import format_value, key_of_argument
from tinyformer.config.resume import is_first_process
from tinyformer.data import DataModule, QuestionSplit
from tinyformer.errors import ArgumentError
from tinyformer.files import atomic_write, relative_path
from tinyformer.hardware import free_memory
from tinyformer.nn import AttentionMask, Network
from tinyformer.run.lock import locked
from tinyformer.run.loggers import closing, make_loggers
from tinyformer.run.match import match_size, set_size
from tinyformer.run.parts import check_config, evaluation_mask, make_task, require_known_tokens
from tinyformer.run.run import Run
from tinyformer.run.run_results import has_test, score_training, summarise_training
from tinyformer.run.starting_checkpoint import load_start, make_starting_network, prepare_data
from tinyformer.run.summary import describe_non_finite
from tinyformer.run.trainer import (
    Settings,
    choose_kernels,
    compile_arguments,
    make_callbacks,
    make_settings,
    require_one_process,
    set_up_process,
    training_trainer,
)
from tinyformer.tasks import Task
from tinyformer.training import TrainingModule
from tinyformer.training.callbacks.checkpoints import Checkpoints, Interrupted
from tinyformer.training.callbacks.finite import NonFiniteStep
from tinyformer.training.callbacks.progress import StepProgress
from tinyformer.training.callbacks.report import Report
from tinyformer.training.weights_memory import find_memory_shortage


def train(config: DictConfig, folder: Path, invocation: Invocation | None = None) -> dict[str, Any]:
    """Train the model that a config describes; write checkpoints, metrics, pictures and `results.json` into a folder.

    Args:
        config: the config of `train`, as `compose_run("train", ["attention=gqa"])` returns it.
        folder: where the files of the run are written.
        invocation: what the command line says in addition to the config.

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
            return summarise_training(run, *score_training(run)) if is_first_process() else {}


def set_up(config: DictConfig, folder: Path, invocation: Invocation) -> Run:
    """Make the parts of a run, each checked as it is made."""
    written, config = config, copy.deepcopy(config)
    set_up_process()
    start = load_start(config, folder)
    stored = check_config(config, invocation.choices)
    settings = make_settings(config)
    compiled = compile_arguments(config, settings)
    data = prepare_data(config, start, invocation, settings.device)
    stored["task"] |= {"labels": data.labels, "num_texts": data.num_texts}
    task = make_task(config, data)
    matched = match_size(config, invocation, data.tokenizer.vocab_size)
    set_size(stored, matched)
    network = make_starting_network(config, data.tokenizer, start)
    require_known_tokens(task, network)
    mask = evaluation_mask(task, data, "validation")
    if has_test(task, data):
        evaluation_mask(task, data, "test")  # refuses an empty split, which would end the run after its training
    kernels = choose_kernels(network, settings, mask, training=True)
    warning = memory_warning(stored, network, kernels, settings, mask, data)
    if compiled is not None:
        # Otherwise torch compiles each graph twice: for the length of the first batch, then, at the second, for any.
        network.compile(**compiled, dynamic=data.row_format.varying_length or None)
    optimizer, schedule = instantiate(config.optimizer, _convert_="all"), instantiate(config.schedule)
    module = TrainingModule(network, task, data, optimizer, schedule)
    loggers = make_loggers(config, folder, network, invocation.is_sweep, start.first_step if start else 0)
    accept = functools.partial(keep_overrides, config, written, folder, invocation)
    callbacks = [
        *make_callbacks(config),
        make_checkpoints(describe_config(stored, invocation.choices), folder, settings, data, task, accept),
    ]
    report = Report()
    progress = [StepProgress(report)] if settings.arguments["enable_progress_bar"] else []
    trainer = training_trainer(settings, folder, loggers, [report, *callbacks, *progress])
    if invocation.in_python:
        require_one_process(trainer)
    parts = (config, folder, settings, data, task, network, kernels, module, loggers, trainer)
    return Run(*parts, invocation, start, warning, matched)


def memory_warning(
    stored: dict[str, Any],
    network: Network,
    kernels: list[str],
    settings: Settings,
    mask: AttentionMask,
    data: DataModule,
) -> str | None:
    """A sentence if the attention weights of a step will not fit into memory."""
    free, split = free_memory(settings.device), data.splits["train"]
    lengths = split.sizes if isinstance(split, QuestionSplit) else getattr(split, "lengths", None)
    longest = None if lengths is None else int(lengths.max(initial=1))
    facts = (settings.device, settings.dtype, mask, data.batch_size, free, longest)
    shortage = find_memory_shortage(network, kernels, *facts)
    return shortage.describe(functools.partial(key_of_argument, stored), format_value) if shortage else None


def make_checkpoints(
    overrides: dict[str, Any],
    folder: Path,
    settings: Settings,
    data: DataModule,
    task: Task,
    accept: Callable[[], None],
) -> Checkpoints:
    """The callback that saves the run, with what an evaluation needs in addition to the weights."""
    facts = {
        "precision": settings.precision,
        "data_fingerprint": data.fingerprint,
        "content": data.content,
        "train/num_tokens": data.splits["train"].num_tokens,
    }
    contents = {"format": FORMAT, "overrides": overrides, "tokenizer": data.tokenizer.to_json(), "facts": facts}
    contents["trained_on"] = None if data.trained_on is None else torch.from_numpy(data.trained_on.view(np.int64))
    return Checkpoints(folder / "checkpoints", contents, f"val/{task.monitor}", task.higher_is_better, accept)


def keep_overrides(config: DictConfig, written: DictConfig, folder: Path, invocation: Invocation) -> None:
    """Write down the config, as the run has set it and as Hydra has `written` it, and the words, for `resume`."""
    if not is_first_process():
        return
    texts = {"config.yaml": OmegaConf.to_yaml(config, resolve=True)}
    if invocation.overrides:
        (folder / ".hydra").mkdir(exist_ok=True)
        texts[".hydra/config.yaml"] = OmegaConf.to_yaml(written)
        texts[".hydra/overrides.yaml"] = OmegaConf.to_yaml(list(invocation.overrides))
    for name, text in texts.items():
        with atomic_write(folder / name) as temporary:
            temporary.write_text(text, encoding="utf-8")


def fit(run: Run) -> None:
    """Run the training loop.

    Raises:
        ConfigError: a step was not finite.
        SystemExit: see `train`.
    """
    if is_first_process() and run.warning:
        print(run.warning, file=sys.stderr)
    resumed = str(run.start.checkpoint.path) if run.start and run.start.is_resumed else None
    try:
        run.trainer.fit(run.module, datamodule=run.data, ckpt_path=resumed, weights_only=True)
    except (NonFiniteStep, Interrupted) as stop:
        if not is_first_process():  # the first one reports how the run ended
            raise SystemExit(0) from stop
        folder, last = relative_path(run.folder), run.checkpoints.last
        if isinstance(stop, NonFiniteStep):
            raise ConfigError(describe_non_finite(stop, last, run.invocation.call(f"resume={folder}", "…"))) from stop
        print(f"\nStopped at step {run.trainer.global_step}. To continue: {run.invocation.call(f'resume={folder}')}")
        raise SystemExit(128 + stop.signal_number) from stop
    except SystemExit as end:  # Lightning's, after Ctrl-C before the first step
        raise end.__context__ if isinstance(end.__context__, KeyboardInterrupt) else end from None
    except (LookupError, ValueError, TypeError, AttributeError, RuntimeError, ArithmeticError) as error:
        is_explained = isinstance(error, ArgumentError | ConfigError) or OUT_OF_MEMORY.search(str(error))
        if resumed is None or run.checkpoints.num_begun > 1 or is_explained:
            raise
        problem = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        raise ConfigError(
            f"resume={run.config.resume}: the state in {relative_path(Path(resumed))} does not fit this run, or is "
            f"malformed ({problem}); optimizer, trainer and callbacks must be those of its run."
        ) from error
    if not run.trainer.global_step:
        limit = format_value(run.settings.arguments.get("max_time"))
        raise ConfigError(f"trainer.max_time={limit}: ended before the first step; trainer.max_time=00:00:30:00 works.")


def leave_process_group(run: Run) -> None:
    """Leave the process group: the first process alone scores the run, on one device."""
    if run.trainer.world_size > 1:
        torch.distributed.destroy_process_group()
    run.data.trainer = None  # it divided each batch among the processes
