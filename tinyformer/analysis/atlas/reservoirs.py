"""Samples of a stream in bounded memory: the entries with the smallest scores of each of several groups."""

from collections.abc import Mapping
from typing import TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

Entries: TypeAlias = Mapping[str, Tensor]
"""Fields of entries by name, each with one row for each entry: `group`, `score` and what else is to be kept."""

MIN_PENDING = 4096  # entries that wait at least until they are merged with those that are kept


def priorities(seed: int, *indices: Tensor | int) -> Int[Tensor, "..."]:
    """A random number from 0 to 2³² - 1 for each tuple of indices, the same whatever the batch that it comes in.

    The indices are mixed in, one after the other, by a hash of 32 bits (Wellons 2018, "Prospecting for hash
    functions").
    """
    mixed = torch.as_tensor(seed)
    for index in indices:
        mixed = (mixed + 0x9E3779B9 + index) & 0xFFFFFFFF
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
            mixed = ((mixed ^ (mixed >> shift)) * factor) & 0xFFFFFFFF
        mixed = mixed ^ (mixed >> 16)
    return mixed


class Smallest:
    """The entries with the smallest scores of each group of a stream; of equal scores, the first ones.

    With random scores it is a uniform sample without replacement of each group (bottom-k: Cohen & Kaplan 2007).

    Attributes:
        limits: by group, the score that an entry has to be below; others need not be offered.
    """

    def __init__(self, num_groups: int, size: int, device: torch.device) -> None:
        self.size, self._parts = size, list[Entries]()
        self._num_kept = self._num_pending = 0
        self.limits: Float[Tensor, " groups"] = torch.full((num_groups,), torch.inf, dtype=torch.float64, device=device)

    def offer(self, entries: Entries) -> None:
        self._parts.append(entries)
        self._num_pending += len(entries["score"])
        if self._num_pending >= max(MIN_PENDING, self._num_kept):
            self.merge()

    def merge(self) -> Entries:
        """What is kept of all that was offered, by group and score."""
        entries = {name: torch.cat([part[name] for part in self._parts]) for name in self._parts[0]}
        order = entries["score"].argsort(stable=True)
        order = order[entries["group"][order].argsort(stable=True)]
        groups, scores = entries["group"][order], entries["score"][order]
        counts = groups.bincount(minlength=len(self.limits))
        firsts = counts.cumsum(dim=0) - counts
        order = order[torch.arange(len(order), device=order.device) - firsts[groups] < self.size]
        is_full = counts >= self.size
        self.limits[is_full] = scores[firsts[is_full] + self.size - 1]
        self._parts = [{name: field[order] for name, field in entries.items()}]
        self._num_kept, self._num_pending = len(order), 0
        return self._parts[0]
