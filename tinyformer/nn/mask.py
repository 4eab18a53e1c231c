"""Attention masks: one description, which each kernel turns into its own form."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import torch
from jaxtyping import Bool, Int, Int32
from torch import Tensor

from tinyformer.errors import ArgumentError

MaskMod: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""FlexAttention's signature: `mask_mod(batch, head, q_idx, kv_idx)` is True where the query may attend."""


class Grid(NamedTuple):
    """The indices of all pairs of a query and a key: four tensors that broadcast to `batch heads q_seq k_seq`."""

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
        """The grid of these sizes, for all queries or those at `rows`.

        The last query is at the position of the last key, so `q_idx` may start above 0, or below.
        """
        first = k_seq - q_seq
        # Parts of one range, which a GPU makes with one launch.
        indices = torch.arange(min(0, first), max(batch, num_heads, k_seq), device=device)
        from_zero, q_idx = indices[max(0, -first) :], indices[max(0, first) :][:q_seq]
        return cls(
            from_zero[:batch].view(-1, 1, 1, 1),
            from_zero[:num_heads].view(1, -1, 1, 1),
            (q_idx if rows is None else q_idx[rows]).view(1, 1, -1, 1),
            from_zero[:k_seq].view(1, 1, 1, -1),
        )


@dataclass(frozen=True)
class AttentionMask:
    """The keys that each query may attend to: those that all conditions allow; without arguments, all keys.

    The last query is at the position of the last key: with fewer queries than keys (decoding with a cache), query `i`
    is at position `k_seq - q_seq + i`. The output of a query without any key is zero on every backend.

    Args:
        causal: whether a query attends only to keys at its own position and before.
        lengths: number of real keys in each row; the rest is padding at the end, which is masked.
        documents: index of the document that each key belongs to, in rows packed with several documents; it never
            decreases along a row. A query attends to keys of its own document only.
        window: number of keys that a query attends to, its own position included (Beltagy et al. 2020, arXiv
            2004.05150): the last ones if causal, else `window // 2` before and `(window - 1) // 2` after it.
        document_starts: where documents begin in the rows of `documents` laid end to end, from 0 on, and the number of
            tokens; a repeated start makes an empty document. They must agree with `documents`. Without them, kernels
            for packed sequences wait for the GPU to count the documents.
        allowed: a mask of any pattern, True where a query may attend: `q_seq k_seq` for all, `batch q_seq k_seq` with
            a pattern for each example, or `batch num_heads q_seq k_seq`, where an axis of size 1 stands for all. Four
            axes are kept. In decoding, its queries are those of the call, its keys are all keys, cached ones included.
    """

    causal: bool = False
    lengths: Int[Tensor, " batch"] | None = None
    documents: Int[Tensor, "batch k_seq"] | None = None
    window: int | None = None
    document_starts: Int32[Tensor, " starts"] | None = None
    allowed: Bool[Tensor, "#q_seq #k_seq"] | Bool[Tensor, "#batch *#num_heads #q_seq #k_seq"] | None = None

    def __post_init__(self) -> None:
        if self.allowed is None:
            return
        if self.allowed.dtype != torch.bool:
            reason = "must be boolean, True where a query may attend"
            raise ArgumentError("allowed.dtype", self.allowed.dtype, reason, {"dtype": torch.bool})
        if not 2 <= self.allowed.ndim <= 4:
            reason = "must have the axes q_seq k_seq, batch q_seq k_seq or batch num_heads q_seq k_seq"
            raise ArgumentError("allowed.shape", tuple(self.allowed.shape), reason)
        if self.allowed.ndim < 4:  # of all examples, or of all heads
            four_axes = self.allowed[None, None] if self.allowed.ndim == 2 else self.allowed.unsqueeze(1)
            object.__setattr__(self, "allowed", four_axes)

    def to(self, device: str | torch.device) -> "AttentionMask":
        """This mask on a device."""
        names = ("lengths", "documents", "document_starts", "allowed")
        tensors = {name: tensor.to(device) for name in names if (tensor := getattr(self, name)) is not None}
        return replace(self, **tensors)

    def within(self, window: int | None) -> "AttentionMask":
        """This mask with a window of at most this size."""
        if window is None or (self.window is not None and self.window <= window):
            return self
        return replace(self, window=window)

    def require_sizes(self, batch: int, num_heads: int) -> None:
        """Refuse a pattern for another number of examples or heads than these; 1 stands for all."""
        shape = () if self.allowed is None else tuple(self.allowed.shape)
        if any(size not in (1, whole) for size, whole in zip(shape, (batch, num_heads), strict=False)):
            reason = f"must be of {batch} examples and {num_heads} heads, or of 1 for all of them"
            raise ArgumentError("allowed.shape", shape, reason)

    def aligned(self, window: int, first: int, q_seq: int, k_seq: int) -> "AttentionMask":
        """This mask with a window of the keys around position t for query t (local-m, Luong et al. 2015, §3.2).

        Queries, the first of which is query `first`, and keys are those of two sequences that are read at the same
        pace (arXiv 1508.04025: p_t = t); a query beyond the last key has the window of the last. The window has
        `window // 2` keys before p_t and `(window - 1) // 2` after it.
        """
        device = None if self.lengths is None else self.lengths.device
        keys = torch.arange(k_seq, device=device)
        last = keys[None, -1:] if self.lengths is None else self.lengths.unsqueeze(1) - 1
        centre = torch.arange(first, first + q_seq, device=device).minimum(last).unsqueeze(-1)
        near = ((centre - keys) <= window // 2) & ((keys - centre) <= (window - 1) // 2)
        return replace(self, allowed=near.unsqueeze(1) if self.allowed is None else self.allowed & near.unsqueeze(1))

    def without_first(self, num_keys: int) -> "AttentionMask":
        """This mask without its first keys, which a cache with a window has dropped."""
        if not num_keys:
            return self
        allowed = self.allowed
        if allowed is not None and allowed.shape[-1] > 1:
            allowed = allowed[..., num_keys:]
        return replace(
            self,
            lengths=None if self.lengths is None else (self.lengths - num_keys).clamp(min=0),
            documents=None if self.documents is None else self.documents[:, num_keys:],
            document_starts=None,
            allowed=allowed,
        )

    def for_last(self, k_seq: int) -> "AttentionMask":
        """This mask for the last query alone: causality, or a window of `k_seq` or more, hides no key from it."""
        is_wide = self.window is None or k_seq <= self.window
        return replace(self, causal=False, window=None) if self.causal and is_wide else self

    @property
    def span(self) -> tuple[int, int]:
        """The most keys before, and after, its own position that a query attends to; -1 for no limit."""
        if self.window is None:
            return -1, 0 if self.causal else -1
        return (self.window - 1, 0) if self.causal else (self.window // 2, (self.window - 1) // 2)

    def mask_mods(self, q_seq: int, k_seq: int) -> list[MaskMod]:
        """The conditions under which a query attends to a key; all of them must be met."""
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
            # A query before the first key belongs to no document.
            mods.append(
                lambda batch, head, q_idx, kv_idx: (
                    (q_idx >= 0) & (documents[batch, q_idx.clamp(min=0)] == documents[batch, kv_idx])
                )
            )
        if self.allowed is not None:
            mods.append(_pattern(self.allowed, q_seq, k_seq))
        return mods

    def dense(
        self, q_seq: int, k_seq: int, device: torch.device, rows: Int[Tensor, " rows"] | None = None
    ) -> Bool[Tensor, "#batch #num_heads #q_seq k_seq"] | None:
        """The dense mask of all queries or those at `rows`, True where they may attend; None if nothing is masked."""
        mods = self.mask_mods(q_seq, k_seq)
        if not mods:
            return None
        grid = Grid.of(self.num_rows, self.num_heads, q_seq, k_seq, device, rows)
        allowed = mods[0](*grid)
        for mod in mods[1:]:
            allowed = allowed & mod(*grid)
        return allowed

    @property
    def num_rows(self) -> int:
        """Batch size of the mask; 1 if it is the same for all rows."""
        sizes = [len(tensor) for tensor in (self.lengths, self.documents, self.allowed) if tensor is not None]
        return next((size for size in sizes if size != 1), 1)

    @property
    def num_heads(self) -> int:
        """Number of heads of the mask; 1 if it is the same for all heads."""
        return 1 if self.allowed is None else self.allowed.shape[1]

    def is_plain(self, q_seq: int, k_seq: int) -> bool:
        """Return True if kernels have a flag for the mask: none, or causality alone with as many queries as keys."""
        is_special = any(part is not None for part in (self.lengths, self.documents, self.window, self.allowed))
        return not is_special and (not self.causal or q_seq == k_seq)

    def may_leave_rows_empty(self, q_seq: int, k_seq: int) -> bool:
        """Return True if all keys of a query may be masked: in a row of length zero, or with more queries than keys."""
        if self.lengths is not None or self.allowed is not None:  # a whole document or window may be hidden, too
            return True
        return q_seq > k_seq and not self.is_plain(q_seq, k_seq)


def _pattern(allowed: Bool[Tensor, "batch num_heads #q_seq #k_seq"], q_seq: int, k_seq: int) -> MaskMod:
    """The mask modification of `allowed`, checked; the last query is at the position of the last key."""
    if any(size not in (1, whole) for size, whole in zip(allowed.shape[2:], (q_seq, k_seq), strict=True)):
        reason = f"must have {q_seq} queries and {k_seq} keys, or 1 for all of them"
        raise ArgumentError("allowed.shape", tuple(allowed.shape), reason)
    whole, first = allowed.expand(-1, -1, q_seq, k_seq), k_seq - q_seq

    def allows(batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        row, of_head = (index if size > 1 else 0 for index, size in zip((batch, head), allowed.shape, strict=False))
        return whole[row, of_head, q_idx - first, kv_idx]

    return allows


def window_of_layer(window: int | Sequence[int | None] | None, layer_index: int) -> int | None:
    """The window of one layer, from one number or a pattern over the layers."""
    pattern = [window] if window is None or isinstance(window, int) else list(window)
    if not pattern or any(width is not None and width < 1 for width in pattern):
        reason = "must be at least 1 (the query's own position), or a pattern of such numbers"
        raise ArgumentError("window", window, reason, {"window": 16})
    return pattern[layer_index % len(pattern)]
