"""The runs of a finding: trained once, cached by config, and continued if killed; and measurements without training."""

import contextlib
import functools
import json
import multiprocessing
import os
import shutil
import signal
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias

import lightning
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import nn

import tinyformer
from tinyformer.config.errors import config_keys, report
from tinyformer.config.folder import held
from tinyformer.config.launch import compose_run, compose_sweep, isolated_hydra, launch, offer_stored_run
from tinyformer.config.process import isolated_process, named_lines
from tinyformer.data import SourceDataModule
from tinyformer.errors import argument_path, relative_path
from tinyformer.files import write_table, write_whole
from tinyformer.hardware import Pass, median_seconds, peak_bytes
from tinyformer.model.loading import train
from tinyformer.nn import Attention, AttentionMask, Cache, Encoder, FeedForward, LayerNorm, PreNormBlock
from tinyformer.programs.card import make_card
from tinyformer.programs.doctor.cells import examine
from tinyformer.programs.doctor.exactness import describe_machine, one_thread, quiet
from tinyformer.programs.findings.files import CONFIG_NAMES, QUIET, Finding
from tinyformer.programs.findings.records import ENDED, PlannedRun, contents_of, digest_of, read_results
from tinyformer.programs.findings.verdicts import in_force, now, versions_of
from tinyformer.programs.train_evaluate import guard_imports
from tinyformer.run.data import make_data
from tinyformer.run.pipeline import evaluate

Measurements: TypeAlias = tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]  # numbers, and tables, by name

CAUSAL = AttentionMask(causal=True)
SIZES = {"width": 128, "depth": 1, "heads": 8, "kv_heads": 8}
"""The sizes of the encoder whose time and memory are measured by length."""


def plan(finding: Finding, runs_folder: Path) -> list[PlannedRun]:
    """The runs of a finding, seed by seed; all configs are composed, so that mistakes are found before any run."""
    config_name = CONFIG_NAMES.get(finding.program)
    quiet = QUIET if finding.program == "train" else ()
    versions = {name: version for name, version in versions_of(finding).items() if version > 1}
    descriptions: dict[str, Any] = {}
    contents: dict[str, dict[str, str]] = {}
    for name in finding.runs:
        descriptions[name] = words = finding.words(name)
        contents[name] = contents_of(words)
        if config_name:  # the others take plain arguments
            config, invocation = compose_run(config_name, [*words, *quiet])
            descriptions[name] = OmegaConf.to_container(config, resolve=False)
            if finding.program == "train":
                with config_keys(config), argument_path("datamodule"):
                    data = make_data(config, invocation)
                    contents[name] |= {"data": data.content} if isinstance(data, SourceDataModule) else {}
    planned = []
    for seed in finding.seeds:
        for name in finding.runs:
            words, description = finding.words(name), descriptions[name]
            if config_name:  # composing takes a second, so it is done once for all seeds
                words, description = [*words, f"seed={seed}", *quiet], description | {"seed": seed}
            known = versions | contents[name]
            described = [description, known] if known else description  # earlier folders keep their names
            folder = runs_folder / f"{finding.program}-{digest_of(described)}"
            repeated = [word for word in words if word in finding.trusted]
            evaluation = finding.evaluation(name)
            evaluate = [*repeated, *evaluation] if evaluation else []
            planned.append(PlannedRun(finding.name, name, seed, finding.program, words, folder, evaluate))
    return planned


def run_all(planned: Sequence[PlannedRun], num_jobs: int = 1) -> int:
    """Make the runs that are not complete, and print a line about each run; runs of one folder are made by one job.

    A run that was killed continues from its last checkpoint, or starts over if it has none. If a run fails, the error
    is printed and the other runs are made. With `num_jobs` > 1, each job has its own process. Returns the exit code.
    """
    labelled: dict[Path, list[tuple[str, PlannedRun]]] = {}
    for number, run in enumerate(planned, 1):
        label = f"[{number}/{len(planned)}] {run.finding}/{run.name}, seed {run.seed}:"
        labelled.setdefault(run.folder, []).append((label, run))
    if num_jobs == 1:
        return max(map(_make_all, labelled.values()))
    guard_imports()
    import joblib

    return max(joblib.Parallel(num_jobs)(joblib.delayed(_make_all)(runs) for runs in labelled.values()))


