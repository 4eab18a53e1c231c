"""Every variant under every mask on every backend: equal to eager, or refused with one that can."""

import os
import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path

import pytest
import torch
from attention_cases import AttentionKernels, assert_within_bf16, error
from variants import VARIANTS, Able, documents, make, mask_of, mla, prepared, tokens

from tinyformer.nn import (
    BACKENDS,
    LACKS,
    ALiBi,
    Attention,
    AttentionMask,
    BaseAttention,
    DifferentialAttention,
    Feature,
    LatentAttention,
    RotaryPosition,
    Scoring,
    ShawPosition,
    T5Position,
    resolve_backend,
)
from tinyformer.nn.kernels.case import features_of
from tinyformer.nn.score import AdditiveScore, ScoreMod, softcap

MASKS = ("full", "causal", "padded", "causal+padded", "documents", "causal+documents", "padded+documents")
SINGLE = [name for name in VARIANTS if "+" not in name]
CELLS = [(name, mask) for name in SINGLE for mask in MASKS[:5]]
CELLS += [(name, mask) for name in VARIANTS if "+" in name for mask in ("full", "causal+padded", "causal+documents")]
CELLS += [(name, mask) for name in ("gqa", "mla", "differential") for mask in MASKS[5:]]
NAMES = pytest.mark.parametrize("name", VARIANTS)


