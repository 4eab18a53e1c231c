"""An evaluation, from a checkpoint to its summary."""

import time
from typing import Any

import lightning as L
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from lightning.pytorch.loggers import Logger
from omegaconf import DictConfig, OmegaConf

from tinyformer.analysis import Findings
from tinyformer.app import build
from tinyformer.app.analysis_run import examine, keep_findings, make_subject, run_analysis
from tinyformer.app.config import check_types
from tinyformer.app.sample import check_generation, describe_prompts, print_samples, refuse_prompts
from tinyformer.app.summary import (
    counted,
    describe_split,
    is_cut,
    print_summary,
    shown,
    split_results,
    write_results,
)
from tinyformer.checkpoint import load_checkpoint, load_weights
from tinyformer.data import DataModule
from tinyformer.errors import argument_path
from tinyformer.memory import keep_freed_memory
from tinyformer.training import AttentionTelemetry, TrainingModule
from tinyformer.training.hardware import describe_device, resolve_device

SPLITS = ("train", "validation", "test", "all")

NETWORK = ("model", "attention", "position", "block", "feed_forward", "norm", "task", "network")
"""Nodes of a config that make the network, which an evaluation may change."""


class EvaluationRun:
    """A checkpoint's model and the text that it is evaluated on.

    Args:
        config: composed by Hydra on the checkpoint's own.

    Raises:
        ValueError: something in the config cannot work, or does not fit the checkpoint.
    """

    def __init__(self, config: DictConfig) -> None:
        build.quiet_libraries()
        # First of all, since Hydra's `instantiate` resolves what its node refers to in place.
        unresolved: Any = OmegaConf.to_container(config, resolve=False)
        check_types(config)
        check_generation(config.generate)
        if config.split not in (None, *SPLITS):
            raise ValueError(f"split={config.split}: choose one of {', '.join(SPLITS)}.")
        self.config, self.folder = config, build.run_dir()
        with argument_path(passed={"path": "checkpoint"}):
            self.checkpoint = load_checkpoint(config.checkpoint)
        self.stored = self.checkpoint.config | {name: unresolved[name] for name in NETWORK if name in unresolved}
        facts = self.checkpoint.facts
        if config.trainer.precision == "auto":
            config.trainer.precision = facts["precision"]
        self.arguments = build.trainer_arguments(config)
        with argument_path("trainer"):
            self.device = resolve_device(self.arguments["accelerator"])
        keep_freed_memory()
        self.data, self.split = self._data()
        self.task = build.build_task(config, self.data)
        refuse_prompts(config.generate, self.task)
        self.network = build.build_network(config, self.data.tokenizer)
        load_weights(self.network, self.checkpoint)
        self.batches = self.data.evaluation_dataloader(self.split)
        mask = self.task.mask(next(iter(self.batches)))
        self.analysis = instantiate(config.analysis, _convert_="all") if config.get("analysis") else None
        goes_back = self.analysis is not None and self.analysis.needs_gradient
        kernels = build.resolve_kernels(self.network, self.arguments, mask, training=goes_back)
        self.kernel = ", ".join(sorted(set(kernels)))
        self.module = TrainingModule(
            self.network, self.task, self.data, evaluated=self.split, first_step=self.checkpoint.step
        )

    def evaluate(self) -> None:
        """Analyse, score the split, draw the maps, sample a text; leave `results.json` in the run's folder."""
        loggers, status = build.build_loggers(self.config), "failed"
        callbacks = build.build_callbacks(self.config)
        try:
            trainer = build.scoring_trainer(self.arguments, self.folder, loggers, callbacks)
            # The analysis is the first, so that what it refuses is refused before anything was computed or written.
            findings = self._analyse(trainer, loggers)
            start = time.perf_counter()
            trainer.validate(self.module, self.batches, verbose=False)
            seconds = time.perf_counter() - start
            split = self.data.splits[self.split]
            self.metrics = self.module.metrics | self.task.final_metrics(self.network, split, self.data.tokenizer)
            examined = examine(self.task, self.network, self.data, self.split, trainer)
            keep_findings(examined, self.folder, loggers)
            findings.files += examined.files
            self._summarise(self._results(seconds) | findings.scalars, callbacks, loggers, findings)
            status = "success"
        finally:
            build.close_loggers(loggers, status)

    def _analyse(self, trainer: L.Trainer, loggers: list[Logger]) -> Findings:
        """What the chosen analysis finds; nothing without one."""
        if self.analysis is None:
            return Findings()
        subject = make_subject(
            self.config,
            self.stored,
            self.checkpoint,
            self.network,
            self.task,
            self.data,
            self.split,
            self.analysis.num_windows,
            trainer,
        )
        return run_analysis(self.analysis, subject, self.folder, loggers)

    def _data(self) -> tuple[DataModule, str]:
        """The data in the checkpoint's tokens, and the split to score."""
        config, tokenizer = self.config, build.tokenizer_of(self.checkpoint, "checkpoint")
        data = build.build_data(config)
        chosen = [o for o in HydraConfig.get().overrides.task if o.startswith(("data=", "data."))]
        split = config.split
        if split is None:
            split = "all" if chosen and data.scored_whole else "validation"
        # The run's own data may lie there in its tokens already.
        if not data.is_prepared(tokenizer, whole=split == "all"):
            data = build.build_data(config, tokenizer)
        with argument_path("datamodule"):
            data.prepare(whole=split == "all")
        return data, split

    def _results(self, seconds: float) -> dict[str, Any]:
        split, limit = self.data.splits[self.split], self.arguments["limit_val_batches"]
        return {
            **split_results(self.metrics, split, self._prefix, limit),
            "split": self.split,
            "train/num_tokens": self.checkpoint.facts["train/num_tokens"],
            "throughput/tokens_per_second": None if is_cut(limit) else split.num_targets / seconds,
            "num_parameters": self.network.num_parameters(),
            "device": describe_device(self.device),
            "precision": self.arguments["precision"],
            "attention_backend": self.config.attention.backend,
            "attention_kernel": self.kernel,
            "steps": self.checkpoint.step,
            "seconds": seconds,
            "data_fingerprint": self.data.fingerprint,
        }

    @property
    def _prefix(self) -> str:
        return self.split if self.split in ("train", "test") else "val"

    def _summarise(
        self, results: dict[str, Any], callbacks: list[L.Callback], loggers: list[Logger], findings: Findings
    ) -> None:
        write_results(self.folder / "results.json", results | {"sample": None})
        (self.folder / "config.yaml").write_text(OmegaConf.to_yaml(self.config, resolve=True))
        pictures = [path for c in callbacks if isinstance(c, AttentionTelemetry) for path in c.paths]
        print_summary(
            {
                "checkpoint": f"{shown(self.checkpoint.path)}, after {results['steps']:,} steps",
                "parameters": f"{results['num_parameters']:,}",
                "device": f"{results['device']}, {results['precision']}",
                "attention": f"{self.kernel} kernel (attention.backend={results['attention_backend']})",
                "data": f"{self.data.name}, {self.split} split, "
                + counted(self.data.splits[self.split].num_documents, "document"),
                **describe_split(
                    self.task,
                    self.metrics,
                    self.data.splits[self.split],
                    self._prefix,
                    self.arguments["limit_val_batches"],
                ),
                "attention maps": shown(pictures[-1]) if pictures else None,
                **findings.lines,
                "analysis": ", ".join(shown(path) for path in findings.files) or None,
                "results": shown(self.folder / "results.json"),
                "prompt": describe_prompts(self.config.generate, self.data.tokenizer, self.network.encoder.max_seq_len),
                "wandb": build.wandb_whereabouts(loggers),
            }
        )
        if self.task.generates:
            sample = print_samples(self.config.generate, self.network, self.data.tokenizer)
            write_results(self.folder / "results.json", results | {"sample": sample})
