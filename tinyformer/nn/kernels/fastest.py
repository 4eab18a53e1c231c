"""Which of the backends that can compute a case is the fastest: what `backend="auto"` chooses."""

import sys
from collections.abc import Collection

import torch

from tinyformer.nn.kernels.case import AttentionCase, Feature

# On CPU plain matrix products beat torch's choice up to these lengths: where it has extra work to do; where that is a
# sink; in bf16, until torch's kernel takes blocks of 256 queries in place of 64; in bf16 and narrow heads, where
# torch's kernel has nothing more to do than skip what a causal mask hides.
CPU_EAGER_MAX_SEQ, CPU_SINK_EAGER_MAX_SEQ, CPU_BF16_EAGER_MAX_SEQ, CPU_BF16_NARROW_EAGER_MAX_SEQ = 96, 192, 767, 160

SKIPPED_BY_FLEX = {Feature.DOCUMENTS, Feature.WINDOW, Feature.BIAS, Feature.LEARNED_BIAS, Feature.SCORE_MOD}
"""On CUDA, features for which flex skips masked blocks or holds no bias in memory; without them torch's own kernels
are as fast and need no compiling."""

DENSE_ON_CPU = {Feature.DOCUMENTS, Feature.WINDOW, Feature.BIAS}
"""Features that torch's kernel on CPU takes as a mask or a bias for every pair of a query and a key."""


def fastest(case: AttentionCase, able: Collection[str]) -> str:
    """The name of the fastest backend, by measurement on CPU and by torch's documentation on CUDA.

    Args:
        case: the call.
        able: the names of the backends that can compute it.
    """
    if case.device == "cpu":
        return _fastest_on_cpu(case, able) if "sdpa" in able else "eager"
    order = ("flash", "flex", "sdpa") if case.features & SKIPPED_BY_FLEX else ("flash", "sdpa", "flex")
    return next((name for name in order if name in able), "eager")


def _fastest_on_cpu(case: AttentionCase, able: Collection[str]) -> str:
    # Torch's own choice on CPU is its flash kernel wherever that can run, so sdpa is flash without the switch around
    # each call. Where it cannot, torch's unfused arithmetic is left. Flex is not compiled on CPU.
    is_fused = "flash" in able
    is_bf16 = case.dtype == torch.bfloat16
    longest = _bf16_eager_max_seq(case, is_fused) if is_bf16 else _fp32_eager_max_seq(case, is_fused)
    return "eager" if (case.seq or sys.maxsize) <= longest else "sdpa"


def _fp32_eager_max_seq(case: AttentionCase, is_fused: bool) -> int:
    """The length up to which eager takes no longer than sdpa, forward and backward; measured from 64 to 2048 tokens."""
    features = case.features
    has_sink = Feature.SINK in features
    works_more = has_sink or Feature.VALUE_DIM in features or not is_fused
    # Flash skips what a causal mask hides, and eager works more where rows may be empty: without either, there is
    # nothing to win over unfused arithmetic, or with a sink's extra dimension and key, or with dimensions of zeros.
    hides = bool(features & {Feature.CAUSAL, Feature.PADDING})
    if Feature.LEARNED_BIAS in features or (works_more and not hides):
        return sys.maxsize
    if has_sink and Feature.PADDING not in features:
        return CPU_SINK_EAGER_MAX_SEQ
    return CPU_EAGER_MAX_SEQ if works_more or Feature.BIAS in features else 0


def _bf16_eager_max_seq(case: AttentionCase, is_fused: bool) -> int:
    """The same in bf16, where eager's plain matrix products win more often: 1.2 to 2 times as fast without a mask."""
    features, is_narrow = case.features, case.head_dim <= 32
    is_padded = Feature.PADDING in features
    # Flash skips what a causal mask hides, unless it gets a mask for every pair, which in narrow heads costs less.
    skips = Feature.CAUSAL in features and (is_narrow or not features & DENSE_ON_CPU)
    if not is_fused or not (skips or is_padded):
        return sys.maxsize
    if is_padded and is_narrow:
        return CPU_SINK_EAGER_MAX_SEQ if Feature.SINK in features else CPU_EAGER_MAX_SEQ
    works_more = features & (DENSE_ON_CPU | {Feature.SINK, Feature.VALUE_DIM})
    return CPU_BF16_NARROW_EAGER_MAX_SEQ if is_narrow and not works_more else CPU_BF16_EAGER_MAX_SEQ
