"""The stacks of blocks, the base class of networks, and the choice of the backend of each attention layer."""

import copy
import inspect
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tinyformer.errors import ArgumentError, argument_path, require_sizes
from tinyformer.hardware import Pass
from tinyformer.nn.attention import BaseAttention
from tinyformer.nn.block import Context
from tinyformer.nn.cache import Cache
from tinyformer.nn.heads import KINDS, Address, layer_title, not_a_head, plain_address, prune_heads
from tinyformer.nn.kernels.choose import Backend, select_backend
from tinyformer.nn.layers import make_dropout
from tinyformer.nn.maps import QKV, AttentionInputs, NoMapsError, running_kernel
from tinyformer.nn.mask import AttentionMask
from tinyformer.nn.mixers import TokenMixer
from tinyformer.nn.position import SinusoidalPosition
from tinyformer.nn.side_inputs import SideInputs


class Encoder(nn.Module):
    """Token embeddings and positional encodings, followed by a stack of blocks.

    BERT's encoder and GPT's decoder are both this class: only the mask differs.

    Args:
        max_seq_len: length of the longest sequence, in tokens.
        block: factory of a block, called with `layer_index` and `num_layers`.
        norm: factory of the final norm, called with `d_model`; `nn.Identity` for none. Post-norm blocks need none.
        position: factory of the absolute positional encoding; None for no encoding.
        dropout: dropout probability of the embeddings.
        scaled_embedding: whether to multiply token embeddings by √d_model, before positions are added (Vaswani et al.
            2017, arXiv 1706.03762, §3.4; Gemma, Mesnard et al. 2024, arXiv 2403.08295); a tied readout does not.
        embedding_norm: whether to normalise the sum of embeddings and positional encodings, as in BERT and BLOOM.
        checkpoint_activations: whether to store only the input of each layer in training and to recompute the other
            activations in the backward pass. Training takes about a third more time, but the activations of only one
            layer at a time are in memory (Chen et al. 2016, arXiv 1604.06174).
        autocast_residual: whether the residual stream has autocast's dtype, such as bf16, in place of fp32. This halves
            the memory traffic between layers, but rounds sums to the dtype's precision (8 bits in bf16).
        kind: "encoder" or "decoder" in a network that has both, see `Block`.
    """

    def __init__(
        self,
        vocab_size: int,
        num_layers: int,
        d_model: int,
        max_seq_len: int,
        block: Callable[..., nn.Module],
        norm: Callable[..., nn.Module],
        position: Callable[..., nn.Module] | None = None,
        dropout: float = 0.0,
        embedding_norm: bool = False,
        checkpoint_activations: bool = False,
        autocast_residual: bool = False,
        kind: str | None = None,
        scaled_embedding: bool = False,
    ) -> None:
        super().__init__()
        self.checkpoint_activations, self.autocast_residual = checkpoint_activations, autocast_residual
        require_sizes(num_layers, d_model, max_seq_len, vocab_size)
        self.vocab_size, self.max_seq_len = vocab_size, max_seq_len
        self.token_embedding = nn.Embedding(vocab_size, d_model)
        with argument_path("position"):
            self.position = position() if position else None
        if scaled_embedding and isinstance(self.position, SinusoidalPosition):
            reason = "multiplies embeddings twice: SinusoidalPosition multiplies them by √d_model, too"
            raise ArgumentError("scaled_embedding", True, reason, {"scaled_embedding": False})
        self.embedding_scale = math.sqrt(d_model) if scaled_embedding else 1.0
        self.embedding_norm = norm(d_model) if embedding_norm else nn.Identity()
        if embedding_norm and isinstance(self.embedding_norm, nn.Identity):
            raise ArgumentError("embedding_norm", True, "needs a `norm`", {"embedding_norm": False})
        self.dropout = make_dropout(dropout)
        with argument_path("block"):
            options = {} if kind is None else {"kind": kind}
            layers = (block(layer_index=i, num_layers=num_layers, **options) for i in range(num_layers))
            self.layers = nn.ModuleList(layers)
        for part in self.modules():
            if part is not self and (longest := getattr(part, "max_seq_len", max_seq_len)) < max_seq_len:
                reason = f"must be at most {longest}, the number of positions of {type(part).__name__}"
                raise ArgumentError("max_seq_len", max_seq_len, reason, {"max_seq_len": longest})
        self.final_norm = nn.Identity() if self.layers[-1].ends_normalised else norm(d_model)
        with argument_path("block", "attention"):
            require_equal_values(self.layers)
        self.reads_side_inputs = any(getattr(part, "reads_side_inputs", False) for part in self.modules())

    @property
    def takes_cache(self) -> bool:
        """Return True if the attention of every layer can keep keys and values, or its state, in a cache."""
        parts = [getattr(layer, name, None) for layer in self.layers for name in ("attention", "cross_attention")]
        return all("cache" in inspect.signature(part.forward).parameters for part in parts if part is not None)

    def forward(
        self,
        tokens: Int[Tensor, "batch seq"],
        mask: AttentionMask | None = None,
        cache: Cache | None = None,
        context: Context | None = None,
    ) -> Float[Tensor, "batch seq d_model"]:
        """Return one vector for each token; without a mask, each token attends to all tokens of its sequence.

        The cache holds the tokens before `tokens`, and is extended by `tokens`. Blocks with cross-attention attend to
        the context. An `ArgumentError` is raised for more than `max_seq_len` tokens, including cached tokens.
        """
        first = cache.length if cache else 0
        if first + tokens.shape[1] > self.max_seq_len:
            cached = f" after {first} in the cache" if first else ""
            reason = f"must be at most max_seq_len={self.max_seq_len} tokens{cached}"
            raise ArgumentError("tokens.shape[1]", tokens.shape[1], reason)
        x = self.token_embedding(tokens)
        x = x if self.embedding_scale == 1 else x * self.embedding_scale
        x = self.position(x, first) if self.position else x
        x = self.dropout(self.embedding_norm(x))
        device = x.device.type
        if self.autocast_residual and torch.is_autocast_enabled(device):
            x = x.to(torch.get_autocast_dtype(device))
        recompute = self.checkpoint_activations and self.training and torch.is_grad_enabled() and cache is None
        side = SideInputs(tokens, x) if self.reads_side_inputs else None
        for index, layer in enumerate(self.layers):
            if context is not None and cache is not None:
                context = context._replace(cache=cache.context_layers[index])
            inputs: tuple[Any, ...] = (x, mask or AttentionMask(), cache.layers[index] if cache else None)
            if context is not None or side is not None:  # other blocks need not take these arguments
                inputs = (*inputs, context)
            if side is not None:
                inputs = (*inputs, side)
            x = checkpoint(layer, *inputs, use_reentrant=False) if recompute else layer(*inputs)
            if side is not None:
                x, side = x
        return self.final_norm(x)


