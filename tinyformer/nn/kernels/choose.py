"""The attention backends: their abilities, the choice of the fastest for a call, and `run_kernel`, which runs one."""

import functools
import importlib.util
import math
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention import activate_flash_attention_impl

from tinyformer.errors import ArgumentError, require_choice
from tinyformer.hardware import has_native_bf16
from tinyformer.nn.kernels.eager import eager
from tinyformer.nn.kernels.flash import flash
from tinyformer.nn.kernels.flex import flex
from tinyformer.nn.kernels.sdpa import HEAD_DIM_STEP, sdpa
from tinyformer.nn.mask import AttentionMask
from tinyformer.nn.score import Scoring


class Feature(StrEnum):
    """A feature of attention that some kernels lack; the value is the feature's name in error messages."""

    CAUSAL = "a causal mask"
    PADDING = "padding"
    CAUSAL_PADDING = "padding together with a causal mask (which by itself hides padding at the end of a row)"
    DOCUMENTS = "documents"
    PADDED_DOCUMENTS = "documents together with padding"
    WINDOW = "a window"
    PATTERN = "a mask of any pattern"
    UNEVEN = "fewer queries than keys"
    DROPOUT = "attention dropout"
    GRADIENT = "training"
    VALUE_DIM = "values of another size than the keys"
    BIAS = "a bias on the scores"
    LEARNED_BIAS = "a learned bias on the scores"
    SCORE_MOD = "score modifications other than a bias"
    COMPARE = "scores other than dot products"
    SINK = "sinks"
    MASKED_SINK = "sinks together with padding, documents or a window"
    WEIGHTS = "explicit attention weights"
    DECAY = "a forget gate"
    LEARNED_DECAY = "training of a forget gate"


def features_of(
    mask: AttentionMask,
    scoring: Scoring,
    q_seq: int,
    k_seq: int,
    dropout: bool,
    gradient: bool,
    uneven_dims: bool = False,
) -> frozenset[Feature]:
    """The features that a call needs; `gradient` says whether a backward pass follows.

    `uneven_dims` says whether values have another size than keys.
    """
    padded, packed, windowed = mask.lengths is not None, mask.documents is not None, mask.window is not None
    needed = {
        Feature.CAUSAL: mask.causal,
        Feature.PADDING: padded,
        Feature.CAUSAL_PADDING: padded and (mask.causal or windowed),
        Feature.DOCUMENTS: packed,
        Feature.PADDED_DOCUMENTS: packed and padded,
        Feature.WINDOW: windowed,
        Feature.PATTERN: mask.allowed is not None,
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
        Feature.DECAY: scoring.log_decay is not None,
        Feature.LEARNED_DECAY: scoring.log_decay is not None and gradient,
    }
    return frozenset(feature for feature, is_needed in needed.items() if is_needed)


class KernelRequirements(NamedTuple):
    """The properties of a call (a "case") that determine whether a kernel can compute it, and how fast.

    Attributes:
        device: device type, "cpu" or "cuda".
        dtype: dtype of queries, keys and values in the kernel; under autocast, the lower precision.
        head_dim: the larger of the head sizes of keys and values.
        features: the features that the call needs beyond plain attention.
        seq: length of the longest sequence; None if it is unknown, which is treated as long.
        has_one_query: whether there is a single query, as in a step of cached generation.
    """

    device: str
    dtype: torch.dtype
    head_dim: int
    features: frozenset[Feature] = frozenset()
    seq: int | None = None
    has_one_query: bool = False

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scoring: Scoring, dropout: float, gradient: bool
    ) -> "KernelRequirements":
        """The requirements of a call; `gradient` says whether a backward pass follows."""
        q_seq, k_seq, q_dim, v_dim = q.shape[2], k.shape[2], q.shape[-1], v.shape[-1]
        features = features_of(mask, scoring, q_seq, k_seq, dropout > 0, gradient, q_dim != v_dim)
        return cls(q.device.type, q.dtype, max(q_dim, v_dim), features, max(q_seq, k_seq), q_seq == 1)


_MORE_THAN_A_BIAS = {Feature.SCORE_MOD, Feature.COMPARE, Feature.WEIGHTS}

LACKS: dict[tuple[str, str], frozenset[Feature]] = {
    ("sdpa", "cpu"): frozenset(_MORE_THAN_A_BIAS),
    ("sdpa", "cuda"): frozenset(_MORE_THAN_A_BIAS),
    ("flash", "cpu"): frozenset(_MORE_THAN_A_BIAS | {Feature.DROPOUT, Feature.LEARNED_BIAS}),
    ("flash", "cuda"): frozenset(
        _MORE_THAN_A_BIAS
        | {Feature.BIAS, Feature.LEARNED_BIAS, Feature.LEARNED_DECAY, Feature.UNEVEN, Feature.PATTERN}
        | {Feature.CAUSAL_PADDING, Feature.PADDED_DOCUMENTS, Feature.MASKED_SINK}
    ),
    ("flex", "cpu"): frozenset({Feature.DROPOUT, Feature.COMPARE, Feature.WEIGHTS, Feature.GRADIENT}),
    ("flex", "cuda"): frozenset({Feature.DROPOUT, Feature.COMPARE, Feature.WEIGHTS, Feature.LEARNED_DECAY}),
}
"""The features that a backend cannot compute on a device (torch 2.11 to 2.13).

Eager computes all features, and all backends compute a feature that is in no entry.
"""

