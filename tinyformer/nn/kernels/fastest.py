"""The fastest of the backends that can compute a case, which `backend="auto"` chooses."""

import sys
from collections.abc import Collection

import torch

from tinyformer.hardware import has_native_bf16
from tinyformer.nn.kernels.case import Feature, KernelRequirements

# Sequence lengths up to which eager is faster than torch's kernel on CPU:
CPU_EAGER_MAX_SEQ = 96  # where torch's kernel has more work than plain attention,
CPU_SINK_EAGER_MAX_SEQ = 192  # where this work is a sink,
CPU_BF16_EAGER_MAX_SEQ = 767  # in bf16, where torch's kernel takes blocks of 256 queries in place of 64 from 768 on,
CPU_BF16_NARROW_EAGER_MAX_SEQ = 160  # in bf16 with narrow heads, where it only has to skip what a causal mask hides.

CPU_BF16_DECODING_MAX_SEQ = 128
"""Number of keys up to which sdpa, which computes short sequences in fp32, is faster in bf16 for a single query: in
half of the time of eager's two products, each of which takes 20 µs at least."""

SKIPPED_BY_FLEX = {Feature.DOCUMENTS, Feature.WINDOW, Feature.BIAS, Feature.LEARNED_BIAS, Feature.SCORE_MOD}
"""On CUDA, features for which flex skips masked blocks or holds no bias in memory; without them torch's own kernels
are as fast and need no compiling."""

DENSE_ON_CPU = {Feature.DOCUMENTS, Feature.WINDOW, Feature.PATTERN, Feature.BIAS}
"""Features that torch's kernel on CPU takes as a dense mask or bias, with an entry for every query and key."""


def fastest(case: KernelRequirements, able: Collection[str]) -> str:
    """The fastest of the backends that can compute a case: measured on one CPU, by torch's documentation on CUDA.

    Other CPUs may differ; `nn.timing` compares on the machine that trains.
    On Hopper GPUs sdpa runs cuDNN's kernel for unmasked and causal attention, in 0.7 of flash's time; no whole run has
    been made with it yet, so it is not chosen.
    """
    if case.device == "cpu":
        return _fastest_on_cpu(case, able) if "sdpa" in able else "eager"
    order = ("flash", "flex", "sdpa") if case.features & SKIPPED_BY_FLEX else ("flash", "sdpa", "flex")
    return next((name for name in order if name in able), "eager")


def _fastest_on_cpu(case: KernelRequirements, able: Collection[str]) -> str:
    # On CPU sdpa runs torch's flash kernel if that can compute the case, and unfused arithmetic otherwise, so it is
    # never slower than flash. Flex is not compiled on CPU.
    is_fused = "flash" in able
    if case.dtype != torch.bfloat16:
        longest = _fp32_eager_max_seq(case, is_fused)
    elif has_native_bf16(case.device):
        longest = _bf16_eager_max_seq(case, is_fused)
    else:  # emulated products are slow, and torch's kernels make fewer: up to 3 times as fast, at every length
        longest = 0
    return "eager" if (case.seq or sys.maxsize) <= longest else "sdpa"


def _fp32_eager_max_seq(case: KernelRequirements, is_fused: bool) -> int:
    """The length up to which eager takes no longer than sdpa, forward and backward; measured from 64 to 2048 tokens."""
    features = case.features
    has_sink = Feature.SINK in features
    works_more = has_sink or Feature.VALUE_DIM in features or not is_fused
    # Flash skips what a causal mask hides, and eager has more work with padding. Without either, eager wins at any
    # length over unfused arithmetic, and over flash with a sink's extra dimension and key or with padded head sizes.
    hides = bool(features & {Feature.CAUSAL, Feature.PADDING})
    if Feature.LEARNED_BIAS in features or (works_more and not hides):
        return sys.maxsize
    if has_sink and Feature.PADDING not in features:
        return CPU_SINK_EAGER_MAX_SEQ
    return CPU_EAGER_MAX_SEQ if works_more or Feature.BIAS in features else 0


def _bf16_eager_max_seq(case: KernelRequirements, is_fused: bool) -> int:
    """The same length in native bf16, where eager wins more often: 1.2 to 2 times as fast without a mask."""
    features, is_narrow = case.features, case.head_dim <= 32
    if case.has_one_query and not features and (case.seq or sys.maxsize) <= CPU_BF16_DECODING_MAX_SEQ:
        return 0
    is_padded = Feature.PADDING in features
    # Flash skips what a causal mask hides, unless it is given a dense mask, which costs less with narrow heads.
    skips = Feature.CAUSAL in features and (is_narrow or not features & DENSE_ON_CPU)
    if not is_fused or not (skips or is_padded):
        return sys.maxsize
    if is_padded and is_narrow:
        return CPU_SINK_EAGER_MAX_SEQ if Feature.SINK in features else CPU_EAGER_MAX_SEQ
    works_more = features & (DENSE_ON_CPU | {Feature.SINK, Feature.VALUE_DIM})
    return CPU_BF16_NARROW_EAGER_MAX_SEQ if is_narrow and not works_more else CPU_BF16_EAGER_MAX_SEQ
