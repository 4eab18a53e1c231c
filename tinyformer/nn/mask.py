"""The attention mask: one description, which each kernel converts to its own format."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import torch
from jaxtyping import Bool, Float, Int, Int32
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
        """The grid of these sizes, for all queries or the queries at the indices `rows`.

        The last query is at the position of the last key, so `q_idx` starts at `k_seq - q_seq`.
        """
        first = k_seq - q_seq
        # Slices of one range, which takes one kernel launch on a GPU.
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
    """The keys that each query may attend to: all keys that meet every given condition.

    The last query is at the position of the last key: with fewer queries than keys (decoding with a cache), query `i`
    is at position `k_seq - q_seq + i`. The output of a query without any visible key is zero on every backend.

    Args:
        causal: whether a query attends only to keys at its own position and before.
        lengths: number of real keys in each row; the rest is padding at the end, which is masked.
        documents: index of the document that each key belongs to, in rows packed with several documents; it never
            decreases along a row. A query attends to keys of its own document only.
        window: number of keys that a query attends to, its own position included (Beltagy et al. 2020, arXiv
            2004.05150): the last keys if causal, else `window // 2` keys before and `(window - 1) // 2` after it.
        document_starts: index of each document's first token in the concatenated rows of `documents`, followed by the
            number of tokens; a repeated index is an empty document. It must agree with `documents`. Without it, kernels
            for packed sequences wait for the GPU to count the documents.
        allowed: a mask of any pattern, True where a query may attend. Its shape is `q_seq k_seq`, `batch q_seq k_seq`
            or `batch num_heads q_seq k_seq`; axes of size 1 are broadcast, and missing axes are added. In decoding,
            q_seq counts the queries of the call, and k_seq includes the cached keys.
        log_decay: the sums c of a `ForgetGate`, set by its attention layer: c_i - c_j is added to the score of query i
            and key j.
    """

    causal: bool = False
    lengths: Int[Tensor, " batch"] | None = None
    documents: Int[Tensor, "batch k_seq"] | None = None
    window: int | None = None
    document_starts: Int32[Tensor, " starts"] | None = None
    allowed: Bool[Tensor, "#q_seq #k_seq"] | Bool[Tensor, "#batch *#num_heads #q_seq #k_seq"] | None = None
    log_decay: Float[Tensor, "rows heads keys"] | None = None

    def __post_init__(self) -> None:
        if self.allowed is None:
            return
        if self.allowed.dtype != torch.bool:
            reason = "must be boolean, True where a query may attend"
            raise ArgumentError("allowed.dtype", self.allowed.dtype, reason, {"dtype": torch.bool})
        if not 2 <= self.allowed.ndim <= 4:
            reason = "must have the axes q_seq k_seq, batch q_seq k_seq or batch num_heads q_seq k_seq"
            raise ArgumentError("allowed.shape", tuple(self.allowed.shape), reason)
        if self.allowed.ndim < 4:  # for all examples, or for all heads
            four_axes = self.allowed[None, None] if self.allowed.ndim == 2 else self.allowed.unsqueeze(1)
            object.__setattr__(self, "allowed", four_axes)

    def to(self, device: str | torch.device) -> "AttentionMask":
        """A copy of this mask with its tensors on a device."""
        names = ("lengths", "documents", "document_starts", "allowed")
        tensors = {name: tensor.to(device) for name in names if (tensor := getattr(self, name)) is not None}
        return replace(self, **tensors)

    def within(self, window: int | None) -> "AttentionMask":
        """This mask with a window of at most this size."""
        if window is None or (self.window is not None and self.window <= window):
            return self
        return replace(self, window=window)

    def require_sizes(self, batch: int, num_heads: int) -> None:
        """Raise an `ArgumentError` if the batch size or number of heads of `allowed` is neither 1 nor the given one."""
        shape = () if self.allowed is None else tuple(self.allowed.shape)
        if any(size not in (1, whole) for size, whole in zip(shape, (batch, num_heads), strict=False)):
            reason = f"must have {batch} examples and {num_heads} heads, or 1 in place of either number"
            raise ArgumentError("allowed.shape", shape, reason)

    def aligned(self, window: int, first: int, q_seq: int, k_seq: int) -> "AttentionMask":
        """This mask with a window of the keys around position t for query t (local-m, Luong et al. 2015, §3.2).

        Queries and keys are of two sequences that are aligned one to one (arXiv 1508.04025: p_t = t), and `first` is
        the index of the first query. A query beyond the last key has the window of the last key. The window has
        `window // 2` keys before p_t and `(window - 1) // 2` keys after it.
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
        """This mask for the last query alone, without conditions that hide no key from this query, such as `causal`."""
        is_wide = self.window is None or k_seq <= self.window
        return replace(self, causal=False, window=None) if self.causal and is_wide else self

    @property
    def span(self) -> tuple[int, int]:
        """The largest numbers of keys before and after a query that the query attends to; -1 for no limit."""
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
        """The dense mask of all queries or the queries at `rows`, True if visible; None if all keys are visible."""
        mods = self.mask_mods(q_seq, k_seq)
        if not mods:
            return None
        grid = Grid.of(self.num_rows, self.num_heads, q_seq, k_seq, device, rows)
        allowed = mods[0](*grid)
        for mod in mods[1:]:
            allowed = allowed & mod(*grid)
        return allowed

    def num_visible(self, q_seq: int, k_seq: int, device: torch.device) -> Int[Tensor, "#batch #num_heads #q_seq"]:
        """The number of keys that each query may attend to, without a tensor of all pairs unless there is a pattern."""
        if self.allowed is not None:
            dense = self.dense(q_seq, k_seq, device)
            assert dense is not None
            return dense.sum(dim=-1)
        before, after = self.span
        query = torch.arange(k_seq - q_seq, k_seq, device=device)
        first, end = torch.zeros_like(query), torch.full_like(query, k_seq)
        if before >= 0:
            first = (query - before).clamp(min=0)
        if after >= 0:
            end = (query + after + 1).clamp(min=0, max=k_seq)
        if self.lengths is not None:
            end = end.minimum(self.lengths.unsqueeze(1))
        if self.documents is not None:  # whose indices never decrease
            own = self.documents[:, query.clamp(min=0)].contiguous()
            first = first.maximum(torch.searchsorted(self.documents.contiguous(), own))
            end = end.minimum(torch.searchsorted(self.documents.contiguous(), own, right=True))
        return (end - first).clamp(min=0).view(-1, 1, q_seq)

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
        """Return True if kernels need no mask tensor: there is no condition, or only `causal` with `q_seq == k_seq`."""
        is_special = any(part is not None for part in (self.lengths, self.documents, self.window, self.allowed))
        return not is_special and (not self.causal or q_seq == k_seq)

    def may_leave_rows_empty(self, q_seq: int, k_seq: int) -> bool:
        """Return True if all keys of a query may be masked: in a row of length zero, or with more queries than keys."""
        if self.lengths is not None or self.allowed is not None:  # a whole document or window may be hidden, too
            return True
        return q_seq > k_seq and not self.is_plain(q_seq, k_seq)