_VARLEN = {Feature.PADDING, Feature.DOCUMENTS, Feature.WINDOW}
"""Features for which flash on CUDA runs the kernel for packed sequences."""


@runtime_checkable
class AttentionFunction(Protocol):
    """The signature that all backends share; see `eager` for the shapes."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scoring: Scoring, dropout: float = 0.0
    ) -> Tensor: ...


@dataclass(frozen=True)
class Backend:
    """A named implementation of attention.

    Args:
        refusal: function that returns the reason why the backend cannot compute a case, or None if it can.
        activate: function that is called whenever the backend is selected, before `compute`.
    """

    name: str
    compute: AttentionFunction
    refusal: Callable[[KernelRequirements], str | None]
    activate: Callable[[], object] = lambda: None


def _lacking(name: str) -> Callable[[KernelRequirements], str | None]:
    """The `refusal` function of a backend according to the table `LACKS`."""

    def refusal(case: KernelRequirements) -> str | None:
        lacks = LACKS.get((name, case.device))
        if lacks is None and name != "sdpa":  # sdpa runs wherever torch does
            return f"has no kernel for the device '{case.device}'"
        lacking = sorted(case.features & (lacks or _MORE_THAN_A_BIAS))
        return f"cannot compute {' or '.join(lacking)} on {case.device.upper()}" if lacking else None

    return refusal


def _flash_refusal(case: KernelRequirements) -> str | None:
    """The reason why flash cannot compute a case, by `LACKS` or its CUDA kernel's dtypes and sizes; None if it can."""
    reason = _lacking("flash")(case)
    if reason is not None or case.device != "cuda":
        return reason
    if case.dtype not in (torch.bfloat16, torch.float16):
        return f"needs bf16 or fp16 on CUDA, as in mixed precision, not {case.dtype}"
    head_dim = case.head_dim + HEAD_DIM_STEP * len({Feature.SINK, Feature.DECAY} & case.features)
    if head_dim > 256:
        return f"takes heads of at most 256 dimensions on CUDA (8 for a sink, 8 for a forget gate), not {head_dim}"
    if Feature.DROPOUT in case.features and case.features & _VARLEN:
        return "cannot compute attention dropout together with padding, documents or a window on CUDA"
    return None


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False


@functools.lru_cache(maxsize=1)
def _activate(version: str) -> None:
    """Register a version of FlashAttention as torch's flash kernel, and leave it registered for the backward pass.

    Results are cached, since torch would register the kernels again at each call.
    """
    activate_flash_attention_impl(version)


def _newer_flash(version: str, package: str) -> Backend:
    """The backend of FlashAttention 3 or 4, which needs another package, and is not yet tested on a GPU."""

    def refusal(case: KernelRequirements) -> str | None:
        if case.device != "cuda":
            return f"runs on CUDA, not on {case.device.upper()}"
        if not _is_installed(package):
            return f"needs the package {package}, which is not installed"
        if Feature.DROPOUT in case.features:
            return "has no attention dropout"
        return _flash_refusal(case)

    return Backend(version.lower(), flash, refusal, lambda: _activate(version))


BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("eager", eager, lambda case: None),
        Backend("sdpa", sdpa, _lacking("sdpa")),
        Backend("flash", flash, _flash_refusal),
        Backend("flex", flex, _lacking("flex")),
        _newer_flash("FA3", "flash_attn_interface"),
        _newer_flash("FA4", "flash_attn.cute"),
    )
}
"""The backends by name."""


def run_kernel(
    backend: Backend | str,
    q: Float[Tensor, "batch num_heads q_seq head_dim"],
    k: Float[Tensor, "batch num_kv_heads k_seq head_dim"],
    v: Float[Tensor, "batch num_kv_heads k_seq v_head_dim"],
    mask: AttentionMask,
    scoring: Scoring,
    dropout: float = 0.0,
) -> Float[Tensor, "batch num_heads q_seq v_head_dim"]:
    """The output of each head, computed by `backend`: a selected backend, a name in `BACKENDS`, or "auto"."""
    if not scoring.scale and scoring.compare is None:  # a kernel would multiply the -inf of masked keys by 0
        q, scoring = q * 0.0, replace(scoring, scale=1.0)
    # In decoding, the one query needs no causal mask, which a kernel might lack.
    mask = mask.for_last(k.shape[2]) if q.shape[2] == 1 else mask
    if isinstance(backend, str):
        case = KernelRequirements.of(q, k, v, mask, scoring, dropout, torch.is_grad_enabled())
        backend = select_backend(backend, case)
    if mask.log_decay is not None:  # `scoring` has it, and a kernel may cache what it computes from a mask
        mask = replace(mask, log_decay=None)
    return backend.compute(q, k, v, mask, scoring, dropout)


