"""The choice of a backend by auto, what each refuses on CUDA, the features of a mask, and the kernel that runs."""

from dataclasses import replace

import pytest
import torch

from nn.variants import CAUSAL, documents, gqa, mha, t5, tokens
from tinyformer.errors import ArgumentError
from tinyformer.nn import (
    BACKENDS,
    AttentionMask,
    Feature,
    KernelRequirements,
    Scoring,
    kernel_of_layer,
    resolve_backend,
    select_backend,
)
from tinyformer.nn.kernels import choose
from tinyformer.nn.kernels.choose import features_of
from tinyformer.nn.maps import KernelObserver


def case(
    device: str, dtype: torch.dtype, head_dim: int, *features: Feature, seq: int | None = None
) -> KernelRequirements:
    return KernelRequirements(device, dtype, head_dim, frozenset(features), seq)


# Auto.


FP32, BF16 = torch.float32, torch.bfloat16
CAUSALLY = Feature.CAUSAL
LENGTHS = {  # up to which length eager is at least as fast, measured; 0 is never, None is always
    "fp32": (FP32, 64, (CAUSALLY,), 0),
    "fp32-dropout": (FP32, 64, (CAUSALLY, Feature.DROPOUT), 96),
    "fp32-sink": (FP32, 64, (CAUSALLY, Feature.SINK), 192),
    "fp32-learned-bias": (FP32, 64, (CAUSALLY, Feature.BIAS, Feature.LEARNED_BIAS), None),
    "fp32-additive": (FP32, 64, (CAUSALLY, Feature.COMPARE), None),
    "bf16": (BF16, 64, (CAUSALLY,), 767),
    "bf16-narrow": (BF16, 32, (CAUSALLY,), 160),
    "bf16-narrow-padded": (BF16, 32, (CAUSALLY, Feature.PADDING), 96),
    "bf16-documents": (BF16, 64, (CAUSALLY, Feature.DOCUMENTS), None),
    "bf16-dropout": (BF16, 64, (CAUSALLY, Feature.DROPOUT), None),
}


@pytest.mark.parametrize(("dtype", "head_dim", "features", "longest"), LENGTHS.values(), ids=LENGTHS)
def test_auto_on_cpu_is_eager_up_to_the_measured_length(native_bf16, dtype, head_dim, features, longest):
    def chosen(seq: int | None) -> str:
        asked = case("cpu", dtype, head_dim, *features, seq=seq)
        backend = select_backend("auto", asked)
        assert backend.refusal(asked) is None
        return backend.name

    assert chosen(None) == ("eager" if longest is None else "sdpa")
    assert chosen(longest or 1) == ("sdpa" if longest == 0 else "eager")
    assert chosen((longest or 0) + 1) == ("eager" if longest is None else "sdpa")


@pytest.mark.parametrize(
    ("features", "seq", "chosen"), [((), 128, "sdpa"), ((), 129, "eager"), ((Feature.PADDING,), 1, "eager")]
)
def test_auto_takes_sdpa_for_a_single_query_in_bf16_up_to_the_measured_length(native_bf16, features, seq, chosen):
    asked = case("cpu", BF16, 64, *features, seq=seq)._replace(has_one_query=True)
    assert select_backend("auto", asked).name == chosen


# What each backend computes on other devices, by hand, and what auto chooses; CPU is tested in `test_backends`.

CASES = {
    "wide": (case("cuda", BF16, 256), "sdpa flash flex", "flash"),
    "too wide": (case("cuda", BF16, 512), "sdpa flex", "sdpa"),
    "fp32": (case("cuda", FP32, 64), "sdpa flex", "sdpa"),
    "mps": (case("mps", FP32, 64), "sdpa", "sdpa"),
    "cpu": (case("cpu", FP32, 64, CAUSALLY, Feature.DROPOUT, seq=97), "sdpa", "sdpa"),
    "padding": (case("cuda", BF16, 64, Feature.PADDING), "sdpa flash flex", "flash"),
    "causal-padding": (case("cuda", BF16, 64, Feature.PADDING, Feature.CAUSAL_PADDING), "sdpa flex", "sdpa"),
    "padded-documents": (case("cuda", BF16, 64, Feature.DOCUMENTS, Feature.PADDED_DOCUMENTS), "sdpa flex", "flex"),
    "pattern": (case("cuda", BF16, 64, Feature.PATTERN), "sdpa flex", "sdpa"),
    "cached": (case("cuda", BF16, 64, Feature.UNEVEN), "sdpa flex", "sdpa"),
    "dropout": (case("cuda", BF16, 64, Feature.DROPOUT), "sdpa flash", "flash"),
    "dropout-window": (case("cuda", BF16, 64, Feature.DROPOUT, Feature.WINDOW), "sdpa", "sdpa"),
    "alibi": (case("cuda", BF16, 64, Feature.BIAS), "sdpa flex", "flex"),
    "softcap": (case("cuda", BF16, 64, Feature.SCORE_MOD), "flex", "flex"),
    "shaw-values": (case("cuda", BF16, 64, Feature.BIAS, Feature.WEIGHTS), "", "eager"),
    "sink": (case("cuda", BF16, 64, Feature.SINK), "sdpa flash flex", "flash"),
    "sink-window": (case("cuda", BF16, 64, Feature.SINK, Feature.MASKED_SINK), "sdpa flex", "sdpa"),
}


