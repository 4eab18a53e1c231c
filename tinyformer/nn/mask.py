"""Who may attend to whom: one description, rendered for each backend."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from jaxtyping import Bool, Int
from torch import Tensor

MaskMod: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""FlexAttention's signature: `mask_mod(batch, head, q_idx, kv_idx)` is True where the query may attend."""


@dataclass(frozen=True)
class AttentionMask:
    """The keys that each query may attend to; without arguments, all of them.

    The last query stands at the last key: with fewer queries than keys (decoding against a cache), query `i` is
    at position `k_seq - q_seq + i`. A query that may attend to nothing yields zeros on every backend.

    Args:
        causal: a query sees the keys at its own position and before.
        lengths: how many of a row's keys are real; the rest is padding, at the right, and seen by nobody.
    """

    causal: bool = False
    lengths: Int[Tensor, " batch"] | None = None

    def mask_mods(self) -> list[MaskMod]:
        """The conditions that must all hold for a query to attend to a key."""
        mods: list[MaskMod] = []
        if self.causal:
            mods.append(lambda batch, head, q_idx, kv_idx: kv_idx <= q_idx)
        if self.lengths is not None:
            lengths = self.lengths
            mods.append(lambda batch, head, q_idx, kv_idx: kv_idx < lengths[batch])
        return mods

    def dense(self, q_seq: int, k_seq: int, device: torch.device) -> Bool[Tensor, "#batch 1 #q_seq k_seq"] | None:
        """The mask on its full grid, True where the query may attend; None where everybody sees everything."""
        mods = self.mask_mods()
        if not mods:
            return None
        num_rows = 1 if self.lengths is None else len(self.lengths)
        batch = torch.arange(num_rows, device=device).view(-1, 1, 1, 1)
        head = torch.zeros(1, dtype=torch.long, device=device).view(1, 1, 1, 1)
        q_idx = torch.arange(k_seq - q_seq, k_seq, device=device).view(1, 1, -1, 1)
        kv_idx = torch.arange(k_seq, device=device).view(1, 1, 1, -1)
        allowed = mods[0](batch, head, q_idx, kv_idx)
        for mod in mods[1:]:
            allowed = allowed & mod(batch, head, q_idx, kv_idx)
        return allowed

    def is_square_causal(self, q_seq: int, k_seq: int) -> bool:
        """Whether this is plain causal self-attention, which every kernel computes without a mask in memory."""
        return self.causal and self.lengths is None and q_seq == k_seq

    def may_leave_rows_empty(self, q_seq: int, k_seq: int) -> bool:
        """Whether some query may have no key at all: a row of length zero, or more causal queries than keys."""
        return self.lengths is not None or (self.causal and q_seq > k_seq)
