"""The fastest of the backends that can compute a case, which `backend="auto"` chooses."""

import math
import sys
from collections.abc import Collection

import torch

from tinyformer.hardware import has_native_bf16
from tinyformer.nn.kernels.case import Feature, KernelRequirements

SKIPPED_BY_FLEX = {Feature.DOCUMENTS, Feature.WINDOW, Feature.BIAS, Feature.LEARNED_BIAS, Feature.SCORE_MOD}
"""On CUDA, features for which flex skips masked blocks or holds no bias in memory; without them torch's own kernels
are as fast and need no compiling."""

DENSE_ON_CPU = {Feature.DOCUMENTS, Feature.WINDOW, Feature.PATTERN, Feature.BIAS}
"""Features that torch's kernel on CPU takes as a dense mask or bias, with an entry for every query and key."""

EAGER_MAX_SEQ = {
    "more work": 96,  # torch's kernel has more work than plain attention,
    "sink": 192,  # and this work is a sink
    "bf16": 767,  # torch's kernel takes blocks of 256 queries in place of 64 from 768 on
    "bf16, narrow": 160,  # it only has to skip what a causal mask hides, in narrow heads
}
"""The longest sequences for which eager takes no longer than sdpa on a CPU, forward and backward; measured from 64 to
2048 tokens."""

DECODING_SDPA_MAX_SEQ = 128
"""Number of keys up to which sdpa, which computes short sequences in fp32, is faster in bf16 for a single query: in
half of the time of eager's two products, each of which takes 20 µs at least."""


def fastest(case: KernelRequirements, able: Collection[str]) -> str:
    """The fastest of the backends that can compute a case: measured on one CPU, by torch's documentation on CUDA.

    Other CPUs may differ; `nn.timing` compares on the machine that trains.
    On Hopper GPUs sdpa runs cuDNN's kernel for unmasked and causal attention, in 0.7 of flash's time; no whole run has
    been made with it yet, so it is not chosen.
    """
    if case.device != "cpu":
        order = ("flash", "flex", "sdpa") if case.features & SKIPPED_BY_FLEX else ("flash", "sdpa", "flex")
        return next((name for name in order if name in able), "eager")
    # On CPU sdpa runs torch's flash kernel if that can compute the case, and unfused arithmetic otherwise, so it is
    # never slower than flash. Flex is not compiled on CPU.
    is_long = (case.seq or sys.maxsize) > _eager_max_seq(case, is_fused="flash" in able)
    return "sdpa" if "sdpa" in able and is_long else "eager"


def _eager_max_seq(case: KernelRequirements, is_fused: bool) -> float:
    """The length up to which eager is the faster on a CPU; `is_fused` tells if sdpa runs torch's flash kernel.

    Flash skips what a causal mask hides, and eager has more work with padding. Without either, eager wins at any length
    over unfused arithmetic, and in fp32 over flash with a sink's extra dimension and key or with padded head sizes. In
    native bf16 it wins more often: 1.2 to 2 times as fast without a mask.
    """
    features, is_narrow = case.features, case.head_dim <= 32
    has_sink, is_padded, is_causal = (each in features for each in (Feature.SINK, Feature.PADDING, Feature.CAUSAL))
    works_more = has_sink or Feature.VALUE_DIM in features
    is_dense = bool(features & DENSE_ON_CPU)
    if case.dtype != torch.bfloat16:
        works_more = works_more or not is_fused
        if Feature.LEARNED_BIAS in features or (works_more and not (is_causal or is_padded)):
            return math.inf
        if has_sink and not is_padded:
            return EAGER_MAX_SEQ["sink"]
        return EAGER_MAX_SEQ["more work"] if works_more or Feature.BIAS in features else 0
    if not has_native_bf16(case.device):  # emulated products are slow, and torch's kernels make fewer
        return 0
    if case.has_one_query and not features and (case.seq or sys.maxsize) <= DECODING_SDPA_MAX_SEQ:
        return 0
    skips = is_causal and (is_narrow or not is_dense)  # a dense mask costs flash less with narrow heads
    if not is_fused or not (skips or is_padded):
        return math.inf
    if is_narrow and is_padded:
        return EAGER_MAX_SEQ["sink" if has_sink else "more work"]
    return EAGER_MAX_SEQ["bf16, narrow" if is_narrow and not (works_more or is_dense) else "bf16"]