def require_equal_values(layers: nn.ModuleList) -> None:
    """Raise an `ArgumentError` if a layer mixes in values that the first layer does not have in the same sizes."""
    first, *others = (getattr(layer, "attention", None) for layer in layers)
    given = isinstance(first, BaseAttention) and first.gives_first_values and (first.num_kv_heads, first.v_head_dim)
    for layer in others:
        if not isinstance(layer, BaseAttention) or layer.value_residual is None:
            continue
        if given != (sizes := (layer.num_kv_heads, layer.v_head_dim)):
            reason = f"needs a first layer with {sizes[0]} K/V heads of {sizes[1]} dimensions, as in later layers"
            layer.refuse_mixed_values(reason)


class Decoder(Encoder):
    """A stack of blocks with cross-attention, which maps token ids and a `Context` to one vector for each token.

    Its self-attention is causal if the mask is. Relative positions act in self-attention only, since positions in two
    sequences have no distance.

    Args:
        block: factory of a block, called with `cross_attention`, `layer_index` and `num_layers`.
        cross_attention: factory of the cross-attention, called with `layer_index` and `num_layers`.
    """

    def __init__(
        self,
        *arguments: Any,
        block: Callable[..., nn.Module],
        cross_attention: Callable[..., nn.Module],
        **options: Any,
    ) -> None:
        try:
            attending = partial(block, cross_attention=cross_attention)
            super().__init__(*arguments, block=attending, kind="decoder", **options)
        except ArgumentError as error:
            if error.path[:2] == ("block", "cross_attention"):
                error.path = error.path[1:]  # `cross_attention` is an argument of this class
            raise


def attentions_in(module: nn.Module) -> list[BaseAttention]:
    """All `BaseAttention` modules within a module, including the module itself."""
    return [part for part in module.modules() if isinstance(part, BaseAttention)]


def mixers_in(module: nn.Module) -> list[TokenMixer]:
    """All `TokenMixer` modules within a module, including the module itself."""
    return [part for part in module.modules() if isinstance(part, TokenMixer)]


