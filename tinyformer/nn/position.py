"""Where a token stands.

Absolute positions are added to the embeddings. Relative ones act in attention: they turn queries and keys (rotary), or
add to the scores what depends on the distance between query and key (ALiBi, T5, Shaw).
"""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tinyformer.nn.mask import Grid
from tinyformer.nn.score import ScoreMod


class LearnedPosition(nn.Module):
    """One learned vector for each position, added to the token embedding (Gehring et al. 2017, arXiv 1705.03122)."""

    def __init__(self, max_seq_len: int, d_model: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(max_seq_len, d_model)

    def forward(self, x: Float[Tensor, "batch seq d_model"], offset: int = 0) -> Float[Tensor, "batch seq d_model"]:
        """Add to tokens of which the first stands at position `offset`."""
        return x + self.embedding.weight[offset : offset + x.shape[1]]


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

    def forward(self, x: Float[Tensor, "batch seq d_model"], offset: int = 0) -> Float[Tensor, "batch seq d_model"]:
        """Add to tokens of which the first stands at position `offset`."""
        return x * self.scale + self.table[offset : offset + x.shape[1]].to(x.dtype)


class RelativePosition(nn.Module):
    """No relative position; the others override what they do. Attention makes one with its `head_dim`."""

    mixed_dim: int | None = None
    """The dimensions of what `mix` adds to the output, if it adds anything."""

    multiply_adds: int = 0
    """What `score_mod` and `mix` cost for each query of each head, in matrix products."""

    def __init__(self, head_dim: int | None = None) -> None:
        super().__init__()

    def rotate(
        self, x: Float[Tensor, "batch heads seq head_dim"], offset: int = 0
    ) -> Float[Tensor, "batch heads seq head_dim"]:
        """Queries or keys, of which the first stands at position `offset`, with their positions in them."""
        return x

    def score_mod(
        self, q: Float[Tensor, "batch num_heads q_seq head_dim"], k_seq: int, scale: float, causal: bool
    ) -> ScoreMod | None:
        """What is added to the scores.

        Args:
            q: the queries.
            k_seq: number of keys.
            scale: of the scores.
            causal: whether keys stand before their queries only.
        """
        return None

    def mix(self, q_seq: int, k_seq: int) -> Callable[[Tensor], Tensor] | None:
        """What the weights add to the output besides the values, if anything."""
        return None


class RotaryPosition(RelativePosition):
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
        cos, sin = angles.cos().float(), angles.sin().float()
        # One factor for each dimension: products of whole vectors are quicker than those of halves put together.
        self.register_buffer("cos", torch.cat([cos, cos], dim=-1), persistent=False)
        self.register_buffer("sin", torch.cat([-sin, sin], dim=-1), persistent=False)

    def rotate(
        self, x: Float[Tensor, "batch heads seq head_dim"], offset: int = 0
    ) -> Float[Tensor, "batch heads seq head_dim"]:
        """Turn queries or keys; in fp32 at least, whatever they come in."""
        end = offset + x.shape[2]
        other_coordinates = x.roll(x.shape[-1] // 2, dims=-1)
        turned = torch.addcmul(x * self.cos[offset:end], other_coordinates, self.sin[offset:end])
        return turned.to(x.dtype)


class ALiBi(RelativePosition):
    """score ← score - slope_h · |i - j| (Press et al. 2021, arXiv 2108.12409), nothing learned.

    The slopes of n heads are 2^(-8/n), 2^(-16/n), …, 2^-8; where n is no power of two, those of the next smaller one,
    then every other one of the next larger, as in the paper's code.
    """

    slopes: Tensor

    def __init__(self, num_heads: int, head_dim: int | None = None) -> None:
        super().__init__()
        self.register_buffer("slopes", torch.tensor(_alibi_slopes(num_heads)), persistent=False)

    def score_mod(
        self, q: Float[Tensor, "batch num_heads q_seq head_dim"], k_seq: int, scale: float, causal: bool
    ) -> ScoreMod:
        """The slopes' bias; they do not know the scale."""
        slopes = self.slopes

        def subtract(score: Tensor, batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return score - slopes[head] * (q_idx - kv_idx).abs()

        return ScoreMod(subtract, additive=True, by_head=True)


class T5Position(RelativePosition):
    """score ← score + table[bucket(j - i), h] (Raffel et al. 2019, arXiv 1910.10683, §2.1).

    Half of the buckets hold one distance each, the others ranges that grow logarithmically up to `max_distance`, the
    last one all beyond. Without a causal mask, keys behind the query and keys before it have half of them each. T5
    itself shares the table between its layers (see `Shared`) and does not scale the scores (`attention.score=dot`).
    """

    def __init__(
        self, num_heads: int, num_buckets: int = 32, max_distance: int = 128, head_dim: int | None = None
    ) -> None:
        super().__init__()
        if num_buckets < 4 or num_buckets % 4:
            raise ValueError(f"position.num_buckets={num_buckets}: a multiple of 4 is needed, 32 works.")
        if max_distance <= num_buckets // 2:
            raise ValueError(
                f"position.max_distance={max_distance} must pass half of num_buckets={num_buckets}; "
                f"{4 * num_buckets} works."
            )
        self.num_buckets, self.max_distance = num_buckets, max_distance
        self.embedding = nn.Embedding(num_buckets, num_heads)

    def score_mod(
        self, q: Float[Tensor, "batch num_heads q_seq head_dim"], k_seq: int, scale: float, causal: bool
    ) -> ScoreMod:
        """The table's bias; it does not know the scale."""
        table = self.embedding.weight

        def add(score: Tensor, batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return score + table[self.bucket(kv_idx - q_idx, causal), head]

        return ScoreMod(add, additive=True, learned=True, by_head=True)

    def bucket(self, distance: Int[Tensor, "*grid"], causal: bool) -> Int[Tensor, "*grid"]:
        """The bucket of a distance, key minus query."""
        num_buckets = self.num_buckets if causal else self.num_buckets // 2
        first = 0 if causal else (distance > 0).long() * num_buckets
        distance = (-distance).clamp(min=0) if causal else distance.abs()
        exact = num_buckets // 2
        logarithmic = torch.log(distance.clamp(min=1).float() / exact) / math.log(self.max_distance / exact)
        far = (exact + (logarithmic * (num_buckets - exact)).long()).clamp(max=num_buckets - 1)
        return first + torch.where(distance < exact, distance, far)


class ShawPosition(RelativePosition):
    """Keys and values get a learned vector of their clipped distance (Shaw et al. 2018, arXiv 1803.02155).

    score(i, j) = scale · qᵢᵀ (kⱼ + a_K[clip(j - i)]);  output_i = Σⱼ w_ij (vⱼ + a_V[clip(j - i)])

    The heads of a layer share the vectors. The values' term needs the weights themselves, which no fused kernel gives.

    Args:
        head_dim: of each head.
        max_distance: up to which distances are told apart.
        values: whether values get the vector of their distance, too.
    """

    def __init__(self, head_dim: int, max_distance: int = 16, values: bool = True) -> None:
        super().__init__()
        if max_distance < 1:
            raise ValueError(f"position.relative.max_distance={max_distance}: at least 1, 16 works.")
        self.max_distance = max_distance
        self.keys = nn.Embedding(2 * max_distance + 1, head_dim)
        self.values = nn.Embedding(2 * max_distance + 1, head_dim) if values else None
        self.mixed_dim = head_dim if values else None
        self.multiply_adds = sum(table.numel() for table in self.parameters())

    def score_mod(
        self, q: Float[Tensor, "batch num_heads q_seq head_dim"], k_seq: int, scale: float, causal: bool
    ) -> ScoreMod:
        """Scale · qᵢᵀ a_K, one product for each distance, looked up for each pair."""
        products = scale * (q @ self.keys.weight.to(q.dtype).T)
        products = products.to(torch.promote_types(q.dtype, torch.float32))
        first = k_seq - q.shape[2]

        def add(score: Tensor, batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return score + products[batch, head, q_idx - first, self.clip(kv_idx - q_idx)]

        return ScoreMod(add, additive=True, learned=True)

    def mix(self, q_seq: int, k_seq: int) -> Callable[[Tensor], Tensor] | None:
        """Σⱼ w_ij a_V[clip(j - i)]: the weights of each distance added up, times its vector."""
        if self.values is None:
            return None
        table = self.values.weight

        def mix(weights: Tensor) -> Tensor:
            grid = Grid.of(1, 1, q_seq, k_seq, weights.device)
            index = self.clip(grid.kv_idx - grid.q_idx).expand_as(weights)
            # In fp32 at least: many far keys add up in one number.
            summed = weights.to(torch.promote_types(weights.dtype, torch.float32))
            totals = summed.new_zeros(*weights.shape[:3], len(table)).scatter_add(-1, index, summed)
            return totals.to(weights.dtype) @ table.to(weights.dtype)

        return mix

    def clip(self, distance: Int[Tensor, "*grid"]) -> Int[Tensor, "*grid"]:
        """The row of a distance, key minus query."""
        return distance.clamp(-self.max_distance, self.max_distance) + self.max_distance


class Shared:
    """Makes one position and gives it to every layer, as T5 does with its table.

    Args:
        position: makes it, once.
    """

    def __init__(self, position: Callable[..., RelativePosition]) -> None:
        self.make = position
        self.made: RelativePosition | None = None

    def __call__(self, **sizes: int) -> RelativePosition:
        """The one position."""
        if self.made is None:
            self.made = self.make(**sizes)
        return self.made


def _alibi_slopes(num_heads: int) -> list[float]:
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    if power < num_heads:
        slopes += _alibi_slopes(2 * power)[::2][: num_heads - power]
    return slopes


def _angles(max_seq_len: int, dim: int, base: float) -> Float[Tensor, "max_seq_len half_dim"]:
    """Position times frequency, for dim / 2 frequencies from 1 down to 1 / base."""
    # In float64: at position 10,000 an fp32 angle is off by 1e-3 of a radian.
    frequencies = base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    return torch.outer(torch.arange(max_seq_len, dtype=torch.float64), frequencies)
