"""Scores, positions, and latent and differential attention: by hand, and one pair at a time in NumPy."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from nn.variants import (
    CAUSAL,
    attend_by_loops,
    differential,
    error,
    gqa,
    make,
    mla,
    prepared,
    projected,
    rotary,
    tokens,
)
from tinyformer.nn import (
    ALiBi,
    AttentionMask,
    BaseAttention,
    LatentAttention,
    LayerCache,
    LearnedPosition,
    RMSNorm,
    RotaryPosition,
    ScaledDotScore,
    SinusoidalPosition,
    T5Position,
)

# Every score by loops, which know neither of tinyformer nor of torch's kernels.


class Negative(ScaledDotScore):
    """A score function of the user's own: -qᵀk / √head_dim."""

    def forward(self, q: torch.Tensor) -> torch.Tensor:
        return -q


Score = Callable[[int, np.ndarray, np.ndarray, int, int], float]
"""The score of a head, a query and a key, given their positions."""


def numbers(parameter: torch.Tensor) -> np.ndarray:
    return parameter.detach().double().numpy()


def scaled(add: Callable[[int, int, int], float] = lambda h, i, j: 0.0, factor: float = 8**-0.5) -> Score:
    """A scaled dot product, and what a head adds for a pair of positions."""
    return lambda h, q, k, i, j: factor * float(q @ k) + add(h, i, j)


def rotated(k: np.ndarray, distance: int) -> np.ndarray:
    """A key of 8 dimensions, rotated by the angles of a distance (arXiv 2104.09864)."""
    turned = (k[:4] + 1j * k[4:]) * np.exp(1j * distance * 10_000 ** (-np.arange(4) / 4))
    return np.concatenate([turned.real, turned.imag])


def general(layer: BaseAttention, turn: Callable[[np.ndarray, int], np.ndarray] = lambda k, distance: k) -> Score:
    matrices = numbers(layer.score.weight)
    return lambda h, q, k, i, j: float(q @ matrices[h] @ turn(k, j - i))


def additive(layer: BaseAttention) -> Score:
    vectors = numbers(layer.score.weight)[..., 0]
    return lambda h, q, k, i, j: float(vectors[h] @ np.tanh(q + k))


SLOPES = [0.25, 0.0625, 0.015625, 0.00390625]


def alibi(h: int, i: int, j: int) -> float:
    return -SLOPES[h] * abs(i - j)


def capped(layer: BaseAttention) -> Score:
    """Positions are added after the cap."""
    return lambda h, q, k, i, j: 0.5 * math.tanh(8**-0.5 * float(q @ k) / 0.5) + alibi(h, i, j)


def clipped(i: int, j: int) -> int:
    return max(-3, min(3, j - i)) + 3


def shaw(layer: BaseAttention) -> Score:
    vectors = numbers(layer.position.keys.weight)
    return lambda h, q, k, i, j: 8**-0.5 * float(q @ (k + vectors[clipped(i, j)]))


def decoupled_shaw(layer: BaseAttention) -> Score:
    """In latent attention, vectors join the decoupled part alone."""
    vectors = numbers(layer.position.keys.weight)
    return lambda h, q, k, i, j: 12**-0.5 * float(q @ k + q[8:] @ vectors[clipped(i, j)])


FORMULAS: dict[str, tuple[str, dict[str, Any], Callable[[BaseAttention], Score]]] = {
    "dot": ("gqa+dot", {}, lambda layer: scaled(factor=1)),
    "scale": ("gqa+rotary", {"scale": 0.3}, lambda layer: scaled(factor=0.3)),
    "scale of zero": ("gqa", {"scale": 0}, lambda layer: scaled(factor=0)),
    "mla": ("mla", {}, lambda layer: scaled(factor=12**-0.5)),
    "mla with a scale": ("mla", {"scale": 1}, lambda layer: scaled(factor=1)),
    "own class": ("gqa", {"score": Negative}, lambda layer: scaled(factor=8**-0.5)),  # queries are negated
    "scaled dot": ("gqa", {}, lambda layer: scaled()),
    "additive": ("gqa+additive", {}, additive),
    "alibi": ("gqa+alibi", {}, lambda layer: scaled(alibi)),
    "alibi after the cap": ("gqa+alibi+softcap", {}, capped),
    "shaw": ("relative_keys", {}, shaw),
    "shaw of mla": ("mla+relative_keys", {}, decoupled_shaw),
}