def gradients(
    attention: BaseAttention,
    x: torch.Tensor,
    mask: AttentionMask,
    context: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """Output and gradients of all inputs and parameters under a random upstream gradient."""
    leaves = {"x": x.clone().requires_grad_()}
    if context is None:
        out = attention(leaves["x"], mask)
    else:
        leaves["context"] = context.clone().requires_grad_()
        out = attention(leaves["x"], context=leaves["context"], context_mask=mask)
    leaves |= dict(attention.named_parameters())
    upstream = tokens(*out.shape[:2], seed=6, d_model=out.shape[-1]).to(out.dtype)
    grads = torch.autograd.grad(out, list(leaves.values()), upstream, allow_unused=True)
    return {"out": out.detach()} | {n: g for n, g in zip(leaves, grads, strict=True) if g is not None}


def is_sum_that_cancels(name: str, key: str) -> bool:
    """Whether a gradient is a sum over all tokens of terms of either sign that outweigh it a hundredfold.

    λ and the sinks of differential attention only shift what is normalised next. In fp32 such a sum says nothing, so
    it is compared in float64.
    """
    return name.startswith("differential") and ("lambdas" in key or key == "sink")


def assert_equal_to_eager(name: str, mask: AttentionMask, context: torch.Tensor | None = None) -> None:
    x, able = tokens(), VARIANTS[name][1]
    expected = gradients(make(name), x, mask, context)
    for backend in able.training or ("auto",):
        actual = gradients(make(name, backend), x, mask, context)
        assert actual.keys() == expected.keys()
        for key in expected:
            assert is_sum_that_cancels(name, key) or error(actual[key], expected[key]) <= 1e-5, (backend, key)
    if any(is_sum_that_cancels(name, key) for key in expected):
        inputs = (x.double(), mask, None if context is None else context.double())
        exact = gradients(make(name).double(), *inputs)
        for backend in able.training:
            actual = gradients(make(name, backend).double(), *inputs)
            for key in exact:
                assert error(actual[key], exact[key]) <= 1e-10, (backend, key)
    with torch.no_grad():
        for backend in able.evaluation or ("auto",):
            given = {"mask": mask} if context is None else {"context": context, "context_mask": mask}
            assert error(make(name, backend)(x, **given), expected["out"]) <= 1e-5, backend


@pytest.mark.parametrize(("name", "mask"), CELLS)
def test_every_backend_that_can_is_eager(name, mask):
    assert_equal_to_eager(name, mask_of(mask))


@pytest.mark.parametrize("mask", ["full", "causal", "padded", "causal+padded"])
@pytest.mark.parametrize(
    "name",
    ["gqa", "mla+rotary", "differential", "general", "additive", "softcap", "sink+gqa", "sink+window", "gate", "shaw"],
)
def test_every_backend_that_can_is_eager_across_sequences(name, mask):
    context = tokens(seq=14, seed=3)
    described = AttentionMask("causal" in mask, torch.tensor([14, 5, 0]) if "padded" in mask else None)
    if VARIANTS[name][1].training == () and name == "shaw":  # positions are for self-attention only, so any backend can
        assert "position.values.weight" not in gradients(make(name), tokens(), described, context)
        return
    assert_equal_to_eager(name, described, context)


@pytest.mark.parametrize("mask", ["full", "causal", "causal+padded", "documents"])
@pytest.mark.parametrize(
    "name",
    ["gqa", "mla+rotary", "differential+rotary", "general", "alibi", "t5", "shaw-keys", "window-even", "sink+gqa"],
)
def test_bf16_is_eager_to_its_rounding(name, mask):
    x, described = tokens().bfloat16(), mask_of(mask)

    def of(backend: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        attention = make(name, backend).bfloat16().to(dtype)  # the same parameters in every dtype
        return gradients(attention, x.to(dtype), described)

    exact, eager = of("eager", torch.float64), of("eager", torch.bfloat16)
    for backend in ("auto", *VARIANTS[name][1].training):
        actual = of(backend, torch.bfloat16)
        for key in exact:
            if not is_sum_that_cancels(name, key):
                assert_within_bf16(actual[key], eager[key], exact[key], f"{backend}, {key}")
    with torch.no_grad():
        for backend in VARIANTS[name][1].evaluation:
            out = make(name, backend).bfloat16()(x, described)
            assert_within_bf16(out, eager["out"], exact["out"], backend)


REALISTIC = {
    "gqa+rotary": partial(Attention, 128, 2, 1, position=partial(RotaryPosition, 1024)),
    "mla+rotary": partial(LatentAttention, 128, 2, position=partial(RotaryPosition, 1024)),
    "differential": partial(DifferentialAttention, 128, 2),
    "alibi+sink": partial(Attention, 64, 1, sink=True, position=partial(ALiBi, 1)),
    "sink+window": partial(Attention, 128, 2, 1, sink=True, window=128),
    "t5": partial(Attention, 64, 1, position=partial(T5Position, 1)),
    "shaw-keys": partial(Attention, 64, 1, position=partial(ShawPosition, values=False)),
}


@pytest.mark.slow
@pytest.mark.parametrize("mask", ["causal", "causal+padded", "causal+documents"])
@pytest.mark.parametrize("name", REALISTIC)
def test_every_backend_is_eager_at_a_realistic_size(name, mask):
    factory, ids = REALISTIC[name], torch.arange(1024).ge(700).long().expand(2, -1)
    described = AttentionMask(
        True,
        torch.tensor([1024, 300]) if "padded" in mask else None,
        ids if "documents" in mask else None,
    )
    x = tokens(2, 1024, d_model=64 if factory.args[0] == 64 else 128)
    expected = gradients(prepared(partial(factory, backend="eager")), x, described)
    for backend in ("auto", "sdpa") if name in ("t5", "shaw-keys") else ("auto", "sdpa", "flash"):
        actual = gradients(prepared(partial(factory, backend=backend)), x, described)
        for key in expected:
            assert is_sum_that_cancels(name, key) or error(actual[key], expected[key]) <= 1e-5, (backend, key)
    with torch.no_grad():
        for backend in ("flash", "flex"):
            out = prepared(partial(factory, backend=backend))(x, described)
            assert error(out, expected["out"]) <= 1e-5, backend


# What is refused.


def named(able: tuple[str, ...]) -> str:
    """The end of a refusal."""
    return f" ({', '.join(['eager', *able])} can); backend='auto' works."


def assert_refused(name: str, backend: str, training: bool, able: tuple[str, ...]) -> None:
    """At construction, or when it is resolved and at the first step: with the key, and with all that can."""
    with pytest.raises(ValueError, match=rf"^backend='{backend}': ") as caught:
        resolve_backend(make(name, backend), "cpu", torch.float32, AttentionMask(causal=True), training=training)
    assert str(caught.value).endswith(named(able))
    possible = set(VARIANTS[name][1].evaluation)
    if backend in possible:
        attention = make(name, backend)
        with (
            torch.set_grad_enabled(training),
            AttentionKernels() as kernels,
            pytest.raises(ValueError, match=rf"^backend='{backend}': ") as caught,
        ):
            attention(tokens())
        assert str(caught.value).endswith(named(able))
        assert kernels.names == []


@NAMES
def test_what_cannot_train_on_cpu_is_refused_with_one_that_can(name):
    able: Able = VARIANTS[name][1]
    for backend in {"sdpa", "flash", "flex"} - set(able.training):
        # A variant that no device computes is refused when it is made, before anybody knows whether it trains.
        others = able.training if backend in able.evaluation else able.evaluation
        assert_refused(name, backend, True, others)
    for backend in able.training:
        chosen = resolve_backend(make(name, backend), "cpu", torch.float32, AttentionMask(causal=True))
        assert chosen is BACKENDS[backend]


@NAMES
def test_what_cannot_evaluate_on_cpu_is_refused_with_one_that_can(name):
    able: Able = VARIANTS[name][1]
    for backend in {"sdpa", "flash", "flex"} - set(able.evaluation):
        assert_refused(name, backend, False, able.evaluation)
    for backend in able.evaluation:
        chosen = resolve_backend(make(name, backend), "cpu", torch.float32, AttentionMask(causal=True), training=False)
        assert chosen is BACKENDS[backend]


@pytest.mark.parametrize("backend", ["flash", "flex"])
def test_dropout_is_refused_in_training_and_not_after(backend):
    attention = make("gqa", backend, dropout=0.1)
    with torch.no_grad(), pytest.raises(ValueError, match=r"cannot compute attention dropout on CPU.*eager, sdpa"):
        attention.train()(tokens())
    with torch.no_grad():
        attention.eval()(tokens())


def test_values_of_shaw_need_values_of_its_size():
    with pytest.raises(ValueError, match=r"^position\.values=True: .*; position\.values=False works"):
        mla(position=partial(ShawPosition, max_distance=3))
    assert mla(position=partial(ShawPosition, values=False))(tokens()).shape == (3, 11, 32)


# The table of what a backend lacks is what happens.


def add_a_third(score, batch, head, q_idx, kv_idx):
    return score + (q_idx - kv_idx).abs() / 3 - head / 2


def call(feature: Feature) -> tuple[AttentionMask, Scoring, float, int]:
    """Mask, scoring, dropout and number of queries of a call that asks for the feature, and for as little else."""
    lengths, ids, sink = torch.tensor([9, 4, 0]), documents(3, 9), torch.tensor([0.5, -1.0, 0.0, 2.0])
    bias = torch.linspace(-1, 1, 9).requires_grad_()
    score = AdditiveScore(4, 8)
    masks = {
        Feature.CAUSAL: AttentionMask(causal=True),
        Feature.PADDING: AttentionMask(lengths=lengths),
        Feature.CAUSAL_PADDING: AttentionMask(True, lengths=lengths),
        Feature.DOCUMENTS: AttentionMask(documents=ids),
        Feature.PADDED_DOCUMENTS: AttentionMask(documents=ids, lengths=lengths),
        Feature.WINDOW: AttentionMask(window=3),
        Feature.UNEVEN: AttentionMask(causal=True),
        Feature.MASKED_SINK: AttentionMask(True, lengths, ids, 4),
    }
    scorings = {
        Feature.BIAS: {"mods": (ScoreMod(add_a_third, additive=True),)},
        Feature.LEARNED_BIAS: {
            "mods": (ScoreMod(lambda s, b, h, i, j: s + bias[(i - j).abs()], additive=True, learned=True),)
        },
        Feature.SCORE_MOD: {"mods": (softcap(0.5), ScoreMod(add_a_third, additive=True))},
        Feature.COMPARE: {"compare": score.compare},
        Feature.SINK: {"sink": sink},
        Feature.MASKED_SINK: {"sink": sink},
        Feature.WEIGHTS: {"reweigh": lambda weights, grid: weights.square()},
    }
    mask = masks.get(feature, AttentionMask())
    dropout = 0.5 if feature == Feature.DROPOUT else 0.0
    return mask, Scoring(0.3, **scorings.get(feature, {})), dropout, 5 if feature == Feature.UNEVEN else 9


@pytest.mark.parametrize("feature", Feature)
@pytest.mark.parametrize("backend", ["sdpa", "flash", "flex"])
def test_a_backend_lacks_on_cpu_what_the_table_says_and_nothing_else(backend, feature):
    torch.manual_seed(0)
    mask, scoring, dropout, q_seq = call(feature)
    trains = feature in (Feature.GRADIENT, Feature.LEARNED_BIAS)
    v_dim = 5 if feature == Feature.VALUE_DIM else 8
    asked = features_of(mask, scoring, q_seq, 9, dropout > 0, trains, v_dim != 8)
    assert feature in asked
    q, k, v = torch.randn(3, 4, q_seq, 8), torch.randn(3, 2, 9, 8), torch.randn(3, 2, 9, v_dim)
    q.requires_grad_(trains)

    def compute(name: str, dropout: float = dropout) -> list[torch.Tensor]:
        with torch.set_grad_enabled(trains):
            out = BACKENDS[name].compute(q, k, v, mask, scoring, dropout)
            return [out.detach(), torch.autograd.grad(out.square().sum(), q)[0]] if trains else [out.detach()]

    def succeeds() -> bool:
        try:
            actual = compute(backend)
        except (RuntimeError, NotImplementedError):
            return False
        if feature == Feature.DROPOUT:
            return not torch.equal(actual[0], compute(backend, 0.0)[0])
        return all(error(ours, theirs) <= 1e-5 for ours, theirs in zip(actual, compute("eager"), strict=True))

    assert succeeds() == (not asked & LACKS[backend, "cpu"])


# Flex as it is run, through torch's compiler.

SCRIPT = """
    import warnings
    import torch
    from attention_cases import error
    from variants import VARIANTS, make, mask_of, tokens

    warnings.simplefilter("ignore")  # that it is slow
    count = 0
    with torch.no_grad():
        for name, (_, able) in VARIANTS.items():
            for mask in ("padded", "causal+documents") if "flex" in able.evaluation else ():
                out, expected = (make(name, backend)(tokens(), mask_of(mask)) for backend in ("flex", "eager"))
                assert error(out, expected) <= 1e-5, (name, mask)
                count += 1
    print(count, "cells")
"""


@pytest.mark.slow
def test_flex_is_eager_through_torchs_compiler():
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT)],
        env=os.environ | {"PYTHONPATH": f"{here.parents[1]}:{here}"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    able = sum("flex" in able.evaluation for _, able in VARIANTS.values())
    assert done.stdout.strip() == f"{2 * able} cells", done.stderr