def _pattern(allowed: Bool[Tensor, "batch num_heads #q_seq #k_seq"], q_seq: int, k_seq: int) -> MaskMod:
    """The mask modification of `allowed`, after a check of its sizes; the last query is at the last key's position."""
    if any(size not in (1, whole) for size, whole in zip(allowed.shape[2:], (q_seq, k_seq), strict=True)):
        reason = f"must have {q_seq} queries and {k_seq} keys; a size of 1 stands for all of them"
        raise ArgumentError("allowed.shape", tuple(allowed.shape), reason)
    whole, first = allowed.expand(-1, -1, q_seq, k_seq), k_seq - q_seq

    def allows(batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        row, of_head = (index if size > 1 else 0 for index, size in zip((batch, head), allowed.shape, strict=False))
        return whole[row, of_head, q_idx - first, kv_idx]

    return allows


def window_of_layer(window: int | Sequence[int | None] | None, layer_index: int) -> int | None:
    """The window of one layer, given one number for all layers or a pattern that repeats over the layers."""
    pattern = [window] if window is None or isinstance(window, int) else list(window)
    if not pattern or any(width is not None and width < 1 for width in pattern):
        reason = "must be at least 1 (the query's own position), or a pattern of such numbers"
        raise ArgumentError("window", window, reason, {"window": 16})
    return pattern[layer_index % len(pattern)]
