"""Which backend can compute what, and which one does it fastest: the table that README and doctor show."""

import importlib.util
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn.attention import activate_flash_attention_impl

from tinyformer.nn import backends
from tinyformer.nn.mask import AttentionMask
from tinyformer.nn.score import Scoring

# On CPU plain matrix products beat torch's choice up to these lengths: where it has extra work to do; where that is a
# sink; in bf16, until torch's kernel takes blocks of 256 queries in place of 64; in bf16 and narrow heads, where
# torch's kernel has nothing more to do than skip what a causal mask hides.
CPU_EAGER_MAX_SEQ, CPU_SINK_EAGER_MAX_SEQ, CPU_BF16_EAGER_MAX_SEQ, CPU_BF16_NARROW_EAGER_MAX_SEQ = 96, 192, 767, 160


class Feature(StrEnum):
    """What a description may ask of a kernel beyond plain attention, in the words of an error."""

    CAUSAL = "a causal mask"
    PADDING = "padding"
    CAUSAL_PADDING = "padding beside a causal mask (which hides padding at the right by itself)"
    DOCUMENTS = "documents"
    PADDED_DOCUMENTS = "documents beside padding"
    WINDOW = "a window"
    UNEVEN = "fewer queries than keys"
    DROPOUT = "attention dropout"
    GRADIENT = "training"
    VALUE_DIM = "values of another size than the keys"
    BIAS = "a bias on the scores"
    LEARNED_BIAS = "a learned bias on the scores"
    SCORE_MOD = "scores changed by more than a bias"
    COMPARE = "scores that are no dot product"
    SINK = "sinks"
    MASKED_SINK = "sinks beside padding, documents or a window"
    WEIGHTS = "a use of the weights themselves"


def features_of(
    mask: AttentionMask,
    scoring: Scoring,
    q_seq: int,
    k_seq: int,
    dropout: bool,
    gradient: bool,
    uneven_dims: bool = False,
) -> frozenset[Feature]:
    """What a call asks for.

    Args:
        mask: of the call.
        scoring: of the call.
        q_seq: number of queries.
        k_seq: number of keys.
        dropout: whether attention weights are dropped.
        gradient: whether a backward pass follows.
        uneven_dims: whether values have another size than keys.
    """
    padded, packed, windowed = mask.lengths is not None, mask.documents is not None, mask.window is not None
    asked = {
        Feature.CAUSAL: mask.causal,
        Feature.PADDING: padded,
        Feature.CAUSAL_PADDING: padded and (mask.causal or windowed),
        Feature.DOCUMENTS: packed,
        Feature.PADDED_DOCUMENTS: packed and padded,
        Feature.WINDOW: windowed,
        Feature.UNEVEN: q_seq != k_seq and (mask.causal or windowed or packed),
        Feature.DROPOUT: dropout,
        Feature.GRADIENT: gradient,
        Feature.VALUE_DIM: uneven_dims,
        Feature.BIAS: any(mod.additive and not (gradient and mod.learned) for mod in scoring.mods),
        Feature.LEARNED_BIAS: gradient and any(mod.learned for mod in scoring.mods),
        Feature.SCORE_MOD: any(not mod.additive for mod in scoring.mods),
        Feature.COMPARE: scoring.compare is not None,
        Feature.SINK: scoring.sink is not None,
        Feature.MASKED_SINK: scoring.sink is not None and (padded or packed or windowed),
        Feature.WEIGHTS: scoring.reweigh is not None or scoring.mix is not None,
    }
    return frozenset(feature for feature, is_asked in asked.items() if is_asked)


class AttentionCase(NamedTuple):
    """What a model asks of its backend: all that decides whether a kernel can serve it, and how fast.

    Args:
        device: the type, "cpu" or "cuda".
        dtype: that of queries, keys and values inside the kernel, under autocast the lower one.
        head_dim: of each head, the larger of the keys' and the values'.
        features: what it asks for beyond plain or causal attention.
        seq: the longest sequence, in tokens; long unless given.
    """

    device: str
    dtype: torch.dtype
    head_dim: int
    features: frozenset[Feature] = frozenset()
    seq: int | None = None


