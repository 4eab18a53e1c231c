"""The variants of `tinyformer doctor` at a size for tests, combinations of them, and what the tests of nn share."""

from collections import ChainMap
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from tinyformer.nn import (
    ALiBi,
    Attention,
    AttentionMask,
    BaseAttention,
    DifferentialAttention,
    Encoder,
    FeedForward,
    LatentAttention,
    LayerNorm,
    PreNormBlock,
    RMSNorm,
    RotaryPosition,
    ShawPosition,
    T5Position,
    TokenReadout,
    Transformer,
)
from tinyformer.nn.shift import CausalSum
from tinyformer.programs.doctor.exactness import factory_of
from tinyformer.programs.doctor.variants import VARIANTS, Variant

D_MODEL, NUM_HEADS = 32, 4
CAUSAL = AttentionMask(causal=True)
ON_CPU = ("eager", "sdpa", "flash", "flex")
"""The backends that compute on CPU; flex forward only."""

mha = partial(Attention, D_MODEL, NUM_HEADS)
gqa, mqa = (partial(mha, num_kv_heads=num_kv_heads) for num_kv_heads in (2, 1))
mla = partial(LatentAttention, D_MODEL, NUM_HEADS, kv_rank=12)
differential = partial(DifferentialAttention, D_MODEL, NUM_HEADS, 2)
rotary = partial(RotaryPosition, 64)
alibi = partial(ALiBi, NUM_HEADS)
t5 = partial(T5Position, NUM_HEADS, num_buckets=8, max_distance=10)
shaw = partial(ShawPosition, max_distance=3)
shaw_keys = partial(ShawPosition, max_distance=3, values=False)

NAMES = (
    *(name for name in VARIANTS if name not in ("cross", "dropout")),
    *("gqa+additive", "gqa+rotary+sink+gate+qk_norm", "gqa+relative", "gqa+softcap", "gqa+local_gaussian"),
    *("gqa+sink+dot", "gqa+sink+window", "gqa+sink+softcap", "gqa+sink+additive", "gqa+sink+t5", "mqa+t5"),
    *("gqa+alibi+window", "mqa+alibi+sink+window", "gqa+alibi+softcap", "gqa+general+alibi"),
    *("mla+rotary+qk_norm", "mla+alibi", "mla+relative_keys", "mla+sink+window", "mla+additive"),
    *("gqa+differential", "gqa+differential+rotary+qk_norm", "differential+t5", "gqa+differential+sink+window"),
    *("differential+general", "differential+softcap", "differential+local_gaussian"),
    *("gqa+v_head_dim+rotary+sink+gate", "mqa+v_head_dim+alibi", "mla+v_head_dim+rotary", "differential+v_head_dim"),
    *("gqa+rotary+projection_norm+bias", "mla+rotary+projection_norm+bias", "gqa+differential+projection_norm+bias"),
    *("gqa+shifted_keys+convolution+rotary+qk_norm", "gqa+differential+shifted_keys+convolution+v_head_dim"),
    *("gqa+general+rotary+qk_norm", "mla+general+rotary+qk_norm", "differential+general+rotary"),
    *("gqa+forget+rotary+sink", "gqa+forget+alibi+window", "mla+forget+ssmax", "gqa+differential+forget"),
    *("gqa+forget+softcap", "gqa+forget+additive"),
)
"""Variants and combinations, for which every law of attention is tested."""

PLACES = {"attention_convolution": True, "feed_forward_convolution": True}
CONVOLVED = {"kind": partial(PreNormBlock, **PLACES), "feed_forward": partial(FeedForward, convolution=True)}
"""The arguments of `network` with short convolutions in all places but attention."""

EITHER_WAY = [name for name in NAMES if "forget" not in name]
"""The variants that need no causal mask."""

SMALL = {
    "mla": {"kv_rank": 12},
    "t5": {"position": ("T5Position", t5.keywords | {"num_heads": NUM_HEADS})},
    "relative": {"position": ("ShawPosition", shaw.keywords)},
    "relative_keys": {"position": ("ShawPosition", shaw_keys.keywords)},
    "v_head_dim": {"v_head_dim": 12},
    "window": {"window": 4},
    "local_gaussian": {"window": 4, "local_gaussian": True},
    "softcap": {"softcap": 0.5},
}
"""Options that take effect in sequences of 11 tokens."""


