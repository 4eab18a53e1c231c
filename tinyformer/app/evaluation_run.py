"""An evaluation, from a checkpoint to its summary; `evaluate` and `set_up` name its steps."""

import copy
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from tinyformer.analysis import Analysis, Findings
from tinyformer.app.admission import AXES, admit_config
from tinyformer.app.analysis_run import describe_subject, examine, keep_findings, make_subject, run_analysis
from tinyformer.app.config import Invocation
from tinyformer.app.errors import config_keys
from tinyformer.app.evaluation_data import prepare_data, reads_own_data
from tinyformer.app.loggers import closing, make_loggers, wandb_location
from tinyformer.app.parts import (
    evaluation_mask,
    make_network,
    make_seeded_network,
    make_task,
    require_known_tokens,
    require_network_of,
)
from tinyformer.app.run import Parts
from tinyformer.app.sample import describe_prompts, print_generated, refuse_prompts
from tinyformer.app.summary import (
    data_results,
    describe_data,
    describe_split,
    is_partial,
    print_summary,
    split_results,
    write_results,
)
from tinyformer.app.trainer import (
    choose_kernels,
    forward_context,
    make_callbacks,
    make_settings,
    scoring_trainer,
    set_up_process,
)
from tinyformer.app.training_run import check_config
from tinyformer.checkpoint import Checkpoint, load_checkpoint, load_weights, require_fitting
from tinyformer.data.base import count
from tinyformer.errors import ArgumentError, argument_path, require_choice
from tinyformer.files import relative_path
from tinyformer.hardware import describe_device
from tinyformer.nn import LearnedPosition, Network
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
            scores = score(run) if run.is_scored else None
            if scores is not None:
                findings.files += task_findings(run).files
            return summarise(run, scores, findings)


def set_up(config: DictConfig, folder: Path, invocation: Invocation, checkpoint: Checkpoint | None) -> "Evaluation":
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
    require_network_of(task, config)
    refuse_prompts(config.generate, task)
    check_score(config)
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
    kernel = ", ".join(sorted(set(kernels))) or "its own"
    parts = (config, folder, settings, data, task, network, kernel, module, loggers, trainer)
    return Evaluation(*parts, checkpoint, stored, split, analysis)


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


def scores_split(config: DictConfig) -> bool:
    """Whether the split is scored: `score`; where that is null, whether there is no analysis."""
    return config.get("analysis") is None if config.score is None else config.score


def check_score(config: DictConfig) -> None:
    """Refuse `score=false` where there is nothing else to do, and a prompt that would be ignored.

    Raises:
        ArgumentError: there is neither a score nor an analysis, or a prompt without a score.
    """
    require_choice("score", config.score, (None, True, False))
    if config.score is False and config.get("analysis") is None:
        raise ArgumentError("score", False, "leaves nothing to do without an analysis", {"score": True})
    for name in ("prompt", "prompt_file"):
        if config.generate[name] is not None and not scores_split(config):
            reason = "is not read by an analysis alone; add score=true"
            raise ArgumentError(f"generate.{name}", config.generate[name], reason)


@dataclass
class Evaluation(Parts):
    """An evaluation before it computes anything.

    Args:
        checkpoint: the checkpoint.
        stored: the unresolved config of the network as it is evaluated, for checkpoints of pruned copies.
        split: the split that is scored.
        analysis: the analysis, if one is chosen.
    """

    checkpoint: Checkpoint
    stored: dict[str, Any]
    split: str
    analysis: Analysis | None

    @property
    def is_scored(self) -> bool:
        """Whether the split is scored, its attention maps are drawn and text is sampled."""
        return scores_split(self.config)

    @property
    def prefix(self) -> str:
        """The prefix of the split's metrics."""
        return self.split if self.split in ("train", "test") else "val"


def analyse(run: Evaluation) -> Findings:
    """The findings of the chosen analysis; none without one."""
    if run.analysis is None:
        return Findings()
    subject = make_subject(
        run.config,
        run.stored,
        run.checkpoint,
        run.network,
        run.task,
        run.data,
        run.split,
        run.analysis.num_windows,
        run.trainer,
    )
    return run_analysis(run.analysis, subject, run.folder, run.loggers)


