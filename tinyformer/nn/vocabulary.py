"""Logits over a vocabulary, and their cross-entropy without holding all of them in memory."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tinyformer.batch import IGNORED

CPU_LOGITS = 2**24
"""Logits held at a time on a CPU: 64 MB in fp32; larger chunks are slower."""

GPU_FRACTION = 1 / 4
"""The fraction of a GPU's memory for logits and their gradients."""

BYTES_PER_LOGIT = 16
"""The bytes of a logit, its gradient and copies of both in fp32. Compiled code holds each once, and no copies."""


def vocabulary_scores(
    x: Float[Tensor, "*batch d_model"],
    weight: Float[Tensor, "vocab_size d_model"],
    bias: Float[Tensor, " vocab_size"] | None = None,
) -> Float[Tensor, "*batch vocab_size"]:
    """The logits x Wᵀ + b."""
    scores = padded_scores(x, weight, bias) if x.is_cuda else F.linear(x, weight, bias)
    return scores if scores.shape[-1] == len(weight) else scores[..., : len(weight)]


def padded_scores(
    x: Float[Tensor, "*batch d_model"],
    weight: Float[Tensor, "vocab_size d_model"],
    bias: Float[Tensor, " vocab_size"] | None = None,
    multiple: int = 64,
) -> Float[Tensor, "*batch width"]:
    """The logits x Wᵀ + b, and columns of zeros up to a multiple of `multiple` (GPT-2's 50,257 become 50,304).

    Tensor cores are faster where 64 divides the sizes of a product; CPUs gain nothing from that.
    """
    padding = -len(weight) % multiple
    if padding:
        weight = F.pad(weight, (0, 0, 0, padding))
        bias = None if bias is None else F.pad(bias, (0, padding))
    return F.linear(x, weight, bias)


def vocabulary_cross_entropy(
    x: Float[Tensor, "*batch d_model"],
    weight: Float[Tensor, "vocab_size d_model"],
    targets: Int[Tensor, "*batch"],
    bias: Float[Tensor, " vocab_size"] | None = None,
    max_logits: int | None = None,
    label_smoothing: float = 0.0,
) -> Float[Tensor, ""]:
    """Mean of -log softmax(x Wᵀ + b)[target] over the targets that are not `IGNORED`, in nats; 0 if all are ignored.

    At most `max_logits` logits are in memory at a time, by default `CPU_LOGITS`, or what `GPU_FRACTION` allows. If
    there are more, those of the first rows are kept for the backward pass, and the others are computed in chunks, and
    again in the backward pass. `label_smoothing` is the share of the target probability that is spread evenly over the
    vocabulary (Szegedy et al. 2015, arXiv 1512.00567).
    """
    x, targets = x.flatten(0, -2), targets.flatten()
    scored = targets != IGNORED
    # The number of scored rows would take a synchronisation on a GPU, and be a dynamic shape in a compiled graph.
    if not x.is_cuda and not torch.compiler.is_compiling() and not scored.all():
        x, targets = x[scored], targets[scored]
    most = max((max_logits or _most_logits(x.device, torch.compiler.is_compiling())) // len(weight), 2)
    if len(x) <= most:
        nats = _summed_nats(x, weight, targets, bias, label_smoothing)
    else:
        recomputed_nats = partial(checkpoint, _summed_nats, use_reentrant=False, preserve_rng_state=False)
        chunk_size = min(len(x) - most, most // 2)
        sizes = [most - chunk_size, len(x) - most + chunk_size]  # rows whose logits are kept, and the others
        (kept, others), (kept_targets, other_targets) = x.split(sizes), targets.split(sizes)
        sums = [_summed_nats(kept, weight, kept_targets, bias, label_smoothing)]
        for chunk, target in zip(others.split(chunk_size), other_targets.split(chunk_size), strict=True):
            sums.append(recomputed_nats(chunk, weight, target, bias, label_smoothing))
        nats = torch.stack(sums).sum()
    return nats / scored.sum().clamp(min=1)


@torch.compiler.assume_constant_result
def _most_logits(device: torch.device, is_compiled: bool) -> int:
    """The number of logits that a device holds at a time."""
    if device.type != "cuda":
        return CPU_LOGITS
    memory = GPU_FRACTION * torch.cuda.get_device_properties(device).total_memory
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else torch.float32
    return int(memory / (2 * dtype.itemsize if is_compiled else BYTES_PER_LOGIT))


def _summed_nats(x: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, label_smoothing: float) -> Tensor:
    if torch.compiler.is_compiling() and not label_smoothing:
        scores = padded_scores(x, weight, bias, 64 if x.is_cuda else 1)
        nats, _ = TargetNats.apply(scores, targets, len(weight))
        return nats.sum()
    scores = vocabulary_scores(x, weight, bias)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    return F.cross_entropy(scores, targets, ignore_index=IGNORED, reduction="sum", label_smoothing=label_smoothing)


class TargetNats(torch.autograd.Function):
    """-log softmax(scores)[target] of each row in nats, 0 where the target is `IGNORED`, and its log-sum-exp.

    The gradient, softmax(scores) - one-hot(target), is written out: compiled, it is one pass over the scores, in their
    dtype. That of `F.cross_entropy` takes three on a GPU, one of them to sum a row in which only the target's entry is
    not zero. Uncompiled, each operation here would be a pass of its own.
    """

    @staticmethod
    def forward(
        scores: Float[Tensor, "rows width"], targets: Int[Tensor, " rows"], vocab_size: int
    ) -> tuple[Float[Tensor, " rows"], Float[Tensor, " rows"]]:
        wide = _unpadded(scores, vocab_size)
        log_sums = wide.logsumexp(dim=-1)
        of_targets = wide.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        return torch.where(targets == IGNORED, 0.0, log_sums - of_targets), log_sums

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: tuple[Tensor, Tensor]) -> None:
        scores, targets, ctx.vocab_size = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(scores, targets, output[1])

    @staticmethod
    def backward(ctx: Any, pull: Tensor, _: Tensor | None) -> tuple[Tensor, None, None]:
        scores, targets, log_sums = ctx.saved_tensors
        pull = torch.where(targets == IGNORED, 0.0, pull).unsqueeze(-1)
        probabilities = (_unpadded(scores, ctx.vocab_size) - log_sums.unsqueeze(-1)).exp()
        is_target = torch.arange(scores.shape[-1], device=scores.device) == targets.unsqueeze(-1)
        return ((probabilities - is_target.to(pull.dtype)) * pull).to(scores.dtype), None, None


def _unpadded(scores: Float[Tensor, "rows width"], vocab_size: int) -> Float[Tensor, "rows width"]:
    """The scores in fp32 at least, with -inf in the columns beyond the vocabulary."""
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if scores.shape[-1] == vocab_size:
        return scores
    return scores.masked_fill(torch.arange(scores.shape[-1], device=scores.device) >= vocab_size, -torch.inf)
