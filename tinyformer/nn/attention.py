"""What all kinds of attention share: compare, mix, gate, and project back.

How queries, keys and values are made is the business of `multi_head`, `latent` and `differential`.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from tinyformer.nn.cache import LayerCache
from tinyformer.nn.gate import HeadGate, OutputGate, ablated_in_layer
from tinyformer.nn.mask import AttentionMask, window_of_layer
from tinyformer.nn.position import RelativePosition
from tinyformer.nn.score import LocalGaussian, Scoring, find_score
from tinyformer.nn.score import softcap as softcap_mod
from tinyformer.nn.support import (
    AttentionCase,
    Backend,
    features_of,
    require_possible,
    select_backend,
)
from tinyformer.nn.weights import AttentionMaps, attention_maps


class BaseAttention(nn.Module):
    """All of attention but the projections, which a subclass makes: those that `project` uses, and `o_proj`.

    `q_proj`, `k_proj` and `v_proj` have the rows of one head after the other, and `o_proj` their columns, so that
    `prune_heads` can take any of them.

    Args:
        d_model: width of the residual stream.
        num_heads: query heads.
        head_dim: of queries and keys as one softmax compares them.
        v_head_dim: of values; `head_dim` unless given.
        position_dim: of the part of queries and keys that the relative position acts on; `head_dim` unless given.
        dropout: probability to drop an attention weight in training.
        score: how a query and a key are compared: a name in `SCORES`, or the dotted name of a class of yours, made
            with `num_heads` and `head_dim`.
        window: how many keys a token sees, itself included; all if null. A list is a pattern that repeats over the
            layers, as [128, 128, 128, 128, 128, null] for five local layers to one global.
        local_gaussian: weigh the window by a Gaussian around a centre that the query predicts, see `LocalGaussian`.
        softcap: scores stay between its negative and itself; no bound if null. Positions are added afterwards.
        sink: whether each head has a logit that takes attention and gives no value, see `Scoring`.
        gate: whether each token gates each head's output, see `OutputGate`.
        backend: "auto" or a name in `BACKENDS`.
        position: makes the relative position, given `head_dim`; applied to self-attention only, since the tokens of
            two sequences have no distance.
        ablated_heads: `[layer, head]` pairs of the whole model whose heads are taken away.
        layer_index: which layer this is, from 0.
        num_layers: how many there are.
    """

    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    o_proj: nn.Linear
    num_kv_heads: int
    kept: Tensor | None
    kv_index: Tensor | None

    num_softmaxes: int = 1
    """Of each head."""

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        position_dim: int | None = None,
        *,
        dropout: float = 0.0,
        score: str = "scaled_dot",
        window: int | Sequence[int | None] | None = None,
        local_gaussian: bool = False,
        softcap: float | None = None,
        sink: bool = False,
        gate: bool = False,
        backend: str = "auto",
        position: Callable[..., RelativePosition] | None = None,
        ablated_heads: Sequence[Sequence[int]] = (),
        layer_index: int = 0,
        num_layers: int = 1,
    ) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.v_head_dim = num_heads, head_dim, v_head_dim or head_dim
        self.layer_index, self.position_dim = layer_index, position_dim or head_dim
        self.dropout, self.backend = dropout, backend
        self.score = find_score(score)(num_heads, head_dim)
        self.window = window_of_layer(window, layer_index)
        if not 0 <= dropout < 1:
            raise ValueError(f"attention.dropout={dropout} is no probability below 1; attention.dropout=0.1 is.")
        if local_gaussian and (window is None or not (isinstance(window, int) or any(window))):
            raise ValueError("attention.local_gaussian=true needs a window to fall off in; attention.window=16 works.")
        # In a pattern of local and global layers, it is the local ones that have it.
        self.gaussian = LocalGaussian(num_heads, head_dim, self.window) if local_gaussian and self.window else None
        self.softcap = softcap_mod(softcap) if softcap is not None else None
        self.sink = nn.Parameter(torch.zeros(num_heads)) if sink else None
        self.position = position(head_dim=self.position_dim) if position else RelativePosition()
        self.output_gate = OutputGate(d_model, num_heads) if gate else None
        self.head_gate = HeadGate(num_heads, ablated_in_layer(ablated_heads, layer_index, num_layers, num_heads))
        # Where heads were pruned (`prune_heads`): which, which are left, and which K/V head each of these reads.
        self.pruned: list[int] = []
        self.register_buffer("kept", None, persistent=False)
        self.register_buffer("kv_index", None, persistent=False)
        # The structure is checked now; the first step, or `resolve_backend`, decides for a device and a dtype.
        self.resolved: Backend | None = None
        self._check_structure()

    @abstractmethod
    def project(
        self,
        x: Float[Tensor, "batch q_seq d_model"],
        context: Float[Tensor, "batch k_seq d_model"] | None = None,
        cache: LayerCache | None = None,
    ) -> tuple[
        Float[Tensor, "batch num_heads q_seq q_dim"],
        Float[Tensor, "batch num_kv_heads all_seq q_dim"],
        Float[Tensor, "batch num_kv_heads all_seq v_head_dim"],
    ]:
        """Queries, keys and values, normalised and positioned, the cache's before the new ones."""

    def forward(
        self,
        x: Float[Tensor, "batch q_seq d_model"],
        mask: AttentionMask | None = None,
        context: Float[Tensor, "batch k_seq d_model"] | None = None,
        context_mask: AttentionMask | None = None,
        cache: LayerCache | None = None,
    ) -> Float[Tensor, "batch q_seq d_model"]:
        """Mix the values of the tokens that the mask lets each token see.

        Args:
            x: the tokens that ask.
            mask: who may attend to whom among them; everybody to everybody unless given.
            context: the tokens that answer (cross-attention); `x` itself unless given.
            context_mask: who may attend to whom in the context.
            cache: of the tokens before `x`, which answer too; it will hold `x` as well.

        Raises:
            ValueError: there is a cache beside a context, or tokens in it that should have seen `x`.
        """
        q, k, v, mask = self._asked(x, mask, context, context_mask, cache)
        heads = self.attend(q, k, v, mask, context is not None)
        if self.output_gate is not None:
            heads = self.output_gate(heads, x)
        return self.o_proj(self.head_gate(heads).transpose(1, 2).flatten(-2))

    def attend(
        self,
        q: Float[Tensor, "batch num_heads q_seq head_dim"],
        k: Float[Tensor, "batch num_kv_heads k_seq head_dim"],
        v: Float[Tensor, "batch num_kv_heads k_seq v_head_dim"],
        mask: AttentionMask,
        crosses: bool,
    ) -> Float[Tensor, "batch num_heads q_seq v_head_dim"]:
        """The heads' outputs, by the resolved backend or the one that this call allows."""
        dropout = self.dropout if self.training else 0.0
        q, scoring = self.scoring(q, k.shape[2], mask, crosses)
        # A step behind a cache asks for nothing that a kernel might lack, and no mask is built for it.
        mask = mask.for_last(k.shape[2]) if q.shape[2] == 1 else mask
        backend = self.resolved or select_backend(self.backend, self._case(q, k, mask, scoring, dropout))
        return backend.compute(q, k, v, mask, scoring, dropout)

    def scoring(
        self, q: Float[Tensor, "batch num_heads q_seq head_dim"], k_seq: int, mask: AttentionMask, crosses: bool
    ) -> tuple[Float[Tensor, "batch num_heads q_seq head_dim"], Scoring]:
        """The queries as the score function wants them, and what becomes of them.

        Args:
            q: the queries.
            k_seq: number of keys.
            mask: of this layer.
            crosses: whether the keys are those of another sequence.
        """
        q = self.score(q)
        mods = [self.softcap] if self.softcap else []
        mix = reweigh = None
        if not crosses:
            positional = self.position.score_mod(self.position_part(q), k_seq, self.score.scale, mask.causal)
            mods += [positional if self.kept is None else positional.of_heads(self.kept)] if positional else []
            mix = self.position.mix(q.shape[2], k_seq)
        if self.gaussian is not None:
            reweigh = self.gaussian(q, k_seq, mask.span)
        return q, Scoring(self.score.scale, self.score.compare, tuple(mods), self.sink, reweigh, mix)

    def position_part(
        self, q: Float[Tensor, "batch num_heads q_seq head_dim"]
    ) -> Float[Tensor, "batch num_heads q_seq position_dim"]:
        """What of a query the relative position acts on."""
        return q

    def weights(
        self,
        x: Float[Tensor, "batch q_seq d_model"],
        mask: AttentionMask | None = None,
        context: Float[Tensor, "batch k_seq d_model"] | None = None,
        context_mask: AttentionMask | None = None,
        cache: LayerCache | None = None,
    ) -> Float[Tensor, "batch maps q_seq k_seq"]:
        """The exact attention weights that `forward` uses, whatever kernel it runs; without dropout."""
        return self.maps(x, mask, context, context_mask, cache).weights

    def maps(
        self,
        x: Float[Tensor, "batch q_seq d_model"],
        mask: AttentionMask | None = None,
        context: Float[Tensor, "batch k_seq d_model"] | None = None,
        context_mask: AttentionMask | None = None,
        cache: LayerCache | None = None,
        rows: Int[Tensor, " rows"] | None = None,
    ) -> AttentionMaps:
        """The weights, and the logits that they are made from, for some queries or all; see `forward`.

        A cache is left as it is. The keys that its window has left behind have weight 0.
        """
        earlier = cache.copy() if cache is not None else None
        q, k, _, mask = self._asked(x, mask, context, context_mask, earlier)
        found = self.softmaxes(q, k, mask, context is not None, rows)
        gone = earlier.length - k.shape[2] if earlier is not None else 0
        return AttentionMaps(F.pad(found.weights, (gone, 0)), F.pad(found.logits, (gone, 0), value=-torch.inf))

    def softmaxes(
        self,
        q: Float[Tensor, "batch num_heads q_seq head_dim"],
        k: Float[Tensor, "batch num_kv_heads k_seq head_dim"],
        mask: AttentionMask,
        crosses: bool,
        rows: Int[Tensor, " rows"] | None = None,
    ) -> AttentionMaps:
        """Those of each softmax, one for each head unless a subclass has more."""
        q, scoring = self.scoring(q, k.shape[2], mask, crosses)
        return attention_maps(q, k, mask, scoring, rows)

    @property
    def head_ids(self) -> list[int]:
        """The number of each head, which it keeps when others are pruned."""
        return list(range(self.num_heads)) if self.kept is None else self.kept.tolist()

    @property
    def kv_of_head(self) -> list[int]:
        """The K/V head that each head reads, both as indices within the layer."""
        if self.kv_index is not None:
            return self.kv_index.tolist()
        return [head // (self.num_heads // self.num_kv_heads) for head in range(self.num_heads)]

    @property
    def map_names(self) -> list[str]:
        """What each map is called: `03` for head 3, `03a` and `03b` where a head has two softmaxes."""
        letters = "ab" if self.num_softmaxes > 1 else [""]
        return [f"{head:02d}{letter}" for head in self.head_ids for letter in letters]

    def _asked(
        self,
        x: Tensor,
        mask: AttentionMask | None,
        context: Tensor | None,
        context_mask: AttentionMask | None,
        cache: LayerCache | None,
    ) -> tuple[Tensor, Tensor, Tensor, AttentionMask]:
        """What `project` makes, and the mask of its keys.

        Where pruning left groups of unequal size, keys and values are each query head's own.
        """
        mask = ((mask if context is None else context_mask) or AttentionMask()).within(self.window)
        if cache is not None and context is not None:
            raise ValueError("A cache is of the tokens before x; with a context, give no cache.")
        if cache is not None and cache.length and not mask.causal:
            raise ValueError(
                "Behind a cache the mask has to be causal, AttentionMask(causal=True): the tokens in it have not seen "
                "those that come."
            )
        q, k, v = self.project(x, context, cache)
        if cache is not None:
            mask = mask.without_first(cache.length - k.shape[2])
        return (q, k, v, mask) if self.kv_index is None else (q, k[:, self.kv_index], v[:, self.kv_index], mask)

    def _case(self, q: Tensor, k: Tensor, mask: AttentionMask, scoring: Scoring, dropout: float) -> AttentionCase:
        q_seq, k_seq = q.shape[2], k.shape[2]
        gradient, uneven = torch.is_grad_enabled(), self.head_dim != self.v_head_dim
        features = features_of(mask, scoring, q_seq, k_seq, dropout > 0, gradient, uneven)
        return AttentionCase(q.device.type, q.dtype, self._largest_dim, features, max(q_seq, k_seq))

    def planned_case(
        self, device: str, dtype: torch.dtype, mask: AttentionMask, seq: int | None = None, training: bool = True
    ) -> AttentionCase:
        """What this layer will ask of its backend; see `resolve_backend` for the arguments."""
        mask, weight = mask.within(self.window), next(self.parameters(), torch.empty(0))
        probe = torch.zeros(1, self.num_heads, 1, self.head_dim, device=weight.device, dtype=weight.dtype)
        _, scoring = self.scoring(probe, 1, mask, crosses=False)
        uneven = self.head_dim != self.v_head_dim
        features = features_of(mask, scoring, 1, 1, training and self.dropout > 0, training, uneven)
        return AttentionCase(device, dtype, self._largest_dim, features, seq)

    @property
    def cached_numbers(self) -> int:
        """How many numbers a cache holds for each token: keys and values, unless a subclass makes do with less."""
        return self.num_kv_heads * (self.num_softmaxes * self.head_dim + self.v_head_dim)

    @property
    def pair_multiply_adds(self) -> int:
        """Multiply-adds for each query and key: their score in each softmax, and that weight times the value."""
        return self.num_softmaxes * self.num_heads * (self.head_dim + self.v_head_dim)

    @property
    def query_multiply_adds(self) -> int:
        """Multiply-adds for each query alone, between the projections and the scores."""
        gaussian = self.gaussian.multiply_adds if self.gaussian is not None else 0
        each = self.score.multiply_adds + self.position.multiply_adds + gaussian
        return self.num_softmaxes * self.num_heads * each

    @property
    def _largest_dim(self) -> int:
        return max(self.head_dim, self.v_head_dim)

    def _check_structure(self) -> None:
        """Refuse now what the named backend computes on no device, and values that a position cannot add to."""
        mixed = self.position.mixed_dim
        if mixed is not None and mixed != self.v_head_dim:
            raise ValueError(
                f"position.relative.values=true adds vectors of {mixed} dimensions to values, which have "
                f"{self.v_head_dim} in this attention; position.relative.values=false works."
            )
        case = self.planned_case("cpu", torch.bfloat16, AttentionMask(), training=False)
        require_possible(self.backend, case)

    def split(
        self, x: Float[Tensor, "batch seq width"], num_heads: int
    ) -> Float[Tensor, "batch {num_heads} seq head_dim"]:
        """One vector for each head out of a vector for all of them."""
        return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)
