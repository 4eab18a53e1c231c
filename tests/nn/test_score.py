"""Scores, caps, sinks and local weights: by hand, and one pair at a time in NumPy."""

import math

import numpy as np
import pytest
import torch

from nn.variants import attend_by_loops, error, gqa, make, prepared, projected, tokens
from tinyformer.nn import BACKENDS, SCORES, Attention, AttentionMask, ScaledDotScore, Scoring, attention_weights
from tinyformer.nn.score import AdditiveScore, GeneralScore, softcap

CAUSAL = AttentionMask(causal=True)


class Negative(ScaledDotScore):
    """A score function of the user's own: -qᵀk / √head_dim."""

    def forward(self, q: torch.Tensor) -> torch.Tensor:
        return -q


def exact(name: str, **options) -> Attention:
    """A variant in float64, so that a formula in NumPy is met to its last digits."""
    return make(name, **options).double()


def assert_loops(
    attention: Attention,
    score,
    mask: AttentionMask = CAUSAL,
    projecting: Attention | None = None,
    tolerance: float = 1e-12,
    **rest,
) -> None:
    x = tokens(2, 9).double()
    may_attend = lambda i, j: bool(mask.dense(9, 9, torch.device("cpu"))[0, 0, i, j])  # noqa: E731
    heads = attend_by_loops(*(projecting or attention).project(x), score, may_attend=may_attend, **rest)
    assert error(attention(x, mask), projected(heads, attention)) <= tolerance


# Score functions.


def test_the_scores_of_one_query_and_two_keys_by_hand():
    q, k = torch.tensor([[[[1.0, 2.0]]]]), torch.tensor([[[[3.0, 1.0], [0.0, -1.0]]]])
    by_hand = {"scaled_dot": [5 / math.sqrt(2), -2 / math.sqrt(2)], "dot": [5.0, -2.0]}
    for name, scores in by_hand.items():
        score = SCORES[name](1, 2)
        weights = attention_weights(score(q), k, AttentionMask(), Scoring(score.scale, score.compare))
        torch.testing.assert_close(weights[0, 0, 0], torch.tensor(scores).softmax(0), msg=name)
    general, additive = GeneralScore(1, 2), AdditiveScore(1, 2)
    with torch.no_grad():
        # q W = (1, 2) [[0, 1], [2, 0]] = (4, 1): with (3, 1) it is 13, with (0, -1) it is -1.
        general.weight.copy_(torch.tensor([[[0.0, 1.0], [2.0, 0.0]]]))
        additive.weight.copy_(torch.tensor([[[0.5], [-1.0]]]))
    torch.testing.assert_close(general(q) @ k.mT * general.scale, torch.tensor([[[[13.0, -1.0]]]]))
    expected = [0.5 * math.tanh(4) - math.tanh(3), 0.5 * math.tanh(1) - math.tanh(1)]
    torch.testing.assert_close(additive.compare(q, k), torch.tensor([[[expected]]]))


@pytest.mark.parametrize(
    ("name", "options", "factor"),
    [
        *(("gqa+dot", {}, 1), ("gqa+rotary", {"scale": 0.3}, 0.3), ("gqa", {"scale": 0}, 0)),
        *(("mla", {"scale": 1}, 1), ("mla", {}, 12**-0.5)),
    ],
)
def test_the_factor_of_the_dot_product(name, options, factor):
    attention = exact(name, **options)
    assert_loops(attention, lambda h, q, k, i, j: factor * float(q @ k))


@pytest.mark.parametrize("name", ["gqa", "gqa+sink", "gqa+sink+window", "mla+rotary", "differential"])
def test_a_scale_of_zero_is_uniform_attention_on_every_backend(name):
    x, found = tokens(2).double(), {}
    for backend in ("eager", "sdpa", "flash"):
        attention, own = make(name, backend, scale=0.0).double(), x.clone().requires_grad_()
        out = attention(own, AttentionMask(True, torch.tensor([11, 6])))
        found[backend] = (
            out,
            *torch.autograd.grad(out.square().sum(), [own, *attention.parameters()], allow_unused=True),
        )
        weights = attention.weights(x, AttentionMask(True))
        assert (weights[0, :, 2, :3] == weights[0, :, 2, :1]).all()
    for values in zip(*found.values(), strict=True):
        for value in values[1:]:
            torch.testing.assert_close(value, values[0], rtol=1e-9, atol=1e-12)


def rotated(k: np.ndarray, distance: int) -> np.ndarray:
    """A key of 8 dimensions, rotated by the angles of a distance (arXiv 2104.09864)."""
    turned = (k[:4] + 1j * k[4:]) * np.exp(1j * distance * 10_000 ** (-np.arange(4) / 4))
    return np.concatenate([turned.real, turned.imag])