def select_backend(name: str, case: KernelRequirements) -> Backend:
    """The backend that computes a case: the named backend, or for "auto" the fastest backend that can compute it.

    If the named backend cannot compute the case, an `ArgumentError` says what it lacks and which backends can.
    """
    if name == "auto":
        return BACKENDS[fastest(case, [other for other in ("sdpa", "flash", "flex") if _can(other, case)])]
    require_choice("backend", name, ["auto", *BACKENDS])
    _require(name, [case])
    BACKENDS[name].activate()
    return BACKENDS[name]


def require_possible(name: str, case: KernelRequirements) -> None:
    """Raise an `ArgumentError` if a backend does not exist, or cannot compute a case on any device."""
    if name != "auto":
        require_choice("backend", name, ["auto", *BACKENDS])
        _require(name, [case._replace(device=device) for device in ("cpu", "cuda")])


def _require(name: str, cases: Sequence[KernelRequirements]) -> None:
    """Raise an `ArgumentError` if a backend can compute none of `cases`, which differ only in the device."""
    reasons = [BACKENDS[name].refusal(case) for case in cases]
    if None not in reasons:
        able = ", ".join(other for other in BACKENDS if all(_can(other, case) for case in cases))
        raise ArgumentError("backend", name, f"{', and '.join(map(str, reasons))} ({able} can)", {"backend": "auto"})


def _can(name: str, case: KernelRequirements) -> bool:
    return BACKENDS[name].refusal(case) is None


SKIPPED_BY_FLEX = {Feature.DOCUMENTS, Feature.WINDOW, Feature.BIAS, Feature.LEARNED_BIAS, Feature.SCORE_MOD}
"""On CUDA, features for which flex skips masked blocks or holds no bias in memory; without them torch's own kernels
are as fast and need no compiling."""

DENSE_ON_CPU = {Feature.DOCUMENTS, Feature.WINDOW, Feature.PATTERN, Feature.BIAS}
"""Features that torch's kernel on CPU takes as a dense mask or bias, with an entry for every query and key."""

EAGER_MAX_SEQ = {
    "more work": 96,  # torch's kernel has more work than plain attention,
    "sink": 192,  # and this work is a sink
    "bf16": 767,  # torch's kernel takes blocks of 256 queries in place of 64 from 768 on
    "bf16, narrow": 160,  # torch's kernel only has to skip the keys that a causal mask hides, and heads are narrow
}
"""The longest sequences for which eager takes no longer than sdpa on a CPU, forward and backward; measured from 64 to
2048 tokens."""

DECODING_SDPA_MAX_SEQ = 128
"""Number of keys up to which sdpa is faster than eager for a single query in bf16. Sdpa computes short sequences in
fp32, in half of the time of eager's two products, each of which takes at least 20 µs."""


def fastest(case: KernelRequirements, able: Collection[str]) -> str:
    """The name of the fastest of the backends in `able`, which can compute a case.

    The choice follows measurements on one CPU, and torch's documentation on CUDA. Other CPUs may differ, so a training
    run measures eager and sdpa itself. On Hopper GPUs sdpa runs cuDNN's kernel for unmasked and causal attention, which
    takes 0.7 of flash's time; sdpa is still not chosen, since no whole run has been made with this kernel yet.
    """
    if case.device != "cpu":
        order = ("flash", "flex", "sdpa") if case.features & SKIPPED_BY_FLEX else ("flash", "sdpa", "flex")
        return next((name for name in order if name in able), "eager")
    # On CPU sdpa runs torch's flash kernel if that can compute the case, and unfused arithmetic otherwise, so it is
    # never slower than flash. Flex is not compiled on CPU.
    is_long = (case.seq or sys.maxsize) > _eager_max_seq(case, is_fused="flash" in able)
    return "sdpa" if "sdpa" in able and is_long else "eager"


def _eager_max_seq(case: KernelRequirements, is_fused: bool) -> float:
    """The sequence length up to which eager is faster than sdpa on a CPU; if `is_fused`, sdpa runs the flash kernel.

    Flash skips keys that a causal mask hides, and padding slows eager down. Without causal mask and padding, eager is
    faster than unfused arithmetic at any length. In fp32, it is also faster than flash with a sink, or with keys and
    values of different sizes. In native bf16, eager without a mask is 1.2 to 2 times as fast as sdpa.
    """
    features, is_narrow = case.features, case.head_dim <= 32
    has_sink, is_padded, is_causal = (each in features for each in (Feature.SINK, Feature.PADDING, Feature.CAUSAL))
    works_more = has_sink or bool({Feature.VALUE_DIM, Feature.DECAY} & features)
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
