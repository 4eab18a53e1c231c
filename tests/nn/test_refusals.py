"""The parts of the network refuse in a sentence with the argument, its value, the reason, and a value that works."""

import inspect
import typing
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from nn.model_cases import make_encoder
from nn.variants import CAUSAL, make, mla, shaw, tokens
from tinyformer.errors import ArgumentError
from tinyformer.nn import (
    Attention,
    AttentionMask,
    AttentionOptions,
    BaseAttention,
    Cache,
    ClassReadout,
    Decoder,
    Encoder,
    EncoderDecoder,
    FeedForward,
    LayerCache,
    LayerNorm,
    PreNormBlock,
    RelativePosition,
    Residual,
    RotaryPosition,
    ScoreMod,
    Shared,
    SinusoidalPosition,
    T5Position,
    TokenReadout,
    Transformer,
    prune_heads,
)
from tinyformer.nn.score import DotScore

EMBEDDING, IDS = nn.Embedding(5, 8), torch.zeros(1, 4, dtype=torch.long)


TWO_HEADS, attention = partial(Attention, 8, 2), partial(Attention, 8, 4)


def block(attention: Callable[..., nn.Module] = TWO_HEADS, **options: object) -> Callable[..., nn.Module]:
    return partial(PreNormBlock, 8, attention, partial(FeedForward, 8), LayerNorm, **options)


SIZES = {"vocab_size": 5, "num_layers": 2, "d_model": 8, "max_seq_len": 4, "block": block(), "norm": LayerNorm}


def encoder(**options: object) -> Encoder:
    return Encoder(**(SIZES | options))


def transformer(pruned_heads: list[list[int]]) -> Transformer:
    return Transformer(encoder(), TokenReadout, pruned_heads=pruned_heads)


def encoder_decoder(pruned_heads: list[list[str | int]] | tuple[()] = (), **others: object) -> EncoderDecoder:
    decoder = Decoder(**(SIZES | {"cross_attention": TWO_HEADS} | others))
    return EncoderDecoder(encoder(num_layers=1), decoder, TokenReadout, pruned_heads=pruned_heads)


@torch.no_grad()
def of_another_context() -> None:
    network, cache = encoder_decoder(), Cache(2)
    network.decode(IDS, network.encode(IDS), cache=cache)
    network.decode(IDS[:, :0], network.encode(IDS[:, :3]), cache=cache)


def forgetting_both_ways() -> None:
    network = Transformer(encoder(block=block(partial(TWO_HEADS, forget=True))), TokenReadout)
    network.resolve_backends("cpu", torch.float32, AttentionMask())


class Fading(RelativePosition):
    """Declares itself additive, and is not for distant keys, which shows when the length is known."""

    def score_mod(self, q, k_seq, scale, causal):
        def change(score, batch, head, q_idx, kv_idx):
            return torch.where((q_idx - kv_idx).abs() >= 10, 0.9 * score, score)

        return ScoreMod(change, additive=True)


def with_fading() -> None:
    made = encoder(max_seq_len=16, block=block(partial(TWO_HEADS, position=Fading)))
    Transformer(made, TokenReadout).resolve_backends("cpu", torch.float32, CAUSAL)