@pytest.mark.parametrize("position", ["", "+rotary"], ids=["none", "rotary"])
def test_general_has_a_matrix_for_each_head(position):
    attention, plain = exact(f"gqa+general{position}"), exact("gqa")
    plain.load_state_dict(attention.state_dict(), strict=False)
    matrices = attention.score.weight.detach().numpy()

    def score(h: int, q: np.ndarray, k: np.ndarray, i: int, j: int) -> float:
        return float(np.einsum("d,de,e->", q, matrices[h], rotated(k, j - i) if position else k))

    tolerance = 1e-6 if position else 1e-12  # rotary's tables are fp32
    assert_loops(attention, score, projecting=plain, tolerance=tolerance)


def test_additive_has_a_vector_for_each_head_and_no_scale():
    attention = exact("gqa+additive")
    vectors = attention.score.weight.detach().numpy()[..., 0]
    assert_loops(attention, lambda h, q, k, i, j: float(vectors[h] @ np.tanh(q + k)))


def test_a_score_of_the_users_own():
    attention = prepared(lambda: gqa(score=Negative))
    plain = prepared(gqa)
    with torch.no_grad():
        plain.q_proj.weight.neg_()
    assert error(attention(tokens(), CAUSAL), plain(tokens(), CAUSAL)) <= 1e-6


# What is done to scores.


def test_softcap_by_hand():
    scores = torch.tensor([-1000.0, -2.0, 0.0, 0.001, 2.0, 1000.0])
    capped = softcap(2.0).function(scores, *[torch.zeros(1, dtype=torch.long)] * 4)
    expected = [-2.0, -2 * math.tanh(1), 0.0, 2 * math.tanh(0.0005), 2 * math.tanh(1), 2.0]
    torch.testing.assert_close(capped, torch.tensor(expected))


def test_positions_are_added_after_the_cap():
    slopes = [0.25, 0.0625, 0.015625, 0.00390625]
    capped = lambda q, k: 0.5 * math.tanh(8**-0.5 * float(q @ k) / 0.5)  # noqa: E731
    assert_loops(exact("gqa+alibi+softcap"), lambda h, q, k, i, j: capped(q, k) - slopes[h] * abs(i - j))


# Sinks.


def test_a_sink_by_hand():
    # Scores 0 and ln 3 beside a sink of ln 4: 1/8, 3/8, and 4/8 to nobody.
    q, k = torch.tensor([[[[1.0]]]]), torch.tensor([[[[0.0], [math.log(3)]]]])
    v, scoring = torch.tensor([[[[8.0], [16.0]]]]), Scoring(1.0, sink=torch.tensor([math.log(4)]))
    torch.testing.assert_close(attention_weights(q, k, AttentionMask(), scoring), torch.tensor([[[[0.125, 0.375]]]]))
    for name in ("eager", "sdpa", "flash", "flex"):
        out = BACKENDS[name].compute(q, k, v, AttentionMask(), scoring)
        torch.testing.assert_close(out, torch.tensor([[[[7.0]]]]), msg=name)


# Local weights.


@pytest.mark.parametrize(("causal", "span"), [(True, (3, 0)), (False, (2, 1))], ids=["causal", "full"])
def test_the_local_gaussian_is_the_papers(causal, span):
    attention = exact("gqa+local_gaussian")
    matrices = attention.gaussian.weight.detach().numpy()
    vectors = attention.gaussian.vector.detach().numpy()[..., 0]
    before, after = span

    def reweigh(h: int, q: np.ndarray, i: int, j: int) -> float:
        share = 1 / (1 + math.exp(-float(vectors[h] @ np.tanh(q @ matrices[h]))))
        centre, sigma = i - before + share * (before + after), max(before, after) / 2
        return math.exp(-((j - centre) ** 2) / (2 * sigma**2))

    mask = AttentionMask(causal, window=4)
    assert_loops(attention, lambda h, q, k, i, j: 8**-0.5 * float(q @ k), mask, reweigh=reweigh)


# Windows over layers.


def test_a_pattern_of_windows_repeats_over_the_layers():
    layers = [gqa(window=[2, 3, None], local_gaussian=True, layer_index=i, num_layers=7) for i in range(7)]
    assert [layer.window for layer in layers] == [2, 3, None, 2, 3, None, 2]
    assert [layer.gaussian is None for layer in layers] == [False, False, True] * 2 + [False]
    assert [gqa(window=4, layer_index=i).window for i in range(3)] == [4, 4, 4]
    weights = layers[1].weights(tokens(), CAUSAL)
    assert ((weights > 0) == torch.ones(11, 11).tril().triu(-2).bool()).all()
