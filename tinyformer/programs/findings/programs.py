"""What makes the runs of a finding: training, and what is computed without it. Each leaves files in a folder."""

import csv
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from tinyformer.config.admission import offer_stored_run
from tinyformer.config.invocation import config_dir
from tinyformer.config.isolation import keep_hydra, keep_process
from tinyformer.config.sweep import compose_run, compose_sweep
from tinyformer.model.trained_run import train
from tinyformer.nn import AttentionMask, Cache
from tinyformer.programs.card import make_card
from tinyformer.programs.doctor.growth import measure_axis
from tinyformer.programs.doctor.machine import one_thread, quiet
from tinyformer.programs.doctor.verdict import examine
from tinyformer.run.evaluation_run import evaluate


def train_run(words: Sequence[str], folder: Path) -> None:
    """Train as `tinyformer train` does; continue a run that was killed after it had saved a checkpoint."""
    if (folder / "results.json").exists():  # it was killed while it generated its sample text, which no finding needs
        return
    if (folder / "checkpoints" / "last.ckpt").exists():
        train([*words, f"resume={folder}"])  # whose classes the finding's own command has named
    else:
        shutil.rmtree(folder, ignore_errors=True)
        train([*words, f"hydra.run.dir={folder}"])


def analyse(checkpoint: Path, words: Sequence[str], folder: Path) -> None:
    """Evaluate a checkpoint as `tinyformer evaluate` does."""
    arguments = [f"checkpoint={checkpoint}", *words]
    with keep_hydra(), keep_process():
        loaded = offer_stored_run(arguments)
        config, invocation = compose_run("evaluate", arguments)
        folder.mkdir(parents=True)
        evaluate(config, folder, invocation, loaded)


@torch.no_grad()
def count_costs(words: Sequence[str], folder: Path) -> None:
    """The figures of `tinyformer card`, and the size of a real cache.

    `results.json` has the card's fields, "filled_cache_bytes" of an fp32 cache that a network with random weights has
    filled with T tokens, and "score_flops_of_sequence", the operations of scores and weighted values of T tokens.
    """
    with keep_hydra():
        ((overrides, config),) = compose_sweep(config_dir(), "card", words)
        card = make_card(overrides, config)
        small = OmegaConf.merge(config, {"model": {"vocab_size": 64}})  # whose size the cache does not depend on
        network = instantiate(small.network, _convert_="all").eval()
    cache, seq_len = Cache(config.model.num_layers), config.model.max_seq_len
    network(torch.zeros(1, seq_len, dtype=torch.long), AttentionMask(causal=True), cache)
    scores = seq_len * card["flops_per_token_by_part"]["attention_scores_and_values"]
    _write(folder, card | {"filled_cache_bytes": cache.num_bytes, "score_flops_of_sequence": scores})


def examine_kernels(words: Sequence[str], folder: Path) -> None:
    """The cells of `tinyformer doctor --full`, and memory and time by length, as the tables `cells` and `growth`.

    The words are "backends=A,B", "variants=A,B", "masks=A,B" and "dtypes=A,B" of the doctor, and "lengths=512,1024".
    """
    given = {key: values.split(",") for key, _, values in (word.partition("=") for word in words)}
    lengths = list(map(int, given.pop("lengths")))
    with keep_process(), quiet(), one_thread():
        rows = examine(**given, device=torch.device("cpu"), full=True)
        cells = [asdict(cell) for row in rows for cell in row]
        growth = measure_axis("seq", lengths, given["backends"], "cpu", repeats=1)
    _write(folder, {"cells": len(cells)}, cells=cells, growth=growth)


PROGRAMS: dict[str, Callable[[Sequence[str], Path], None]] = {
    "train": train_run,
    "costs": count_costs,
    "kernels": examine_kernels,
}
"""What makes a run, by the name in a finding's file."""


def _write(folder: Path, results: dict[str, Any], **tables: list[dict[str, Any]]) -> None:
    """Write `results.json`, and each table as a CSV."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "results.json").write_text(json.dumps(results, indent=1))
    for name, rows in tables.items():
        with (folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)))
            writer.writeheader()
            writer.writerows(rows)
