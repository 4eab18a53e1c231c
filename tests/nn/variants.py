"""Every variant of attention, small, and which backend computes it on CPU: a table written by hand."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
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

D_MODEL, NUM_HEADS = 32, 4


class Able(NamedTuple):
    """The backends that compute a variant on CPU beside eager and auto: with a backward pass, and without."""

    training: tuple[str, ...]
    evaluation: tuple[str, ...]


ANY = Able(("sdpa", "flash"), ("sdpa", "flash", "flex"))
LEARNED = Able(("sdpa",), ("sdpa", "flash", "flex"))
CAPPED = Able((), ("flex",))
BY_HAND = Able((), ())

mha = partial(Attention, D_MODEL, NUM_HEADS)
gqa = partial(Attention, D_MODEL, NUM_HEADS, 2)
mqa = partial(Attention, D_MODEL, NUM_HEADS, 1)
mla = partial(LatentAttention, D_MODEL, NUM_HEADS, kv_rank=12)
differential = partial(DifferentialAttention, D_MODEL, NUM_HEADS, 2)
rotary = partial(RotaryPosition, 64)
alibi = partial(ALiBi, NUM_HEADS)
t5 = partial(T5Position, NUM_HEADS, num_buckets=8, max_distance=10)
shaw = partial(ShawPosition, max_distance=3)
shaw_keys = partial(ShawPosition, max_distance=3, values=False)

VARIANTS: dict[str, tuple[Callable[..., BaseAttention], Able]] = {
    "mha": (mha, ANY),
    "gqa": (gqa, ANY),
    "mqa": (mqa, ANY),
    "mla": (mla, ANY),
    "mla-q_rank": (partial(mla, q_rank=10, rope_head_dim=6), ANY),
    "differential": (differential, ANY),
    "dot": (partial(gqa, score="dot"), ANY),
    "general": (partial(gqa, score="general"), ANY),
    "additive": (partial(gqa, score="additive"), BY_HAND),
    "rotary": (partial(gqa, position=rotary), ANY),
    "alibi": (partial(gqa, position=alibi), ANY),
    "t5": (partial(gqa, position=t5), LEARNED),
    "shaw": (partial(gqa, position=shaw), BY_HAND),
    "shaw-keys": (partial(gqa, position=shaw_keys), LEARNED),
    "window-odd": (partial(gqa, window=3), ANY),
    "window-even": (partial(gqa, window=4), ANY),
    "local_gaussian": (partial(gqa, window=4, local_gaussian=True), BY_HAND),
    "softcap": (partial(gqa, softcap=0.5), CAPPED),
    "sink": (partial(mha, sink=True), ANY),
    "gate": (partial(gqa, gate=True), ANY),
    "qk_norm": (partial(gqa, qk_norm=True), ANY),
    "ablated": (partial(gqa, ablated_heads=[[0, 1]]), ANY),
    "sink+gqa": (partial(gqa, sink=True), ANY),
    "sink+dot": (partial(gqa, sink=True, score="dot"), ANY),
    "sink+window": (partial(gqa, sink=True, window=3), ANY),
    "sink+softcap": (partial(gqa, sink=True, softcap=0.5), CAPPED),
    "sink+additive": (partial(gqa, sink=True, score="additive"), BY_HAND),
    "t5+sink": (partial(gqa, sink=True, position=t5), LEARNED),
    "t5+mqa": (partial(mqa, position=t5), LEARNED),
    "alibi+window": (partial(gqa, position=alibi, window=4), ANY),
    "alibi+sink+window": (partial(mqa, position=alibi, sink=True, window=4), ANY),
    "alibi+softcap": (partial(gqa, position=alibi, softcap=0.5), CAPPED),
    "general+alibi": (partial(gqa, score="general", position=alibi), ANY),
    "rotary+sink+gate+qk_norm": (partial(gqa, position=rotary, sink=True, gate=True, qk_norm=True), ANY),
    "mla+rotary": (partial(mla, position=rotary, qk_norm=True), ANY),
    "mla+alibi": (partial(mla, position=alibi), ANY),
    "mla+shaw-keys": (partial(mla, position=shaw_keys), LEARNED),
    "mla+sink+window": (partial(mla, sink=True, window=4), ANY),
    "mla+additive": (partial(mla, score="additive"), BY_HAND),
    "differential+rotary": (partial(differential, position=rotary, qk_norm=True), ANY),
    "differential+t5": (partial(differential, position=t5), LEARNED),
    "differential+sink+window": (partial(differential, sink=True, window=4), ANY),
    "differential+general": (partial(differential, score="general"), ANY),
    "differential+softcap": (partial(differential, softcap=0.5), CAPPED),
    "differential+local_gaussian": (partial(differential, window=4, local_gaussian=True), BY_HAND),
}
POSITIONED = ("rotary", "alibi", "t5", "shaw", "window", "local_gaussian")
"""What in a variant's name says that it tells places apart."""