def assert_loops(layer: BaseAttention, score: Score, causal: bool, **rest: Any) -> None:
    x, projecting = tokens(2, 9).double(), rest.pop("projecting", layer)
    tolerance = rest.pop("tolerance", 1e-12)
    heads = attend_by_loops(*projecting.project(x), score, may_attend=lambda i, j: not causal or j <= i, **rest)
    assert error(layer(x, AttentionMask(causal)), projected(heads, layer)) <= tolerance


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize(("name", "options", "score"), FORMULAS.values(), ids=FORMULAS)
def test_every_score_is_its_formula(name, options, score, causal):
    layer = make(name, **options).double()
    assert_loops(layer, score(layer), causal)


@pytest.mark.parametrize("position", ["", "+rotary"], ids=["none", "rotary"])
def test_general_has_a_matrix_for_each_head(position):
    layer, plain = make(f"gqa+general{position}").double(), make("gqa").double()
    plain.load_state_dict(layer.state_dict(), strict=False)
    tolerance = 1e-6 if position else 1e-12  # rotary's tables are fp32
    score = general(layer, rotated) if position else general(layer)
    assert_loops(layer, score, True, projecting=plain, tolerance=tolerance)


def test_t5_adds_its_bucket_of_each_head():
    layer = make("gqa+t5").double()
    # 8 buckets up to distance 10: 0, 1, 2, 3, then 4 + ⌊4 · ln(d / 4) / ln 2.5⌋.
    table, buckets = numbers(layer.position.embedding.weight), [0, 1, 2, 3, 4, 4, 5, 6, 7]
    assert_loops(layer, scaled(lambda h, i, j: table[buckets[i - j], h]), True)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_shaws_vectors_of_clipped_distances_join_the_values_too(causal):
    layer = make("relative").double()
    table = numbers(layer.position.values.weight)
    assert_loops(layer, shaw(layer), causal, value=lambda i, j: table[clipped(i, j)])


@pytest.mark.parametrize(("causal", "span"), [(True, (3, 0)), (False, (2, 1))], ids=["causal", "full"])
def test_the_local_gaussian_is_the_papers(causal, span):
    layer, (before, after) = make("gqa+local_gaussian").double(), span
    matrices, vectors = numbers(layer.gaussian.weight), numbers(layer.gaussian.vector)[..., 0]

    def reweigh(h: int, q: np.ndarray, i: int, j: int) -> float:
        share = 1 / (1 + math.exp(-float(vectors[h] @ np.tanh(q @ matrices[h]))))
        centre, sigma = i - before + share * (before + after), max(before, after) / 2
        return math.exp(-((j - centre) ** 2) / (2 * sigma**2))

    x = tokens(2, 9).double()
    heads = attend_by_loops(
        *layer.project(x),
        scaled(),
        may_attend=lambda i, j: i - before <= j <= i + after,
        reweigh=reweigh,
    )
    assert error(layer(x, AttentionMask(causal)), projected(heads, layer)) <= 1e-12


def test_a_pattern_of_windows_repeats_over_the_layers():
    layers = [gqa(window=[2, 3, None], local_gaussian=True, layer_index=i, num_layers=7) for i in range(7)]
    assert [layer.window for layer in layers] == [2, 3, None, 2, 3, None, 2]
    assert [layer.gaussian is None for layer in layers] == [False, False, True] * 2 + [False]
    assert [gqa(window=4, layer_index=i).window for i in range(3)] == [4, 4, 4]
    weights = layers[1].weights(tokens(), CAUSAL)
    assert ((weights > 0) == torch.ones(11, 11).tril().triu(-2).bool()).all()


# Positions.


@pytest.mark.parametrize("base", [10_000.0, 100.0])
def test_sinusoidal_follows_the_papers_formula_and_scales_the_embedding(base):
    x = torch.randn(2, 50, 6)
    added = SinusoidalPosition(50, 6, base)(x) - math.sqrt(6) * x
    for pos in (0, 1, 7, 49):
        angles = [pos / base ** (2 * i / 6) for i in range(3)]
        waves = torch.tensor([wave(angle) for angle in angles for wave in (math.sin, math.cos)])
        torch.testing.assert_close(added[:, pos], waves.expand(2, 6), rtol=0, atol=2e-6)


