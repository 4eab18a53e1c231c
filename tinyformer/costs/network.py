"""Parameters, floating-point operations and KV-cache size of a network, from the shapes of its layers alone.

On torch's meta device a network has shapes but no memory, so that networks of any size can be counted:
`with torch.device("meta"): network = …`.

One multiply-add is two floating-point operations (FLOPs). Only matrix products are counted, as in
`torch.utils.flop_counter`; elementwise operations such as softmax, norms and activations are not. For each token of a
sequence of T tokens:

    forward   2 · weights of the projections, the feed-forward networks and the readout
            + 2 · T · num_heads · (head_dim + v_head_dim) in each layer, for the scores and the weighted values
    training  3 · forward

The first term is Kaplan et al. 2020 (arXiv 2001.08361, §2.1), plus the readout. The second is Chowdhery et al. 2022
(PaLM, arXiv 2204.02311, appendix B), whose 12 L H Q T is for training L layers of H heads with keys and values of size
Q. The second term assumes that every query attends to all T keys; `attended_flops_per_token` is for kernels that skip
the keys hidden by a causal mask or a window. The backward pass has two products for each product of the forward pass;
recomputation by activation checkpointing is not counted.

An encoder–decoder processes a source and a target of T tokens each. Its counts per token are for one source token plus
one target token, and its cache holds the decoder's keys and values for both sequences.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn

from tinyformer.errors import ArgumentError, require_choice
from tinyformer.nn import AttentionMask, BaseAttention, LatentAttention, Network, ShawPosition, TokenMixer
from tinyformer.nn.network import attentions_in, mixers_in
from tinyformer.nn.score import GeneralScore, LocalGaussian
from tinyformer.nn.shift import CausalSum

BYTES = {"bf16": 2, "fp32": 4}  # bytes of an element of the KV cache, by dtype

QUERY_PROJECTIONS = ("q_down_proj", "q_proj", "o_proj", "output_gate")
"""Submodules of an attention layer that are applied to the tokens of the queries, or to the output at these tokens."""


@dataclass(frozen=True)
class Costs:
    """Parameters, FLOPs and KV-cache size of a network."""

    vocab_size: int
    seq_len: int  # T, the context length, at which FLOPs are counted
    num_parameters: int  # a tied readout counts once
    attention_parameters: int
    attention_weights: int  # parameters of the attention's projection matrices, without biases
    attention_weights_per_layer: int  # mean of `attention_weights` over the attention layers, rounded down
    feed_forward_parameters: int
    embedding_parameters: int  # of the embeddings of tokens and absolute positions
    flops_per_token: int  # of a forward pass
    training_flops_per_token: int  # of a forward and a backward pass
    flops_per_token_by_part: dict[str, int]  # of a forward pass, see `flops_per_token`
    attended_flops_per_token: int  # of a forward pass, if the kernel skips the keys that the mask hides
    cache_dtype: str  # a name in `BYTES`
    cache_bytes_per_token: int  # over all layers, without inputs of short convolutions and shifted keys
    cache_bytes: int  # after T tokens: a layer keeps its window, an LSTM one state, a short convolution three inputs
    cache_reduction: float  # how many times larger a cache with a key and a value for each query head is


def count_costs(network: Network, cache_dtype: str = "bf16") -> Costs:
    """The costs of a network on any device, "meta" included, with a cache whose dtype is a name in `BYTES`.

    Raises:
        ArgumentError: the dtype is unknown, or an attention is no `BaseAttention`, so that its operations are unknown.
    """
    require_choice("cache_dtype", cache_dtype, BYTES)
    if others := uncounted(network):
        reason = "is no BaseAttention, so its FLOPs and its cache cannot be counted"
        raise ArgumentError("attention", type(others[0]).__name__, reason)
    attentions, stacks, seq_len = [*network.attentions(), *mixers_in(network)], network.stacks(), network.max_seq_len
    embeddings = [part for stack in stacks for part in (stack.token_embedding, stack.position) if part is not None]
    by_part = flops_per_token(network)
    forward, weights = sum(by_part.values()), projection_weights(attentions)
    cached: list[BaseAttention | TokenMixer] = [*attentions_in(stacks[-1]), *mixers_in(stacks[-1])]
    multi_head = sum(  # cache elements with a key and a value for each query head, or in place of a mixer
        2 * layer.d_model if isinstance(layer, TokenMixer) else layer.num_heads * head_cache_elements(layer)
        for layer in cached
    )
    sizes = [BYTES[cache_dtype] * cache_elements(layer) + decay_bytes(layer) for layer in cached]
    # Cross-attention caches the whole source, whatever its window.
    windows = [None if getattr(layer, "kind", None) == "cross" else layer.window for layer in cached]
    kept = sum(size * min(window or seq_len, seq_len) for size, window in zip(sizes, windows, strict=True))
    kept += sum(BYTES[cache_dtype] * part.width * min(part.reach, seq_len) for part in causal_sums([stacks[-1]]))
    return Costs(
        vocab_size=network.vocab_size,
        seq_len=seq_len,
        num_parameters=network.num_parameters(),
        attention_parameters=num_parameters(attentions),
        attention_weights=weights,
        attention_weights_per_layer=weights // len(attentions),
        feed_forward_parameters=num_parameters(feed_forwards(network)),
        embedding_parameters=num_parameters(embeddings),
        flops_per_token=forward,
        training_flops_per_token=3 * forward,
        flops_per_token_by_part=by_part,
        attended_flops_per_token=forward - hidden_flops_per_token(network),
        cache_dtype=cache_dtype,
        cache_bytes_per_token=sum(sizes),
        cache_bytes=kept,
        cache_reduction=BYTES[cache_dtype] * multi_head / sum(sizes),
    )


def num_parameters(modules: Iterable[nn.Module]) -> int:
    """The number of parameters of several modules; shared parameters count once."""
    return sum(parameter.numel() for parameter in nn.ModuleList(modules).parameters())


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """The total size of several tensors in bytes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def feed_forwards(network: Network) -> list[nn.Module]:
    """The feed-forward networks of all layers."""
    return [layer.feed_forward for stack in network.stacks() for layer in cast(Iterable[Any], stack.layers)]