@pytest.mark.parametrize(("asked", "able", "auto"), CASES.values(), ids=CASES)
def test_what_is_computed_and_what_is_refused_with_one_that_can(asked, able, auto):
    for name in ("sdpa", "flash", "flex"):
        if name in able.split():
            assert select_backend(name, asked) is BACKENDS[name]
            continue
        with pytest.raises(ArgumentError, match=rf"^backend='{name}': ") as caught:
            select_backend(name, asked)
        assert str(caught.value).endswith(f" ({', '.join(['eager', *able.split()])} can); backend='auto' works.")
    assert select_backend("auto", asked) is BACKENDS[auto]


@pytest.mark.parametrize(("name", "package"), [("fa3", "flash_attn_interface"), ("fa4", "flash_attn.cute")])
def test_newer_flash_needs_cuda_and_its_package(name, package, monkeypatch):
    windowed, activated = case("cuda", BF16, 64, Feature.WINDOW), []
    monkeypatch.setattr(choose, "_is_installed", lambda package: False)
    assert BACKENDS[name].refusal(case("cpu", BF16, 64)) == "runs on CUDA, not on CPU"
    assert BACKENDS[name].refusal(windowed) == f"needs the package {package}, which is not installed"
    monkeypatch.setattr(choose, "_is_installed", lambda found: found == package)
    monkeypatch.setattr(choose, "activate_flash_attention_impl", activated.append)
    choose._activate.cache_clear()
    for _ in range(2):  # torch would register its kernels anew at each call
        assert select_backend(name, windowed) is BACKENDS[name]
    choose._activate.cache_clear()
    assert activated == [name.upper()]
    assert BACKENDS[name].refusal(case("cuda", BF16, 64, Feature.BIAS)) is not None


# Features.

LENGTHS_OF = torch.tensor([7, 3])
PADDED, PACKED = AttentionMask(lengths=LENGTHS_OF), AttentionMask(documents=documents(2, 9))
MASK_FEATURES = [
    (AttentionMask(), 5, set()),
    (CAUSAL, 9, {Feature.CAUSAL}),
    (CAUSAL, 5, {Feature.CAUSAL, Feature.UNEVEN}),
    (PADDED, 9, {Feature.PADDING}),
    (AttentionMask(True, LENGTHS_OF), 9, {Feature.CAUSAL, Feature.PADDING, Feature.CAUSAL_PADDING}),
    (PADDED.within(3), 9, {Feature.PADDING, Feature.WINDOW, Feature.CAUSAL_PADDING}),
    (PACKED, 9, {Feature.DOCUMENTS}),
    (replace(PACKED, lengths=LENGTHS_OF), 9, {Feature.PADDING, Feature.DOCUMENTS, Feature.PADDED_DOCUMENTS}),
    (AttentionMask(allowed=torch.ones(5, 9, dtype=torch.bool)), 5, {Feature.PATTERN}),
    (AttentionMask(window=3), 5, {Feature.WINDOW, Feature.UNEVEN}),
]


@pytest.mark.parametrize(("mask", "q_seq", "expected"), MASK_FEATURES)
def test_the_features_of_a_mask(mask, q_seq, expected):
    assert features_of(mask, Scoring(), q_seq, 9, dropout=False, gradient=False) == expected
    more = features_of(mask, Scoring(), q_seq, 9, dropout=True, gradient=True)
    assert more == expected | {Feature.DROPOUT, Feature.GRADIENT}


# The backend of a layer, and its kernel.


def test_the_resolved_backend_is_fixed():
    attention = mha(backend="eager")
    assert resolve_backend(attention, "cpu", FP32, CAUSAL) is BACKENDS["eager"]
    attention.backend = "flash"
    for names in ([], ["_scaled_dot_product_flash_attention_for_cpu"]):
        with KernelObserver() as kernels:
            attention(tokens(2, 7))
        assert kernels.names == names
        resolve_backend(attention, "cpu", FP32, CAUSAL)


KERNELS = {
    "eager": (mha, {"backend": "eager"}, True, "eager"),
    "dropout": (mha, {"dropout": 0.1}, True, "math"),
    "dropout in evaluation": (mha, {"dropout": 0.1, "backend": "flash"}, False, "flash"),
    "flex in evaluation": (mha, {"backend": "flex"}, False, "flex"),
    "learned bias": (gqa, {"position": t5, "backend": "sdpa"}, True, "math"),
    "learned bias in evaluation": (gqa, {"position": t5, "backend": "flash"}, False, "flash"),
}


@pytest.mark.parametrize(("make_layer", "options", "training", "kernel"), KERNELS.values(), ids=KERNELS)
def test_the_kernel_of_a_layer_is_named(make_layer, options, training, kernel):
    attention = make_layer(**options).eval()
    resolve_backend(attention, "cpu", FP32, CAUSAL, training=training)
    assert kernel_of_layer(attention, "cpu", FP32, CAUSAL, training=training) == kernel
    # The layer itself is not changed.
    assert (attention.training, attention.q_proj.weight.dtype) == (False, FP32)
