"""The loss, scores and metrics of token prediction, shared by causal and masked language modelling."""

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from tinyformer.batch import IGNORED, Batch
from tinyformer.tasks.task import Task

MAX_SCORES = 2**26
"""The most logits that are scored at once: 256 MB in fp32. 32 x 1,024 tokens of GPT-2 have 25 times as many."""


class TokenTask(Task):
    """Prediction of tokens; a subclass defines the attention mask."""

    def loss(self, network: nn.Module, batch: Batch) -> Float[Tensor, ""]:
        """Mean negative log-likelihood of the targets, in nats per token."""
        return self.forward(network, batch, targets=batch["targets"])

    def logits(self, network: nn.Module, batch: Batch) -> Float[Tensor, "batch seq vocab_size"]:
        """The logits of the token to predict at each position."""
        return self.forward(network, batch)

    def nats(self, network: nn.Module, batch: Batch) -> tuple[Float[Tensor, " batch"], Int[Tensor, " batch"]]:
        """The negative log-likelihood of each sequence, and its number of targets."""
        logits = self.logits(network, batch).float()
        nats = F.cross_entropy(logits.mT, batch["targets"], ignore_index=IGNORED, reduction="none")
        return nats.sum(dim=1), self.num_targets(batch)

    def score(self, network: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Sums over the targets of a batch.

        Returns:
            `nats`: negative log-likelihood; `tokens`: number of targets; `top1`, `top5`: number of targets that were
            the most likely token, or among the five most likely.
        """
        logits, targets = self.logits(network, batch).flatten(0, 1), batch["targets"].flatten()
        rows = max(1, MAX_SCORES // logits.shape[-1])
        parts = [_score(*part) for part in zip(logits.split(rows), targets.split(rows), strict=True)]
        return {name: torch.stack([part[name] for part in parts]).sum(dim=0) for name in parts[0]}

    def metrics(self, sums: Mapping[str, Tensor], split: Any) -> dict[str, float | None]:
        """`loss` (nats per token), `accuracy` and `accuracy_top5`."""
        tokens = float(sums["tokens"])
        return {
            "loss": float(sums["nats"]) / tokens,
            "accuracy": float(sums["top1"]) / tokens,
            "accuracy_top5": float(sums["top5"]) / tokens,
        }


def _score(
    logits: Float[Tensor, "targets vocab_size"], targets: Int[Tensor, " targets"]
) -> dict[str, Float[Tensor, ""]]:
    """The scores of `TokenTask.score` for some targets."""
    logits, scored = logits.float(), targets != IGNORED
    likeliest = logits.topk(min(5, logits.shape[-1]), dim=-1).indices
    hits = (likeliest == targets.unsqueeze(-1)) & scored.unsqueeze(-1)
    nats = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
    sums = {"nats": nats, "tokens": scored.sum(), "top1": hits[:, 0].sum(), "top5": hits.sum()}
    return {name: value.to(torch.float32) for name, value in sums.items()}


def perplexity(loss: float) -> float:
    """exp(loss), for a mean negative log-likelihood in nats; finite however large the loss."""
    return math.exp(min(loss, 700.0))
