"""A training run, from its config to its summary."""

import functools
import sys
from pathlib import Path
from typing import Any

import lightning as L
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from tinyformer.app import build
from tinyformer.app.analysis_run import examine, keep_findings
from tinyformer.app.config import check_types
from tinyformer.app.keys import format_value, key_of_argument
from tinyformer.app.sample import check_generation, describe_prompts, print_samples, refuse_prompts
from tinyformer.app.summary import (
    describe_events,
    describe_profile,
    describe_speed,
    describe_split,
    describe_telemetry,
    print_summary,
    shown,
    speed_results,
    split_results,
    telemetry_results,
    write_results,
)
from tinyformer.checkpoint import Checkpoint, load_checkpoint, load_weights, start_from
from tinyformer.data import DataModule
from tinyformer.errors import argument_path
from tinyformer.memory import keep_freed_memory
from tinyformer.training import AttentionTelemetry, TrainingModule
from tinyformer.training.callbacks import Checkpoints, Interrupted, Report, StepProgress
from tinyformer.training.hardware import compute_dtype, describe_device, free_memory, resolve_device
from tinyformer.training.profilers import make_profiler
from tinyformer.training.weights_memory import find_memory_shortage


class TrainingRun:
    """All that a run consists of, made and checked before its first step.

    Args:
        config: composed by Hydra.

    Raises:
        ValueError: something in the config cannot work.
    """

    def __init__(self, config: DictConfig) -> None:
        build.quiet_libraries()
        self._take_pruned_heads(config)
        # Unresolved, so that overrides act on it; and first of all, since Hydra's `instantiate` resolves what its
        # node refers to in place.
        unresolved: Any = OmegaConf.to_container(config, resolve=False)
        check_types(config)
        check_generation(config.generate)
        self.config, self.folder = config, build.run_dir()
        self.arguments = build.trainer_arguments(config)
        with argument_path("trainer"):
            self.device = resolve_device(self.arguments["accelerator"])
        keep_freed_memory()
        compiled = build.compile_arguments(config, self.device)
        self.resumed = self._resumed()
        self.tested: dict[str, float | None] = {}

        self.data = self._data()
        with argument_path("datamodule"):
            self.data.require_device(self.device)
        self.task = build.build_task(config, self.data)
        refuse_prompts(config.generate, self.task)
        unresolved["task"]["labels"] = self.data.labels
        self.network = build.build_network(config, self.data.tokenizer)
        if config.init_from and not self.resumed:
            with argument_path(passed={"path": "init_from", "checkpoint": "init_from"}):
                start_from(self.network, load_checkpoint(config.init_from), config.task)
        if config.freeze_encoder:
            self.network.encoder.requires_grad_(False)
            if not self.network.num_parameters():
                raise ValueError(
                    "freeze_encoder=true leaves nothing to train, since the readout is the embedding; "
                    "model.tied_readout=false gives it a matrix of its own."
                )
        mask = self.task.mask(next(iter(self.data.evaluation_dataloader("validation"))))
        kernels = build.resolve_kernels(self.network, self.arguments, mask, training=True)
        self.kernel = ", ".join(sorted(set(kernels)))
        shortage = find_memory_shortage(
            self.network,
            kernels,
            self.device,
            compute_dtype(self.arguments["precision"]),
            mask,
            self.data.batch_size,
            free_memory(self.device),
        )
        name_of = functools.partial(key_of_argument, unresolved)
        self.warning = shortage.describe(name_of, format_value) if shortage else None
        if compiled is not None:
            self.network.compile(**compiled)
        optimizer, schedule = instantiate(config.optimizer, _convert_="all"), instantiate(config.schedule)
        self.module = TrainingModule(self.network, self.task, self.data, optimizer, schedule)

        self.loggers = build.build_loggers(config, self.resumed.step if self.resumed else 0)
        self.report = Report()
        self.checkpoints = Checkpoints(
            self.folder / "checkpoints",
            self._stored(unresolved),
            f"val/{self.task.monitor}",
            self.task.higher_is_better,
        )
        callbacks = [self.report, *build.build_callbacks(config), self.checkpoints]
        if self.arguments["enable_progress_bar"]:
            callbacks.append(StepProgress(self.report))
        self.telemetry = [callback for callback in callbacks if isinstance(callback, AttentionTelemetry)]
        self.trainer = L.Trainer(
            **self.arguments | {"profiler": make_profiler(self.arguments.get("profiler"), self.folder)},
            default_root_dir=self.folder,
            logger=self.loggers,
            callbacks=callbacks,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            use_distributed_sampler=False,
        )

    def fit(self) -> None:
        """Train, and leave checkpoints, metrics, pictures and `results.json` in the run's folder.

        Raises:
            SystemExit: a signal stopped the run, with 128 + its number as the code, after its state was saved.
        """
        if build.is_first_process():
            (self.folder / "config.yaml").write_text(OmegaConf.to_yaml(self.config, resolve=True))
            if self.warning:
                print(self.warning, file=sys.stderr)
        status = "failed"
        try:
            checkpoint = str(self.resumed.path) if self.resumed else None
            self.trainer.fit(self.module, datamodule=self.data, ckpt_path=checkpoint, weights_only=True)
            if build.is_first_process():
                self._score()
                self._summarise()
            status = "success"
        except Interrupted as stop:
            print(
                f"\nStopped at step {self.trainer.global_step}. To go on: python train.py resume={shown(self.folder)}"
            )
            raise SystemExit(128 + stop.signal_number) from stop
        finally:
            build.close_loggers(self.loggers, status)

    def _score(self) -> None:
        """Take what is scored once, at the end: of the last weights, and of the best ones on text not seen before."""
        validation = self.data.splits["validation"]
        self.metrics = self.module.metrics | self.task.final_metrics(self.network, validation, self.data.tokenizer)
        trainer, examined = build.scoring_trainer(self.arguments | {"profiler": None}, self.folder), "validation"
        if self.task.tests_best and "test" in self.data.splits:
            load_weights(self.network, load_checkpoint(self.checkpoints.best))
            module, examined = TrainingModule(self.network, self.task, self.data, evaluated="test"), "test"
            trainer.validate(module, self.data.test_dataloader(), verbose=False)
            self.tested = module.metrics
        self.findings = examine(self.task, self.network, self.data, examined, trainer)
        keep_findings(self.findings, self.folder, self.loggers)

    @staticmethod
    def _take_pruned_heads(config: DictConfig) -> None:
        """A run that starts from a pruned checkpoint lacks the same heads, unless it names others."""
        if config.init_from and not config.model.pruned_heads:
            # A resumed run has a checkpoint of its own, and the one that it began with may be gone.
            own = Path(config.resume) / "checkpoints" / "last.ckpt" if config.resume else None
            with argument_path(passed={"path": "resume" if own else "init_from"}):
                start = load_checkpoint(own) if own else load_checkpoint(config.init_from)
            config.model.pruned_heads = start.config["model"].get("pruned_heads", [])

    def _data(self) -> DataModule:
        """The text, tokenised: by the recipe of the config, or by what a checkpoint to start from knows.

        Raises:
            ValueError: a tokenizer is chosen for data that bring their own, or the data are not a checkpoint's.
        """
        given, config, hydra = None, self.config, HydraConfig.get()
        chosen = [override for override in hydra.overrides.task if override.startswith("tokenizer")]
        if chosen and "tokenizer" not in config.datamodule:
            raise ValueError(
                f"{chosen[0]}: data={hydra.runtime.choices['data']} brings its own tokens; leave tokenizer= out."
            )
        with argument_path(passed={"path": "init_from"}):
            start = self.resumed or (load_checkpoint(config.init_from) if config.init_from else None)
        if start is not None and not self.resumed and not chosen:
            given = build.tokenizer_of(start, "init_from")
        data = build.build_data(config, given)
        with argument_path("datamodule"):
            data.prepare()
        if start is not None:
            build.require_same_vocabulary(start, data.tokenizer, "resume" if self.resumed else "init_from")
        if self.resumed and self.resumed.facts["data_fingerprint"] != data.fingerprint:
            raise ValueError(
                f"resume={config.resume}: its text, or how it is held out, has changed since. With the new text, "
                f"init_from={shown(self.resumed.path)} starts a run from its weights."
            )
        return data

    def _resumed(self) -> Checkpoint | None:
        """The checkpoint to go on from, if any; a folder that holds a run is not written over.

        Raises:
            ValueError: there is no step left to make, or the folder is another run's.
        """
        last = self.folder / "checkpoints" / "last.ckpt"
        if self.config.resume is None:
            if last.exists() and build.is_first_process():
                folder = shown(self.folder)
                raise ValueError(
                    f"hydra.run.dir={folder} holds a run already: resume={folder} goes on with it, "
                    f"hydra.run.dir={folder}-2 starts another."
                )
            return None
        with argument_path(passed={"path": "resume"}):
            checkpoint = load_checkpoint(Path(self.config.resume) / "checkpoints" / "last.ckpt")
        if 0 <= self.arguments["max_steps"] <= checkpoint.step:
            raise ValueError(
                f"resume={self.config.resume} has made its {checkpoint.step} steps; "
                f"trainer.max_steps={2 * checkpoint.step} makes it longer."
            )
        return checkpoint

    def _stored(self, unresolved: Any) -> dict[str, Any]:
        """What a checkpoint holds beside Lightning's own keys."""
        return {
            "config": unresolved,
            "tokenizer": self.data.tokenizer.to_json(),
            "facts": {
                "precision": self.arguments["precision"],
                "data_fingerprint": self.data.fingerprint,
                "train/num_tokens": self.data.splits["train"].num_tokens,
            },
        }

    def results(self) -> dict[str, Any]:
        """The contents of `results.json`."""
        limit = self.arguments["limit_val_batches"]
        tested = split_results(self.tested, self.data.splits["test"], "test", limit) if self.tested else {}
        return {
            **split_results(self.metrics, self.data.splits["validation"], "val", limit),
            f"best/val/{self.task.monitor}": self.checkpoints.best_value,
            **tested,
            "train/num_tokens": self.data.splits["train"].num_tokens,
            "train/num_unknown": self.data.splits["train"].num_unknown,
            "train/loss": self.report.latest.get("train/loss"),
            **speed_results(self.report),
            "num_parameters": self.network.num_parameters(),
            "device": describe_device(self.device),
            "precision": self.arguments["precision"],
            "attention_backend": self.config.attention.backend,
            "attention_kernel": self.kernel,
            "steps": self.trainer.global_step,
            **telemetry_results(self.telemetry, self.report.total.seconds),
            "data_fingerprint": self.data.fingerprint,
        }

    def _summarise(self) -> None:
        results, splits, limit = self.results(), self.data.splits, self.arguments["limit_val_batches"]
        write_results(self.folder / "results.json", results | {"sample": None})
        pictures = [path for callback in self.telemetry for path in callback.paths]
        print_summary(
            {
                "parameters": f"{results['num_parameters']:,}",
                "device": f"{results['device']}, {results['precision']}",
                "attention": f"{self.kernel} kernel (attention.backend={results['attention_backend']})",
                "warning": self.warning,
                "speed": describe_speed(self.report, self.trainer.global_step),
                "telemetry": describe_telemetry(results, self.telemetry),
                "data": f"{self.data.name}, {results['train/num_tokens']:,} tokens to train on, "
                f"fingerprint {self.data.fingerprint[:12]}",
                **describe_split(self.task, self.metrics, splits["validation"], "val", limit),
                **(describe_split(self.task, self.tested, splits["test"], "test", limit) if self.tested else {}),
                "examples": ", ".join(shown(path) for path in self.findings.files) or None,
                "checkpoints": f"{shown(self.folder)}/checkpoints/last.ckpt, best.ckpt",
                "attention maps": shown(pictures[-1]) if pictures else None,
                "events": describe_events([e for t in self.telemetry for e in t.detector.events], self.folder),
                "logs": f"{shown(self.folder)}/metrics.csv, attention/heads.csv, results.json",
                "prompt": describe_prompts(self.config.generate, self.data.tokenizer, self.network.encoder.max_seq_len),
                "profile": describe_profile(self.folder) if self.arguments.get("profiler") else None,
                "wandb": build.wandb_whereabouts(self.loggers),
            }
        )
        if self.task.generates:
            sample = print_samples(self.config.generate, self.network, self.data.tokenizer)
            write_results(self.folder / "results.json", results | {"sample": sample})