class Network(nn.Module):
    """Base class of `Transformer`, with one stack of layers, and of `EncoderDecoder`, with two stacks."""

    encoder: Encoder
    readout: nn.Module

    kinds: ClassVar[Mapping[Address, tuple[str, ...]]]
    """For each kind of attention, given as the prefix of its layers' addresses, the arguments that lead to its modules:
    the stack comes first, the sublayer last."""

    def stacks(self) -> list[Encoder]:
        """The stacks of layers, in the order in which they run."""
        return [getattr(self, stack) for stack in dict.fromkeys(path[0] for path in self.kinds.values())]

    def attentions_by_address(self) -> dict[Address, BaseAttention]:
        """The `BaseAttention` modules by address, sorted by kind of attention, then from the first layer to the last.

        An address is the index of the layer; in an encoder–decoder, the kind of attention comes before it. If a layer
        has several of these modules, modules are counted in place of layers. An address and a head's number identify a
        head: ["cross", 3, 0].
        """
        found: dict[Address, BaseAttention] = {}
        for kind, (stack, *_, sublayer) in self.kinds.items():
            modules = [getattr(block, sublayer) if kind else block for block in getattr(self, stack).layers]
            parts = [(index, part) for index, module in enumerate(modules) for part in attentions_in(module)]
            if len({index for index, _ in parts}) < len(parts):
                parts = list(enumerate(part for _, part in parts))
            found |= {(*kind, index): part for index, part in parts}
        return found

    def attentions(self) -> list[BaseAttention]:
        """The `BaseAttention` modules, in the order of `attentions_by_address`."""
        return list(self.attentions_by_address().values())

    def layer_addresses(self) -> list[Address]:
        """The address of each module of `attentions`."""
        return list(self.attentions_by_address())

    def separate_blocks(self) -> list[nn.Module]:
        """The blocks of all stacks; an empty list if blocks share weights, such as T5's position table."""
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
        """The attention modules that contain no `BaseAttention`."""
        return [module for module, _ in self.attention_sublayers() if not attentions_in(module)]

    def require_heads(self) -> list[BaseAttention]:
        """The modules of `attentions`; raises a `NoMapsError` if there are none."""
        if not (found := self.attentions()):
            raise NoMapsError(self.other_attentions()[0], "is no BaseAttention, so it has no heads")
        return found

    def require_heads_everywhere(self) -> None:
        """Raise a `NoMapsError` if a layer has no `BaseAttention`."""
        for module in self.other_attentions():
            raise NoMapsError(module, "is no BaseAttention, but all layers need heads here")

    def find_head(self, argument: str, entry: Any) -> tuple[int, int]:
        """The index in `attentions` of a head's layer, and the index of the head in this layer, given its address."""
        head, layers = plain_address(entry if isinstance(entry, Sequence) else [entry]), self.attentions_by_address()
        for index, (address, layer) in enumerate(layers.items()):
            if head[:-1] == address and head[-1] in layer.head_map.ids:
                return index, layer.head_map.ids.index(head[-1])
        if not layers:
            reason = f"names a head, but {type(self.other_attentions()[0]).__name__} has no heads"
            raise ArgumentError(argument, [list(head)], reason, {argument: []})
        kinds = [kind for kind in KINDS if any(kind in address for address in layers)]
        kind = next((kind for kind in kinds if kind in head), kinds[0]) if kinds else None
        of_kind = [layer for address, layer in layers.items() if kind in (None, address[0])]
        raise not_a_head(argument, head, len(of_kind), of_kind[-1].num_heads, kind)

    def layer_names(self) -> list[str]:
        """The name of each module of `attentions`: "layer_03", or "cross/layer_03" in an encoder–decoder."""
        return ["/".join([*map(str, kind), f"layer_{index:02d}"]) for *kind, index in self.layer_addresses()]

    def attention_masks(self, mask: AttentionMask) -> list[AttentionMask]:
        """The mask of each module of `attentions`, given the mask of a batch."""
        return [mask] * len(self.attentions())

    def attention_paths(self) -> list[tuple[str, ...]]:
        """The path of arguments that leads to each module of `attentions`, for errors."""
        return [self.kinds[address[:-1]] for address in self.layer_addresses()]

    @property
    def max_seq_len(self) -> int:
        """Length of the longest sequence, in tokens."""
        return self.encoder.max_seq_len

    @property
    def vocab_size(self) -> int:
        """Number of tokens in the vocabulary."""
        return self.encoder.vocab_size

    def pruned_heads(self) -> list[list[str | int]]:
        """The heads that were removed, as `[layer, head]`, or `[kind, layer, head]` in an encoder–decoder."""
        layers = self.attentions_by_address().items()
        return [[*address, head] for address, layer in layers for head in layer.head_map.pruned]

    def prune(self, pruned_heads: Sequence[Sequence[str | int]]) -> None:
        """Remove heads in place, given as `[layer, head]` or `[kind, layer, head]`; see `prune_heads`."""
        layers, heads = self.attentions_by_address(), defaultdict[Address, set[int]](set)
        for entry in pruned_heads:
            self.find_head("pruned_heads", entry)
            heads[tuple(entry[:-1])].add(int(entry[-1]))
        emptied = [address for address, of_layer in heads.items() if len(of_layer) == layers[address].num_heads]
        if emptied:
            entries = [list(entry) for entry in pruned_heads]
            kept = [[*address, max(heads[address])] for address in emptied]
            reason = f"leaves no head in {layer_title(emptied[0])}; set its attention's residual branch to 0 instead"
            works = {"pruned_heads": [entry for entry in entries if entry not in kept]}
            raise ArgumentError("pruned_heads", entries, reason, works)
        for address, of_layer in heads.items():
            with argument_path(*self.kinds[address[:-1]]):
                prune_heads(layers[address], of_layer)

    def resolve_backends(self, device: str, dtype: torch.dtype, mask: AttentionMask, training: bool = True) -> None:
        """Choose the attention backend of every layer, see `resolve_backend`.

        An `ArgumentError` is raised if a `TokenMixer` cannot use the mask.
        """
        for mixer in mixers_in(self.encoder):  # a decoder's mask is always causal
            with argument_path("encoder", "block"):
                mixer.require_causal(mask)
        layers = zip(self.attentions(), self.attention_masks(mask), self.attention_paths(), strict=True)
        for layer, own, path in layers:
            with argument_path(*path):
                if layer.forget is not None:
                    layer.forget.require_causal(own.causal)
                resolve_backend(layer, device, dtype, own, self.max_seq_len, training)

    def num_parameters(self) -> int:
        """The number of trainable parameters, including embeddings; shared parameters count once."""
        return sum(parameter.numel() for parameter in self.parameters() if parameter.requires_grad)


