"""The features that a call needs of a kernel beyond plain attention."""

from enum import StrEnum
from typing import NamedTuple

import torch
from torch import Tensor

from tinyformer.nn.mask import AttentionMask
from tinyformer.nn.score import Scoring


class Feature(StrEnum):
    """A feature that some kernels lack; its value is what errors call it."""

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
    }
    return frozenset(feature for feature, is_needed in needed.items() if is_needed)


class KernelRequirements(NamedTuple):
    """A call as a kernel sees it: all that decides whether the kernel can compute it, and how fast.

    Attributes:
        device: the type, "cpu" or "cuda".
        dtype: of queries, keys and values inside the kernel; under autocast, the one of lower precision.
        head_dim: the larger of the head sizes of keys and values.
        features: what it needs beyond plain attention.
        seq: the length of the longest sequence; None if it is not known, which counts as long.
        has_one_query: whether it has a single query, as a step of cached generation.
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
        """The case of a call; `gradient` says whether a backward pass follows."""
        q_seq, k_seq, q_dim, v_dim = q.shape[2], k.shape[2], q.shape[-1], v.shape[-1]
        features = features_of(mask, scoring, q_seq, k_seq, dropout > 0, gradient, q_dim != v_dim)
        return cls(q.device.type, q.dtype, max(q_dim, v_dim), features, max(q_seq, k_seq), q_seq == 1)
