"""Sums over a token and the few tokens before it: short convolutions, and keys mixed with the previous key."""

from abc import abstractmethod
from typing import TypeAlias

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from tinyformer.nn.cache import LayerCache
from tinyformer.nn.mask import AttentionMask

Vectors: TypeAlias = Float[Tensor, "batch seq width"]
"""A vector for each token."""


def before(x: Vectors, steps: int, documents: Int[Tensor, "#batch k_seq"] | None = None) -> Vectors:
    """The vector of the token `steps` places before each token; 0 if that token is missing or of another document."""
    seq = x.shape[1]
    moved = F.pad(x, (0, 0, steps, 0))[:, :seq]
    if documents is None:
        return moved
    own = documents[:, documents.shape[1] - seq :]
    return moved.where((own == F.pad(own, (steps, 0))[:, :seq]).unsqueeze(-1), 0.0)


class CausalSum(nn.Module):
    """Base class of y_j = Σ_t w_t ⊙ x_{j-t}, a sum over token j and the `reach` tokens before it in its document.

    No token reads a later token, even if the attention sees both directions. The cache holds the last `reach` inputs.
    """

    reach: int
    dims = 1  # number of adjacent dimensions of x that share their weights

    @property
    def width(self) -> int:
        """Number of dimensions of x."""
        return len(next(self.parameters())) * self.dims

    @abstractmethod
    def weights(self) -> Float[Tensor, "steps width"]:
        """The weights w, of which w_0 belongs to the token itself."""

    def forward(self, x: Vectors, mask: AttentionMask | None = None, cache: LayerCache | None = None) -> Vectors:
        """The sum at each token, computed in the higher precision of inputs and weights."""
        documents = None if mask is None else mask.documents
        seen = x if cache is None else cache.with_earlier(x, self.reach)
        terms = (weight * before(seen, steps, documents) for steps, weight in enumerate(self.weights()))
        return sum(terms, x.new_zeros(()))[:, seen.shape[1] - x.shape[1] :].to(x.dtype)


class ShortConvolution(CausalSum):
    """A Canon layer (Allen-Zhu 2025, arXiv 2512.17351): y_j = x_j + Σ_t h_t ⊙ x_{j-t} with t from 0 to 3.

    Each dimension has its own filter h, which starts at 0: the identity.
    """

    reach = 3

    def __init__(self, width: int) -> None:
        super().__init__()
        # As in torch.nn.Conv1d, with the token itself last. With three axes, it is no matrix for the optimizers.
        self.filters = nn.Parameter(torch.zeros(width, 1, self.reach + 1))

    def weights(self) -> Float[Tensor, "steps width"]:
        wide = self.filters.to(torch.promote_types(self.filters.dtype, torch.float32))  # bf16 rounds 1.003 to 1
        own, *others = wide[:, 0].flip(1).T
        return torch.stack([1 + own, *others])


class ShiftedKeys(CausalSum):
    """The shift of keys: k'_j = σ(a) k_j + (1 - σ(a)) k_{j-1} (Olsson et al. 2022, arXiv 2209.11895).

    Each K/V head has an a, which starts at 0, where k'_j is the mean of both keys; no finite a is the identity.
    """

    reach = 1

    def __init__(self, num_kv_heads: int, key_dim: int) -> None:
        super().__init__()
        self.a, self.dims = nn.Parameter(torch.zeros(num_kv_heads)), key_dim

    def weights(self) -> Float[Tensor, "steps width"]:
        share = torch.sigmoid(self.a).repeat_interleave(self.dims)
        return torch.stack([share, 1 - share])


class ProjectionSums(nn.ModuleDict):
    """The `ShortConvolution` of the projections q, k and v by letter, and `ShiftedKeys` as "shifted_keys"."""

    def mixed(self, letter: str, x: Vectors, mask: AttentionMask | None, cache: LayerCache | None) -> Vectors:
        """One of the projections, mixed with the same projection of earlier tokens."""
        for name in (letter, "shifted_keys") if letter == "k" else (letter,):
            x = self[name](x, mask, cache and cache.part(name)) if name in self else x
        return x