@functools.cache
def _end_with_parent() -> None:
    """In a process that joblib has started, ignore Ctrl-C, and end soon after the parent process has ended."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        while os.getppid() == parent.pid:
            time.sleep(0.2)
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def _make_all(runs: Sequence[tuple[str, PlannedRun]]) -> int:
    """Make the runs of one folder, and print lines and errors after the label of each run; returns the exit code."""
    _end_with_parent()
    codes = []
    for label, run in runs:
        with named_lines(label):
            try:
                if run.has_ended:
                    print(f"made before in {relative_path(run.folder)}")
                    continue
                start = time.perf_counter()
                _make(run)
                print(f"{time.perf_counter() - start:.0f} s, {relative_path(run.folder)}")
            except Exception as error:  # reported like an error of the program, so that the other runs are made
                codes.append(report(error, "train", os.environ.get("HYDRA_FULL_ERROR") == "1"))
    return max(codes, default=0)


def _make(run: PlannedRun) -> None:
    """Make a run and its analysis, unless another process makes it."""
    run.folder.parent.mkdir(parents=True, exist_ok=True)
    problem = "another process is making this run; run the same command again when it has ended"
    with held(run.folder.with_name(f".{run.folder.name}.ended.lock"), f"{relative_path(run.folder)}: {problem}."):
        if not (run.folder / ENDED).exists():
            with _recorded(run.folder, run.words, _recorded_start(run)):
                PROGRAMS[run.program](run.words, run.folder)
        if run.analysed and not (run.analysed / ENDED).exists():
            shutil.rmtree(run.analysed, ignore_errors=True)  # an analysis that was killed takes seconds
            with _recorded(run.analysed, run.evaluate, {}):
                _analyse(run.folder / "checkpoints" / "last.ckpt", run.evaluate, run.analysed)


def _recorded_start(run: PlannedRun) -> dict[str, Any]:
    """The time of a run's first start and the hashes of the statements then in force; a continued run keeps both.

    Both are unknown for a run that an earlier version of tinyformer started.
    """
    path = run.folder.with_suffix(".json")
    if not path.exists():
        is_new = not run.folder.exists()
        start = {"started": now(), "statements": in_force(run.folder.parent)} if is_new else {}
        write_whole(path, json.dumps(start))
    return dict(json.loads(path.read_text(encoding="utf-8")))


@contextlib.contextmanager
def _recorded(folder: Path, words: list[str], begun: dict[str, Any]) -> Iterator[None]:
    """Redirect the output of a `with` statement to a file next to a folder; then write `ENDED` into the folder."""
    start = time.perf_counter()
    with folder.with_suffix(".txt").open("a", encoding="utf-8") as printed, contextlib.redirect_stdout(printed):
        yield
    # The results of a resumed run include the time before its interruption.
    seconds = max(time.perf_counter() - start, read_results(folder).get("seconds", 0.0))
    facts = {"overrides": words, "seconds": round(seconds, 1), **begun, **_surroundings()}
    write_whole(folder / ENDED, json.dumps(facts, indent=1))


def _surroundings() -> dict[str, Any]:
    machine = describe_machine(torch.device("cuda" if torch.cuda.is_available() else "cpu"), full=False)
    return {
        "machine": {key: machine[key] for key in ("name", "cpus", "threads", "system")},
        "versions": {
            "tinyformer": version("tinyformer"),
            "python": machine["python"],
            "torch": torch.__version__,
            "lightning": lightning.__version__,
        },
        "time": now(),
        "commit": _commit(),
    }


def _commit() -> str | None:
    """The commit of a checkout; None if the package is installed elsewhere."""
    root = Path(tinyformer.__file__).parents[1]
    if (root / ".git").exists():
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            words = ["git", "-C", str(root), "rev-parse", "--short", "HEAD"]
            return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    return None


def _train(words: Sequence[str], folder: Path) -> None:
    """Train like `tinyformer train`, or continue a run that was killed after it had saved a checkpoint."""
    if (folder / "results.json").exists():  # killed while it sampled text, which no finding needs
        return
    if (folder / "checkpoints" / "last.ckpt").exists():
        train([*words, f"resume={folder}"])  # the user's command has named its classes
    else:
        shutil.rmtree(folder, ignore_errors=True)
        train([*words, f"hydra.run.dir={folder}"])


def _analyse(checkpoint: Path, words: Sequence[str], folder: Path) -> None:
    arguments = [f"checkpoint={checkpoint}", *words, f"hydra.run.dir={folder}", "hydra.output_subdir=null"]
    with isolated_hydra(), isolated_process():
        loaded = offer_stored_run(arguments)
        launch(arguments, "evaluate", functools.partial(evaluate, checkpoint=loaded), "tinyformer evaluate")


def _write_measured(measured: Callable[[Sequence[str]], Measurements], words: Sequence[str], folder: Path) -> None:
    with isolated_hydra(), isolated_process(), quiet(), one_thread():
        results, tables = measured(words)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "results.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
    for name, rows in tables.items():
        columns = list(dict.fromkeys(key for row in rows for key in row))
        write_table(folder / f"{name}.csv", columns, [[row.get(key, "") for key in columns] for row in rows])


def measured_costs(words: Sequence[str]) -> Measurements:
    """The numbers of `tinyformer card`, and measurements of a network with random weights.

    The measurements are, for T tokens: "filled_cache_bytes", the size of an fp32 cache that the network has filled;
    "score_flops_of_sequence", the operations of scores and weighted values; "step_seconds" and "step_bytes", the time
    and peak memory of a forward and a backward pass in fp32.
    """
    ((overrides, config),) = compose_sweep("card", words)
    card = make_card(overrides, config)
    small = OmegaConf.merge(config, {"model": {"vocab_size": 64}})  # the size of the cache does not depend on it
    network = instantiate(small.network, _convert_="all")
    cache, seq_len = Cache(config.model.num_layers), config.model.max_seq_len
    tokens = torch.zeros(1, seq_len, dtype=torch.long)
    with torch.no_grad():
        network.eval()(tokens, CAUSAL, cache)
    network.train().resolve_backends("cpu", torch.float32, CAUSAL)
    step = forward_and_backward(network, tokens)
    seconds = statistics.median(median_seconds({"step": step}, "cpu")["step"] for _ in range(3))
    scores = seq_len * card["flops_per_token_by_part"]["attention_scores_and_values"]
    own = {"filled_cache_bytes": cache.num_bytes, "score_flops_of_sequence": scores}
    return card | own | {"step_seconds": seconds, "step_bytes": peak_bytes(step, "cpu")}, {}


def measured_kernels(words: Sequence[str]) -> Measurements:
    """The cells of `tinyformer doctor --full`, and memory and time by length, as the tables `cells` and `growth`.

    The words are "backends=A,B", "variants=A,B", "masks=A,B" and "dtypes=A,B" of the doctor, and "lengths=512,1024".
    """
    given = {key: values.split(",") for key, _, values in (word.partition("=") for word in words)}
    lengths = list(map(int, given.pop("lengths")))
    cells = [asdict(cell) for row in examine(**given, device=torch.device("cpu"), full=True) for cell in row]
    growth = [
        {"axis": "seq", "value": seq, "backend": backend} | measure_encoder(SIZES | {"seq": seq}, backend)
        for seq in lengths
        for backend in given["backends"]
    ]
    return {"cells": len(cells)}, {"cells": cells, "growth": growth}


def measure_encoder(
    sizes: Mapping[str, int], backend: str, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> dict[str, float]:
    """Seconds and peak bytes of a forward and backward pass of an encoder, for one row of `sizes["seq"]` tokens."""
    seq, width, heads = sizes["seq"], sizes["width"], sizes["heads"]
    attention = partial(Attention, width, heads, min(sizes["kv_heads"], heads), backend=backend)
    block = partial(PreNormBlock, width, attention, partial(FeedForward, width), LayerNorm)
    encoder = Encoder(64, sizes["depth"], width, seq, block, LayerNorm).to(device, dtype).train()
    step = forward_and_backward(encoder, torch.zeros(1, seq, dtype=torch.long, device=device))
    return {"seconds": median_seconds({"step": step}, device)["step"], "bytes": peak_bytes(step, device)}


def forward_and_backward(network: nn.Module, tokens: torch.Tensor) -> Pass:
    """A function that runs a forward and a backward pass under a causal mask, and clears the gradients."""

    def step() -> None:
        network(tokens, CAUSAL).sum().backward()
        network.zero_grad()

    return step


PROGRAMS: dict[str, Callable[[Sequence[str], Path], None]] = {
    "train": _train,
    "costs": functools.partial(_write_measured, measured_costs),
    "kernels": functools.partial(_write_measured, measured_kernels),
}
"""The functions that make a run, by the `program` in a finding's file."""