def able(name: str, training: bool = True) -> tuple[str, ...]:
    """The fused backends that compute a variant on CPU, as the documentation promises."""
    parts = {*name.split("+")}
    if parts & {"additive", "relative", "local_gaussian"}:
        return ()
    if "softcap" in parts:
        return () if training else ("flex",)
    if not training:
        return ("sdpa", "flash", "flex")
    return ("sdpa",) if parts & {"t5", "relative_keys"} else ("sdpa", "flash")


def small(name: str) -> Variant:
    """The variant of a name, or of several joined by "+", with the options of `SMALL`."""
    parts = [VARIANTS[part] for part in name.split("+")]
    kind = next((part.attention for part in parts if part.attention != "Attention"), "Attention")
    options = [part.options for part in parts] + [SMALL.get(part.name, {}) for part in parts]
    return Variant(name, kind, dict(ChainMap(*reversed(options))))


def factory(name: str) -> Callable[..., BaseAttention]:
    """A variant of `D_MODEL` and `NUM_HEADS` as a factory."""
    return partial(factory_of(small(name)), D_MODEL, NUM_HEADS)


def make(name: str, backend: str = "eager", seed: int = 0, **options: object) -> BaseAttention:
    """A variant with random weights, sinks and norms."""
    return prepared(partial(factory(name), backend=backend, **options), seed)


def prepared(factory: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """The module of a factory, the same for the same seed, with random sinks and norms in place of zeros and ones."""
    torch.manual_seed(seed)
    module = factory()
    with torch.no_grad():
        for part in module.modules():
            if isinstance(part, RMSNorm):
                part.weight.add_(0.2 * torch.randn_like(part.weight))
            if isinstance(part, BaseAttention) and part.sink is not None:
                part.sink.normal_()
            if isinstance(part, CausalSum):
                for weight in part.parameters():
                    weight.normal_(std=0.5)
    return module


def network(
    attention: Callable[..., nn.Module],
    absolute: Callable[..., nn.Module] | None = None,
    kind: Callable[..., nn.Module] = PreNormBlock,
    feed_forward: Callable[..., nn.Module] = FeedForward,
    **options: object,
) -> Transformer:
    """A language model with two layers of an attention, with weights large enough to tell heads and positions apart."""

    def factory() -> Transformer:
        block = partial(kind, D_MODEL, attention, partial(feed_forward, D_MODEL), LayerNorm)
        encoder = Encoder(50, 2, D_MODEL, 16, block, LayerNorm, absolute)
        return Transformer(encoder, partial(TokenReadout, tied=False), init_std=0.3, **options)

    return prepared(factory).eval()


def tokens(batch: int = 3, seq: int = 11, seed: int = 1, d_model: int = D_MODEL) -> Tensor:
    return torch.randn(batch, seq, d_model, generator=torch.Generator().manual_seed(seed))


def documents(batch: int = 3, seq: int = 11) -> Tensor:
    """Rows of four, two and one documents."""
    cuts = [[3, 4, 9], [6], []]
    ids = torch.zeros(batch, seq, dtype=torch.long)
    for row in range(batch):
        for cut in cuts[row % 3]:
            ids[row, cut:] += 1
    return ids


def mask_of(kind: str, seq: int = 11) -> AttentionMask:
    """A mask for three rows, by a name such as "causal+padded"."""
    return AttentionMask(
        causal="causal" in kind,
        lengths=torch.tensor([seq, 4, 0]) if "padded" in kind else None,
        documents=documents(3, seq) if "documents" in kind else None,
    )


def projected(heads: Tensor, attention: BaseAttention) -> Tensor:
    """The output of an attention layer, given the outputs of its heads."""
    return attention.o_proj(heads.transpose(1, 2).flatten(-2))


def error(actual: Tensor, reference: Tensor) -> float:
    """max|a-b| / max|b|; max|a-b| where the reference is zero but for rounding."""
    assert actual.shape == reference.shape
    largest = reference.abs().max().item()
    return (actual.double() - reference.double()).abs().max().item() / (largest if largest > 1e-6 else 1.0)
