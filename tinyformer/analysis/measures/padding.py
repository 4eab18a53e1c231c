"""Which positions of a batch are tokens, and which are padding."""

from collections import defaultdict
from collections.abc import Iterable
from typing import cast

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from tinyformer.batch import IGNORED, Batch, tensors


def queries_by_kind(batch: Batch) -> dict[str, Bool[Tensor, "batch seq"]]:
    """By kind of attention, which queries are tokens and not padding; the kind is "" where there is only one.

    A batch without lengths has no padding.
    """
    if "source" in batch:
        is_target = batch["targets"] != IGNORED
        return {
            "encoder": _before(batch["source_lengths"], batch["source"]),
            "decoder": is_target,
            "cross": is_target,
        }
    inputs = batch["inputs"]
    return {"": _before(batch["lengths"], inputs) if "lengths" in batch else torch.ones_like(inputs, dtype=torch.bool)}


def without_padding(batches: Iterable[Batch]) -> list[Batch]:
    """The rows of batches of windows or examples without their padding, one batch for each length.

    Args:
        batches: windows or examples; only their tensors with one entry per token are kept.
    """
    by_length: dict[int, list[dict[str, Tensor]]] = defaultdict(list)
    for batch in batches:
        lengths = queries_by_kind(batch)[""].sum(dim=1)
        of_tokens = {name: rows for name, rows in tensors(batch).items() if name in ("inputs", "targets", "documents")}
        for length in lengths.unique().tolist():
            rows_of_length = {name: rows[lengths == length, :length] for name, rows in of_tokens.items()}
            by_length[length].append(rows_of_length)
    return [
        cast(Batch, {name: torch.cat([part[name] for part in parts]) for name in parts[0]})
        for parts in by_length.values()
    ]


def of_one_length(batches: Iterable[Batch]) -> Batch:
    """The rows of batches of windows or examples as one batch, all cut to the same length.

    The length is that of the shortest row that is at least half as long as the longest; shorter rows are left out. One
    batch needs fewer kernel launches than those of `without_padding`.

    Args:
        batches: windows or examples; only their tensors with one entry per token are kept.
    """
    parts = [tensors(batch) for batch in without_padding(batches)]
    longest = max(part["inputs"].shape[1] for part in parts)
    long = [part for part in parts if 2 * part["inputs"].shape[1] >= longest]
    seq = min(part["inputs"].shape[1] for part in long)
    return cast(Batch, {name: torch.cat([part[name][:, :seq] for part in long]) for name in long[0]})


def _before(lengths: Int[Tensor, " batch"], tokens: Int[Tensor, "batch seq"]) -> Bool[Tensor, "batch seq"]:
    return torch.arange(tokens.shape[1], device=tokens.device) < lengths.unsqueeze(1)