def resolve_backend(
    layer: BaseAttention,
    device: str,
    dtype: torch.dtype,
    mask: AttentionMask,
    seq: int | None = None,
    training: bool = True,
) -> Backend:
    """Fix the backend of a layer, before the first step and before compiling.

    Args:
        layer: the layer, whose `resolved` backend is set.
        device: device type, "cpu" or "cuda".
        dtype: dtype of queries, keys and values; under autocast, the lower precision.
        mask: an example of the masks that `forward` will get.
        seq: length of the longest sequence; None if it is long or unknown.
        training: whether there will be dropout and backward passes.
    """
    layer.resolved = select_backend(layer.backend, layer.planned_case(device, dtype, mask, seq, training))
    return layer.resolved


def kernel_of_layer(
    layer: BaseAttention, device: str, dtype: torch.dtype, mask: AttentionMask, seq: int = 8, training: bool = True
) -> str:
    """The name of the kernel that the resolved backend runs, observed in one call; see `resolve_backend`."""
    if layer.resolved is None or layer.resolved.name in ("eager", "flex"):
        return "eager" if layer.resolved is None else layer.resolved.name
    seq = seq if mask.documents is None else mask.documents.shape[1]
    heads, kv_heads = layer.num_heads, layer.num_kv_heads
    sizes = [(heads, layer.head_dim), (kv_heads, layer.head_dim), (kv_heads, layer.v_head_dim)]
    q, k, v = (torch.zeros(mask.num_rows, n, seq, dim, device=device, dtype=dtype) for n, dim in sizes)
    if mask.allowed is not None:  # a single entry is broadcast to any number of queries and keys
        mask = replace(mask, allowed=mask.allowed[:1, :1, :1, :1])
    probe = copy.deepcopy(layer).to(device, dtype).train(training)
    with torch.set_grad_enabled(training):
        kernel = running_kernel(
            lambda: BaseAttention.attend(probe, QKV(q, k, v), probe.planned_mask(mask, q), is_cross=False)
        )
    return "flash" if kernel == "varlen" else kernel  # the same kernel over packed sequences


def heads_pass(layer: BaseAttention, call: AttentionInputs, backend: Backend, gradient: bool = True) -> Pass:
    """A function that runs a layer's heads with a backend, without projections; with `gradient`, also backwards."""
    qkv, mask = [x.detach().requires_grad_(gradient) for x in call.qkv], call.mask
    if mask.log_decay is not None:
        mask = replace(mask, log_decay=mask.log_decay.detach().requires_grad_(gradient))
    leaves = [*qkv, *(weight for weight in layer.parameters() if weight.requires_grad)]
    (batch, _, q_seq, _), v = call.qkv.q.shape, call.qkv.v
    upstream = torch.randn(batch, layer.num_heads, q_seq, v.shape[-1], device=v.device, dtype=v.dtype)

    def run() -> None:
        layer.resolved = backend
        with torch.set_grad_enabled(gradient):
            output = layer.attend(QKV(*qkv), mask, call.is_cross)
        if gradient:
            torch.autograd.grad(output, leaves, upstream, allow_unused=True)

    return run