@runtime_checkable
class AttentionFunction(Protocol):
    """The signature that all backends share; see `backends.eager` for the shapes."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scoring: Scoring, dropout: float = 0.0
    ) -> Tensor:
        """Attend."""
        ...


_MORE_THAN_A_BIAS = {Feature.SCORE_MOD, Feature.COMPARE, Feature.WEIGHTS}

LACKS: dict[tuple[str, str], frozenset[Feature]] = {
    ("sdpa", "cpu"): frozenset(_MORE_THAN_A_BIAS),
    ("sdpa", "cuda"): frozenset(_MORE_THAN_A_BIAS),
    ("flash", "cpu"): frozenset(_MORE_THAN_A_BIAS | {Feature.DROPOUT, Feature.LEARNED_BIAS}),
    ("flash", "cuda"): frozenset(
        _MORE_THAN_A_BIAS
        | {Feature.BIAS, Feature.LEARNED_BIAS, Feature.UNEVEN}
        | {Feature.CAUSAL_PADDING, Feature.PADDED_DOCUMENTS, Feature.MASKED_SINK}
    ),
    ("flex", "cpu"): frozenset({Feature.DROPOUT, Feature.COMPARE, Feature.WEIGHTS, Feature.GRADIENT}),
    ("flex", "cuda"): frozenset({Feature.DROPOUT, Feature.COMPARE, Feature.WEIGHTS}),
}
"""What a backend cannot compute on a device (torch 2.11 to 2.13). Eager computes all; what is in no entry, all can."""


def _lacking(name: str) -> Callable[[AttentionCase], str | None]:
    """Why the backend of this name refuses a case, by the table."""

    def refusal(case: AttentionCase) -> str | None:
        lacks = LACKS.get((name, case.device))
        if lacks is None and name != "sdpa":  # which runs wherever torch does
            return f"has no kernel for the device '{case.device}'"
        lacking = sorted(case.features & (lacks or _MORE_THAN_A_BIAS))
        return f"cannot compute {' or '.join(lacking)} on {case.device.upper()}" if lacking else None

    return refusal


def _refuse_nothing(case: AttentionCase) -> str | None:
    return None


def _flash_refusal(case: AttentionCase) -> str | None:
    """By the table, and what the CUDA kernel asks of dtype and size."""
    reason = _lacking("flash")(case)
    if reason is None and case.device == "cuda" and case.dtype not in (torch.bfloat16, torch.float16):
        return f"computes in bf16 or fp16 on CUDA, not in {case.dtype} (trainer.precision=bf16-mixed works)"
    head_dim = case.head_dim + backends.HEAD_DIM_STEP * (Feature.SINK in case.features)
    if reason is None and case.device == "cuda" and head_dim > 256:
        return f"takes heads of at most 256 dimensions on CUDA (8 of them for a sink), not {head_dim}"
    if reason is None and case.device == "cuda" and Feature.DROPOUT in case.features and case.features & _VARLEN:
        return "cannot drop attention weights beside padding, documents or a window on CUDA"
    return reason


_VARLEN = {Feature.PADDING, Feature.DOCUMENTS, Feature.WINDOW}


@dataclass(frozen=True)
class Backend:
    """A way to compute attention.

    Args:
        name: the value of `attention.backend`.
        compute: the function.
        refusal: why it cannot serve a case, or None if it can.
    """

    name: str
    compute: AttentionFunction
    refusal: Callable[[AttentionCase], str | None]


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # of the package that it is part of
        return False


def _newer_flash(version: str, package: str) -> Backend:
    """FlashAttention 3 or 4, where its package is installed. Untested: no GPU has shown them yet."""

    def compute(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scoring: Scoring, dropout: float = 0.0) -> Tensor:
        activate_flash_attention_impl(version)  # stays active, since the backward pass needs it
        return backends.flash(q, k, v, mask, scoring, dropout)

    def refusal(case: AttentionCase) -> str | None:
        if case.device != "cuda":
            return f"runs on CUDA, not on {case.device.upper()}"
        if not _is_installed(package):
            return f"needs the package {package}, which is not installed"
        if Feature.DROPOUT in case.features:
            return "has no attention dropout"
        return _flash_refusal(case)

    return Backend(version.lower(), compute, refusal)


BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("eager", backends.eager, _refuse_nothing),
        Backend("sdpa", backends.sdpa, _lacking("sdpa")),
        Backend("flash", backends.flash, _flash_refusal),
        Backend("flex", backends.flex, _lacking("flex")),
        _newer_flash("FA3", "flash_attn_interface"),
        _newer_flash("FA4", "flash_attn.cute"),
    )
}


def _fastest(case: AttentionCase) -> str:
    """The name of the fastest backend for a case, by measurement on CPU and by torch's documentation on CUDA."""
    able = {name for name in ("sdpa", "flash", "flex") if BACKENDS[name].refusal(case) is None}
    if case.device == "cpu":
        return _fastest_on_cpu(case) if "sdpa" in able else "eager"
    # Flex skips what these hide, and holds no bias in memory; without them torch's own kernels need no compiling.
    order = ("flash", "flex", "sdpa") if case.features & _FOR_FLEX else ("flash", "sdpa", "flex")
    return next((name for name in order if name in able), "eager")


