"""Predict the next token."""

from typing import NotRequired, TypedDict

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from tinyformer.nn import AttentionMask

IGNORED = -100
"""A target that is not scored: padding."""


class Batch(TypedDict):
    """Token ids; target `i` is the token that follows input `i`. `documents`: the document of each, if masked by it."""

    inputs: Int[Tensor, "batch seq"]
    targets: Int[Tensor, "batch seq"]
    documents: NotRequired[Int[Tensor, "batch seq"]]


class CausalLM:
    """Next-token prediction: every token is predicted from those before it (Radford et al. 2018)."""

    def mask(self, batch: Batch) -> AttentionMask:
        """Who may attend to whom in a batch. Padding stands at the right, so that causality already hides it."""
        return AttentionMask(causal=True, documents=batch.get("documents"))

    def loss(self, network: nn.Module, batch: Batch) -> Float[Tensor, ""]:
        """Mean negative log-likelihood of the targets, in nats per token."""
        logits = network(batch["inputs"], self.mask(batch))
        return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), ignore_index=IGNORED)

    def nats(self, network: nn.Module, batch: Batch) -> tuple[Float[Tensor, " batch"], Int[Tensor, " batch"]]:
        """The negative log-likelihood of each sequence, and how many targets it is the sum of."""
        logits = network(batch["inputs"], self.mask(batch)).float()
        nats = F.cross_entropy(logits.mT, batch["targets"], ignore_index=IGNORED, reduction="none")
        return nats.sum(dim=1), (batch["targets"] != IGNORED).sum(dim=1)

    def score(self, network: nn.Module, batch: Batch) -> dict[str, Float[Tensor, ""]]:
        """Sums over the targets of a batch, which add up over batches.

        Returns:
            `nats`: negative log-likelihood; `tokens`: how many targets; `top1`, `top5`: how many of them were the
            likeliest token, or among the five likeliest.
        """
        logits = network(batch["inputs"], self.mask(batch)).flatten(0, 1).float()
        targets = batch["targets"].flatten()
        scored = targets != IGNORED
        likeliest = logits.topk(min(5, logits.shape[-1]), dim=-1).indices
        hits = (likeliest == targets.unsqueeze(-1)) & scored.unsqueeze(-1)
        nats = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
        sums = {"nats": nats, "tokens": scored.sum(), "top1": hits[:, 0].sum(), "top5": hits.sum()}
        return {name: value.to(torch.float32) for name, value in sums.items()}
