"""Logits over a vocabulary, and their cross-entropy without holding all of them in memory."""

from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tinyformer.batch import IGNORED

CPU_LOGITS = 2**24
"""Logits held at a time on a CPU: 64 MB in fp32; larger chunks are slower."""

GPU_FRACTION = 1 / 8
"""The fraction of a GPU's memory for logits and their gradients."""

BYTES_PER_LOGIT = 12
"""The bytes of a logit and its gradient, each in bf16 and in fp32."""


def vocabulary_scores(
    x: Float[Tensor, "*batch d_model"],
    weight: Float[Tensor, "vocab_size d_model"],
    bias: Float[Tensor, " vocab_size"] | None = None,
) -> Float[Tensor, "*batch vocab_size"]:
    """The logits x Wᵀ + b.

    Tensor cores are faster where 64 divides the sizes of a product, so on a GPU W is padded with zeros for the product
    (GPT-2's 50,257 rows become 50,304). CPUs gain nothing from that.
    """
    return padded_scores(x, weight, bias) if x.is_cuda and len(weight) >= 1024 else F.linear(x, weight, bias)


def padded_scores(
    x: Float[Tensor, "*batch d_model"],
    weight: Float[Tensor, "vocab_size d_model"],
    bias: Float[Tensor, " vocab_size"] | None = None,
    multiple: int = 64,
) -> Float[Tensor, "*batch vocab_size"]:
    """The logits x Wᵀ + b by a product whose width is padded to a multiple of `multiple`."""
    padding = -len(weight) % multiple
    if bias is not None:
        bias = F.pad(bias, (0, padding))
    return F.linear(x, F.pad(weight, (0, 0, 0, padding)), bias)[..., : len(weight)]


def vocabulary_cross_entropy(
    x: Float[Tensor, "*batch d_model"],
    weight: Float[Tensor, "vocab_size d_model"],
    targets: Int[Tensor, "*batch"],
    bias: Float[Tensor, " vocab_size"] | None = None,
    max_logits: int | None = None,
    label_smoothing: float = 0.0,
) -> Float[Tensor, ""]:
    """Mean of -log softmax(x Wᵀ + b)[target] over the targets that are not `IGNORED`, in nats; 0 if all are ignored.

    If there are more than `max_logits`, they are computed in chunks of rows and recomputed in the backward pass.

    By default these are `CPU_LOGITS`, or what `GPU_FRACTION` allows. `label_smoothing` is the share of the target
    probability that is spread evenly over the vocabulary (Szegedy et al. 2015, arXiv 1512.00567).
    """
    x, targets = x.flatten(0, -2), targets.flatten()
    scored = targets != IGNORED
    # The number of scored rows would take a synchronisation on a GPU, and be a dynamic shape in a compiled graph.
    if not x.is_cuda and not torch.compiler.is_compiling() and not scored.all():
        x, targets = x[scored], targets[scored]
    rows = max((max_logits or _most_logits(x.device)) // len(weight), 1)
    if len(x) <= rows:
        nats = _summed_nats(x, weight, targets, bias, label_smoothing)
    else:
        recomputed_nats = partial(checkpoint, _summed_nats, use_reentrant=False, preserve_rng_state=False)
        chunks = zip(x.split(rows), targets.split(rows), strict=True)
        nats = torch.stack(
            [recomputed_nats(chunk, weight, target, bias, label_smoothing) for chunk, target in chunks]
        ).sum()
    return nats / scored.sum().clamp(min=1)


@torch.compiler.assume_constant_result
def _most_logits(device: torch.device) -> int:
    """The number of logits that a device holds at a time."""
    if device.type != "cuda":
        return CPU_LOGITS
    return int(GPU_FRACTION * torch.cuda.get_device_properties(device).total_memory / BYTES_PER_LOGIT)


def _summed_nats(x: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, label_smoothing: float) -> Tensor:
    scores = vocabulary_scores(x, weight, bias)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    return F.cross_entropy(scores, targets, ignore_index=IGNORED, reduction="sum", label_smoothing=label_smoothing)
