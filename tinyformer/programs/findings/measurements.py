"""Measurements of a finding without training: the costs of a network, and the kernels by length."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, TypeAlias

import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import nn

from tinyformer.config.compose import compose_sweep
from tinyformer.nn import Attention, AttentionMask, Cache, Encoder, FeedForward, LayerNorm, PreNormBlock
from tinyformer.nn.timing import Pass, median_seconds, peak_bytes
from tinyformer.programs.card import make_card
from tinyformer.programs.doctor.verdict import examine

Measurements: TypeAlias = tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]  # numbers, and tables, by name

CAUSAL = AttentionMask(causal=True)
SIZES = {"width": 128, "depth": 1, "heads": 8, "kv_heads": 8}
"""The sizes of the encoder whose time and memory are measured by length."""


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
    """A forward and a backward pass under a causal mask, which leaves no gradients."""

    def step() -> None:
        network(tokens, CAUSAL).sum().backward()
        network.zero_grad()

    return step
