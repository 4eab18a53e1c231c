"""Every variant under every mask by every backend is exact in output and gradients, or is refused, as promised."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from nn.attention_cases import error
from nn.variants import NAMES, able, documents, make, mla, prepared, shaw, shaw_keys, small, tokens
from tinyformer.doctor.cases import MASKS, Shape, factory_of
from tinyformer.doctor.exactness import Problem
from tinyformer.doctor.variants import MAX_SEQ, combine
from tinyformer.doctor.verdict import Cell, check_exactness
from tinyformer.errors import ArgumentError
from tinyformer.nn import BACKENDS, LACKS, AttentionMask, Feature, Scoring, resolve_backend
from tinyformer.nn.kernels.case import features_of
from tinyformer.nn.kernels.observe import KernelObserver
from tinyformer.nn.score import AdditiveScore, ScoreMod, softcap

CPU, SMALL_SHAPE = torch.device("cpu"), Shape(11, 8, 3)
FUSED = ("sdpa", "flash", "flex")
EVERY_MASK = MASKS | {
    "documents+full": lambda rows, seq, device: AttentionMask(documents=documents(rows, seq)),
    "documents+padded": lambda rows, seq, device: AttentionMask(
        lengths=torch.tensor([seq, seq // 2, 0]), documents=documents(rows, seq)
    ),
}


def assert_exact(
    name: str, mask: str, dtype: torch.dtype, *backends: str, shape: Shape = SMALL_SHAPE, cross: bool = False
) -> None:
    """All backends that compute a variant are as exact as the dtype allows, and the promised ones do compute it."""
    variant = small(name) if shape is SMALL_SHAPE else combine(name)
    attention = prepared(lambda: factory_of(variant)(shape.d_model, 4))
    problem = Problem(attention, EVERY_MASK[mask], shape, CPU, cross)
    for backend in backends or ("eager", *FUSED):
        cell = check_exactness(problem, Cell(backend, name, mask, str(dtype)), dtype)
        assert cell.failure is None, cell
        promised = backend == "eager" or backend in able(name, training=False)
        assert (cell.status == "ran") >= promised, cell
        trains = backend == "eager" or backend in able(name)
        assert cell.has_backward >= trains, cell


def grid():
    """Every variant with every mask; one mask of each variant is fast, the others are nightly."""
    for number, name in enumerate(NAMES):
        for index, mask in enumerate(EVERY_MASK):
            is_fast = index == number % len(EVERY_MASK)
            yield pytest.param(name, mask, marks=[] if is_fast else [pytest.mark.nightly], id=f"{name}-{mask}")


@pytest.mark.parametrize(("name", "mask"), list(grid()))
def test_fp32_is_exact(name, mask):
    assert_exact(name, mask, torch.float32)


@pytest.mark.parametrize(("name", "mask"), list(grid()))
def test_bf16_is_as_exact_as_its_rounding(name, mask):
    assert_exact(name, mask, torch.bfloat16)


@pytest.mark.parametrize("name", [name for name in NAMES if "differential" in name])
def test_gradients_that_cancel_in_fp32_are_exact_in_float64(name):
    """λ and the sinks of differential attention only shift what is normalised next."""
    assert_exact(name, "causal+padded", torch.float64, "sdpa", "flash")


CROSS = ("gqa", "mla+rotary", "differential", "gqa+general", "gqa+additive", "gqa+softcap", "sink", "gqa+sink+window")


@pytest.mark.parametrize("mask", ["full", "causal", "padded", "causal+padded"])
@pytest.mark.parametrize("name", [*CROSS, "gate"])
def test_cross_attention_is_exact(name, mask):
    assert_exact(name, mask, torch.float32, cross=True)


@pytest.mark.parametrize("name", ["rotary", "alibi", "t5", "relative"])
@torch.no_grad()
def test_positions_have_no_effect_across_two_sequences(name):
    attention, plain, context = make(name), make("mha"), tokens(seq=14, seed=3)
    plain.load_state_dict(attention.state_dict(), strict=False)
    assert error(attention(tokens(), context=context), plain(tokens(), context=context)) <= 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("mask", ["causal", "causal+padded", "documents"])
@pytest.mark.parametrize("name", ["gqa+rotary", "mla+rotary", "differential", "gqa+alibi+sink+window", "t5"])
def test_a_realistic_size_is_exact(name, mask):
    assert_exact(name, mask, torch.float32, shape=Shape(MAX_SEQ, 32, 1))


# What is refused.


@pytest.mark.parametrize("name", NAMES)
def test_a_backend_is_refused_exactly_where_it_is_not_promised(name):
    """At construction or when it is resolved, and before a kernel runs."""
    for training in (True, False):
        for backend in FUSED:
            if backend in able(name, training):
                chosen = resolve_backend(make(name, backend), "cpu", torch.float32, AttentionMask(True), None, training)
                assert chosen is BACKENDS[backend]
                continue
            with (
                torch.set_grad_enabled(training),
                KernelObserver() as kernels,
                pytest.raises(ArgumentError) as caught,
            ):
                make(name, backend)(tokens())
            assert caught.value.path == ("backend",)
            assert caught.value.works == {"backend": "auto"}
            assert kernels.names == []
            if backend in able(name, training=False):
                with pytest.raises(ArgumentError):
                    resolve_backend(make(name, backend), "cpu", torch.float32, AttentionMask(causal=True))


@pytest.mark.parametrize("backend", ["flash", "flex"])
@torch.no_grad()
def test_dropout_is_refused_in_training_only(backend):
    attention = make("gqa", backend, dropout=0.1)
    with pytest.raises(ArgumentError, match=r"cannot compute attention dropout on CPU \(eager, sdpa can\)"):
        attention.train()(tokens())
    attention.eval()(tokens())


def test_relative_values_must_have_the_size_of_the_values():
    with pytest.raises(ArgumentError, match=r"position\.values=True: .*position\.values=False works"):
        mla(position=shaw)
    assert mla(position=shaw_keys)(tokens()).shape == (3, 11, 32)


def add_a_third(score, batch, head, q_idx, kv_idx):
    return score + (q_idx - kv_idx).abs() / 3 - head / 2


def call(feature: Feature) -> tuple[AttentionMask, Scoring, float, int]:
    """Mask, scoring, dropout and number of queries of a call that needs a feature and as few others as possible."""
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
@pytest.mark.parametrize("backend", FUSED)
def test_a_backend_lacks_on_cpu_exactly_what_the_table_says(backend, feature):
    torch.manual_seed(0)
    mask, scoring, dropout, q_seq = call(feature)
    trains = feature in (Feature.GRADIENT, Feature.LEARNED_BIAS)
    v_dim = 5 if feature == Feature.VALUE_DIM else 8
    needed = features_of(mask, scoring, q_seq, 9, dropout > 0, trains, v_dim != 8)
    assert feature in needed
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

    assert succeeds() == (not needed & LACKS[backend, "cpu"])


# Flex as it runs in production, compiled by torch, in a process without the type checker's wrappers.

SCRIPT = """
    import warnings
    import torch
    from nn.attention_cases import error
    from nn.variants import NAMES, able, make, mask_of, tokens

    warnings.simplefilter("ignore")  # that it is slow
    count = 0
    with torch.no_grad():
        for name in NAMES:
            for mask in ("padded", "causal+documents") if "flex" in able(name, training=False) else ():
                out, expected = (make(name, backend)(tokens(), mask_of(mask)) for backend in ("flex", "eager"))
                assert error(out, expected) <= 1e-5, (name, mask)
                count += 1
    print(count, "cells")
"""


@pytest.mark.nightly
def test_compiled_flex_equals_eager():
    here = Path(__file__).parent
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT)],
        env=os.environ | {"PYTHONPATH": f"{here.parents[1]}:{here.parent}"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    num_variants = sum("flex" in able(name, training=False) for name in NAMES)
    assert ended.stdout.strip() == f"{2 * num_variants} cells", ended.stderr