def projection_weights(modules: Iterable[nn.Module]) -> int:
    """The number of weights of all linear and recurrent layers within several modules, without biases."""
    layers = (layer for module in modules for layer in module.modules() if isinstance(layer, nn.Linear | nn.RNNBase))
    return sum(weight.numel() for layer in layers for weight in layer.parameters(recurse=False) if weight.ndim == 2)


def flops_per_token(network: Network) -> dict[str, int]:
    """FLOPs of a forward pass over T tokens, divided by T.

    - `attention_projections`, `feed_forward`, `readout`: 2 · weights.
    - `attention_scores_and_values`: 2 · T · num_heads · (head_dim + v_head_dim) for each softmax of a head, plus the
      products of queries with parameters of score functions and positions. A differential head has two softmaxes, each
      over half of its queries and keys and all of its values. An additive score, vᵀ tanh(q + k), counts like a dot
      product. A convolution counts 2 · kernel_size · d_model, as a direct sum; an LSTM's matrices are projections.
      Short convolutions and shifted keys also count as direct sums, but in `feed_forward` if they are part of it.
    """
    seq_len, attentions, mixers = network.max_seq_len, network.attentions(), mixers_in(network)
    mixing = sum(pair_multiply_adds(layer) * seq_len + query_multiply_adds(layer) for layer in attentions)
    within = sum_multiply_adds(feed_forwards(network))
    mixing += sum(mixer.multiply_adds for mixer in mixers) + sum_multiply_adds([network]) - within
    return {
        "attention_projections": 2 * projection_weights([*attentions, *mixers]),
        "attention_scores_and_values": 2 * mixing,
        "feed_forward": 2 * (projection_weights(feed_forwards(network)) + within),
        "readout": 2 * projection_weights([network.readout]),
    }


def batch_sizes(batch: Mapping[str, Any]) -> Counter[str]:
    """The numbers of tokens and query–key pairs in a batch, padding included; a source is counted separately."""
    rows, seq = batch["inputs"].shape
    sizes = Counter(tokens=rows * seq, pairs=rows * seq * seq)
    if "source" in batch:
        source_seq = batch["source"].shape[1]
        sizes.update(
            source_tokens=rows * source_seq, source_pairs=rows * source_seq**2, cross_pairs=rows * seq * source_seq
        )
    return sizes


@dataclass(frozen=True)
class TrainingFlops:
    """FLOPs of training steps on sequences of any length.

    A trained weight takes one product in the forward pass and two in the backward pass. If the encoder is frozen, its
    weights take only the forward product; the readout's weights take this product and the product for their gradient.
    Recomputation is not counted. If the class of an attention is user-defined, all counts are nan.
    """

    per_size: Mapping[str, float]  # FLOPs of the layers for each token or pair, by the names of `batch_sizes`
    per_readout: float  # FLOPs of the readout for each token that it is applied to

    @classmethod
    def of(cls, network: Network) -> "TrainingFlops":
        trains = any(parameter.requires_grad for parameter in network.encoder.parameters())
        layers, readout = (3, 3) if trains else (1, 2)
        counts = {"tokens": math.nan} if uncounted(network) else multiply_adds(network)
        return cls(
            {size: layers * 2 * number for size, number in counts.items()},
            readout * 2 * projection_weights([network.readout]),
        )

    def count(self, sizes: Mapping[str, int], read_out: float) -> float:
        """FLOPs of batches; `sizes` are the sums of their `batch_sizes`, `read_out` is the number of readout inputs."""
        return sum(flops * sizes[size] for size, flops in self.per_size.items()) + self.per_readout * read_out


