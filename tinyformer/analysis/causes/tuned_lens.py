"""The tuned lens: an affine map of the residual stream at one depth, after which the readout tells the output."""

from collections.abc import Callable
from typing import TypeAlias

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

NUM_STEPS, TOLERANCE = 150, 1e-6  # at most so many steps, while one gains as many nats
MAX_SCORES = 2**24  # log-probabilities that are held at once: 64 MB in fp32
SMALLEST = 1e-4  # the smallest variance that is scaled to 1, as a share of the largest

Stream: TypeAlias = Float[Tensor, "tokens d_model"]


def fit_translator(
    x: Stream, output: Stream, log_probs: Callable[[Stream], Float[Tensor, "tokens vocab_size"]]
) -> nn.Linear:
    """The map x + A x + b with the smallest mean KL(p ‖ q), the tuned lens (Belrose et al. 2023, arXiv 2303.08112).

    It is found by L-BFGS (Liu and Nocedal 1989) on all tokens, from the identity. Its variables are those of the
    whitened stream: where its directions differ in scale by orders of magnitude, that takes a quarter of the steps.

    Args:
        x: the residual stream at some depth.
        output: the residual stream after the last layer, of the same tokens.
        log_probs: log p of the output, and log q of the mapped stream.
    """
    mean = x.mean(dim=0)
    variances, directions = torch.linalg.eigh((x - mean).T @ (x - mean) / len(x))
    whitening = directions / variances.clamp(min=SMALLEST * float(variances[-1])).sqrt()
    factor = x.new_zeros(whitening.shape, requires_grad=True)
    shift = x.new_zeros(mean.shape, requires_grad=True)
    rows = max(1, MAX_SCORES // log_probs(x[:1]).shape[-1])
    parts = [*zip(x.split(rows), ((x - mean) @ whitening).split(rows), output.split(rows), strict=True)]
    optimizer = torch.optim.LBFGS(
        [factor, shift], max_iter=NUM_STEPS, tolerance_change=TOLERANCE, line_search_fn="strong_wolfe"
    )

    def divergence() -> Tensor:
        optimizer.zero_grad()
        total = x.new_zeros(())
        for part, white, last in parts:
            with torch.no_grad():
                p = log_probs(last)
            q = log_probs(part + white @ factor + shift)
            mean_of_part = F.kl_div(q, p, reduction="sum", log_target=True) / len(x)
            mean_of_part.backward(inputs=[factor, shift])
            total += mean_of_part.detach()
        return total

    with torch.enable_grad():
        optimizer.step(divergence)
    added = (whitening @ factor).detach()
    translator = nn.utils.skip_init(nn.Linear, *added.shape, device=x.device, dtype=x.dtype).requires_grad_(False)
    translator.weight.copy_(torch.eye(len(added)).to(added) + added.T)
    translator.bias.copy_(shift.detach() - mean @ added)
    return translator
