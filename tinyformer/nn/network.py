"""The base of whole networks: stacks of layers, attention layers with names and their backends, and a readout."""

import copy
import itertools
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tinyformer.errors import ArgumentError, argument_path
from tinyformer.nn.attention import BaseAttention
from tinyformer.nn.encoder import Encoder
from tinyformer.nn.heads import KINDS, Address, not_a_head, plain_address
from tinyformer.nn.kernels.observe import running_kernel
from tinyformer.nn.kernels.support import Backend, select_backend
from tinyformer.nn.maps import NoMapsError
from tinyformer.nn.mask import AttentionMask
from tinyformer.nn.mixer import TokenMixer


def attentions_in(module: nn.Module) -> list[BaseAttention]:
    """The `BaseAttention` within a module, itself included."""
    return [part for part in module.modules() if isinstance(part, BaseAttention)]


def mixers_in(module: nn.Module) -> list[TokenMixer]:
    """The `TokenMixer` within a module, itself included."""
    return [part for part in module.modules() if isinstance(part, TokenMixer)]


class Network(nn.Module):
    """Base of the networks: `Transformer`, of one stack of layers, and `EncoderDecoder`, of two."""

    encoder: Encoder
    readout: nn.Module

    @abstractmethod
    def stacks(self) -> list[Encoder]:
        """The stacks of layers, in the order in which they run."""

    @abstractmethod
    def attentions(self) -> list[BaseAttention]:
        """The attention modules with heads by kind, those of each kind from the first layer to the last."""

    def separate_blocks(self) -> list[nn.Module]:
        """The blocks of all stacks; none where they share weights, as those of T5's positions."""
        blocks = [block for stack in self.stacks() for block in stack.layers]
        weights = [weight for block in blocks for weight in block.parameters()]
        return blocks if len(set(weights)) == len(weights) else []

    def attention_sublayers(self) -> Iterator[tuple[nn.Module, nn.Module | None]]:
        """Each attention module of any class, with the residual connection around it."""
        for stack in self.stacks():
            for block, name in itertools.product(stack.layers, ("attention", "cross_attention")):
                if (module := getattr(block, name, None)) is not None:
                    yield module, getattr(block, f"{name}_residual", None)

    def other_attentions(self) -> list[nn.Module]:
        """The attention modules without a `BaseAttention` in them."""
        return [module for module, _ in self.attention_sublayers() if not attentions_in(module)]

    def require_heads(self) -> list[BaseAttention]:
        """The attention modules; a `NoMapsError` if there is none."""
        if not (found := self.attentions()):
            raise NoMapsError(self.other_attentions()[0], "is no BaseAttention, so it has no heads")
        return found

    @abstractmethod
    def layer_addresses(self) -> list[Address]:
        """The address of each of `attentions`; followed by a head's number, it names the head: ["cross", 3, 0]."""

    def find_head(self, argument: str, entry: Any) -> tuple[int, int]:
        """The index of a head's layer in `attentions`, and its own within the layer, given its address."""
        head, layers = plain_address(entry if isinstance(entry, Sequence) else [entry]), self.attentions()
        by_address = dict(zip(self.layer_addresses(), range(len(layers)), strict=True))
        # By type, since True equals 1, and a list has no hash.
        index = by_address.get(head[:-1]) if all(type(part) in (int, str) for part in head) else None
        if index is not None and head[-1] in layers[index].head_map.ids:
            return index, layers[index].head_map.ids.index(head[-1])
        if not layers:
            reason = f"names a head, and {type(self.other_attentions()[0]).__name__} has none"
            raise ArgumentError(argument, [list(head)], reason, {argument: []})
        kinds = [kind for kind in KINDS if (kind, 0) in by_address]
        kind = next((kind for kind in kinds if kind in head), kinds[0]) if kinds else None
        of_kind = [layers[at] for address, at in by_address.items() if kind in (None, address[0])]
        raise not_a_head(argument, head, len(of_kind), of_kind[-1].num_heads, kind)

    def layer_names(self) -> list[str]:
        """A name for each of `attentions`: "layer_03", or "cross/layer_03" where there are several kinds."""
        return ["/".join([*map(str, kind), f"layer_{index:02d}"]) for *kind, index in self.layer_addresses()]

    @abstractmethod
    def attention_masks(self, mask: AttentionMask) -> list[AttentionMask]:
        """The mask of each of `attentions`, given that of a batch."""

    @abstractmethod
    def attention_paths(self) -> list[tuple[str, ...]]:
        """The arguments that made each of `attentions`, for errors."""

    @property
    def max_seq_len(self) -> int:
        """Length of the longest sequence, in tokens."""
        return self.encoder.max_seq_len

    @property
    def vocab_size(self) -> int:
        """Number of tokens in the vocabulary."""
        return self.encoder.vocab_size

    def pruned_heads(self) -> list[list[str | int]]:
        """The heads that were removed, as `[layer, head]`, or `[kind, layer, head]` where there are several kinds."""
        layers = zip(self.layer_addresses(), self.attentions(), strict=True)
        return [[*address, head] for address, layer in layers for head in layer.head_map.pruned]

    def resolve_backends(self, device: str, dtype: torch.dtype, mask: AttentionMask, training: bool = True) -> None:
        """Choose the attention backend of every layer, see `resolve_backend`.

        A mask that a `TokenMixer` does not take is refused.
        """
        for mixer in mixers_in(self.encoder):  # those of a decoder are under a causal mask
            with argument_path("encoder", "block"):
                mixer.require_causal(mask)
        layers = zip(self.attentions(), self.attention_masks(mask), self.attention_paths(), strict=True)
        for layer, own, path in layers:
            with argument_path(*path):
                resolve_backend(layer, device, dtype, own, self.max_seq_len, training)

    def num_parameters(self) -> int:
        """The number of trainable parameters, embeddings included; shared ones count once."""
        return sum(parameter.numel() for parameter in self.parameters() if parameter.requires_grad)


