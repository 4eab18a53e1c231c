"""What a network costs, from the shapes of its layers alone: parameters, floating-point operations, cache.

A network on torch's meta device has shapes and no memory, so that the largest is counted in no time:
`with torch.device("meta"): network = …`.

One multiply-add is two floating-point operations (FLOPs). Matrix products are counted and nothing else: softmax,
norms, activations, rotations, lookups and everything else elementwise is left out, as in `torch.utils.flop_counter`.
For each token of a sequence of T tokens:

    forward   2 · weights of the projections, the feed-forward networks and the readout
            + 2 · T · num_heads · (head_dim + v_head_dim) in each layer, for the scores and the weighted values
    training  3 · forward

The first is Kaplan et al. 2020 (arXiv 2001.08361, §2.1), with the readout, which they leave out; the second is
Chowdhery et al. 2022 (PaLM, arXiv 2204.02311, appendix B), whose 12 L H Q T for training is its threefold, where keys
and values have the same size. It takes every query to meet all T keys. A kernel that skips the keys that a causal mask
or a window hides computes less: `attended_flops_per_token`. A backward pass has two products for each one of the
forward pass; what activation checkpointing computes again is not counted.
"""

import functools
from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from tinyformer.nn import BaseAttention, LatentAttention, ShawPosition, Transformer
from tinyformer.nn.score import GeneralScore, LocalGaussian

BYTES = {"bf16": 2, "fp32": 4}
"""Of a number in the cache."""


@dataclass(frozen=True)
class Costs:
    """What a network costs.

    Args:
        vocab_size: number of tokens in the vocabulary.
        seq_len: T, the longest sequence, at which FLOPs are counted.
        num_parameters: all of them; a tied readout counts once.
        attention_parameters: all within the attention layers.
        attention_weights: those in matrices of projections (the output gate's too), so without biases.
        attention_weights_per_layer: their mean over the layers, which are alike unless heads were pruned.
        feed_forward_parameters: of the feed-forward networks.
        embedding_parameters: of the embeddings of tokens and absolute positions.
        flops_per_token: of a forward pass.
        training_flops_per_token: of a forward and a backward pass.
        flops_per_token_by_part: of a forward pass, see `flops_per_token`.
        attended_flops_per_token: of a forward pass whose kernel skips what a causal mask and windows hide.
        cache_dtype: that of the cache, a name in `BYTES`.
        cache_bytes_per_token: keys and values of all layers, or what they are made from.
        cache_bytes: of a sequence of T tokens, of which a layer with a window holds no more than the window.
        cache_reduction: how many times larger the cache of multi-head attention with such heads is.
    """

    vocab_size: int
    seq_len: int
    num_parameters: int
    attention_parameters: int
    attention_weights: int
    attention_weights_per_layer: int
    feed_forward_parameters: int
    embedding_parameters: int
    flops_per_token: int
    training_flops_per_token: int
    flops_per_token_by_part: dict[str, int]
    attended_flops_per_token: int
    cache_dtype: str
    cache_bytes_per_token: int
    cache_bytes: int
    cache_reduction: float


def count_costs(network: Transformer, cache_dtype: str = "bf16") -> Costs:
    """All costs of a network.

    Args:
        network: on any device, "meta" included.
        cache_dtype: a name in `BYTES`.

    Raises:
        ValueError: there is no such dtype.
    """
    if cache_dtype not in BYTES:
        raise ValueError(f"dtype={cache_dtype}: choose one of {', '.join(BYTES)}.")
    encoder, attentions = network.encoder, network.attentions()
    embeddings = [encoder.token_embedding, *([encoder.position] if encoder.position else [])]
    by_part = flops_per_token(network)
    forward = sum(by_part.values())
    weights = projection_weights(attentions)
    return Costs(
        vocab_size=encoder.vocab_size,
        seq_len=encoder.max_seq_len,
        num_parameters=network.num_parameters(),
        attention_parameters=num_parameters(attentions),
        attention_weights=weights,
        attention_weights_per_layer=weights // len(attentions),
        feed_forward_parameters=num_parameters(layer.feed_forward for layer in encoder.layers),
        embedding_parameters=num_parameters(embeddings),
        flops_per_token=forward,
        training_flops_per_token=3 * forward,
        flops_per_token_by_part=by_part,
        attended_flops_per_token=forward - hidden_flops_per_token(network),
        cache_dtype=cache_dtype,
        cache_bytes_per_token=BYTES[cache_dtype] * sum(cache_elements(layer) for layer in attentions),
        cache_bytes=BYTES[cache_dtype] * network_cache_elements(network),
        cache_reduction=cache_reduction(network),
    )


def num_parameters(modules: Iterable[nn.Module]) -> int:
    """All parameters of some modules; what several of them share counts once."""
    return sum(parameter.numel() for parameter in nn.ModuleList(modules).parameters())


def projection_weights(modules: Iterable[nn.Module]) -> int:
    """The entries of the matrices of all linear layers in some modules; biases are none."""
    layers = (layer for module in modules for layer in module.modules())
    return sum(layer.weight.numel() for layer in layers if isinstance(layer, nn.Linear))


