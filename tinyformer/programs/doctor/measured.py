"""Measurements of a finding without training: the costs of a network, and the kernels by length."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, TypeAlias

import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from tinyformer.config.compose import compose_sweep
from tinyformer.nn import AttentionMask, Cache
from tinyformer.nn.timing import median_seconds
from tinyformer.programs.card import make_card
from tinyformer.programs.doctor.growth import measure_axis
from tinyformer.programs.doctor.speed import peak_memory
from tinyformer.programs.doctor.verdict import examine

Measurements: TypeAlias = tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]  # numbers, and tables, by name


def measured_costs(words: Sequence[str]) -> Measurements:
    """The figures of `tinyformer card`, and the size of a real cache.

    The numbers are those of the card, and of T tokens: "filled_cache_bytes", the size of an fp32 cache that a network
    with random weights has filled; "score_flops_of_sequence", the operations of scores and weighted values;
    "step_seconds" and "step_bytes", what a forward and a backward pass in fp32 takes.
    """
    ((overrides, config),) = compose_sweep("card", words)
    card = make_card(overrides, config)
    small = OmegaConf.merge(config, {"model": {"vocab_size": 64}})  # whose size the cache does not depend on
    network = instantiate(small.network, _convert_="all")
    cache, seq_len = Cache(config.model.num_layers), config.model.max_seq_len
    tokens, mask = torch.zeros(1, seq_len, dtype=torch.long), AttentionMask(causal=True)
    with torch.no_grad():
        network.eval()(tokens, mask, cache)
    network.train().resolve_backends("cpu", torch.float32, mask)

    def step() -> None:
        network(tokens, mask).sum().backward()
        network.zero_grad()

    seconds = statistics.median(median_seconds({"step": step}, "cpu")["step"] for _ in range(3))
    scores = seq_len * card["flops_per_token_by_part"]["attention_scores_and_values"]
    own = {"filled_cache_bytes": cache.num_bytes, "score_flops_of_sequence": scores}
    return card | own | {"step_seconds": seconds, "step_bytes": peak_memory(step, "cpu")}, {}


def measured_kernels(words: Sequence[str]) -> Measurements:
    """The cells of `tinyformer doctor --full`, and memory and time by length, as the tables `cells` and `growth`.

    The words are "backends=A,B", "variants=A,B", "masks=A,B" and "dtypes=A,B" of the doctor, and "lengths=512,1024".
    """
    given = {key: values.split(",") for key, _, values in (word.partition("=") for word in words)}
    lengths = list(map(int, given.pop("lengths")))
    cells = [asdict(cell) for row in examine(**given, device=torch.device("cpu"), full=True) for cell in row]
    growth = measure_axis("seq", lengths, given["backends"], "cpu", repeats=1)
    return {"cells": len(cells)}, {"cells": cells, "growth": growth}