def make(name: str, backend: str = "eager", seed: int = 0, **options: object) -> BaseAttention:
    """A variant with default weights, and with sinks and norms that say something."""
    return prepared(partial(VARIANTS[name][0], backend=backend, **options), seed)


def prepared(factory: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """What the factory makes, the same for the same seed; the parameters that begin alike are told apart."""
    torch.manual_seed(seed)
    module = factory()
    with torch.no_grad():
        for part in module.modules():
            if isinstance(part, RMSNorm):
                part.weight.add_(0.2 * torch.randn_like(part.weight))
            if isinstance(part, BaseAttention) and part.sink is not None:
                part.sink.normal_()
    return module


def network(
    attention: Callable[..., nn.Module],
    absolute: Callable[..., nn.Module] | None = None,
    kind: type[nn.Module] = PreNormBlock,
    **options: object,
) -> Transformer:
    """A language model with two layers of an attention, whose weights tell heads and places apart."""

    def factory() -> Transformer:
        block = partial(kind, D_MODEL, attention, partial(FeedForward, D_MODEL), LayerNorm)
        encoder = Encoder(50, 2, D_MODEL, 16, block, LayerNorm, absolute)
        return Transformer(encoder, partial(TokenReadout, tied=False), init_std=0.3, **options)

    return prepared(factory).eval()


def tokens(batch: int = 3, seq: int = 11, seed: int = 1, d_model: int = D_MODEL) -> Tensor:
    return torch.randn(batch, seq, d_model, generator=torch.Generator().manual_seed(seed))


def documents(batch: int = 3, seq: int = 11) -> Tensor:
    """Rows of several documents, each row cut elsewhere; the last one holds one."""
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


def attend_by_loops(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score: Callable[[int, np.ndarray, np.ndarray, int, int], float],
    *,
    sees: Callable[[int, int], bool] = lambda i, j: True,
    sink: np.ndarray | None = None,
    reweigh: Callable[[int, np.ndarray, int, int], float] | None = None,
    value: Callable[[int, int], np.ndarray] | None = None,
) -> Tensor:
    """Attention one pair at a time, with nothing of tinyformer's: `score(head, query, key, i, j)`."""
    queries, keys, values = (x.detach().double().numpy() for x in (q, k, v))
    batch, num_heads, seq = queries.shape[:3]
    group, k_seq = num_heads // keys.shape[1], keys.shape[2]
    out = np.zeros((*queries.shape[:3], values.shape[-1]))
    for b in range(batch):
        for h in range(num_heads):
            for i in range(seq):
                seen = [j for j in range(k_seq) if sees(i, j)]
                weights = {j: np.exp(score(h, queries[b, h, i], keys[b, h // group, j], i, j)) for j in seen}
                total = sum(weights.values()) + (0.0 if sink is None else np.exp(sink[h]))
                for j in seen:
                    weight = weights[j] / total
                    if reweigh is not None:
                        weight *= reweigh(h, queries[b, h, i], i, j)
                    mixed = values[b, h // group, j] + (0.0 if value is None else value(i, j))
                    out[b, h, i] += weight * mixed
    return torch.from_numpy(out)


def projected(heads: Tensor, attention: BaseAttention) -> Tensor:
    """The output of an attention whose heads are these."""
    return attention.o_proj(heads.transpose(1, 2).flatten(-2))
