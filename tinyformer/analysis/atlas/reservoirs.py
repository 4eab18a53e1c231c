"""Samples of a stream in bounded memory: the entries with the smallest scores of each of several groups."""

from typing import TypeAlias

import torch
from jaxtyping import Int
from torch import Tensor

Entries: TypeAlias = dict[str, Tensor]
"""Fields of entries by name, each with a row for each entry: `group`, `score` and what else is to be kept."""

MIN_PENDING = 1024  # entries that wait at least until they are merged with those that are kept


def priorities(seed: int, *indices: Tensor) -> Int[Tensor, "..."]:
    """A random number from 0 to 2³² - 1 for each tuple of indices, the same in whatever batch it comes.

    The indices are mixed in one after the other by a hash of 32 bits (Wellons 2018, "Prospecting for hash functions").
    """
    mixed = torch.as_tensor(seed)
    for index in indices:
        mixed = (mixed + 0x9E3779B9 + index) & 0xFFFFFFFF
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
            mixed = ((mixed ^ (mixed >> shift)) * factor) & 0xFFFFFFFF
        mixed = mixed ^ (mixed >> 16)
    return mixed


class Smallest:
    """The entries with the smallest scores of each group; of equal scores, the first ones.

    With random scores, they are a uniform sample of each group without replacement (Cohen & Kaplan 2007, "Summarizing
    data using bottom-k sketches"). An entry whose score is not below the `limits` of its group need not be offered.
    """

    def __init__(self, num_groups: int, size: int, device: torch.device) -> None:
        self.size, self._parts, self._num_kept, self._num_pending = size, list[Entries](), 0, 0
        self.limits = torch.full((num_groups,), torch.inf, dtype=torch.float64, device=device)

    def offer(self, entries: Entries) -> None:
        self._parts.append(entries)
        self._num_pending += len(entries["score"])
        if self._num_pending >= max(MIN_PENDING, self._num_kept // 4):
            self.kept()

    def kept(self) -> Entries:
        """The kept items, in the order of groups and scores."""
        entries = {name: torch.cat([part[name] for part in self._parts]) for name in self._parts[0]}
        order = entries["score"].argsort(stable=True)
        order = order[entries["group"][order].argsort(stable=True)]
        groups = entries["group"][order]
        counts = groups.bincount(minlength=len(self.limits))
        firsts, is_full = counts.cumsum(dim=0) - counts, counts >= self.size
        self.limits[is_full] = entries["score"][order][firsts[is_full] + self.size - 1]
        order = order[torch.arange(len(order), device=order.device) - firsts[groups] < self.size]
        self._parts = [{name: field[order] for name, field in entries.items()}]
        self._num_kept, self._num_pending = len(order), 0
        return self._parts[0]
