"""Latent attention against its formula, written out token by token."""

import math

import numpy as np
import pytest
import torch

from nn.variants import attend_by_loops, error, make, mla, prepared, projected, rotary, tokens
from tinyformer.nn import AttentionMask, LatentAttention, LayerCache
from tinyformer.nn.norm import RMSNorm

CAUSAL = AttentionMask(causal=True)


def normed(x: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight


def turned(x: torch.Tensor, position: int) -> torch.Tensor:
    """A vector turned by rotary angles, its halves the two coordinates."""
    half = len(x) // 2
    angles = torch.tensor([position / 10_000 ** (2 * i / len(x)) for i in range(half)], dtype=x.dtype)
    pairs = torch.complex(x[:half], x[half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([pairs.real, pairs.imag])


@torch.no_grad()
@pytest.mark.parametrize("q_rank", [None, 10], ids=["q", "q-latent"])
@pytest.mark.parametrize("turns", [False, True], ids=["plain", "rotary"])
def test_the_formula(turns, q_rank):
    options = {"q_rank": q_rank, "rope_head_dim": 6, "position": rotary if turns else None}
    module = prepared(lambda: mla(**options)).double()
    x, seq = tokens(2, 7).double(), 7
    out = torch.zeros(2, seq, 32, dtype=torch.float64)
    for b in range(2):
        latents = [normed(module.kv_down_proj.weight @ x[b, j], module.kv_latent_norm) for j in range(seq)]
        shared = [module.k_rope_proj.weight @ x[b, j] for j in range(seq)]
        for i in range(seq):
            source = x[b, i]
            if q_rank:
                source = normed(module.q_down_proj.weight @ source, module.q_latent_norm)
            heads = []
            for h in range(4):
                query = module.q_proj.weight[14 * h : 14 * (h + 1)] @ source
                content, place = query[:8], query[8:]
                scores = []
                for j in range(i + 1):
                    key = module.k_proj.weight[8 * h : 8 * (h + 1)] @ latents[j]
                    pair = (turned(place, i), turned(shared[j], j)) if turns else (place, shared[j])
                    scores.append((content @ key + pair[0] @ pair[1]) / math.sqrt(14))
                weights = torch.stack(scores).softmax(0)
                values = [module.v_proj.weight[8 * h : 8 * (h + 1)] @ latents[j] for j in range(i + 1)]
                heads.append(sum(w * value for w, value in zip(weights, values, strict=True)))
            out[b, i] = module.o_proj.weight @ torch.cat(heads)
    # The angles' cosines are kept in fp32.
    assert error(module(x, AttentionMask(causal=True)), out) <= (1e-8 if turns else 1e-12)


def test_sizes_are_the_papers_unless_given():
    attention = LatentAttention(64, 4)
    assert (attention.v_head_dim, attention.position_dim, attention.kv_rank, attention.head_dim) == (16, 8, 64, 24)
    q, k, v = attention.project(tokens(d_model=64))
    assert (q.shape, k.shape, v.shape) == ((3, 4, 11, 24), (3, 4, 11, 24), (3, 4, 11, 16))
    assert LatentAttention(12, 4, position=rotary).position_dim == 2  # half of 3 would be odd


@torch.no_grad()
def test_shaws_vectors_join_the_decoupled_part_alone():
    attention, x = make("mla+relative_keys").double(), tokens(2, 9).double()
    vectors = attention.position.keys.weight.numpy()

    def score(h: int, q: np.ndarray, k: np.ndarray, i: int, j: int) -> float:
        return 12**-0.5 * float(q @ k + q[8:] @ vectors[max(-3, min(3, j - i)) + 3])

    heads = attend_by_loops(*attention.project(x), score)
    assert error(attention(x), projected(heads, attention)) <= 1e-12


def test_queries_meet_the_latents_where_that_takes_fewer_multiply_adds():
    # kv_rank 12, heads of 8: n (100 * 4 + 96) against 100 * 96.
    assert [mla().latents_cost_less(queries, 100) for queries in (19, 20)] == [True, False]


@torch.no_grad()
def test_evaluation_on_the_latents_drops_no_weights():
    attention, cache, x = mla(dropout=0.5).eval(), LayerCache(), tokens(1, 40)
    attention(x[:, :-1], CAUSAL, cache=cache)
    again = cache.copy()
    assert torch.equal(attention(x[:, -1:], CAUSAL, cache=cache), attention(x[:, -1:], CAUSAL, cache=again))


@torch.no_grad()
def test_under_autocast_the_cache_is_in_lower_precision():
    attention, cache = mla().eval(), LayerCache()
    with torch.autocast("cpu", torch.bfloat16):
        attention(tokens(1, 20), CAUSAL, cache=cache)
    assert cache.tensors[0].dtype == torch.bfloat16


@torch.no_grad()
def test_tokens_of_two_sequences_are_not_turned():
    attention, x, y = mla(position=rotary), tokens(1, 5), tokens(1, 7)
    q, k, _ = attention.project(x, y)
    alone_q, alone_k, _ = attention.project(x[:, [3]], y[:, [4]])
    assert error(q[:, :, [3]], alone_q) <= 1e-6
    assert error(k[:, :, [4]], alone_k) <= 1e-6
