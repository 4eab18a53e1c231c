"""Scores, positions, and latent and differential attention: by hand, and by the formulas in float64."""

import importlib.metadata
import itertools
import math
import runpy
from functools import partial

import pytest
import torch

from nn.variants import CAUSAL, differential, error, make, prepared, projected, tokens
from tinyformer.nn import (
    ALiBi,
    Attention,
    AttentionMask,
    BaseAttention,
    DifferentialAttention,
    RMSNorm,
    RotaryPosition,
    ScaledDotScore,
    SinusoidalPosition,
)

X = tokens(2, 9).double()
ROW, COLUMN = torch.arange(9)[:, None], torch.arange(9)
"""The positions of queries and keys."""
BOTH = pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])


def parts(name: str, **options: object) -> tuple[BaseAttention, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A layer, and its queries, keys and values of each head before positions and scores."""
    layer, plain = make(name, **options).double(), make(name.split("+", maxsplit=1)[0]).double()
    plain.load_state_dict(layer.state_dict(), strict=False)
    q, k, v = plain.project(X)
    return layer, q, *(x.repeat_interleave(4 // x.shape[1], dim=1) for x in (k, v))


def softmax(scores: torch.Tensor, causal: bool = True) -> torch.Tensor:
    return scores.masked_fill((COLUMN > ROW) & causal, -torch.inf).softmax(-1)


def normed(x: torch.Tensor, norm: RMSNorm, eps: float = 1e-6) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * norm.weight


def turned(x: torch.Tensor) -> torch.Tensor:
    """Vectors turned by rotary angles, their halves the two coordinates (arXiv 2104.09864)."""
    half, seq = x.shape[-1] // 2, x.shape[-2]
    angles = torch.outer(torch.arange(seq), 10_000.0 ** (-torch.arange(half, dtype=x.dtype) / half))
    pairs = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([pairs.real, pairs.imag], dim=-1)


# Scores.


class Negative(ScaledDotScore):
    """A score function of the user's own: -qᵀk / √head_dim."""

    def forward(self, q: torch.Tensor) -> torch.Tensor:
        return -q


def additive(layer, q, k):
    return torch.einsum("bhijd,hd->bhij", torch.tanh(q.unsqueeze(3) + k.unsqueeze(2)), layer.score.weight[..., 0])


def alibi(layer, q, k):
    return -torch.tensor([0.25, 0.0625, 0.015625, 0.00390625]).view(4, 1, 1) * (ROW - COLUMN).abs()


CLIPPED = (COLUMN - ROW).clamp(-3, 3) + 3


def shaw(layer, q, k):
    """In latent attention, vectors join the decoupled part alone, which has 4 dimensions."""
    vectors = layer.position.keys.weight
    return torch.einsum("bhid,ijd->bhij", q[..., -vectors.shape[1] :], vectors[CLIPPED])


FORMULAS = {
    "scaled dot": ("gqa", {}, lambda layer, q, k: q @ k.mT / 8**0.5),
    "dot": ("gqa+dot", {}, lambda layer, q, k: q @ k.mT),
    "scale": ("gqa+rotary", {"scale": 0.3}, lambda layer, q, k: 0.3 * turned(q) @ turned(k).mT),
    "scale of zero": ("gqa", {"scale": 0}, lambda layer, q, k: 0 * q @ k.mT),
    "own class": ("gqa", {"score": Negative}, lambda layer, q, k: -q @ k.mT / 8**0.5),
    "additive": ("gqa+additive", {}, additive),
    "general": ("gqa+general", {}, lambda layer, q, k: q @ layer.score.weight @ k.mT),
    "rotary": ("gqa+general+rotary", {}, lambda layer, q, k: turned(q @ layer.score.weight) @ turned(k).mT),
    "alibi": ("gqa+alibi", {}, lambda layer, q, k: q @ k.mT / 8**0.5 + alibi(layer, q, k)),
    "alibi after the cap": (
        "gqa+alibi+softcap",
        {},
        lambda layer, q, k: 0.5 * torch.tanh(q @ k.mT / 8**0.5 / 0.5) + alibi(layer, q, k),
    ),
    "shaw": ("mha+relative_keys", {}, lambda layer, q, k: (q @ k.mT + shaw(layer, q, k)) / 8**0.5),
    "mla": ("mla", {}, lambda layer, q, k: q @ k.mT / 12**0.5),
    "mla with a scale": ("mla", {"scale": 1}, lambda layer, q, k: q @ k.mT),
    "shaw of mla": ("mla+relative_keys", {}, lambda layer, q, k: (q @ k.mT + shaw(layer, q, k)) / 12**0.5),
}


@BOTH
@pytest.mark.parametrize(("name", "options", "score"), FORMULAS.values(), ids=FORMULAS)
def test_every_score_is_its_formula(name, options, score, causal):
    layer, q, k, v = parts(name, **options)
    expected = projected(softmax(score(layer, q, k), causal) @ v, layer)
    # Rotary's tables are fp32.
    assert error(layer(X, AttentionMask(causal)), expected) <= (1e-6 if "rotary" in name else 1e-12)


@BOTH
def test_ssmax_multiplies_scores_by_the_logarithm_of_the_number_of_visible_keys(causal):
    layer, q, k, v = parts("gqa+ssmax")
    number = torch.arange(1, len(X[0]) + 1).double() if causal else torch.full((len(X[0]),), float(len(X[0])))
    scores = 0.43 * number.log().unsqueeze(-1) * (q @ k.mT) / 8**0.5
    assert error(layer(X, AttentionMask(causal)), projected(softmax(scores, causal) @ v, layer)) <= 1e-7


def test_forgetting_adds_the_logarithms_of_all_gates_from_the_key_to_the_query():
    layer, q, k, v = parts("gqa+forget")
    gates, decay = torch.sigmoid(layer.forget.proj(X)), torch.zeros(2, 4, 9, 9).double()
    for i, j in itertools.product(range(9), range(9)):
        decay[:, :, i, j] = sum(gates[:, between].log() for between in range(j + 1, i + 1))
    expected = projected(softmax(q @ k.mT / 8**0.5 + decay) @ v, layer)
    for backend in ("eager", "sdpa", "flash"):
        layer.backend = backend
        assert error(layer(X, CAUSAL), expected) <= 1e-12, backend


def test_forgetting_is_that_of_flash_linear_attention():
    """In fp32; its module is read by itself, as its package imports Triton."""
    files = importlib.metadata.files("fla-core")
    (path,) = (file.locate() for file in files if file.match("forgetting_attn/naive.py"))
    layer, x = make("gqa+forget", window=5).requires_grad_(), tokens(2, 9).requires_grad_()
    q, k, v = (each.transpose(1, 2) for each in layer.project(x))
    decay = torch.nn.functional.logsigmoid(layer.forget.proj(x))
    heads = runpy.run_path(str(path))["naive_forgetting_attn"](q, k, v, decay, window_size=5)
    outputs = layer(x, CAUSAL), layer.o_proj(heads.flatten(2))
    given = [x, layer.forget.proj.weight]
    gradients = [torch.autograd.grad(output, given, x.detach(), retain_graph=True) for output in outputs]
    torch.testing.assert_close(*zip(outputs, *zip(*gradients, strict=True), strict=True), atol=1e-5, rtol=1e-5)


@BOTH
def test_shaws_vectors_of_clipped_distances_join_the_values_too(causal):
    layer, q, k, v = parts("mha+relative")
    weights = softmax((q @ k.mT + shaw(layer, q, k)) / 8**0.5, causal)
    heads = weights @ v + torch.einsum("bhij,ijd->bhid", weights, layer.position.values.weight[CLIPPED])
    assert error(layer(X, AttentionMask(causal)), projected(heads, layer)) <= 1e-12


@pytest.mark.parametrize(("causal", "before", "after"), [(True, 3, 0), (False, 2, 1)], ids=["causal", "full"])
def test_the_local_gaussian_is_the_papers(causal, before, after):
    layer, q, k, v = parts("gqa+local_gaussian")
    share = torch.sigmoid(torch.tanh(q @ layer.gaussian.weight) @ layer.gaussian.vector)
    centre, sigma = ROW - before + share * (before + after), max(before, after) / 2
    outside = (ROW - before > COLUMN) | (ROW + after < COLUMN)
    weights = (q @ k.mT / 8**0.5).masked_fill(outside, -torch.inf).softmax(-1)
    heads = (weights * torch.exp(-((COLUMN - centre) ** 2) / (2 * sigma**2))) @ v
    assert error(layer(X, AttentionMask(causal)), projected(heads, layer)) <= 1e-12


def test_vectors_of_another_size_are_projected_as_if_zeros_followed():
    narrow, wide = (prepared(partial(Attention, 32, 4, 2, gate=True, input_dim=size)) for size in (12, None))
    cut = {name: wide.state_dict()[name][..., : part.shape[-1]] for name, part in narrow.state_dict().items()}
    narrow.load_state_dict(cut)
    x, context = tokens(2, 5)[..., :12], tokens(2, 7, seed=1)[..., :12]
    expected = wide(torch.nn.functional.pad(x, (0, 20)), context=torch.nn.functional.pad(context, (0, 20)))
    assert error(narrow(x, context=context), expected) <= 1e-6


@pytest.mark.parametrize("cross", [Attention, DifferentialAttention])
def test_local_p_over_the_source_is_a_loop_over_its_tokens(cross):
    """Luong et al. 2015, eq. 9 and 10: window and Gaussian are around p = S sigmoid(v tanh(W q)); D = 2."""
    layer = prepared(partial(cross, 32, 4, 2, window=5, local_gaussian=True)).double()
    plain = prepared(partial(cross, 32, 4, 2)).double()
    plain.load_state_dict(layer.state_dict(), strict=False)
    target, lengths = tokens(2, 4, seed=1).double(), torch.tensor([9, 3])
    given = {"context": X, "context_mask": AttentionMask(lengths=lengths)}
    q, logits = layer.inputs(target, **given).qkv.q, plain.maps_of_call(plain.inputs(target, **given)).logits
    expected = torch.zeros_like(logits)
    gaussians, n = (layer.gaussian.weight, layer.gaussian.vector), layer.num_softmaxes
    for b, h, t in itertools.product(range(2), range(4 * n), range(4)):
        weight, vector = (part[h // n] for part in gaussians)
        centre = lengths[b] * torch.sigmoid(torch.tanh(q[b, h, t] @ weight) @ vector)
        near = [s for s in range(lengths[b]) if abs(s - centre) <= 2]
        align = logits[b, h, t, near].softmax(-1)
        expected[b, h, t, near] = align * torch.exp(-((torch.tensor(near) - centre) ** 2) / 2)
    torch.testing.assert_close(layer.weights(target, **given), expected)
    fewer = layer.maps_of_call(layer.inputs(target, **given), torch.tensor([3]))
    torch.testing.assert_close(fewer.weights, expected[:, :, 3:])
    assert not torch.equal(layer(target, **given), plain(target, **given))


# Positions.


def test_sinusoidal_follows_the_papers_formula_and_scales_the_embedding():
    x, angles = torch.randn(2, 50, 6), torch.outer(torch.arange(50), 100.0 ** (-torch.arange(0, 6, 2) / 6))
    waves = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)
    torch.testing.assert_close(SinusoidalPosition(50, 6, 100.0)(x), math.sqrt(6) * x + waves, rtol=0, atol=4e-6)


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
    x = torch.eye(4)[:2].view(2, 1, 1, 4).expand(2, 1, 100_001, 4)
    far = RotaryPosition(100_001, 4, base=7.0).rotate(x)[:, 0, -1].diagonal()
    # An angle of 38,000 radians that passed through fp32 would be off by 2e-3.
    assert far.tolist() == pytest.approx([math.cos(100_000), math.cos(100_000 / math.sqrt(7))], abs=1e-6)


def test_alibis_slopes_are_those_of_the_paper():
    # Of 8 heads 1/2, 1/4, …, 1/256; of 12 heads those of 8, then every other one of 16, which are powers of 2^-½.
    twelve = [*(2.0**-power for power in range(1, 9)), 0.70710678, 0.35355339, 0.17677670, 0.08838835]
    assert ALiBi(12).slopes.tolist() == pytest.approx(twelve, rel=1e-6)


# Latent and differential attention, by hand.


@torch.no_grad()
@pytest.mark.parametrize("layer_index", [0, 3])
def test_differential_attention_is_the_papers_formula_with_qk_norm_in_each_half(layer_index):
    layer = prepared(lambda: differential(layer_index=layer_index, num_layers=4, qk_norm=True)).double()
    lambda_init = 0.8 - 0.6 * math.exp(-0.3 * layer_index)
    q1, k1, q2, k2 = layer.lambdas
    factor = torch.exp((q1 * k1).sum()) - torch.exp((q2 * k2).sum()) + lambda_init
    q, k, v = (
        (X @ proj.weight.T).unflatten(-1, (-1, 8)).transpose(1, 2)
        for proj in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
    first, second = (
        softmax(normed(q[..., half], layer.q_norm) @ normed(k[..., half], layer.k_norm).mT / 4**0.5)
        for half in (slice(0, 4), slice(4, 8))
    )
    heads = (1 - lambda_init) * normed((first - factor * second) @ v, layer.head_norm, 1e-5)
    assert error(layer(X, CAUSAL), projected(heads, layer)) <= 1e-12