def test_learned_adds_one_vector_for_each_position():
    position, x = LearnedPosition(8, 4), torch.randn(2, 5, 4)
    torch.testing.assert_close(position(x, 2), x + position.embedding.weight[2:7])


def test_rotary_turns_each_pair_by_the_papers_angle():
    x = torch.randn(1, 1, 20, 6, generator=torch.Generator().manual_seed(0)).double()
    torch.testing.assert_close(RotaryPosition(32, 6).rotate(x), turned(x), rtol=0, atol=1e-6)


def test_rotary_keeps_the_dtype_and_turns_in_fp32():
    x = torch.randn(1, 1, 500, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    position = RotaryPosition(512, 32)
    out = position.rotate(x)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, position.rotate(x.float()).bfloat16())


@pytest.mark.parametrize("position", [SinusoidalPosition(300, 8), RotaryPosition(300, 8), ALiBi(6)])
def test_tables_of_a_network_in_bf16_stay_in_fp32(position):
    tables = {name: table.clone() for name, table in position.named_buffers()}
    network = torch.nn.Sequential(torch.nn.Linear(2, 2), position).bfloat16()
    assert network[0].weight.dtype == torch.bfloat16
    assert tables
    for name, table in position.named_buffers():
        assert torch.equal(table, tables[name])
    assert all(table.dtype == torch.float64 for table in position.double().buffers())


def test_rotary_angles_are_exact_at_far_positions():
    x = torch.tensor([1.0, 0.0, 0.0, 0.0]).expand(1, 1, 1, 4)
    position = RotaryPosition(100_001, 4, base=7.0)
    far = position.rotate(x.expand(1, 1, 100_001, 4))[0, 0, -1]
    assert far[0].item() == pytest.approx(math.cos(100_000), abs=1e-6)
    second = position.rotate(torch.tensor([0.0, 1.0, 0.0, 0.0]).expand(1, 1, 100_001, 4))[0, 0, -1]
    # An angle of 38,000 radians that passed through fp32 would be off by 2e-3.
    assert second[1].item() == pytest.approx(math.cos(100_000 / math.sqrt(7)), abs=1e-6)


def test_alibis_slopes_are_those_of_the_paper():
    # Of 8 heads 1/2, 1/4, …, 1/256; of 12 heads those of 8, then every other one of 16, which are powers of 2^-½.
    eight = [0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.0078125, 0.00390625]
    assert ALiBi(8).slopes.tolist() == eight
    twelve = [*eight, 0.70710678, 0.35355339, 0.17677670, 0.08838835]
    assert ALiBi(12).slopes.tolist() == pytest.approx(twelve, rel=1e-6)
    assert ALiBi(1).slopes.tolist() == [2**-8]
    assert ALiBi(4).slopes.tolist() == [0.25, 0.0625, 0.015625, 0.00390625]


BIDIRECTIONAL = {0: 0, -1: 1, -7: 7, -8: 8, -11: 8, -12: 9, -15: 9, -16: 10, -22: 10, -23: 11, -32: 12, -64: 14}
BIDIRECTIONAL |= {-127: 15, -128: 15, -5000: 15, 1: 17, 7: 23, 8: 24, 12: 25, 23: 27, 64: 30, 127: 31, 5000: 31}
ONE_WAY = {5: 0, 1: 0, 0: 0, -1: 1, -15: 15, -16: 16, -31: 21, -64: 26, -100: 30, -127: 31, -128: 31, -5000: 31}


@pytest.mark.parametrize(("causal", "known"), [(False, BIDIRECTIONAL), (True, ONE_WAY)], ids=["full", "causal"])
def test_t5s_buckets_at_known_distances(causal, known):
    # 8 + ⌊8 · ln(d / 8) / ln(128 / 8)⌋ with half of 32 buckets, 16 + ⌊16 · ln(d / 16) / ln(128 / 16)⌋ with all of them.
    buckets = T5Position(1).bucket(torch.tensor(list(known)), causal)
    assert dict(zip(known, buckets.tolist(), strict=True)) == known


