"""Where a token stands: absolute positions are added to the embeddings, relative ones act on queries and keys."""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn


class LearnedPosition(nn.Module):
    """One learned vector for each position, added to the token embedding (Gehring et al. 2017, arXiv 1705.03122)."""

    def __init__(self, max_seq_len: int, d_model: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(max_seq_len, d_model)

    def forward(self, x: Float[Tensor, "batch seq d_model"]) -> Float[Tensor, "batch seq d_model"]:
        return x + self.embedding.weight[: x.shape[1]]


class SinusoidalPosition(nn.Module):
    """Sines and cosines of geometrically spaced wavelengths, added to the embedding (Vaswani et al. 2017, §3.5).

    PE(pos, 2i) = sin(pos / base^(2i / d_model)), PE(pos, 2i + 1) = the cosine of the same (arXiv 1706.03762). The
    embeddings are first multiplied by √d_model, as in the paper's §3.4, or the sines would drown them.
    """

    table: Tensor

    def __init__(self, max_seq_len: int, d_model: int, base: float = 10_000.0) -> None:
        super().__init__()
        if d_model % 2:
            raise ValueError(f"model.d_model={d_model}: sinusoidal positions need an even one, {d_model + 1} works.")
        self.scale = math.sqrt(d_model)
        angles = _angles(max_seq_len, d_model, base)
        table = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)
        self.register_buffer("table", table.float(), persistent=False)

    def forward(self, x: Float[Tensor, "batch seq d_model"]) -> Float[Tensor, "batch seq d_model"]:
        return x * self.scale + self.table[: x.shape[1]].to(x.dtype)


class RotaryPosition(nn.Module):
    """Rotates queries and keys by an angle that grows with the position (Su et al. 2021, arXiv 2104.09864).

    Dimension `i` of the first half and of the second half of a head are the two coordinates that are turned by
    pos / base^(2i / head_dim), so a score depends on the distance between query and key alone.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, max_seq_len: int, head_dim: int, base: float = 10_000.0) -> None:
        super().__init__()
        if head_dim % 2:
            raise ValueError(
                f"attention.head_dim={head_dim} (d_model / num_heads): rotary positions need an even one, "
                f"{head_dim + 1} works."
            )
        angles = _angles(max_seq_len, head_dim, base)
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)

    def forward(self, x: Float[Tensor, "batch heads seq head_dim"]) -> Float[Tensor, "batch heads seq head_dim"]:
        """Turn queries or keys; in fp32 at least, whatever they come in."""
        cos, sin = self.cos[: x.shape[2]], self.sin[: x.shape[2]]
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
        return turned.to(x.dtype)


def _angles(max_seq_len: int, dim: int, base: float) -> Float[Tensor, "max_seq_len half_dim"]:
    """Position times frequency, for dim / 2 frequencies from 1 down to 1 / base."""
    # In float64: at position 10,000 an fp32 angle is off by 1e-3 of a radian.
    frequencies = base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    return torch.outer(torch.arange(max_seq_len, dtype=torch.float64), frequencies)