def multiply_adds(network: Network) -> Counter[str]:
    """Multiply-adds of the layers in a forward pass, for each token or pair; the keys are those of `batch_sizes`."""
    counts = Counter[str]()
    prefixes = ["source_", ""] if len(network.stacks()) > 1 else [""]
    for prefix, stack in zip(prefixes, network.stacks(), strict=True):
        for layer in cast(Iterable[Any], stack.layers):
            inner = attentions_in(layer.attention)
            own = projection_weights([layer.attention, layer.feed_forward]) + sum(map(query_multiply_adds, inner))
            own += sum(mixer.multiply_adds for mixer in mixers_in(layer.attention)) + sum_multiply_adds([layer])
            counts.update({f"{prefix}tokens": own, f"{prefix}pairs": sum(map(pair_multiply_adds, inner))})
            if (cross := getattr(layer, "cross_attention", None)) is not None:  # a user-defined block may lack it
                # Keys and values are projected from the source, queries from the target and outputs to it.
                of_queries = [module for name, module in cross.named_children() if name in QUERY_PROJECTIONS]
                queries, inner = projection_weights(of_queries), attentions_in(cross)
                counts["tokens"] += queries + sum(map(query_multiply_adds, inner))
                counts["source_tokens"] += projection_weights([cross]) - queries
                counts["cross_pairs"] += sum(map(pair_multiply_adds, inner))
    return counts


def hidden_flops_per_token(network: Network) -> int:
    """FLOPs per token of a forward pass spent on pairs that a causal mask or a window hides.

    A network of one stack is counted as causal, whatever its task; the encoder of an encoder–decoder as bidirectional.
    """
    seq_len, masks = network.max_seq_len, network.attention_masks(AttentionMask(causal=len(network.stacks()) == 1))
    hidden = 0
    for layer, mask in zip(network.attentions(), masks, strict=True):
        hidden += pair_multiply_adds(layer) * (seq_len**2 - visible_pairs(seq_len, mask.within(layer.window)))
    return round(2 * hidden / seq_len)


def visible_pairs(seq_len: int, mask: AttentionMask) -> int:
    """T² - Σ c (c + 1) / 2: the number of query–key pairs that a mask allows.

    The sum is over the two sides of the diagonal. If a query sees at most n keys on a side, c = max(T - 1 - n, 0) keys
    are hidden from the query at one end of the sequence, c - 1 from the query next to it, and so on.
    """
    corners = (max(seq_len - 1 - limit, 0) for limit in mask.span if limit >= 0)
    return seq_len**2 - sum(corner * (corner + 1) // 2 for corner in corners)


def uncounted(network: Network) -> list[nn.Module]:
    """The attention modules of a user-defined class, whose operations are unknown."""
    return [module for module in network.other_attentions() if not mixers_in(module)]


def cache_elements(layer: BaseAttention | TokenMixer) -> int:
    """A layer's cache elements per token: keys and values, a latent and a positional key, or a mixer's state."""
    if isinstance(layer, TokenMixer):
        return layer.cache_elements
    if isinstance(layer, LatentAttention):
        return layer.kv_rank + layer.position_dim
    return layer.num_kv_heads * head_cache_elements(layer)


def decay_bytes(layer: BaseAttention | TokenMixer) -> int:
    """Bytes per token of the sums of a forget gate, which a layer's cache holds in fp32 whatever its other dtype."""
    return BYTES["fp32"] * layer.num_heads if isinstance(layer, BaseAttention) and layer.forget is not None else 0


def head_cache_elements(layer: BaseAttention) -> int:
    """Elements of the key and the value of one head, without the positional part of latent attention."""
    key_dim = layer.content_dim if isinstance(layer, LatentAttention) else layer.num_softmaxes * layer.head_dim
    return key_dim + layer.v_head_dim


def pair_multiply_adds(layer: BaseAttention) -> int:
    """Multiply-adds for each query–key pair: the score in each softmax, and the weighted value."""
    return layer.num_softmaxes * layer.num_heads * (layer.head_dim + layer.v_head_dim)


def query_multiply_adds(layer: BaseAttention) -> int:
    """Multiply-adds for each query between projections and scores; the number of keys does not change them."""
    parts = (layer.score, layer.position, layer.gaussian)
    return layer.num_softmaxes * layer.num_heads * sum(head_multiply_adds(part) for part in parts)


def causal_sums(modules: Iterable[nn.Module]) -> list[CausalSum]:
    """The short convolutions and shifted keys within several modules."""
    return [part for module in modules for part in module.modules() if isinstance(part, CausalSum)]


def sum_multiply_adds(modules: Iterable[nn.Module]) -> int:
    """Multiply-adds of the short convolutions and shifted keys within several modules, for each token."""
    return sum(part.width * (part.reach + 1) for part in causal_sums(modules))


def head_multiply_adds(part: nn.Module | None) -> int:
    """Multiply-adds in the matrix products of a score function, position or Gaussian, for each query of each head.

    For a user-defined class, this is the class's attribute `multiply_adds`, or 0 if the class has no such attribute.
    """
    if isinstance(part, GeneralScore):  # the product of the query and W
        return part.weight.shape[-1] ** 2
    if isinstance(part, LocalGaussian):  # the centre, vᵀ tanh(W q)
        return part.weight.shape[-1] ** 2 + part.weight.shape[-1]
    if isinstance(part, ShawPosition):  # queries times the table of keys, weights by distance times the table of values
        return sum(table.numel() for table in part.parameters())
    return getattr(part, "multiply_adds", 0)
