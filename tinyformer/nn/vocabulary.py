"""Scores of every token of a vocabulary, and their cross-entropy without ever holding all of them."""

from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tinyformer.batch import IGNORED

_MOST_SCORES = {"cpu": 2**24, "cuda": 2**28}
"""How many are held at a time: 64 MB in fp32 on a CPU, where more is slower, too, and 1 GB on a GPU."""


def vocabulary_scores(
    x: Float[Tensor, "*batch d_model"],
    weight: Float[Tensor, "vocab_size d_model"],
    bias: Float[Tensor, " vocab_size"] | None = None,
) -> Float[Tensor, "*batch vocab_size"]:
    """X W^T + b.

    Tensor cores want sizes that 64 divides, and a vocabulary has any: on a GPU the product is made with rows of zeros
    more (GPT-2's 50,257 become 50,304), which are no parameters. CPUs gain nothing by that.
    """
    return padded_scores(x, weight, bias) if x.is_cuda and len(weight) >= 1024 else F.linear(x, weight, bias)


def padded_scores(
    x: Float[Tensor, "*batch d_model"],
    weight: Float[Tensor, "vocab_size d_model"],
    bias: Float[Tensor, " vocab_size"] | None = None,
    multiple: int = 64,
) -> Float[Tensor, "*batch vocab_size"]:
    """The same, by a product whose width is a multiple of a number."""
    missing = -len(weight) % multiple
    if bias is not None:
        bias = F.pad(bias, (0, missing))
    return F.linear(x, F.pad(weight, (0, 0, 0, missing)), bias)[..., : len(weight)]


def vocabulary_cross_entropy(
    x: Float[Tensor, "*batch d_model"],
    weight: Float[Tensor, "vocab_size d_model"],
    targets: Int[Tensor, "*batch"],
    bias: Float[Tensor, " vocab_size"] | None = None,
    most_scores: int | None = None,
) -> Float[Tensor, ""]:
    """Mean of -log softmax(x W^T + b)[target] over the targets that are not `IGNORED`, in nats; 0 where all are.

    Where there are many scores, they are made for some rows after the other, and made again in the backward pass.

    Args:
        x: vectors.
        weight: a row for each token.
        targets: the token to be predicted from each vector.
        bias: a number for each token.
        most_scores: to be held at a time; what suits the device unless given.
    """
    x, targets = x.flatten(0, -2), targets.flatten()
    scored = targets != IGNORED
    # How many there are a GPU would have to wait for, and a compiler cannot know.
    if not x.is_cuda and not torch.compiler.is_compiling() and not scored.all():
        x, targets = x[scored], targets[scored]
    rows = max((most_scores or _MOST_SCORES.get(x.device.type, 2**24)) // len(weight), 1)
    if len(x) <= rows:
        nats = _summed_nats(x, weight, targets, bias)
    else:
        again = partial(checkpoint, _summed_nats, use_reentrant=False, preserve_rng_state=False)
        parts = zip(x.split(rows), targets.split(rows), strict=True)
        nats = torch.stack([again(part, weight, wanted, bias) for part, wanted in parts]).sum()
    return nats / scored.sum().clamp(min=1)


def _summed_nats(x: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None) -> Tensor:
    scores = vocabulary_scores(x, weight, bias)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    return F.cross_entropy(scores, targets, ignore_index=IGNORED, reduction="sum")