WAVES = partial(SinusoidalPosition, 4, d_model=8)
NO_BRANCH = block(feed_forward_residual=partial(Residual, branch=[]))
PATTERN = torch.ones(5, 4, dtype=torch.bool)
OF_FIVE_EXAMPLES = "allowed.shape=(5, 1, 1, 4): must have 2 examples and 4 heads, or 1 in place of either number"
REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: AttentionMask(allowed=torch.ones(4, 4)), "allowed.dtype=torch.float32: must be boolean"),
    (lambda: AttentionMask(allowed=PATTERN[0]), "allowed.shape=(4,): must have the axes q_seq k_seq, batch q_seq"),
    (lambda: attention()(tokens(1, 5, d_model=8), AttentionMask(allowed=PATTERN)), "allowed.shape=(1, 1, 5, 4): must"),
    (lambda: attention()(tokens(2, 4, d_model=8), AttentionMask(allowed=PATTERN.unsqueeze(1))), OF_FIVE_EXAMPLES),
    (lambda: attention()(*[tokens(1, 5, d_model=8)] * 3), "mask=(1, 5, 8): must be an AttentionMask, such as Att"),
    (lambda: encoder()(tokens(1, 5)[..., 0].long()), "tokens.shape[1]=5: must be at most max_seq_len=4 tokens."),
    (partial(encoder, embedding_norm=True, norm=nn.Identity), "embedding_norm=True: needs a norm"),
    (lambda: encoder(block=NO_BRANCH), "block.feed_forward_residual.branch=[]: must be one number, or one for each of"),
    (lambda: FeedForward(8, activation="tanh"), "activation='tanh': must be one of gelu, gelu_tanh, relu, relu2, silu"),
    (partial(SinusoidalPosition, 4, d_model=5), "d_model=5: must be even for sinusoidal positional encodings; d_model"),
    (partial(RotaryPosition, 4, head_dim=5), "head_dim=5: must be even for rotary positional encodings; head_dim=6 w"),
    (partial(T5Position, 2, num_buckets=0), "num_buckets=0: must be a positive multiple of 4; num_buckets=32 works."),
    (
        lambda: Shared(partial(T5Position, 2, num_buckets=30))(8),
        "position.num_buckets=30: must be a positive multiple of 4",
    ),
    (lambda: mla(position=shaw), "position.values=True: adds vectors of 4 dimensions to values of 8;"),
    (lambda: make("additive+rotary"), "score='additive': depends on absolute positions if queries and keys are"),
    (with_fading, "encoder.block.attention.position='Fading': declares its score modification as additive, but the"),
    (partial(ClassReadout, EMBEDDING, labels=["yes"]), "labels=['yes']: must name at least two classes; labels=["),
    (partial(Attention, 32, num_heads=5), "num_heads=5: must divide d_model=32; num_heads=4 works."),
    (partial(attention, num_kv_heads=3), "num_kv_heads=3: must divide num_heads=4; num_kv_heads=2 works."),
    (partial(attention, backend="fast"), "backend='fast': must be one of auto, eager, sdpa, flash, flex, fa3, fa4."),
    (partial(make_encoder, backend="fa3", softcap=5.0), "block.attention.backend='fa3': runs on CUDA, not on CPU, and"),
    (partial(attention, bias="qvx"), "bias='qvx': must be true, false, or some of the letters q, k, v and o; bias="),
    (partial(attention, convolution="o"), "convolution='o': must be true, false, or some of the letters q, k and v; c"),
    (partial(attention, shifted_keys=True, kind="cross"), "shifted_keys=True: mixes projections of several tokens,"),
    (partial(mla, convolution="qk"), "convolution='qk': mixes projections of several tokens, which neither cross-"),
    (partial(attention, qk_norm="head"), "qk_norm='head': must be one of False, True, zero_centered, "),
    (partial(TokenReadout, EMBEDDING, softcap=0.0), "softcap=0.0: must be above 0; softcap=30.0 works."),
    (partial(encoder, position=WAVES, scaled_embedding=True), "scaled_embedding=True: multiplies embeddings twice: "),
    (partial(Attention, 64, 4, scale=-0.1), "scale=-0.1: must be at least 0, and finite; scale=0.25 works."),
    (partial(attention, score=DotScore, scale=1.0), "scale=1.0: is a factor of the scaled dot product, but score is a"),
    (
        partial(attention, forget=True, kind="cross"),
        "forget=True: lets the scores of a key decrease for later",
    ),
    (
        lambda: make("forget")(tokens()),
        "forget=True: lets the scores of a key decrease for later",
    ),
    (forgetting_both_ways, "encoder.block.attention.forget=True: lets the scores of a key decrease for later"),
    (partial(attention, local_gaussian=True), "local_gaussian=True: needs a window; window=16 works."),
    (lambda: LayerCache().extend(tokens().requires_grad_()), "cache=LayerCache of 0 tokens: keeps no gradients: call"),
    (lambda: encoder_decoder().decoder(IDS, CAUSAL), "context=None: is needed by a block with cross-attention"),
    (of_another_context, "cache=LayerCache of 4 tokens: holds a context of 1 sequences of 4 tokens, not"),
    (lambda: encoder_decoder().encode(IDS, AttentionMask(documents=IDS)), "source_mask.documents='…': must be None"),
    (lambda: encoder_decoder(vocab_size=6), "shared_embedding=True: encoder and decoder have embeddings of the shapes"),
    (
        partial(transformer, pruned_heads=[[1, 0], [0, 1], [1, 1]]),
        "pruned_heads=[[1, 0], [0, 1], [1, 1]]: leaves no head in layer 1; set its attention's residual branch "
        "to 0 instead; pruned_heads=[[1, 0], [0, 1]] works.",
    ),
    (lambda: prune_heads(attention(qk_norm="projection"), [0]), "qk_norm='projection': divides all heads by one root"),
    (lambda: prune_heads(attention(), [0, 1, 2, 3]), "heads=[0, 1, 2, 3]: must leave at least one head;"),
]
for window in (0, [], [4, 0], [None, -2]):
    REFUSED.append((partial(attention, window=window), f"window={window}: must be at least 1"))
NO_HEADS = {
    (): "encoder has 1 layers of 2 heads; pruned_heads=[['encoder', 0, 1]] works.",
    ("self", 0, 0): "encoder has 1 layers of 2 heads",
    ("encoder", 1, 0): "encoder has 1 layers of 2 heads",
    ("decoder", 0, -1): "decoder has 2 layers of 2 heads; pruned_heads=[['decoder', 1, 1]] works.",
}
for head, has in NO_HEADS.items():
    start = f"pruned_heads=[{list(head)}]: must hold [kind, layer, head] with a kind of encoder, decoder, cross; {has}"
    REFUSED.append((partial(encoder_decoder, pruned_heads=[["cross", 0, 0], list(head)]), start))
for pair in ([2, 0], [0, 4], [-1, 0], [0], [0, 1, 1]):
    start = f"_heads=[{pair}]: must hold [layer, head] pairs of a model with 2 layers of"
    ablating = partial(attention, num_layers=2, ablated_heads=[[0, 0], pair])
    pruning = partial(transformer, pruned_heads=[pair])
    REFUSED += [(ablating, f"ablated{start} 4 heads"), (pruning, f"pruned{start} 2 heads; pruned_heads=[[1, 1]]")]


@pytest.mark.parametrize(("call", "sentence"), REFUSED, ids=[sentence.split(":")[0] for _, sentence in REFUSED])
def test_a_refusal_names_argument_value_reason_and_cure(call: Callable[[], object], sentence: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        call()
    assert str(caught.value).startswith(sentence)
    if caught.value.works and isinstance(call, partial):
        call(**{name.removeprefix("block.attention."): value for name, value in caught.value.works.items()})


def test_the_typed_options_of_attention_are_its_keyword_arguments():
    parameters = inspect.signature(BaseAttention).parameters.values()
    keywords = {each.name: each.annotation for each in parameters if each.kind is each.KEYWORD_ONLY}
    assert typing.get_type_hints(AttentionOptions) == keywords
