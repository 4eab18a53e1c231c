"""The exact attention maps of a layer of any class, and the name of the kernel that computed its output.

An attention map is the matrix of weights whose product with the values is the output of a head.
"""

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tinyformer.errors import ArgumentError
from tinyformer.nn.kernels.eager import AttentionMaps
from tinyformer.nn.mask import AttentionMask

if TYPE_CHECKING:
    import tinyformer.nn.attention  # which imports this module

KERNELS = {
    "FlashAttnFwdSm90": "fa3",
    "kernel_cutlass": "fa4",
    "triton_tem": "triton",
    "_scaled_dot_product_flash_attention": "flash",
    "_scaled_dot_product_efficient_attention": "efficient",
    "_scaled_dot_product_cudnn_attention": "cudnn",
    "_scaled_dot_product_fused_attention": "fused",
    "_varlen_attn": "varlen",
}
"""The short name of each kernel, by a substring of the name of torch's operator or of the CUDA kernel. The first three
have no operator in torch; "varlen" is flash over packed sequences."""


def kernel_among(names: Iterable[str]) -> str:
    """The first kernel in `KERNELS` whose substring is in one of `names`; otherwise "math", plain matrix products."""
    seen = list(names)
    return next((kernel for part, kernel in KERNELS.items() if any(part in name for name in seen)), "math")


class KernelObserver(TorchDispatchMode):
    """A context that records the attention operators that torch dispatches in it.

    Attributes:
        calls: the name of each dispatched operator, and the dtype of its queries.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, torch.dtype]] = []

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.calls]

    @property
    def kernel(self) -> str:
        return kernel_among(self.names)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if "scaled_dot_product" in name or "_varlen_attn" in name:
            self.calls.append((name, args[0].dtype))
        return func(*args, **(kwargs or {}))


def running_kernel(call: Callable[[], Any]) -> str:
    """The short name of the kernel that computes attention while `call` runs, see `KERNELS`."""
    with KernelObserver() as observer:
        call()
    return observer.kernel


TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Largest error of an output recomputed from attention maps, relative to its maximum, by dtype; 0.03 for others."""

Weights: TypeAlias = Float[Tensor, "batch maps q_seq k_seq"]
"""Attention weights: a map for each softmax of each head."""

HeadOutputs: TypeAlias = Float[Tensor, "batch heads q_seq v_head_dim"]
"""The output of each head, before gates and the output projection."""

Tokens: TypeAlias = Float[Tensor, "batch q_seq input_dim"]
"""The vectors that queries are projected from."""

Source: TypeAlias = Float[Tensor, "batch k_seq input_dim"]
"""The vectors that keys and values are projected from in cross-attention."""


class QKV(NamedTuple):
    """Queries, keys and values of each head; keys and values of cached tokens come before those of new tokens."""

    q: Float[Tensor, "batch num_q_heads q_seq head_dim"]
    k: Float[Tensor, "batch num_k_heads k_seq head_dim"]
    v: Float[Tensor, "batch num_kv_heads k_seq v_head_dim"]


class AttentionInputs(NamedTuple):
    """The inputs of attention in one forward pass of a layer.

    Attributes:
        is_cross: whether the keys belong to another sequence than the queries.
        num_behind: number of earlier tokens outside the window of every query, which `qkv.k` does not contain.
        weights: attention weights that replace the result of the softmax, one map per softmax; None to keep it.
    """

    qkv: QKV
    mask: AttentionMask
    is_cross: bool
    num_behind: int
    weights: Weights | None = None


class NoMapsError(ArgumentError):
    """The error for a layer of a user-defined class that has no attention maps."""

    def __init__(self, layer: object, reason: str, argument: str = "attention") -> None:
        super().__init__(argument, type(layer).__name__, reason)


def is_own(part: object) -> bool:
    """Return True if a layer, or a part of it, is of a user-defined class, which may compute anything."""
    return not type(part).__module__.startswith(f"{__package__}.")


def exact_maps(
    layer: "tinyformer.nn.attention.BaseAttention", call: AttentionInputs, rows: Int[Tensor, " rows"] | None = None
) -> AttentionMaps:
    """The attention maps of a call, without dropout, for all queries or the queries at `rows`.

    From these maps, `apply_weights` computes the output of `attend`. If the `attention_maps` of a user-defined class do
    not give this output, the weight of a key is the derivative of `attend` with respect to the key's value, and the
    logit is the logarithm of the weight. Keys that the cache has dropped get weight 0.

    Raises:
        NoMapsError: these weights do not give the output, either.
    """
    if is_own(layer):
        maps = AttentionMaps(*(part if rows is None else part[..., rows, :] for part in _maps_of_own(layer, call)))
    else:
        maps = layer.attention_maps(call.qkv, call.mask, call.is_cross, rows)
    if not call.num_behind:
        return maps
    padding = (call.num_behind, 0)
    return AttentionMaps(F.pad(maps.weights, padding), F.pad(maps.logits, padding, value=-torch.inf))


def _maps_of_own(layer: "tinyformer.nn.attention.BaseAttention", call: AttentionInputs) -> AttentionMaps:
    """The maps of `attention_maps` if they give the output of `attend`, otherwise the maps of `_derived_maps`."""
    was_training = layer.training
    layer.train(False)
    try:
        expected = layer.attend(call.qkv, call.mask, call.is_cross)
        for maps_of in (layer.attention_maps, partial(_derived_maps, layer)):
            with suppress(RuntimeError):  # sizes do not fit
                maps = maps_of(call.qkv, call.mask, call.is_cross)
                error = (layer.apply_weights(maps.weights, call.qkv, call.is_cross) - expected).abs().max()
                if error <= TOLERANCES.get(expected.dtype, 0.03) * expected.abs().max():
                    return maps
    finally:
        layer.train(was_training)
    reason = "overrides `attend`, but not `apply_weights` and `attention_maps` to agree with it"
    raise NoMapsError(layer, f"has no attention maps: {type(layer).__name__} {reason}")


def _derived_maps(
    layer: "tinyformer.nn.attention.BaseAttention", qkv: QKV, mask: AttentionMask, is_cross: bool
) -> AttentionMaps:
    """The derivative of `attend` by each key's value: outputs for unit vectors as values minus the output for zeros."""
    k_seq, width = qkv.v.shape[-2:]

    def attend(values: Tensor) -> HeadOutputs:
        return layer.attend(qkv._replace(v=values.expand_as(qkv.v).contiguous()), mask, is_cross)

    units = torch.eye(k_seq, dtype=qkv.v.dtype, device=qkv.v.device).split(width, dim=1)
    outputs = [attend(F.pad(part, (0, width - part.shape[1]))) for part in units]
    weights = torch.cat(outputs, dim=-1)[..., :k_seq] - attend(torch.zeros_like(units[0][:, :1]))[..., :1]
    weights = weights.to(torch.promote_types(weights.dtype, torch.float32))
    logits = weights.abs().clamp(min=torch.finfo(weights.dtype).tiny).log()
    allowed = mask.dense(weights.shape[2], k_seq, weights.device)
    return AttentionMaps(weights, logits if allowed is None else logits.masked_fill(~allowed, -torch.inf))
