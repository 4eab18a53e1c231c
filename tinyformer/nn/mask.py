"""Who may attend to whom: one description, rendered for each backend."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from tinyformer.errors import ArgumentError

MaskMod: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""FlexAttention's signature: `mask_mod(batch, head, q_idx, kv_idx)` is True where the query may attend."""


class Grid(NamedTuple):
    """The indices of all pairs of a query and a key, as four tensors that broadcast to `batch heads q_seq k_seq`."""

    batch: Int[Tensor, "batch 1 1 1"]
    head: Int[Tensor, "1 heads 1 1"]
    q_idx: Int[Tensor, "1 1 q_seq 1"]
    kv_idx: Int[Tensor, "1 1 1 k_seq"]

    @classmethod
    def of(
        cls,
        batch: int,
        num_heads: int,
        q_seq: int,
        k_seq: int,
        device: torch.device,
        rows: Int[Tensor, " rows"] | None = None,
    ) -> "Grid":
        """The grid of these sizes. The last query stands at the last key, so `q_idx` may begin above 0.

        Args:
            batch: number of sequences.
            num_heads: of each.
            q_seq: number of queries.
            k_seq: number of keys.
            device: of the indices.
            rows: which of the queries; all unless given.
        """
        q_idx = torch.arange(k_seq - q_seq, k_seq, device=device)
        return cls(
            torch.arange(batch, device=device).view(-1, 1, 1, 1),
            torch.arange(num_heads, device=device).view(1, -1, 1, 1),
            (q_idx if rows is None else q_idx[rows]).view(1, 1, -1, 1),
            torch.arange(k_seq, device=device).view(1, 1, 1, -1),
        )


@dataclass(frozen=True)
class AttentionMask:
    """The keys that each query may attend to; without arguments, all of them.

    The last query stands at the last key: with fewer queries than keys (decoding against a cache), query `i` is
    at position `k_seq - q_seq + i`. A query that may attend to nothing yields zeros on every backend.

    Args:
        causal: a query sees the keys at its own position and before.
        lengths: how many of a row's keys are real; the rest is padding, at the right, and seen by nobody.
        documents: which document of its row each key belongs to, where rows are packed with several; ids never
            fall along a row. A query sees the keys of its own document.
        window: how many keys a query sees, itself included (Beltagy et al. 2020, arXiv 2004.05150): the last ones
            if causal, else `window // 2` before itself and `(window - 1) // 2` after.
    """

    causal: bool = False
    lengths: Int[Tensor, " batch"] | None = None
    documents: Int[Tensor, "batch k_seq"] | None = None
    window: int | None = None

    def within(self, window: int | None) -> "AttentionMask":
        """This mask, narrowed to a window."""
        if window is None or (self.window is not None and self.window <= window):
            return self
        return replace(self, window=window)

    def without_first(self, num_keys: int) -> "AttentionMask":
        """This mask for the keys that are left when the first are gone, as in a cache under a window."""
        if not num_keys:
            return self
        return replace(
            self,
            lengths=None if self.lengths is None else (self.lengths - num_keys).clamp(min=0),
            documents=None if self.documents is None else self.documents[:, num_keys:],
        )

    def for_last(self, k_seq: int) -> "AttentionMask":
        """This mask for the last query alone: from it causality hides nothing, nor does a window of all the keys."""
        is_wide = self.window is None or k_seq <= self.window
        return replace(self, causal=False, window=None) if self.causal and is_wide else self

    @property
    def span(self) -> tuple[int, int]:
        """How many keys before and after itself a query sees at most; -1 is any number."""
        if self.window is None:
            return -1, 0 if self.causal else -1
        return (self.window - 1, 0) if self.causal else (self.window // 2, (self.window - 1) // 2)

    def mask_mods(self) -> list[MaskMod]:
        """The conditions that must all hold for a query to attend to a key."""
        mods: list[MaskMod] = []
        before, after = self.span
        if before >= 0:
            mods.append(lambda batch, head, q_idx, kv_idx: q_idx - kv_idx <= before)
        if after >= 0:
            mods.append(lambda batch, head, q_idx, kv_idx: kv_idx - q_idx <= after)
        if self.lengths is not None:
            lengths = self.lengths
            mods.append(lambda batch, head, q_idx, kv_idx: kv_idx < lengths[batch])
        if self.documents is not None:
            documents = self.documents
            # A query before the first key is in no document.
            mods.append(
                lambda batch, head, q_idx, kv_idx: (
                    (q_idx >= 0) & (documents[batch, q_idx.clamp(min=0)] == documents[batch, kv_idx])
                )
            )
        return mods

    def dense(
        self, q_seq: int, k_seq: int, device: torch.device, rows: Int[Tensor, " rows"] | None = None
    ) -> Bool[Tensor, "#batch 1 #q_seq k_seq"] | None:
        """The mask on its grid, True where the query may attend; None where everybody sees everything.

        Args:
            q_seq: number of queries.
            k_seq: number of keys.
            device: of the mask.
            rows: which of the queries; all unless given.
        """
        mods = self.mask_mods()
        if not mods:
            return None
        grid = Grid.of(self.num_rows, 1, q_seq, k_seq, device, rows)
        allowed = mods[0](*grid)
        for mod in mods[1:]:
            allowed = allowed & mod(*grid)
        return allowed

    @property
    def num_rows(self) -> int:
        """Of the batch, where they differ in what may be seen; else 1."""
        per_row = self.lengths if self.lengths is not None else self.documents
        return 1 if per_row is None else len(per_row)

    def is_plain(self, q_seq: int, k_seq: int) -> bool:
        """Whether this is no mask, or plain causal self-attention: what every kernel computes without a mask."""
        shaped = self.lengths is not None or self.documents is not None or self.window is not None
        return not shaped and (not self.causal or q_seq == k_seq)

    def may_leave_rows_empty(self, q_seq: int, k_seq: int) -> bool:
        """Whether some query may have no key at all: a row of length zero, or more queries than keys."""
        # A document may lie behind the padding; a window before the first key.
        return self.lengths is not None or (q_seq > k_seq and not self.is_plain(q_seq, k_seq))


def window_of_layer(window: int | Sequence[int | None] | None, layer_index: int) -> int | None:
    """The window of one layer."""
    pattern = [window] if window is None or isinstance(window, int) else list(window)
    if not pattern or any(width is not None and width < 1 for width in pattern):
        raise ArgumentError(
            "window",
            window,
            "must be at least 1 (the query's own position), or a pattern of such numbers",
            {"window": 16},
        )
    return pattern[layer_index % len(pattern)]
