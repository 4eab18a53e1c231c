"""The gates of forgetting attention: each token lowers the scores of all earlier keys for later queries."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from tinyformer.errors import ArgumentError
from tinyformer.nn.cache import LayerCache
from tinyformer.nn.maps import Tokens


class ForgetGate(nn.Module):
    """The forget gates of FoX (Lin et al. 2025, arXiv 2503.02130): f_l = σ(W x_l + b) for each query head and token l.

    score_ij ← score_ij + Σ_{l=j+1..i} log f_l. A head with f_l = 1 forgets nothing. With c_i = Σ_{l≤i} log f_l, the
    sum is c_i - c_j. Eager and flex add it to the scores, sdpa and flash add dimensions to queries and keys
    (`with_decay`). As in flash-linear-attention, b starts at 0, so that f is about 0.5 at first.
    """

    def __init__(self, d_model: int, num_heads: int, kind: str | None = None) -> None:
        super().__init__()
        self.require_causal(kind != "cross")
        self.proj = nn.Linear(d_model, num_heads)

    def forward(
        self, x: Tokens, cache: LayerCache | None = None, window: int | None = None
    ) -> Float[Tensor, "batch num_heads k_seq"]:
        """The sums c_j of all keys, in fp32 at least; the cache holds the sums of earlier tokens within the window."""
        with torch.autocast(x.device.type, enabled=False):
            logits = self.proj(x.to(self.proj.weight.dtype)).mT
        sums = F.logsigmoid(logits.to(torch.promote_types(logits.dtype, torch.float32))).cumsum(dim=-1)
        if cache is None:
            return sums
        held = cache.part("forget")
        if held.length:
            sums = sums + held.tensors[0][..., -1:, 0]
        return held.extend(sums.unsqueeze(-1), window=window)[0].squeeze(-1)

    def require_causal(self, is_causal: bool) -> None:
        """Raise an `ArgumentError` unless the mask is causal."""
        if not is_causal:
            reason = "lets the scores of a key decrease for later queries, so it needs a causal mask in self-attention"
            raise ArgumentError("forget", True, reason, {"forget": False})