class Scores(NamedTuple):
    """The metrics of the split, and the seconds that scoring it took."""

    metrics: dict[str, float | None]
    seconds: float


def score(run: Evaluation) -> Scores:
    """Score the split, drawing its attention maps."""
    batches, start = run.data.evaluation_dataloader(run.split), time.perf_counter()
    run.trainer.validate(run.module, batches, verbose=False)
    seconds = time.perf_counter() - start
    part = run.settings.decoded_part(run.data, run.split)
    with forward_context(run.trainer, run.network):
        final = run.task.final_metrics(run.network, part, run.data.tokenizer)
    return Scores(run.module.metrics | final, seconds)


def task_findings(run: Evaluation) -> Findings:
    """The task's own tables and figures of the split, which are saved."""
    findings = examine(run.task, run.network, run.data, run.split, run.trainer)
    facts = describe_subject(run.checkpoint.path, run.checkpoint.step, run.data, run.split)
    keep_findings(findings, run.folder, run.loggers, facts)
    return findings


def make_results(run: Evaluation, scores: Scores | None) -> dict[str, Any]:
    """The contents of `results.json` except the analysis and the sample; without scores, nothing about the split."""
    results = {
        "split": run.split,
        "train/num_tokens": run.checkpoint.facts.get("train/num_tokens"),
        "num_parameters": run.network.num_parameters(),
        "device": describe_device(run.settings.device),
        "precision": run.settings.precision,
        "attention_backend": run.config.attention.backend,
        "attention_kernel": run.kernel,
        "steps": run.checkpoint.step,
        "data_fingerprint": run.data.fingerprint,
        "data": data_results(run.data, [run.split]),
    }
    if scores is None:
        return results
    split, limit = run.data.splits[run.split], run.settings.limit
    speed = None if is_partial(limit) else split.num_targets / scores.seconds
    results |= {"throughput/tokens_per_second": speed, "seconds": scores.seconds}
    return split_results(scores.metrics, split, run.prefix, limit) | results


def summarise(run: Evaluation, scores: Scores | None, findings: Findings) -> dict[str, Any]:
    """Write `results.json`, print the summary and, where the split was scored, a text sample."""
    results = make_results(run, scores) | findings.scalars
    is_own = run.checkpoint.facts.get("data_fingerprint") is None or reads_own_data(run.data, run.checkpoint)
    remark = "" if is_own else "; not the data and splits of the run"
    if not is_own and run.checkpoint.trained_on is None:
        remark += ", which may have been trained on some of them"
    path, split = run.folder / "results.json", run.data.splits[run.split]
    write_results(path, results | {"sample": None})
    (run.folder / "config.yaml").write_text(OmegaConf.to_yaml(run.config, resolve=True))
    pictures = [picture for callback in run.telemetry for picture in callback.paths]
    print_summary(
        {
            "checkpoint": f"{relative_path(run.checkpoint.path)}, after {count(results['steps'], 'step')}",
            "parameters": f"{results['num_parameters']:,}",
            "device": f"{results['device']}, {results['precision']}",
            "attention": f"{run.kernel} kernel (attention.backend={results['attention_backend']})",
            **describe_data(run.data, [run.split], remark),
            **(describe_split(run.task, scores.metrics, split, run.prefix, run.settings.limit) if scores else {}),
            "attention maps": relative_path(pictures[-1]) if pictures else None,
            **findings.lines,
            "analysis": ", ".join(map(relative_path, findings.files)) or None,
            "results": relative_path(path),
            "prompt": describe_prompts(run.config.generate, run.data.tokenizer, run.network.max_seq_len, run.task),
            "wandb": wandb_location(run.loggers),
        }
    )
    if run.task.generates and run.is_scored:
        with forward_context(run.trainer, run.network):
            results["sample"] = print_generated(run.config.generate, run.task, run.network, run.data)
        write_results(path, results)
    return results
