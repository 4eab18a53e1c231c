"""The points of a network: named activations that a forward pass can return or replace."""

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from html import escape
from typing import Any, TypeAlias

from torch import Tensor, nn

from tinyformer.errors import ArgumentError
from tinyformer.nn import AttentionCall, BaseAttention, ClassReadout, Encoder, Network

Shape: TypeAlias = tuple[int | str, ...]
"""The sizes of a tensor; dimensions of variable size have a name: "batch", "seq" or "source_seq"."""


class Points(dict[str, Shape]):
    """The shape of each point of a model by name, in the order of computation; it prints as a table."""

    def __repr__(self) -> str:
        width = max(map(len, self), default=0)
        return "\n".join(f"{name:{width}}  {_words(shape)}" for name, shape in self.items())

    def _repr_html_(self) -> str:
        rows = (f"<tr><td>{escape(name)}</td><td>{_words(shape)}</td></tr>" for name, shape in self.items())
        return f"<table><tr><th>point</th><th>shape</th></tr>{''.join(rows)}</table>"


def _words(shape: Shape) -> str:
    return " ".join(map(str, shape))


@dataclass(frozen=True)
class Point:
    """An activation of a network.

    Attributes:
        module: the module whose output contains it.
        shape: its shape.
        get: takes it out of the module's output; by default, it is the output.
        put: makes an output with another tensor in its place.
    """

    module: nn.Module
    shape: Shape
    get: Callable[[Any], Tensor] = lambda output: output
    put: Callable[[Any, Tensor], Any] = lambda output, value: value


def points_of(network: Network) -> dict[str, Point]:
    """The points of a network by name, in the order in which they are computed.

    In an encoder–decoder, the names begin with `encoder.` or `decoder.`.
    """
    points: dict[str, Point] = {}
    stacks = network.stacks()
    for index, stack in enumerate(stacks):
        prefix, seq = ("", "seq") if len(stacks) == 1 else (("encoder.", "source_seq"), ("decoder.", "seq"))[index]
        points |= {prefix + name: point for name, point in _of_stack(stack, seq)}
    readout: Any = network.readout
    batch: Shape = ("batch",) if isinstance(readout, ClassReadout) else ("batch", "seq")
    scores = readout.proj.out_features if hasattr(readout, "proj") else "scores"
    points["logits"] = Point(readout, (*batch, scores))
    return points


def _of_stack(stack: Encoder, seq: str) -> Iterator[tuple[str, Point]]:
    stream: Shape = ("batch", seq, stack.token_embedding.embedding_dim)
    yield "embedding", Point(stack.dropout, stream)
    for index, layer in enumerate(stack.layers):
        modules = dict(layer.named_children())
        for attention, keys_seq, mid in (("attention", seq, "mid"), ("cross_attention", "source_seq", "cross_mid")):
            if isinstance(module := modules.get(attention), BaseAttention):
                for name, point in _of_attention(module, seq, keys_seq):
                    yield f"layers.{index}.{attention}.{name}", point
            if f"{mid}_point" in modules:
                yield f"layers.{index}.residual_{mid}", Point(modules[f"{mid}_point"], stream)
        yield f"layers.{index}.residual_post", Point(layer, stream)
    yield "final_norm", Point(stack.final_norm, stream)


def _of_attention(layer: BaseAttention, seq: str, keys_seq: str) -> Iterator[tuple[str, Point]]:
    maps, keys = layer.num_heads * layer.num_softmaxes, layer.num_kv_heads * layer.num_softmaxes
    parts = {
        "queries": ("q", ("batch", maps, seq, layer.head_dim)),
        "keys": ("k", ("batch", keys, keys_seq, layer.head_dim)),
        "values": ("v", ("batch", layer.num_kv_heads, keys_seq, layer.v_head_dim)),
    }
    for name, (part, shape) in parts.items():
        yield name, _of_call(layer, part, shape)

    def weights(call: AttentionCall) -> Tensor:
        return layer.maps_of_call(call).weights

    def weigh(call: AttentionCall, value: Tensor) -> AttentionCall:
        return call._replace(weights=value)

    yield "weights", Point(layer.call_point, ("batch", maps, seq, keys_seq), weights, weigh)
    yield "output_by_head", Point(layer.head_gate, ("batch", layer.num_heads, seq, layer.v_head_dim))


def _of_call(layer: BaseAttention, part: str, shape: Shape) -> Point:
    """The queries, keys or values of an attention layer."""

    def get(call: AttentionCall) -> Tensor:
        return getattr(call.qkv, part)

    def put(call: AttentionCall, value: Tensor) -> AttentionCall:
        return call._replace(qkv=call.qkv._replace(**{part: value}))

    return Point(layer.call_point, shape, get, put)


def matching(points: Mapping[str, Point], patterns: Iterable[str], argument: str) -> dict[str, str]:
    """The points that match some patterns, each with its pattern; `*` in a pattern stands for any characters.

    Args:
        points: all points of a network.
        patterns: names and patterns.
        argument: the argument that holds the patterns, for errors.

    Raises:
        ArgumentError: a pattern matches no point; or, to replace, a point that another pattern matches, too.
    """
    found: dict[str, str] = {}
    for pattern in patterns:
        names = [name for name in points if fnmatchcase(name, pattern)]
        if not names:
            near = difflib.get_close_matches(pattern, points, cutoff=0.5) or list(points)[-3:]
            reason = f"is no point of the model; it has {', '.join(near)} and others, see model.points"
            raise ArgumentError(argument, pattern, reason)
        if argument == "replace" and (twice := [name for name in names if name in found]):
            raise ArgumentError(argument, pattern, f"names {twice[0]}, which {found[twice[0]]!r} replaces already")
        found |= dict.fromkeys(names, pattern)
    return found
