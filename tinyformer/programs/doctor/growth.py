"""Time and memory of a forward and backward pass as one axis of an encoder grows."""

import statistics
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch

from tinyformer.hardware import free_memory
from tinyformer.nn import (
    Attention,
    AttentionMask,
    BaseAttention,
    Encoder,
    FeedForward,
    LayerNorm,
    PreNormBlock,
    backend_refusal,
    resolve_backend,
)
from tinyformer.programs.doctor.speed import peak_memory
from tinyformer.training.attention_memory import stored_bytes

BASE = {
    "cpu": {"seq": 1024, "width": 128, "depth": 1, "heads": 8, "kv_heads": 8},
    "cuda": {"seq": 2048, "width": 1024, "depth": 1, "heads": 16, "kv_heads": 16},
}
"""The values of all axes but the one that is varied."""

CAUSAL = AttentionMask(causal=True)


def measure_axis(
    axis: str, values: Sequence[int], backends: Sequence[str], device: str, repeats: int
) -> list[dict[str, Any]]:
    """Seconds and peak bytes of a forward and backward pass for each value of an axis in `BASE` and each backend.

    A row holds the median of `repeats` passes, or why it is left out.
    """
    rows = []
    for value in values:
        for backend in backends:
            measured = _measure(BASE[device] | {axis: value}, backend, device, repeats)
            rows.append({"axis": axis, "value": value, "backend": backend} | measured)
    return rows


def _encoder(point: dict[str, int], backend: str, device: str, dtype: torch.dtype) -> Encoder:
    width, heads = point["width"], point["heads"]
    attention = partial(Attention, width, heads, min(point["kv_heads"], heads), backend=backend)
    block = partial(PreNormBlock, width, attention, partial(FeedForward, width), LayerNorm)
    return Encoder(64, point["depth"], width, point["seq"], block, LayerNorm).to(device, dtype).train()


def _measure(point: dict[str, int], backend: str, device: str, repeats: int) -> dict[str, Any]:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    encoder = _encoder(point, backend, device, dtype)
    layers = [cast(BaseAttention, layer.attention) for layer in encoder.layers]
    if reason := backend_refusal(layers[0], backend, device, dtype, CAUSAL, point["seq"]):
        return {"left_out": f"{backend} {reason}"}
    free = free_memory(device)
    needed = 3 * sum(stored_bytes(layer, point["seq"], device, dtype) for layer in layers) if backend == "eager" else 0
    if free is not None and needed > free / 4:
        return {"left_out": f"about {needed / 1e9:.0f} GB"}
    for layer in layers:
        resolve_backend(layer, device, dtype, CAUSAL, point["seq"])
    tokens = torch.zeros(1, point["seq"], dtype=torch.long, device=device)

    def step() -> None:
        encoder(tokens, CAUSAL).sum().backward()
        encoder.zero_grad()

    step()
    seconds = []
    for _ in range(repeats):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return {"seconds": statistics.median(seconds), "bytes": peak_memory(step, device)}
