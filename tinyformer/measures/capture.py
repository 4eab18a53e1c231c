"""Capture of the exact attention weights of a batch, on any backend."""

import functools
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from tinyformer.data import TextTokenizer
from tinyformer.errors import ArgumentError
from tinyformer.measures.batches import TokenPair
from tinyformer.nn import (
    AttentionInputs,
    AttentionMaps,
    AttentionMask,
    BaseAttention,
    EncoderDecoder,
    Network,
    Scoring,
    Transformer,
)
from tinyformer.nn.heads import Address, layer_title
from tinyformer.nn.kernels.eager import attention_maps
from tinyformer.nn.maps import NoMapsError, is_own


class Axes(NamedTuple):
    """The token strings of the rows and of the columns of an attention map."""

    queries: Sequence[str]
    keys: Sequence[str]


def axes_of(ids: Mapping[str, tuple[Sequence[int], Sequence[int]]], tokenizer: TextTokenizer | None) -> dict[str, Axes]:
    """The token strings of the queries and keys of each kind of attention; without a tokenizer, the token ids."""
    strings = tokenizer.token_strings if tokenizer else lambda side: list(map(str, side))
    return {kind: Axes(strings(queries), strings(keys)) for kind, (queries, keys) in ids.items()}


LayerCall: TypeAlias = tuple[BaseAttention, AttentionInputs]
"""A layer and its queries, keys, values and mask in one forward pass."""


class CapturedMaps(list[Tensor]):
    """The attention weights of each layer, `batch maps rows k_seq`, in the order of `Network.attentions`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: list[AttentionMaps] = []  # the same weights together with their logits
        self.names: list[list[str]] = []  # the label of each map of each layer, for display
        self.ablated: list[list[bool]] = []  # whether the head of each map of each layer is ablated; empty for none
        self.rows: Int[Tensor, " rows"] | None = None  # positions of the captured queries, counting cached tokens

    def add(self, calls: Sequence[LayerCall], rows: int | Int[Tensor, " rows"] | None = None) -> None:
        """Append the maps of one forward pass; with `rows`, all layers must have the same number of queries."""
        q = calls[0][1].qkv.q
        chosen = _rows(rows, q.shape[2]).to(q.device)
        layers = _maps(calls, None if rows is None else chosen)
        num_cached = layers[0].weights.shape[-1] - q.shape[2]
        self.extend(maps.weights for maps in layers)
        self.layers.extend(layers)
        self.names += [list(map(head_label, map_names(layer))) for layer, _ in calls]
        self.ablated += [layer.ablated_maps() for layer, _ in calls]
        self.rows = chosen + num_cached if num_cached else chosen


def map_names(layer: BaseAttention) -> list[str]:
    """The name of each attention map of a layer: `03` for head 3, `03a` and `03b` where a head has two softmaxes."""
    letters = "ab" if layer.num_softmaxes > 1 else [""]
    return [f"{head:02d}{letter}" for head in layer.head_map.ids for letter in letters]


def head_label(name: str) -> str:
    """A name of `map_names` for display: "3" for "03", "3a" for "03a"."""
    return name.removeprefix("0")


def map_title(address: Address) -> str:
    """A map in words, such as "cross layer 3 head 0a", given the address of its layer followed by the map's name."""
    *layer, name = address
    return f"{layer_title(tuple(layer))} head {head_label(str(name))}"


@contextmanager
def capture_attention(model: Any, rows: int | Int[Tensor, " rows"] | None = None) -> Iterator[CapturedMaps]:
    """A context that collects the attention weights of each layer in every forward pass.

        with capture_attention(model) as maps, torch.no_grad():
            model(tokens, AttentionMask(causal=True))

    A fused kernel never materialises the weights, so they are recomputed from the queries and keys of each layer
    (`BaseAttention.maps_of_call`) at the end of the forward pass. Outside of the context there is no cost.

    Args:
        model: the network, or a trained model that contains it; a compiled network runs uncompiled in the context.
        rows: the indices of the queries to capture, or a number of queries to sample, the same in all layers and calls;
            None for all queries. An encoder–decoder requires None. Memory grows with rows times keys.
    """
    network = cast(Network, getattr(model, "network", model))
    if rows is not None and len(network.stacks()) > 1:
        reason = "must be None for an encoder–decoder, whose layers have queries of two sequences"
        raise ArgumentError("rows", rows, reason, {"rows": None})
    places = {layer: place for place, layer in enumerate(network.require_heads())}
    maps = CapturedMaps()
    calls: list[LayerCall] = []  # a user-defined class may run a layer several times

    def begin(*_: Any) -> None:
        calls.clear()  # a forward pass that failed may have left calls

    def record(layer: BaseAttention, _: Any, args: tuple[AttentionInputs], call: AttentionInputs) -> None:
        calls.append((layer, call))

    def end(*_: Any) -> None:
        maps.add(sorted(calls, key=lambda call: places[call[0]]), rows)
        calls.clear()

    first, last = network.stacks()[0], network.stacks()[-1]
    hooks = [first.register_forward_pre_hook(begin), last.register_forward_hook(end)]
    hooks += [layer.inputs_hook.register_forward_hook(functools.partial(record, layer)) for layer in places]
    with running_hooks(network, hooks):
        yield maps


@torch.no_grad()
def capture_weights(
    network: Transformer, tokens: Int[Tensor, "batch seq"], mask: AttentionMask, rows: int | None = None
) -> CapturedMaps:
    """The exact attention weights of each layer, `batch maps rows seq`, in evaluation mode."""
    maps = CapturedMaps()
    maps.add(attention_calls(network, tokens, mask), rows)
    return maps