def flops_per_token(network: Transformer) -> dict[str, int]:
    """FLOPs of a forward pass over the longest sequence, for each of its T tokens.

    - `attention_projections`, `feed_forward`, `readout`: 2 · weights, for each meets each token once.
    - `attention_scores_and_values`: 2 · T · num_heads · (head_dim + v_head_dim) for each softmax of a head, and what
      some scores and positions multiply queries with. A differential head has two softmaxes, each over half of its
      queries and keys and all of its values. An additive score, vᵀ tanh(q + k), costs as much as a dot product.
    """
    seq_len, attentions = network.encoder.max_seq_len, network.attentions()
    mixing = sum(pair_multiply_adds(layer) * seq_len + query_multiply_adds(layer) for layer in attentions)
    return {
        "attention_projections": 2 * projection_weights(attentions),
        "attention_scores_and_values": 2 * mixing,
        "feed_forward": 2 * projection_weights(layer.feed_forward for layer in network.encoder.layers),
        "readout": 2 * projection_weights([network.readout]),
    }


@dataclass(frozen=True)
class TrainingFlops:
    """FLOPs of training steps, whose sequences need not be the longest that the network takes.

    A weight that trains takes a product in the forward pass and two in the backward pass; of a frozen encoder no more
    than the first is left, and of the readout on it no gradient goes further. What is computed again to save memory is
    not counted.

    Args:
        per_token: in the encoder.
        per_pair: of a query and a key, all layers and heads together.
        per_readout: for each token whose scores are made.
    """

    per_token: int
    per_pair: int
    per_readout: int

    @classmethod
    def of(cls, network: Transformer) -> "TrainingFlops":
        """Those of a network."""
        attentions = network.attentions()
        for_each = projection_weights(attentions)
        for_each += projection_weights(layer.feed_forward for layer in network.encoder.layers)
        for_each += sum(query_multiply_adds(layer) for layer in attentions)
        trains = any(parameter.requires_grad for parameter in network.encoder.parameters())
        encoder, readout = (3, 3) if trains else (1, 2)
        return cls(
            encoder * 2 * for_each,
            encoder * 2 * sum(pair_multiply_adds(layer) for layer in attentions),
            readout * 2 * projection_weights([network.readout]),
        )

    def count(self, tokens: int, pairs: int, read_out: float) -> float:
        """FLOPs of some batches.

        Args:
            tokens: rows times the length of each.
            pairs: rows times the square of that.
            read_out: tokens whose scores are made.
        """
        return self.per_token * tokens + self.per_pair * pairs + self.per_readout * read_out


def hidden_flops_per_token(network: Transformer) -> int:
    """How many FLOPs of the forward pass, for each token, go into pairs that a causal mask or a window hides."""
    seq_len = network.encoder.max_seq_len
    hidden = (
        pair_multiply_adds(layer) * (seq_len**2 - visible_pairs(seq_len, layer.window))
        for layer in network.attentions()
    )
    return round(2 * sum(hidden) / seq_len)


def visible_pairs(seq_len: int, window: int | None = None) -> int:
    """Σ_i min(i, W) = W T - W (W - 1) / 2: the pairs of a query and a key that a causal mask shows.

    Args:
        seq_len: T, the number of queries and keys.
        window: W, how many keys a query sees, itself included; all before it if null.
    """
    width = min(window or seq_len, seq_len)
    return width * seq_len - width * (width - 1) // 2


@functools.singledispatch
def cache_elements(layer: nn.Module) -> int:
    """KV-cache elements per token: keys and values, unless a class of attention is registered with less."""
    assert isinstance(layer, BaseAttention)
    return layer.num_kv_heads * (layer.num_softmaxes * layer.head_dim + layer.v_head_dim)


@cache_elements.register
def _(layer: LatentAttention) -> int:
    """The latent and the positional key."""
    return layer.kv_rank + layer.position_dim


def pair_multiply_adds(layer: BaseAttention) -> int:
    """Multiply-adds for each pair of a query and a key: their score in each softmax, and the weighted value."""
    return layer.num_softmaxes * layer.num_heads * (layer.head_dim + layer.v_head_dim)


def query_multiply_adds(layer: BaseAttention) -> int:
    """Multiply-adds for each query alone, between the projections and the scores."""
    parts = (layer.score, layer.position, layer.gaussian)
    return layer.num_softmaxes * layer.num_heads * sum(head_multiply_adds(part) for part in parts)


@functools.singledispatch
def head_multiply_adds(part: nn.Module | None) -> int:
    """Multiply-adds in matrix products of a score function or position, for each query of each head.

    A class that is not registered here costs what its attribute `multiply_adds` says, or nothing.
    """
    return getattr(part, "multiply_adds", 0)


@head_multiply_adds.register
def _(part: GeneralScore) -> int:
    """QᵀW."""
    return part.weight.shape[-1] ** 2


@head_multiply_adds.register
def _(part: LocalGaussian) -> int:
    """Vᵀ tanh(W q)."""
    return part.weight.shape[-1] ** 2 + part.weight.shape[-1]


@head_multiply_adds.register
def _(part: ShawPosition) -> int:
    """Each query with every vector of the keys' table, and the weights of each distance with the values' table."""
    return sum(table.numel() for table in part.parameters())


def network_cache_elements(network: Transformer) -> int:
    """KV-cache elements after T tokens; a layer with a window holds the tokens of the window."""
    seq_len = network.encoder.max_seq_len
    return sum(cache_elements(layer) * min(layer.window or seq_len, seq_len) for layer in network.attentions())


def cache_reduction(network: Transformer) -> float:
    """Σ 2 num_heads v_head_dim / Σ cache elements over the layers: how many times larger the cache of multi-head is."""
    attentions = network.attentions()
    multi_head = sum(2 * layer.num_heads * layer.v_head_dim for layer in attentions)
    return multi_head / sum(cache_elements(layer) for layer in attentions)
