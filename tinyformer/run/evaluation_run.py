"""An evaluation, from a checkpoint to its summary; `evaluate` and `set_up` name its steps."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from tinyformer.checkpoint.file import Checkpoint, load_checkpoint, load_weights, require_fitting
from tinyformer.config.admission import AXES, admit_config, offer_stored_run
from tinyformer.config.errors import config_keys, in_sentences
from tinyformer.config.invocation import Invocation
from tinyformer.config.isolation import keep_hydra, keep_process
from tinyformer.config.keys import hydra_value
from tinyformer.config.sweep import compose_run
from tinyformer.errors import ArgumentError, argument_path, require_choice
from tinyformer.files import import_matplotlib
from tinyformer.nn import LearnedPosition, Network
from tinyformer.run.analysis_run import analyse
from tinyformer.run.evaluation_data import prepare_data
from tinyformer.run.loggers import closing, make_loggers
from tinyformer.run.parts import (
    check_config,
    evaluation_mask,
    make_network,
    make_seeded_network,
    make_task,
    require_known_tokens,
)
from tinyformer.run.run import Evaluation
from tinyformer.run.run_results import score_evaluation, summarise_evaluation
from tinyformer.run.trainer import choose_kernels, make_callbacks, make_settings, scoring_trainer, set_up_process
from tinyformer.training import TrainingModule

SPLITS = ("train", "validation", "test", "all")


def evaluate(
    config: DictConfig, folder: Path, invocation: Invocation | None = None, checkpoint: Checkpoint | None = None
) -> dict[str, Any]:
    """Score a checkpoint on a split and sample text, or analyse it; write `results.json` and pictures into a folder.

    Args:
        config: the config of `evaluate`, composed on top of the checkpoint's own.
        folder: where the files of the evaluation are written.
        invocation: what the command line says in addition to the config.
        checkpoint: the one that `config.checkpoint` names, if it was loaded already.

    Returns:
        The contents of `results.json`.

    Raises:
        ConfigError: something in the config cannot work, or does not fit the checkpoint.
    """
    with config_keys(config):
        run = set_up(config, folder, invocation or Invocation(), checkpoint)
        with closing(run.loggers):
            # First, so that a mistake in the analysis is refused before anything is scored or written.
            findings = analyse(run)
            return summarise_evaluation(run, findings, score_evaluation(run, findings) if run.is_scored else None)


def set_up(config: DictConfig, folder: Path, invocation: Invocation, checkpoint: Checkpoint | None) -> Evaluation:
    """Make the parts of an evaluation, each checked as it is made."""
    config = copy.deepcopy(config)
    set_up_process()
    unresolved = check_config(config, invocation.choices)
    require_choice("split", config.split, (None, *SPLITS))
    with argument_path(passed={"path": "checkpoint"}):
        checkpoint = checkpoint or load_checkpoint(config.checkpoint)
    stored = admit_config(checkpoint, lambda key, name: OmegaConf.select(config, key) == name)
    # What the network is may be changed, its data and tokenizer are those of the run.
    stored |= {name: unresolved[name] for name in AXES[:-2] if name in unresolved}
    if config.trainer.precision == "auto":
        config.trainer.precision = checkpoint.facts.get("precision", "32-true")
    settings = make_settings(config)
    data, split = prepare_data(config, stored, checkpoint, invocation)
    task = make_task(config, data)
    is_scored = check_score(config)
    unmade = make_network(config, data.tokenizer, "meta")
    require_positions(unmade, checkpoint)
    require_fitting(unmade, checkpoint)  # before memory is allocated
    network = make_seeded_network(config, data.tokenizer)
    require_known_tokens(task, network)
    load_weights(network, checkpoint)
    mask = evaluation_mask(task, data, split)
    analysis = instantiate(config.analysis, _convert_="all") if config.get("analysis") else None
    kernels = choose_kernels(network, settings, mask, training=analysis is not None and analysis.needs_gradient)
    module = TrainingModule(
        network, task, data, evaluated=split, first_step=checkpoint.step, checkpoint=checkpoint.path
    )
    loggers, callbacks = make_loggers(config, folder, network, invocation.is_sweep), make_callbacks(config)
    trainer = scoring_trainer(settings, folder, loggers, callbacks, settings.arguments.get("profiler"))
    parts = (config, folder, settings, data, task, network, kernels, module, loggers, trainer)
    return Evaluation(*parts, checkpoint, stored, split, analysis, is_scored)


def require_positions(network: Network, checkpoint: Checkpoint) -> None:
    """Refuse a context length other than the run's where each position has a learned vector.

    All other positional encodings are computed for any position, or from clipped distances.

    Raises:
        ArgumentError: `model.max_seq_len` is not the number of learned positions.
    """
    for name, module in network.named_modules():
        weight = checkpoint.weights.get(f"{name}.embedding.weight")
        if isinstance(module, LearnedPosition) and weight is not None and len(weight) != module.max_seq_len:
            reason = f"the run has learned vectors for {len(weight)} positions, and for no others"
            raise ArgumentError("model.max_seq_len", module.max_seq_len, reason, {"model.max_seq_len": len(weight)})


def check_score(config: DictConfig) -> bool:
    """Whether the split is scored: `score`; where that is null, whether there is no analysis.

    Raises:
        ArgumentError: there is neither a score nor an analysis, or a prompt that would be ignored.
    """
    require_choice("score", config.score, (None, True, False))
    is_analysed = config.get("analysis") is not None
    if config.score is False and not is_analysed:
        raise ArgumentError("score", False, "leaves nothing to do without an analysis", {"score": True})
    is_scored = not is_analysed if config.score is None else config.score
    for name in ("prompt", "prompt_file"):
        if config.generate[name] is not None and not is_scored:
            reason = "is not read by an analysis alone; add score=true"
            raise ArgumentError(f"generate.{name}", config.generate[name], reason)
    return is_scored


@contextmanager
def evaluation_in_python(
    checkpoint: Path, network: Network, overrides: Sequence[str], folder: str | Path | None, trusted: Sequence[str]
) -> Iterator[Evaluation]:
    """The evaluation of a model in Python, which stays on its device and keeps what the caller has changed in it.

    Args:
        checkpoint: the file that it was loaded from.
        network: the model.
        overrides: the words of the command line of `tinyformer evaluate` beside the checkpoint.
        folder: the folder of the evaluation; None for one that is not kept.
        trusted: further classes that the checkpoint may use.

    Raises:
        ConfigError: something in the overrides cannot work, or does not fit the checkpoint.
    """
    device = next(network.parameters()).device.type
    words = [f"checkpoint={hydra_value(str(checkpoint))}", f"trainer.accelerator={device}", *overrides]
    with TemporaryDirectory() as unkept, keep_hydra(), in_sentences("evaluate"), keep_process():
        import_matplotlib()
        loaded = offer_stored_run(words, trusted)
        config, invocation = compose_run("evaluate", words)
        with config_keys(config):
            run = set_up(config, Path(folder or unkept), invocation, loaded)
            run.network = network
            with closing(run.loggers):
                yield run
