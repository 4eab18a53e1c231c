"""The options that all attention layers share, and the base class that implements them."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypedDict

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tinyformer.errors import ArgumentError, argument_path, require_choice
from tinyformer.nn.forget import ForgetGate
from tinyformer.nn.heads import HeadGate, HeadMap, OutputGate, ablated_in_layer
from tinyformer.nn.kernels.choose import BACKENDS, Backend, KernelRequirements
from tinyformer.nn.mask import AttentionMask, Grid, window_of_layer
from tinyformer.nn.pattern import of_layer
from tinyformer.nn.position import RelativePosition
from tinyformer.nn.projections import by_letter
from tinyformer.nn.score import LocalGaussian, Queries, ScaledDotScore, Scoring, SSMax, make_score
from tinyformer.nn.score import softcap as softcap_mod
from tinyformer.nn.shift import ProjectionSums, ShiftedKeys, ShortConvolution
from tinyformer.nn.side_inputs import SideInputs, ValueEmbedding, ValueResidual, Values

PLANNED_SEQS = (8, 256)
"""Number of tokens in `planned_case`: the default, for a layer that does not know its lengths, and the maximum."""


class AttentionOptions(TypedDict, total=False):
    """The keyword arguments of all attention classes; `SoftmaxAttention` shows the defaults.

    Attributes:
        dropout: dropout probability of attention weights.
        score: the score function: a name in `SCORES`, or a subclass of `ScaledDotScore`, which is called with
            `num_heads` and `head_dim`.
        scale: factor of the dot product, only with `score="scaled_dot"`; None for 1 / √head_dim.
        window: number of keys that a query attends to, its own position included; None for all. A list is a pattern
            that repeats over the layers: [128, 128, None] is two local layers, then a global one.
        local_gaussian: whether to weigh the keys of the window by a Gaussian around a predicted centre, see
            `LocalGaussian`; in cross-attention, the window is around that centre, too.
        ssmax: whether scores are multiplied by a learned factor and log of the number of visible keys, see `SSMax`.
        softcap: bound on the scores' absolute values, before positions are added; None for no bound.
        sink: whether each head has a learned logit that takes part in the softmax without a value, see `Scoring`. With
            "zero", the logit is 0: softmax1, exp(s) / (1 + Σ exp(s)) (Miller 2023).
        backend: "auto" or a name in `BACKENDS`.
        position: factory of the relative position, called with `head_dim`, and with `layer_index` if it has this
            argument. It acts in self-attention only, since positions in two sequences have no distance.
        gate: whether each token gates each head's output, see `OutputGate`; "elementwise" for a gate of each element.
        forget: whether scores decrease with each token between key and query, by a learned gate, see `ForgetGate`.
        exclusive: whether each head's output loses its part along the token's own value, see `without_own_value`.
        convolution: the letters of the projections q, k and v that have a `ShortConvolution`; True for all three.
        shifted_keys: whether each key is mixed with the previous key, see `ShiftedKeys`. Convolution and shift come
            before `qk_norm`, which gives mixed keys the size of others, and before rotation.
        value_residual: initial share of the first layer's values in the values of each later layer, in self-attention,
            see `ValueResidual`; None for none.
        value_embedding: whether values depend on the token id, too, in self-attention, see `ValueEmbedding`. A list is
            a pattern that repeats over the layers.
        vocab_size: number of tokens of the `value_embedding`.
        ablated_heads: `[layer, head]` pairs of the whole model whose heads output zero; see `ablated_in_layer`.
        layer_index: index of the layer, from 0.
        num_layers: number of layers of the model.
        kind: the kind of attention in an encoder–decoder, see `KINDS`.
    """

    dropout: float
    score: str | Callable[..., ScaledDotScore]
    scale: float | None
    window: int | Sequence[int | None] | None
    local_gaussian: bool
    softcap: float | None
    ssmax: bool
    sink: bool | str
    backend: str
    position: Callable[..., RelativePosition] | None
    gate: bool | str
    forget: bool
    exclusive: bool
    convolution: bool | str
    shifted_keys: bool
    value_residual: float | None
    value_embedding: bool | Sequence[bool]
    vocab_size: int | None
    ablated_heads: Sequence[Sequence[int | str]]
    layer_index: int
    num_layers: int
    kind: str | None


class SoftmaxAttention(nn.Module):
    """Base class of attention layers, which implements `AttentionOptions` and creates the `Scoring` of each call.

    Args:
        d_model: size of the vectors that queries are projected from.
        num_heads: number of query heads.
        head_dim: size of a query and of a key in one softmax.
        v_head_dim: size of a value; None for `head_dim`.
        position_dim: size of the part of queries and keys that the relative position acts on; None for `head_dim`.
        num_kv_heads: number of heads of keys and values; None for `num_heads`.

    The keyword arguments are `AttentionOptions`.
    """

    num_softmaxes: int = 1
    """Number of softmaxes of each head."""
    has_latents = False  # whether the cache holds latents in place of keys and values

    sink: Tensor | None

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        position_dim: int | None = None,
        num_kv_heads: int | None = None,
        *,
        dropout: float = 0.0,
        score: str | Callable[..., ScaledDotScore] = "scaled_dot",
        scale: float | None = None,
        window: int | Sequence[int | None] | None = None,
        local_gaussian: bool = False,
        softcap: float | None = None,
        ssmax: bool = False,
        sink: bool | str = False,
        backend: str = "auto",
        position: Callable[..., RelativePosition] | None = None,
        gate: bool | str = False,
        forget: bool = False,
        exclusive: bool = False,
        convolution: bool | str = False,
        shifted_keys: bool = False,
        value_residual: float | None = None,
        value_embedding: bool | Sequence[bool] = False,
        vocab_size: int | None = None,
        ablated_heads: Sequence[Sequence[int | str]] = (),
        layer_index: int = 0,
        num_layers: int = 1,
        kind: str | None = None,
    ) -> None:
        super().__init__()
        if not 0 <= dropout < 1:
            raise ArgumentError("dropout", dropout, "must be at least 0 and below 1", {"dropout": 0.1})
        require_choice("backend", backend, ("auto", *BACKENDS))
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads or num_heads
        self.head_dim, self.v_head_dim = head_dim, v_head_dim or head_dim
        self.position_dim = position_dim or head_dim
        self.dropout, self.backend, self.layer_index = dropout, backend, layer_index
        self.score = make_score(score, num_heads, head_dim, scale)
        self.window = window_of_layer(window, layer_index)
        if local_gaussian and (window is None or not (isinstance(window, int) or any(window))):
            raise ArgumentError("local_gaussian", True, "needs a `window`", {"window": 16})
        # In a pattern of local and global layers, only local layers have a Gaussian.
        self.gaussian = LocalGaussian(num_heads, head_dim, self.window) if local_gaussian and self.window else None
        self.softcap = softcap_mod(softcap) if softcap is not None else None
        require_choice("sink", sink, (False, True, "zero"))
        if sink == "zero":
            self.register_buffer("sink", torch.zeros(num_heads), persistent=False)
        else:
            self.sink = nn.Parameter(torch.zeros(num_heads)) if sink else None
        with argument_path("position"):
            self.position = _make_position(position or RelativePosition, self.position_dim, layer_index)
        self._require_fitting_position(score)
        self.ssmax = SSMax(num_heads) if ssmax else None
        if ssmax and self.score.compare is not None:
            reason = "multiplies the queries, and so only scores that are a dot product; scaled_dot is"
            raise ArgumentError("ssmax", True, reason, {"score": "scaled_dot"})
        self.head_map = HeadMap(num_heads, self.num_kv_heads)
        self._mix(value_residual, value_embedding, vocab_size, layer_index)
        if kind == "cross":
            self.refuse_mixed_values("mixes values of one sequence; the values of cross-attention are of another")
        self.exclusive = exclusive
        if exclusive and kind == "cross":
            reason = "removes the value of the query's own token; in cross-attention, queries have no values"
            raise ArgumentError("exclusive", True, reason, {"exclusive": False})
        self._add_sums(convolution, shifted_keys, kind)
        self.forget = ForgetGate(d_model, num_heads, kind) if forget else None
        require_choice("gate", gate, (False, True, "elementwise"))
        width = self.v_head_dim if gate == "elementwise" else 1
        self.output_gate = OutputGate(d_model, num_heads, width) if gate else None
        self.head_gate = HeadGate(num_heads, ablated_in_layer(ablated_heads, layer_index, num_layers, num_heads, kind))
        self.inputs_hook = nn.Identity()  # its hooks see each `AttentionInputs`, and may replace it
        self.resolved: Backend | None = None
        """The backend that `resolve_backend` has chosen; None to select a backend at each call."""

    def _require_fitting_position(self, score: str | Callable[..., ScaledDotScore]) -> None:
        """Raise an `ArgumentError` if the position does not fit the score function or the size of the values."""
        rotates = type(self.position).rotate is not RelativePosition.rotate
        if rotates and self.score.compare is not None and not self.score.is_rotation_invariant:
            others = "the positions alibi, t5, relative, learned, sinusoidal and none work with it"
            reason = f"depends on absolute positions if queries and keys are rotated; {others}"
            raise ArgumentError("score", score, reason, {"score": "scaled_dot"})
        if self.position.mixed_dim not in (None, self.v_head_dim):
            reason = f"adds vectors of {self.position.mixed_dim} dimensions to values of {self.v_head_dim}"
            raise ArgumentError("position.values", True, reason, {"values": False})

    @property
    def reads_side_inputs(self) -> bool:
        """True if the values of the layer, or of later layers, depend on `SideInputs`."""
        return bool(self.mixing)

    def refuse_mixed_values(self, reason: str) -> None:
        """Raise an `ArgumentError` with this reason if an option mixes other values into the values."""
        for name, (value, off) in self.mixing.items():
            raise ArgumentError(name, value, reason, {name: off})

    def _add_sums(self, convolution: bool | str, shifted_keys: bool, kind: str | None) -> None:
        """Create the short convolutions and the shift of keys; raise an `ArgumentError` if there can be none."""
        (q, k), key_dim = (self.num_heads, self.num_kv_heads), self.num_softmaxes * self.head_dim
        widths = {"q": q * key_dim, "k": k * key_dim, "v": k * self.v_head_dim}
        chosen = by_letter("convolution", convolution, "qkv")
        self.sums = ProjectionSums({of: ShortConvolution(width) for of, width in widths.items() if chosen[of]})
        if shifted_keys:
            self.sums["shifted_keys"] = ShiftedKeys(k, key_dim)
        if self.sums and (kind == "cross" or self.has_latents):
            name, value = ("shifted_keys", True) if shifted_keys else ("convolution", convolution)
            reason = "mixes projections of several tokens, which neither cross-attention nor latent attention supports"
            raise ArgumentError(name, value, reason, {name: False})

    def _mix(
        self, value_residual: float | None, value_embedding: bool | Sequence[bool], vocab_size: int | None, layer: int
    ) -> None:
        """Create the modules that mix other values into the values."""
        self.gives_first_values = value_residual is not None
        has_residual = value_residual is not None and layer > 0
        self.value_residual = ValueResidual(value_residual or 0.0) if has_residual else None
        pattern = [value_embedding] if isinstance(value_embedding, bool) else value_embedding
        has_embedding = of_layer("value_embedding", pattern, layer, False)
        if has_embedding and vocab_size is None:
            raise ArgumentError("vocab_size", None, "is needed by `value_embedding`", {"vocab_size": 256})
        sizes = vocab_size or 0, self.num_kv_heads, self.v_head_dim
        self.value_embedding = ValueEmbedding(*sizes) if has_embedding else None
        self.mixing: dict[str, tuple[Any, Any]] = {}
        if self.gives_first_values:
            self.mixing["value_residual"] = value_residual, None
        if has_embedding:
            self.mixing["value_embedding"] = value_embedding, False
        """The options that mix other values into the values: for each, its value, and the one that turns it off."""

    def mix_values(self, v: Values, side: SideInputs | None) -> Values:
        """The values of new tokens, mixed with the first layer's values and the token embeddings of values."""
        if side is None:
            if self.value_embedding is not None or self.value_residual is not None:
                self.refuse_mixed_values("needs `side`, which blocks pass to the layer")
            return v
        if self.value_embedding is not None:
            v = self.value_embedding(v, side.tokens)
        if self.value_residual is not None and side.first_values is not None:
            v = self.value_residual(v, side.first_values)
        return v

    def transform_queries(self, q: Queries) -> Queries:
        """Queries transformed by the score function, before their positions rotate them."""
        return self.score(q)

    def position_part(self, q: Queries) -> Float[Tensor, "batch num_heads q_seq position_dim"]:
        """The dimensions of the queries that the relative position acts on."""
        return q

    def scoring(self, q: Queries, k_seq: int, mask: AttentionMask, is_cross: bool) -> Scoring:
        """The `Scoring` of a call, given its queries after `transform_queries`."""
        mods = [self.softcap] if self.softcap else []
        mix = reweigh = None
        if not is_cross:
            positional = self.position.score_mod(self.position_part(q), k_seq, self.score.scale, mask.causal)
            mods += [self.head_map.renumber(positional)] if positional else []
            mix = self.position.mix(q.shape[2], k_seq)
        if self.gaussian is not None:
            hide, reweigh = self.gaussian(q, k_seq, mask, is_cross)
            mods += hide
        return Scoring(self.score.scale, self.score.compare, tuple(mods), self.sink, reweigh, mix, mask.log_decay)

    def ablated(self) -> list[bool]:
        """A flag for each head, True if the head is ablated in every row of the batch."""
        factors = self.head_gate.factors
        return [False] * self.num_heads if factors is None else (factors.view(-1, self.num_heads) == 0).all(0).tolist()

    def ablated_maps(self) -> list[bool]:
        """A flag for each attention map, True if the map's head is ablated."""
        return [flag for flag in self.ablated() for _ in range(self.num_softmaxes)]

    def planned_mask(self, mask: AttentionMask, q: Queries) -> AttentionMask:
        """The mask of later calls with queries such as `q`, including the window and the decay of a forget gate."""
        mask = mask.within(self.window)
        if self.forget is None:
            return mask
        zeros = 0 * self.forget.proj.bias  # which require a gradient if the gate does
        return replace(mask, log_decay=zeros.view(-1, 1).expand(len(q), -1, q.shape[2]))

    def planned_case(
        self, device: str, dtype: torch.dtype, mask: AttentionMask, seq: int | None = None, training: bool = True
    ) -> KernelRequirements:
        """The kernel requirements of this layer's later calls; see `resolve_backend` for the arguments."""
        weight = next(self.parameters(), torch.empty(0))
        length = min(seq or PLANNED_SEQS[0], PLANNED_SEQS[1])
        numbers = torch.linspace(-1, 1, length * self.head_dim, device=weight.device, dtype=weight.dtype)
        q = numbers.view(length, self.head_dim).expand(1, self.num_heads, -1, -1)
        v, mask = q[..., :1].expand(-1, -1, -1, self.v_head_dim), self.planned_mask(mask, q)
        scoring = self.scoring(q, length, mask, is_cross=False)
        grid = Grid.of(1, self.num_heads, length, length, weight.device)
        if not all(mod.is_as_declared(grid) for mod in scoring.mods):
            reason = "declares its score modification as additive, but the added term depends on the score"
            raise ArgumentError("position", type(self.position).__name__, reason)
        dropout = self.dropout if training else 0.0
        case = KernelRequirements.of(q, q, v, mask, scoring, dropout, training)
        return case._replace(device=device, dtype=dtype, seq=seq)


def _make_position(factory: Callable[..., RelativePosition], head_dim: int, layer_index: int) -> RelativePosition:
    by_layer = "layer_index" in inspect.signature(factory).parameters
    return factory(head_dim=head_dim, **({"layer_index": layer_index} if by_layer else {}))