def resolve_backend(
    layer: BaseAttention,
    device: str,
    dtype: torch.dtype,
    mask: AttentionMask,
    seq: int | None = None,
    training: bool = True,
) -> Backend:
    """Select the backend of a layer for good, before the first step and before compiling.

    Args:
        layer: from now on it runs this backend.
        device: the type, "cpu" or "cuda".
        dtype: of queries, keys and values; the lower one under autocast.
        mask: an example of the masks that `forward` will get.
        seq: the length of the longest sequence; None for a long one.
        training: whether there will be backward passes, and dropout.
    """
    layer.resolved = select_backend(layer.backend, layer.planned_case(device, dtype, mask, seq, training))
    return layer.resolved


def kernel_of_layer(
    layer: BaseAttention, device: str, dtype: torch.dtype, mask: AttentionMask, seq: int = 8, training: bool = True
) -> str:
    """The kernel that the resolved backend runs on such input, observed in one call; see `resolve_backend`."""
    if layer.resolved is None or layer.resolved.name in ("eager", "flex"):
        return "eager" if layer.resolved is None else layer.resolved.name
    seq = seq if mask.documents is None else mask.documents.shape[1]
    heads, kv_heads = layer.num_heads, layer.num_kv_heads
    sizes = [(heads, layer.head_dim), (kv_heads, layer.head_dim), (kv_heads, layer.v_head_dim)]
    q, k, v = (torch.zeros(mask.num_rows, n, seq, dim, device=device, dtype=dtype) for n, dim in sizes)
    if mask.allowed is not None:  # one entry of it fits any number of queries and keys
        mask = replace(mask, allowed=mask.allowed[:1, :1, :1, :1])
    probe = copy.deepcopy(layer).to(device, dtype).train(training)
    with torch.set_grad_enabled(training):
        kernel = running_kernel(lambda: probe.softmax_attention(q, k, v, mask.within(layer.window)))
    return "flash" if kernel == "varlen" else kernel  # the same kernel over packed sequences
