"""The attention maps of a layer of any class: weights that, applied to the values, give the output of its heads."""

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from tinyformer.errors import ArgumentError
from tinyformer.nn.kernels.eager import AttentionMaps
from tinyformer.nn.mask import AttentionMask

if TYPE_CHECKING:
    from tinyformer.nn.attention import QKV, AttentionCall, BaseAttention

TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Largest error of the output that a layer's maps give, as a share of its largest value; 0.03 in lower precision."""


class NoMapsError(ArgumentError):
    """The error for a layer of a class of one's own that has no attention maps."""

    def __init__(self, layer: nn.Module, reason: str, argument: str = "attention") -> None:
        super().__init__(argument, type(layer).__name__, reason)


def is_own(part: nn.Module) -> bool:
    """Whether the class of a layer, or of a part of it, is none of this package, so that it may compute anything."""
    return not type(part).__module__.startswith(f"{__package__}.")


def exact_maps(
    layer: "BaseAttention", call: "AttentionCall", rows: Int[Tensor, " rows"] | None = None
) -> AttentionMaps:
    """The maps of a call for all queries or those at `rows`, without dropout: `apply_weights` of them gives `attend`.

    A class of one's own may compute other weights than those of `attention_maps`. What it computes then decides: the
    weight of a key is the derivative of `attend` with respect to its value, and its logit is the logarithm of that.
    Keys that the cache has dropped get weight 0.

    Raises:
        NoMapsError: the output is no product of such weights with the values, and the class overrides `attend`
            without `apply_weights` and `attention_maps`.
    """
    if is_own(layer):
        maps = AttentionMaps(*(part if rows is None else part[..., rows, :] for part in _maps_of_own(layer, call)))
    else:
        maps = layer.attention_maps(call.qkv, call.mask, call.is_cross, rows)
    if not call.num_behind:
        return maps
    padding = (call.num_behind, 0)
    return AttentionMaps(F.pad(maps.weights, padding), F.pad(maps.logits, padding, value=-torch.inf))


def _maps_of_own(layer: "BaseAttention", call: "AttentionCall") -> AttentionMaps:
    """The maps of `attention_maps` if the output is that of these, or else those of what `attend` computes."""
    was_training = layer.training
    layer.eval()
    try:
        expected = layer.attend(call.qkv, call.mask, call.is_cross)
        for maps_of in (layer.attention_maps, partial(_derived_maps, layer)):
            with suppress(RuntimeError):  # of sizes that do not fit
                maps = maps_of(call.qkv, call.mask, call.is_cross)
                error = (layer.apply_weights(maps.weights, call.qkv, call.is_cross) - expected).abs().max()
                if error <= TOLERANCES.get(expected.dtype, 0.03) * expected.abs().max():
                    return maps
    finally:
        layer.train(was_training)
    reason = "overrides `attend` without `apply_weights` and `attention_maps` that agree with it"
    raise NoMapsError(layer, f"has no attention maps: {type(layer).__name__} {reason}")


@torch.no_grad()
def _derived_maps(layer: "BaseAttention", qkv: "QKV", mask: AttentionMask, is_cross: bool) -> AttentionMaps:
    """∂ attend / ∂ value of each key: the outputs for unit vectors as values, minus those for zeros."""
    k_seq, width = qkv.v.shape[-2:]

    def attend(values: Tensor) -> Float[Tensor, "batch heads q_seq v_head_dim"]:
        return layer.attend(qkv._replace(v=values.expand_as(qkv.v).contiguous()), mask, is_cross)

    units = torch.eye(k_seq, dtype=qkv.v.dtype, device=qkv.v.device).split(width, dim=1)
    outputs = [attend(F.pad(part, (0, width - part.shape[1]))) for part in units]
    weights = torch.cat(outputs, dim=-1)[..., :k_seq] - attend(torch.zeros_like(units[0][:, :1]))[..., :1]
    weights = weights.to(torch.promote_types(weights.dtype, torch.float32))
    logits = weights.abs().clamp(min=torch.finfo(weights.dtype).tiny).log()
    allowed = mask.dense(weights.shape[2], k_seq, weights.device)
    return AttentionMaps(weights, logits if allowed is None else logits.masked_fill(~allowed, -torch.inf))