_FOR_FLEX = {Feature.DOCUMENTS, Feature.WINDOW, Feature.BIAS, Feature.LEARNED_BIAS, Feature.SCORE_MOD}


def _fastest_on_cpu(case: AttentionCase) -> str:
    # Torch's own choice on CPU is its flash kernel wherever that can run, so sdpa is flash without the switch around
    # each call. Where it cannot, torch's unfused arithmetic is left. Flex is not compiled on CPU.
    longest = _bf16_eager_max_seq(case) if case.dtype == torch.bfloat16 else _fp32_eager_max_seq(case)
    return "eager" if (case.seq or sys.maxsize) <= longest else "sdpa"


def _fp32_eager_max_seq(case: AttentionCase) -> int:
    """Up to which length eager takes no longer than sdpa, forward and backward; measured from 64 to 2048 tokens."""
    features = case.features
    has_sink = Feature.SINK in features
    works_more = has_sink or Feature.VALUE_DIM in features or bool(features & LACKS["flash", "cpu"])
    # Flash skips what a causal mask hides, and eager works more where rows may be empty: without either, there is
    # nothing to win over unfused arithmetic, or with a sink's extra dimension and key, or with dimensions of zeros.
    hides = bool(features & {Feature.CAUSAL, Feature.PADDING})
    if Feature.LEARNED_BIAS in features or (works_more and not hides):
        return sys.maxsize
    if has_sink and Feature.PADDING not in features:
        return CPU_SINK_EAGER_MAX_SEQ
    return CPU_EAGER_MAX_SEQ if works_more or Feature.BIAS in features else 0


def _bf16_eager_max_seq(case: AttentionCase) -> int:
    """The same in bf16, where eager's plain matrix products win more often: 1.2 to 2 times as fast without a mask."""
    features, is_narrow = case.features, case.head_dim <= 32
    unfused, is_padded = bool(features & LACKS["flash", "cpu"]), Feature.PADDING in features
    # Flash skips what a causal mask hides, unless it gets a mask for every pair, which in narrow heads costs less.
    skips = Feature.CAUSAL in features and (is_narrow or not features & _DENSE_ON_CPU)
    if unfused or not (skips or is_padded):
        return sys.maxsize
    if is_padded and is_narrow:
        return CPU_SINK_EAGER_MAX_SEQ if Feature.SINK in features else CPU_EAGER_MAX_SEQ
    works_more = features & (_DENSE_ON_CPU | {Feature.SINK, Feature.VALUE_DIM})
    return CPU_BF16_NARROW_EAGER_MAX_SEQ if is_narrow and not works_more else CPU_BF16_EAGER_MAX_SEQ


_DENSE_ON_CPU = {Feature.DOCUMENTS, Feature.WINDOW, Feature.BIAS}


def select_backend(name: str, case: AttentionCase) -> Backend:
    """The backend that computes a case: the named one, or for "auto" the fastest that can.

    Raises:
        ValueError: there is no such backend, or it cannot compute the case; the sentence names one that can.
    """
    if name == "auto":
        return BACKENDS[_fastest(case)]
    if name not in BACKENDS:
        raise ValueError(f"attention.backend={name}: choose one of {', '.join(['auto', *BACKENDS])}.")
    reason = BACKENDS[name].refusal(case)
    if reason is not None:
        able = _able(other for other in BACKENDS.values() if other.refusal(case) is None)
        raise ValueError(f"attention.backend={name} {reason}; attention.backend={able} can.")
    return BACKENDS[name]


def require_possible(name: str, case: AttentionCase) -> None:
    """Refuse a backend that exists nowhere, or that computes a case on no device.

    Raises:
        ValueError: as for `select_backend`.
    """
    if name != "auto" and not _devices(name, case):
        select_backend(name, case)


def _devices(name: str, case: AttentionCase) -> list[str]:
    """The devices on which a backend computes a case."""
    if name not in BACKENDS:
        return []
    return [device for device in ("cpu", "cuda") if BACKENDS[name].refusal(case._replace(device=device)) is None]


def _able(found: Iterable[Backend]) -> str:
    return " or ".join(["auto", *(backend.name for backend in found)])