# Latent and differential attention, with matrices in float64.


def causal_softmax(scores: torch.Tensor) -> torch.Tensor:
    hidden = torch.ones(scores.shape[-2:]).triu(1).bool()
    return scores.masked_fill(hidden, -torch.inf).softmax(-1)


def normed(x: torch.Tensor, norm: RMSNorm, eps: float = 1e-6) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * norm.weight


def turned(x: torch.Tensor) -> torch.Tensor:
    """Vectors turned by rotary angles, their halves the two coordinates."""
    half, seq = x.shape[-1] // 2, x.shape[-2]
    angles = torch.outer(torch.arange(seq), 10_000.0 ** (-torch.arange(half, dtype=x.dtype) / half))
    pairs = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([pairs.real, pairs.imag], dim=-1)


@torch.no_grad()
@pytest.mark.parametrize("q_rank", [None, 10], ids=["q", "q-latent"])
@pytest.mark.parametrize("turns", [False, True], ids=["plain", "rotary"])
def test_latent_attention_is_the_papers_formula(turns, q_rank):
    options = {"q_rank": q_rank, "rope_head_dim": 6, "position": rotary if turns else None}
    layer, x = prepared(lambda: mla(**options)).double(), tokens(2, 7).double()
    latent = normed(x @ layer.kv_down_proj.weight.T, layer.kv_latent_norm)
    source = normed(x @ layer.q_down_proj.weight.T, layer.q_latent_norm) if q_rank else x
    place = turned if turns else lambda x: x
    shared, heads = place(x @ layer.k_rope_proj.weight.T), []
    for h in range(4):
        query = source @ layer.q_proj.weight[14 * h : 14 * (h + 1)].T
        key, value = (latent @ proj.weight[8 * h : 8 * (h + 1)].T for proj in (layer.k_proj, layer.v_proj))
        scores = query[..., :8] @ key.mT + place(query[..., 8:]) @ shared.mT
        heads.append(causal_softmax(scores / math.sqrt(14)) @ value)
    expected = torch.cat(heads, dim=-1) @ layer.o_proj.weight.T
    assert error(layer(x, CAUSAL), expected) <= (1e-7 if turns else 1e-12)  # the angles' cosines are kept in fp32


def test_sizes_of_latent_attention_are_the_papers_unless_given():
    layer = LatentAttention(64, 4)
    assert (layer.v_head_dim, layer.position_dim, layer.kv_rank, layer.head_dim) == (16, 8, 64, 24)
    assert LatentAttention(12, 4, position=rotary).position_dim == 2  # half of 3 would be odd


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
@pytest.mark.parametrize("layer_index", [0, 3])
def test_differential_attention_is_the_papers_formula(layer_index):
    layer = prepared(lambda: differential(layer_index=layer_index, num_layers=4)).double()
    x, heads = tokens(2, 9).double(), []
    lambda_init = 0.8 - 0.6 * math.exp(-0.3 * layer_index)
    q1, k1, q2, k2 = layer.lambdas
    factor = torch.exp((q1 * k1).sum()) - torch.exp((q2 * k2).sum()) + lambda_init
    for h in range(4):
        q = x @ layer.q_proj.weight[8 * h : 8 * h + 8].T
        k, v = (x @ proj.weight[8 * (h // 2) : 8 * (h // 2) + 8].T for proj in (layer.k_proj, layer.v_proj))
        halves = (slice(0, 4), slice(4, 8))
        first, second = (causal_softmax(q[..., half] @ k[..., half].mT / math.sqrt(4)) for half in halves)
        heads.append((1 - lambda_init) * normed((first - factor * second) @ v, layer.head_norm, 1e-5))
    assert error(layer(x, CAUSAL), torch.cat(heads, dim=-1) @ layer.o_proj.weight.T) <= 1e-12


def test_qk_norm_is_that_of_each_half():
    layer = make("gqa+differential", qk_norm=True)
    q, _, _ = layer.project(tokens())
    raw = (tokens() @ layer.q_proj.weight.T).unflatten(-1, (8, 4)).transpose(1, 2)
    expected = raw / (raw.square().mean(-1, keepdim=True) + 1e-6).sqrt() * layer.q_norm.weight
    assert error(q, expected) <= 1e-6
