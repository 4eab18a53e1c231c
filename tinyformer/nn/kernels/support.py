"""The backends by name, the table of what each can compute, and `run_kernel`, which calls one of them."""

import functools
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention import activate_flash_attention_impl

from tinyformer.errors import ArgumentError, require_choice
from tinyformer.nn.kernels.case import Feature, KernelRequirements
from tinyformer.nn.kernels.eager import eager
from tinyformer.nn.kernels.fastest import fastest
from tinyformer.nn.kernels.flash import flash
from tinyformer.nn.kernels.flex import flex
from tinyformer.nn.kernels.sdpa import HEAD_DIM_STEP, sdpa
from tinyformer.nn.mask import AttentionMask
from tinyformer.nn.score import Scoring

_MORE_THAN_A_BIAS = {Feature.SCORE_MOD, Feature.COMPARE, Feature.WEIGHTS}

LACKS: dict[tuple[str, str], frozenset[Feature]] = {
    ("sdpa", "cpu"): frozenset(_MORE_THAN_A_BIAS),
    ("sdpa", "cuda"): frozenset(_MORE_THAN_A_BIAS),
    ("flash", "cpu"): frozenset(_MORE_THAN_A_BIAS | {Feature.DROPOUT, Feature.LEARNED_BIAS}),
    ("flash", "cuda"): frozenset(
        _MORE_THAN_A_BIAS
        | {Feature.BIAS, Feature.LEARNED_BIAS, Feature.UNEVEN, Feature.PATTERN}
        | {Feature.CAUSAL_PADDING, Feature.PADDED_DOCUMENTS, Feature.MASKED_SINK}
    ),
    ("flex", "cpu"): frozenset({Feature.DROPOUT, Feature.COMPARE, Feature.WEIGHTS, Feature.GRADIENT}),
    ("flex", "cuda"): frozenset({Feature.DROPOUT, Feature.COMPARE, Feature.WEIGHTS}),
}
"""What a backend cannot compute on a device (torch 2.11 to 2.13). Eager computes everything; a feature in no entry is
computed by all."""

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
    """A way to compute attention.

    Args:
        refusal: why it cannot compute a case, or None if it can.
        activate: called whenever it is selected, before it computes.
    """

    name: str
    compute: AttentionFunction
    refusal: Callable[[KernelRequirements], str | None]
    activate: Callable[[], object] = lambda: None


def _lacking(name: str) -> Callable[[KernelRequirements], str | None]:
    """The refusal by the table of the backend of this name."""

    def refusal(case: KernelRequirements) -> str | None:
        lacks = LACKS.get((name, case.device))
        if lacks is None and name != "sdpa":  # which runs wherever torch does
            return f"has no kernel for the device '{case.device}'"
        lacking = sorted(case.features & (lacks or _MORE_THAN_A_BIAS))
        return f"cannot compute {' or '.join(lacking)} on {case.device.upper()}" if lacking else None

    return refusal


def _flash_refusal(case: KernelRequirements) -> str | None:
    """The refusal by the table, and by the dtypes and sizes that the CUDA kernel takes."""
    reason = _lacking("flash")(case)
    if reason is not None or case.device != "cuda":
        return reason
    if case.dtype not in (torch.bfloat16, torch.float16):
        return f"needs bf16 or fp16 on CUDA, as in mixed precision, not {case.dtype}"
    head_dim = case.head_dim + HEAD_DIM_STEP * (Feature.SINK in case.features)
    if head_dim > 256:
        return f"takes heads of at most 256 dimensions on CUDA (8 of them for a sink), not {head_dim}"
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
    """Make a version of FlashAttention torch's flash kernel, for good, since the backward pass needs it, too.

    Cached until another version is activated, since torch registers the kernels anew at each call.
    """
    activate_flash_attention_impl(version)


def _newer_flash(version: str, package: str) -> Backend:
    """FlashAttention 3 or 4, where its package is installed. Not yet tested on a GPU."""

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
    """The output of each head by `eager`, `sdpa`, `flash` or `flex`: a backend chosen before, or one by name."""
    if not scoring.scale and scoring.compare is None:  # a kernel would multiply the -inf of masked keys by 0
        q, scoring = q * 0.0, replace(scoring, scale=1.0)
    # In decoding, the one query needs no causal mask, which a kernel might lack.
    mask = mask.for_last(k.shape[2]) if q.shape[2] == 1 else mask
    if isinstance(backend, str):
        case = KernelRequirements.of(q, k, v, mask, scoring, dropout, torch.is_grad_enabled())
        backend = select_backend(backend, case)
    return backend.compute(q, k, v, mask, scoring, dropout)


def select_backend(name: str, case: KernelRequirements) -> Backend:
    """The backend that computes a case: the named one, or for "auto" the fastest that can.

    An `ArgumentError` says what the named one lacks, and which backends can compute the case.
    """
    if name == "auto":
        return BACKENDS[fastest(case, [other for other in ("sdpa", "flash", "flex") if _can(other, case)])]
    require_choice("backend", name, ["auto", *BACKENDS])
    _require(name, [case])
    BACKENDS[name].activate()
    return BACKENDS[name]


def require_possible(name: str, case: KernelRequirements) -> None:
    """Refuse a backend that does not exist, or that cannot compute a case on any device."""
    if name != "auto":
        require_choice("backend", name, ["auto", *BACKENDS])
        _require(name, [case._replace(device=device) for device in ("cpu", "cuda")])


def _require(name: str, cases: Sequence[KernelRequirements]) -> None:
    """Refuse a backend that can compute a case on none of several devices; `cases` is that case on each."""
    reasons = [BACKENDS[name].refusal(case) for case in cases]
    if None not in reasons:
        able = ", ".join(other for other in BACKENDS if all(_can(other, case) for case in cases))
        raise ArgumentError("backend", name, f"{', and '.join(map(str, reasons))} ({able} can)", {"backend": "auto"})


def _can(name: str, case: KernelRequirements) -> bool:
    return BACKENDS[name].refusal(case) is None
