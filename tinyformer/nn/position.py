"""Positional encodings.

Absolute encodings are added to the token embeddings. Relative encodings act inside attention: they rotate queries and
keys (rotary), or add to the scores a term that depends on the distance between query and key (ALiBi, T5, Shaw).
"""

import math
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Int
from torch import Tensor, nn

from tinyformer.errors import ArgumentError, argument_path, require_at_least, require_choice
from tinyformer.nn.frequencies import SCALINGS, angles, geometric, magnitude
from tinyformer.nn.layers import Stream
from tinyformer.nn.mask import Grid
from tinyformer.nn.pattern import of_layer
from tinyformer.nn.score import Queries, ScoreMod


class LearnedPosition(nn.Module):
    """A learned vector for each position, added to the embeddings (Gehring et al. 2017, arXiv 1705.03122)."""

    def __init__(self, max_seq_len: int, d_model: int) -> None:
        super().__init__()
        self.max_seq_len = max_seq_len
        self.embedding = nn.Embedding(max_seq_len, d_model)

    def forward(self, x: Stream, offset: int = 0) -> Stream:
        """Add the encodings of the positions from `offset` on."""
        return x + self.embedding.weight[offset : offset + x.shape[1]]


class _Fp32Tables(nn.Module):
    """A module whose buffers stay in fp32 when it is cast to a lower precision.

    With 8 significant bits, bf16 cannot represent the difference between the positions 300 and 301.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "_Fp32Tables":
        tables = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)
        for name, table in tables.items():
            cast = getattr(self, name)
            if cast.dtype.itemsize < torch.float32.itemsize:
                setattr(self, name, table.float().to(cast.device))
        return self


class SinusoidalPosition(_Fp32Tables):
    """Sines and cosines of geometrically spaced wavelengths, added to the embeddings (Vaswani et al. 2017, §3.5).

    PE(pos, 2i) = sin(pos / base^(2i / d_model)), PE(pos, 2i + 1) = cos(pos / base^(2i / d_model)) (arXiv 1706.03762).
    The embeddings are first multiplied by √d_model, as in §3.4, since their initial values are much smaller than 1.

    Args:
        base: the longest wavelength is 2π times this.
        interleaved: whether sines and cosines alternate, as in the paper; else all sines come first, as in the paper's
            code and in Marian.
    """

    table: Tensor

    def __init__(self, max_seq_len: int, d_model: int, base: float = 10_000.0, interleaved: bool = True) -> None:
        super().__init__()
        if d_model % 2:
            reason = "must be even for sinusoidal positional encodings"
            raise ArgumentError("d_model", d_model, reason, {"d_model": d_model + 1})
        self.scale = math.sqrt(d_model)
        self.max_seq_len = max_seq_len
        of_positions = angles(max_seq_len, geometric(d_model, base))
        waves = [of_positions.sin(), of_positions.cos()]
        table = torch.stack(waves, dim=-1).flatten(-2) if interleaved else torch.cat(waves, dim=-1)
        self.register_buffer("table", table.float(), persistent=False)

    def forward(self, x: Stream, offset: int = 0) -> Stream:
        return x * self.scale + self.table[offset : offset + x.shape[1]].to(x.dtype)


class RelativePosition(_Fp32Tables):
    """Base class of relative positional encodings, by itself without effect; attention creates one with `head_dim`."""

    mixed_dim: int | None = None
    """Size of the vectors that `mix` adds to the output; None if `mix` adds nothing."""

    def __init__(self, head_dim: int | None = None) -> None:
        super().__init__()

    def rotate(self, x: Queries, offset: int = 0) -> Queries:
        """Queries or keys rotated by their positions, which start at `offset`."""
        return x

    def score_mod(self, q: Queries, k_seq: int, scale: float, causal: bool) -> ScoreMod | None:
        """The modification of the attention scores, or None; `scale` is the factor of the dot product in the scores."""
        return None

    def mix(self, q_seq: int, k_seq: int) -> Callable[[Tensor], Tensor] | None:
        """A function from the attention weights to a term that is added to the output of each head, or None."""
        return None


class RotaryPosition(RelativePosition):
    """Rotary positional encoding, RoPE (Su et al. 2021, arXiv 2104.09864).

    Dimensions i and i + head_dim / 2 of queries and keys are rotated by the angle pos · base^(-2i / head_dim), so that
    a score depends on the positions of query and key only through their distance.

    Args:
        base: the longest wavelength is 2π times almost this. A list is a pattern that repeats over the layers, such as
            Gemma 3's [1e4, 1e4, 1e4, 1e4, 1e4, 1e6], five local layers and a global one (2025, arXiv 2503.19786).
        fraction: share of the dimensions that are rotated, the first ones, with exponents -2i / (fraction · head_dim),
            as in GPT-NeoX, Phi and Qwen3-Next.
        p: share of the frequencies that are kept, the highest; the others are 0 (p-RoPE, Barbero et al. 2024, arXiv
            2410.06205). The exponents are those of all frequencies.
        scaling: a name in `SCALINGS`, for texts longer than those of training; None for none.
        factor: length of the longest text divided by that of training, with `scaling`. A list is a pattern over the
            layers, as with `base`; layers with 1 are not scaled, such as the local layers of Gemma 3 and OLMo 3.
        original_seq_len: number of tokens of a text of training; None for `max_seq_len / factor`.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        max_seq_len: int,
        head_dim: int,
        base: float | Sequence[float] = 10_000.0,
        fraction: float = 1.0,
        p: float = 1.0,
        scaling: str | None = None,
        factor: float | Sequence[float] = 1.0,
        original_seq_len: int | None = None,
        layer_index: int = 0,
    ) -> None:
        super().__init__()
        for name, share in (("fraction", fraction), ("p", p)):
            if not 0 < share <= 1:
                raise ArgumentError(name, share, "must be above 0 and at most 1", {name: 0.5})
        factors = factor if isinstance(factor, Sequence) else [factor]
        if min(factors, default=0) < 1 or (max(factors) > 1) != (scaling is not None):
            reason = "must be above 1 with a `scaling`, and 1 without"
            raise ArgumentError("factor", factor, reason, {"scaling": "yarn", "factor": 4.0})
        factor = of_layer("factor", factors, layer_index, 4.0)
        if head_dim % 2:
            reason = "must be even for rotary positional encodings"
            raise ArgumentError("head_dim", head_dim, reason, {"head_dim": head_dim + 1})
        require_at_least(1, {"original_seq_len": 256}, original_seq_len=original_seq_len)
        if original_seq_len is not None and scaling not in ("yarn", "llama3"):
            reason = "has an effect only with the `scaling` yarn or llama3"
            raise ArgumentError("original_seq_len", original_seq_len, reason, {"original_seq_len": None})
        self.dim = int(fraction * head_dim + 1e-9)  # 15/22 of 44 dimensions are 30, not 29.999…
        if self.dim % 2 or not self.dim:
            reason = f"must rotate an even number of dimensions, and rotates {self.dim} of {head_dim}"
            raise ArgumentError("fraction", fraction, reason, {"fraction": 2 * (self.dim // 2 + 1) / head_dim})
        self.max_seq_len = max_seq_len
        base = of_layer("base", base if isinstance(base, Sequence) else [base], layer_index, 10_000.0)
        if base <= 1:
            raise ArgumentError("base", base, "must be above 1", {"base": 10_000.0})
        frequencies = geometric(self.dim, base)
        if scaling is not None:
            require_choice("scaling", scaling, SCALINGS)
            if factor > 1:
                frequencies = SCALINGS[scaling](frequencies, base, factor, original_seq_len or max_seq_len / factor)
        frequencies[max(1, int(p * len(frequencies) + 1e-9)) :] = 0.0
        of_positions, scale = angles(max_seq_len, frequencies), magnitude(scaling, factor)
        cos, sin = (scale * of_positions.cos()).float(), (scale * of_positions.sin()).float()
        # Stored for both halves: products of whole vectors are faster than concatenating products of halves.
        self.register_buffer("cos", torch.cat([cos, cos], dim=-1), persistent=False)
        self.register_buffer("sin", torch.cat([-sin, sin], dim=-1), persistent=False)

    def rotate(self, x: Queries, offset: int = 0) -> Queries:
        """Rotate queries or keys, in fp32 or higher precision."""
        if self.dim < x.shape[-1]:
            return torch.cat([self._rotated(x[..., : self.dim], offset), x[..., self.dim :]], dim=-1)
        return self._rotated(x, offset)

    def _rotated(self, x: Queries, offset: int) -> Queries:
        end = offset + x.shape[2]
        other_half = x.roll(x.shape[-1] // 2, dims=-1)
        rotated = torch.addcmul(x * self.cos[offset:end], other_half, self.sin[offset:end])
        return rotated.to(x.dtype)


class ALiBi(RelativePosition):
    """Attention with linear biases: score_ij ← score_ij - slope_h · |i - j| (Press et al. 2021, arXiv 2108.12409).

    The slopes of n heads are 2^(-8/n), 2^(-16/n), …, 2^-8 and are not learned. If n is not a power of two, the slopes
    for the next smaller power come first; every second slope for the next larger power follows, as in the paper's code.
    """

    slopes: Tensor

    def __init__(self, num_heads: int, head_dim: int | None = None) -> None:
        super().__init__()
        self.register_buffer("slopes", torch.tensor(_alibi_slopes(num_heads)), persistent=False)

    def score_mod(self, q: Queries, k_seq: int, scale: float, causal: bool) -> ScoreMod:
        """The modification that subtracts slope times distance from a score, regardless of `scale`."""
        slopes = self.slopes

        def subtract(score: Tensor, batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return score - slopes[head] * (q_idx - kv_idx).abs()

        return ScoreMod(subtract, additive=True, by_head=True)


class T5Position(RelativePosition):
    """Learned bias for each head h and bucket of distances: score_ij ← score_ij + table[bucket(j - i), h].

    From T5 (Raffel et al. 2019, arXiv 1910.10683, §2.1). Half of the buckets hold one distance each; the others hold
    ranges spaced logarithmically up to `max_distance`, and the last bucket all larger distances. Without a causal
    mask, half of the buckets are for keys before the query and half for keys after it. T5 shares the table between all
    layers (see `Shared`) and does not scale the scores (see `DotScore`).
    """

    def __init__(
        self, num_heads: int, num_buckets: int = 32, max_distance: int = 128, head_dim: int | None = None
    ) -> None:
        super().__init__()
        if num_buckets < 4 or num_buckets % 4:
            raise ArgumentError("num_buckets", num_buckets, "must be a positive multiple of 4", {"num_buckets": 32})
        if max_distance <= num_buckets // 2:
            reason = f"must be greater than half of `num_buckets`={num_buckets}"
            raise ArgumentError("max_distance", max_distance, reason, {"max_distance": 4 * num_buckets})
        self.num_buckets, self.max_distance = num_buckets, max_distance
        self.embedding = nn.Embedding(num_buckets, num_heads)

    def score_mod(self, q: Queries, k_seq: int, scale: float, causal: bool) -> ScoreMod:
        """The modification that adds the bias of the distance's bucket to a score, regardless of `scale`."""
        table = self.embedding.weight

        def add(score: Tensor, batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return score + table[self.bucket(kv_idx - q_idx, causal), head]

        return ScoreMod(add, additive=True, learned=True, by_head=True)

    def bucket(self, distance: Int[Tensor, "*grid"], causal: bool) -> Int[Tensor, "*grid"]:
        """The bucket of each distance, which is the position of the key minus the position of the query."""
        num_buckets = self.num_buckets if causal else self.num_buckets // 2
        first = 0 if causal else (distance > 0).long() * num_buckets
        distance = (-distance).clamp(min=0) if causal else distance.abs()
        exact = num_buckets // 2
        logarithmic = torch.log(distance.clamp(min=1).float() / exact) / math.log(self.max_distance / exact)
        far = (exact + (logarithmic * (num_buckets - exact)).long()).clamp(max=num_buckets - 1)
        return first + torch.where(distance < exact, distance, far)


class ShawPosition(RelativePosition):
    """Learned vectors for each clipped distance, added to keys and values (Shaw et al. 2018, arXiv 1803.02155).

    score(i, j) = scale · qᵢᵀ (kⱼ + a_K[clip(j - i)]);  output_i = Σⱼ w_ij (vⱼ + a_V[clip(j - i)])

    The heads of a layer share the vectors. The term of the values needs the attention weights explicitly, which fused
    kernels do not compute.

    Args:
        max_distance: distances are clipped to this number of tokens.
        values: whether to add vectors to the values as well as to the keys.
    """

    def __init__(self, head_dim: int, max_distance: int = 16, values: bool = True) -> None:
        super().__init__()
        require_at_least(1, {"max_distance": 16}, max_distance=max_distance)
        self.max_distance = max_distance
        self.keys = nn.Embedding(2 * max_distance + 1, head_dim)
        self.values = nn.Embedding(2 * max_distance + 1, head_dim) if values else None
        self.mixed_dim = head_dim if values else None

    def score_mod(self, q: Queries, k_seq: int, scale: float, causal: bool) -> ScoreMod:
        """The modification that adds scale · qᵢᵀ a_K[clip(j - i)] to a score."""
        products = scale * (q @ self.keys.weight.to(q.dtype).T)
        products = products.to(torch.promote_types(q.dtype, torch.float32))
        first = k_seq - q.shape[2]

        def add(score: Tensor, batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return score + products[batch, head, q_idx - first, self.clip(kv_idx - q_idx)]

        return ScoreMod(add, additive=True, learned=True)

    def mix(self, q_seq: int, k_seq: int) -> Callable[[Tensor], Tensor] | None:
        """The function from weights to Σⱼ w_ij a_V[clip(j - i)], computed from the sum of weights at each distance."""
        if self.values is None:
            return None
        table = self.values.weight

        def mix(weights: Tensor) -> Tensor:
            grid = Grid.of(1, 1, q_seq, k_seq, weights.device)
            index = self.clip(grid.kv_idx - grid.q_idx).expand_as(weights)
            # The weights of all distant keys add up in one element, so sum in fp32 or higher precision.
            summed = weights.to(torch.promote_types(weights.dtype, torch.float32))
            totals = summed.new_zeros(*weights.shape[:3], len(table)).scatter_add(-1, index, summed)
            return totals.to(weights.dtype) @ table.to(weights.dtype)

        return mix

    def clip(self, distance: Int[Tensor, "*grid"]) -> Int[Tensor, "*grid"]:
        """The table's row for each distance, which is the position of the key minus the position of the query."""
        return distance.clamp(-self.max_distance, self.max_distance) + self.max_distance


class Shared:
    """A factory that gives all of its layers the same relative position, as T5 shares its table."""

    def __init__(self, position: Callable[..., RelativePosition]) -> None:
        self._factory = position
        self._position: RelativePosition | None = None

    def __call__(self, head_dim: int) -> RelativePosition:
        if self._position is None:
            with argument_path("position"):
                self._position = self._factory(head_dim=head_dim)
        return self._position


def _alibi_slopes(num_heads: int) -> list[float]:
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    if power < num_heads:
        slopes += _alibi_slopes(2 * power)[::2][: num_heads - power]
    return slopes
