"""A backend is resolved once for each layer, and the kernel that runs is observed."""

from functools import partial

import pytest
import torch

from nn.variants import documents, gqa, make, mha, t5, tokens
from tinyformer.errors import ArgumentError
from tinyformer.nn import BACKENDS, AttentionMask, Scoring, kernel_of_layer, resolve_backend
from tinyformer.nn.kernels.observe import KernelObserver, running_kernel

FP32, BF16 = torch.float32, torch.bfloat16
CAUSAL = AttentionMask(causal=True)
PADDED = AttentionMask(causal=True, lengths=torch.tensor([7, 3]))


def test_the_resolved_backend_is_fixed():
    attention = mha(backend="eager")
    assert resolve_backend(attention, "cpu", FP32, CAUSAL) is BACKENDS["eager"]
    attention.backend = "flash"
    with KernelObserver() as kernels:
        attention(tokens(2, 7))
    assert kernels.names == []
    resolve_backend(attention, "cpu", FP32, CAUSAL)
    with KernelObserver() as kernels:
        attention(tokens(2, 7))
    assert kernels.names == ["_scaled_dot_product_flash_attention_for_cpu"]


def test_what_a_device_cannot_compute_is_refused_for_the_window_of_a_layer():
    options, reason = ({"backend": "flash", "dropout": 0.1, "window": [3, None]}, "dropout together with padding")
    with pytest.raises(ArgumentError, match=reason):
        resolve_backend(mha(**options), "cuda", BF16, CAUSAL)
    assert resolve_backend(mha(**options, layer_index=1), "cuda", BF16, CAUSAL).name == "flash"


KERNELS = {
    "auto": (mha, {}, True, "flash"),
    "eager": (mha, {"backend": "eager"}, True, "eager"),
    "dropout": (mha, {"dropout": 0.1}, True, "math"),
    "dropout in evaluation": (mha, {"dropout": 0.1, "backend": "flash"}, False, "flash"),
    "flex in evaluation": (mha, {"backend": "flex"}, False, "flex"),
    "learned bias": (gqa, {"position": t5, "backend": "sdpa"}, True, "math"),
    "learned bias in evaluation": (gqa, {"position": t5, "backend": "flash"}, False, "flash"),
}


@pytest.mark.parametrize("name", KERNELS)
def test_the_kernel_of_a_layer_is_named(name):
    make_layer, options, training, kernel = KERNELS[name]
    attention = make_layer(**options).eval()
    resolve_backend(attention, "cpu", FP32, CAUSAL, training=training)
    assert kernel_of_layer(attention, "cpu", FP32, CAUSAL, training=training) == kernel
    # The layer itself is not changed.
    assert not attention.training
    assert attention.q_proj.weight.dtype == FP32


@pytest.mark.parametrize("name", ["gqa", "mla", "differential", "alibi", "sink", "window", "sink+window", "qk_norm"])
def test_auto_runs_the_flash_kernel_wherever_it_can(name):
    attention = make(name, "auto")
    for mask in (PADDED, AttentionMask(True, documents=documents(2, 9)), CAUSAL):
        resolve_backend(attention, "cpu", FP32, mask)
        assert kernel_of_layer(attention, "cpu", FP32, mask) == "flash"


def test_the_kernel_of_a_call_is_observed():
    q = torch.zeros(1, 2, 5, 8)
    for name, dropout, kernel in (("flash", 0.0, "flash"), ("eager", 0.0, "math"), ("sdpa", 0.1, "math")):
        assert running_kernel(partial(BACKENDS[name].compute, q, q, q, CAUSAL, Scoring(), dropout)) == kernel