@torch.no_grad()
def capture_pair(network: EncoderDecoder, pair: TokenPair) -> dict[str, CapturedMaps]:
    """The exact attention weights of each layer, by the kind of attention, in evaluation mode."""
    calls = iter(attention_calls(network, pair.source, pair.target))
    captured: dict[str, CapturedMaps] = {}
    for kind, layers in network.attentions_by_kind().items():
        captured[kind] = CapturedMaps()
        captured[kind].add([next(calls) for _ in layers])
    return captured


def attention_calls(model: Network, *inputs: Any) -> list[LayerCall]:
    """The calls of a network's `attentions` in a forward pass in evaluation mode; the last call ends the pass.

    A `NoMapsError` is raised for a layer without attention maps, such as a layer that overrides `forward`.
    """
    calls: dict[BaseAttention, AttentionInputs] = {}
    *_, last = layers = model.require_heads()

    def record(layer: BaseAttention, _: Any, args: tuple[AttentionInputs], call: AttentionInputs) -> None:
        calls[layer] = call
        if layer is last:
            raise PassIsComplete

    hooks = [layer.inputs_hook.register_forward_hook(functools.partial(record, layer)) for layer in layers]
    was_training = model.training
    model.eval()
    try:
        with running_hooks(model, hooks), torch.no_grad(), suppress(PassIsComplete):
            model(*inputs)
    finally:
        model.train(was_training)
    if missing := [layer for layer in layers if layer not in calls]:
        raise NoMapsError(missing[0], "overrides `forward`, so the attention maps are unknown")
    if others := [at for at, call in calls.items() if not call.is_cross and call.qkv.k.shape[2] != call.qkv.q.shape[2]]:
        raise NoMapsError(others[0], "has keys that are not tokens, so its maps cannot be shown")
    return [(layer, calls[layer]) for layer in layers]


class PassIsComplete(Exception):  # noqa: N818 -- no error
    """The exception that ends a forward pass whose remaining layers are not needed."""


class _Plain(NamedTuple):
    """An attention call whose maps are the masked softmax(scale · q kᵀ), without any other option."""

    q: Float[Tensor, "batch num_heads q_seq head_dim"]
    k: Float[Tensor, "batch num_kv_heads k_seq head_dim"]
    mask: AttentionMask
    scale: float

    @classmethod
    def of(cls, layer: BaseAttention, call: AttentionInputs) -> "_Plain | None":
        """The plain form of a layer's call, or None if its maps have another formula."""
        if is_own(layer) or type(layer).attention_maps is not BaseAttention.attention_maps or call.num_behind:
            return None
        k, _ = layer.head_map.expand_kv(call.qkv.k, call.qkv.v)
        scoring = layer.scoring(call.qkv.q, k.shape[2], call.mask, call.is_cross)
        is_plain = replace(scoring, mix=None) == Scoring(scoring.scale)  # `mix` does not change the weights
        return cls(call.qkv.q, k, call.mask, scoring.scale) if is_plain else None

    @property
    def kind(self) -> Hashable:
        """A key that is equal for calls that can be stacked."""
        mask = self.mask
        hides = mask.causal, mask.window, id(mask.lengths), id(mask.documents), id(mask.allowed)
        return self.q.shape, self.k.shape, self.q.dtype, self.scale, hides


def _maps(calls: Sequence[LayerCall], rows: Int[Tensor, " rows"] | None) -> list[AttentionMaps]:
    """The maps of each call; plain calls of equal `kind` are computed together, with fewer kernel launches."""
    maps: dict[int, AttentionMaps] = {}
    alike: dict[Hashable, dict[int, _Plain]] = defaultdict(dict)
    for number, (layer, call) in enumerate(calls):
        if plain := _Plain.of(layer, call):
            alike[plain.kind][number] = plain
        else:
            maps[number] = layer.maps_of_call(call, rows)
    for group in alike.values():
        q, k, (mask, *_), (scale, *_) = zip(*group.values(), strict=True)
        stacked = attention_maps(torch.stack(q), torch.stack(k), mask, Scoring(scale), rows)
        maps |= {n: AttentionMaps(*parts) for n, *parts in zip(group, *stacked, strict=True)}
    return [maps[number] for number in range(len(calls))]


@contextmanager
def running_hooks(model: Network, hooks: Iterable[RemovableHandle] = ()) -> Iterator[None]:
    """A context in which each module's hooks run exactly once per forward pass; at the end, `hooks` are removed."""
    # Activation checkpointing would run each layer, and its hook, a second time in the backward pass.
    recomputing = [stack for stack in model.stacks() if stack.checkpoint_activations]
    for stack in recomputing:
        stack.checkpoint_activations = False
    try:
        with torch.compiler.set_stance("force_eager"):  # compiled code skips hooks
            yield
    finally:
        for stack in recomputing:
            stack.checkpoint_activations = True
        for hook in hooks:
            hook.remove()


def _rows(rows: int | Int[Tensor, " rows"] | None, q_seq: int) -> Int[Tensor, " rows"]:
    if rows is None or (isinstance(rows, int) and rows >= q_seq):
        return torch.arange(q_seq)
    if isinstance(rows, int):
        # A separate generator, so that capturing during training leaves the global random state alone.
        return torch.randperm(q_seq, generator=torch.Generator().manual_seed(0))[:rows].sort().values
    return rows
