"""A backend is settled once for each layer, and the kernel that runs is seen."""

from functools import partial

import pytest
import torch
from attention_cases import AttentionKernels
from variants import documents, gqa, make, mha, shaw_keys, t5, tokens

from tinyformer.nn import BACKENDS, Attention, AttentionMask, BaseAttention, Scoring, kernel_of_layer, resolve_backend
from tinyformer.nn.kernels.observe import running_kernel

CAUSAL = AttentionMask(causal=True)
PADDED = AttentionMask(lengths=torch.tensor([7, 3]))


def test_resolve_fixes_the_backend():
    attention = Attention(32, 4, backend="eager")
    assert resolve_backend(attention, "cpu", torch.float32, AttentionMask(causal=True)) is BACKENDS["eager"]
    attention.backend = "flash"
    with AttentionKernels() as kernels:
        attention(tokens(2, 7))
    assert kernels.names == []
    resolve_backend(attention, "cpu", torch.float32, AttentionMask(causal=True))
    with AttentionKernels() as kernels:
        attention(tokens(2, 7))
    assert kernels.names == ["_scaled_dot_product_flash_attention_for_cpu"]


def test_resolve_takes_the_length_into_account():
    attention = Attention(128, 2, backend="auto")
    names = [resolve_backend(attention, "cpu", torch.bfloat16, CAUSAL, seq).name for seq in (64, 2048, None)]
    assert names == ["eager", "sdpa", "sdpa"]


def test_resolve_refuses_what_the_device_cannot():
    attention = Attention(32, 4, backend="flash")
    with pytest.raises(ValueError, match=r"torch\.float32"):
        resolve_backend(attention, "cuda", torch.float32, AttentionMask(causal=True))
    padded = AttentionMask(causal=True, lengths=torch.tensor([3]))
    with pytest.raises(ValueError, match="padding together with a causal mask"):
        resolve_backend(attention, "cuda", torch.bfloat16, padded)
    assert resolve_backend(attention, "cuda", torch.bfloat16, AttentionMask(causal=True)).name == "flash"
    assert resolve_backend(attention, "cpu", torch.bfloat16, padded).name == "flash"


@pytest.mark.parametrize(("backend", "kernel"), [("auto", "flash"), ("flash", "flash"), ("eager", "eager")])
def test_the_kernel_that_runs_is_named(backend, kernel):
    attention = Attention(32, 4, 2, backend=backend)
    mask = AttentionMask(causal=True)
    resolve_backend(attention, "cpu", torch.float32, mask)
    assert kernel_of_layer(attention, "cpu", torch.float32, mask) == kernel


def test_dropout_on_cpu_runs_no_fused_kernel_and_says_so():
    attention = Attention(32, 4, dropout=0.1)
    mask = AttentionMask(causal=True)
    resolve_backend(attention, "cpu", torch.float32, mask)
    assert kernel_of_layer(attention, "cpu", torch.float32, mask) == "math"


def test_flex_serves_on_cpu_where_nothing_trains():
    attention = Attention(32, 4, backend="flex")
    with pytest.raises(ValueError, match=r"^backend='flex': cannot compute training on CPU \(eager, sdpa"):
        resolve_backend(attention, "cpu", torch.float32, CAUSAL)
    with pytest.raises(ValueError, match=r"^backend='flex': cannot compute training on CPU"):
        attention(tokens())
    assert resolve_backend(attention, "cpu", torch.float32, CAUSAL, training=False) is BACKENDS["flex"]
    assert kernel_of_layer(attention, "cpu", torch.float32, CAUSAL, training=False) == "flex"
    with torch.no_grad():
        assert attention(tokens()).shape == (3, 11, 32)


@pytest.mark.parametrize("position", [t5, shaw_keys], ids=["t5", "shaw"])
def test_a_learned_bias_runs_unfused_in_training_and_on_flash_after(position):
    attention = gqa(position=position, backend="sdpa")
    resolve_backend(attention, "cpu", torch.float32, CAUSAL)
    assert kernel_of_layer(attention, "cpu", torch.float32, CAUSAL) == "math"
    with pytest.raises(ValueError, match="backend='flash': cannot compute a learned bias on the scores on CPU"):
        resolve_backend(gqa(position=position, backend="flash"), "cpu", torch.float32, CAUSAL)
    attention = gqa(position=position, backend="flash")
    resolve_backend(attention, "cpu", torch.float32, CAUSAL, training=False)
    assert kernel_of_layer(attention, "cpu", torch.float32, CAUSAL, training=False) == "flash"


@pytest.mark.parametrize("mask", [PADDED, AttentionMask(True, documents=documents(2, 9))], ids=["padded", "documents"])
@pytest.mark.parametrize("name", ["gqa", "mla", "differential", "alibi", "sink", "window", "sink+window", "qk_norm"])
def test_all_that_flash_serves_runs_the_flash_kernel(name, mask):
    attention = make(name, "auto")
    for described in (mask, CAUSAL):
        resolve_backend(attention, "cpu", torch.float32, described)
        assert kernel_of_layer(attention, "cpu", torch.float32, described) == "flash"


def test_the_kernel_of_a_call_is_seen_and_not_believed():
    q = torch.zeros(1, 2, 5, 8)
    assert running_kernel(lambda: BACKENDS["flash"].compute(q, q, q, CAUSAL, Scoring())) == "flash"
    assert running_kernel(lambda: BACKENDS["eager"].compute(q, q, q, CAUSAL, Scoring())) == "math"
    assert running_kernel(lambda: BACKENDS["sdpa"].compute(q, q, q, CAUSAL, Scoring(), 0.1)) == "math"


def test_the_window_of_a_layer_is_among_what_it_asks():
    # A layer without a window is plain, so it may drop weights on CUDA's flash; one with a window may not.
    local, plain = (mha(backend="flash", dropout=0.1, window=[3, None], layer_index=i) for i in (0, 1))
    assert resolve_backend(plain, "cuda", torch.bfloat16, CAUSAL).name == "flash"
    with pytest.raises(
        ValueError, match="cannot compute attention dropout together with padding, documents or a window on CUDA"
    ):
        resolve_backend(local, "cuda", torch.bfloat16, CAUSAL)


def test_dropout_counts_in_training_only():
    attention = partial(mha, backend="flash", dropout=0.1)()
    with pytest.raises(ValueError, match="attention dropout on CPU"):
        resolve_backend(attention, "cpu", torch.float32, CAUSAL)
    assert resolve_backend(attention, "cpu", torch.float32, CAUSAL, training=False).name == "flash"


def test_the_kernel_of_an_evaluation_runs_without_dropout():
    attention = mha(backend="flash", dropout=0.1)
    resolve_backend(attention, "cpu", torch.float32, CAUSAL, training=False)
    assert kernel_of_layer(attention, "cpu", torch.float32, CAUSAL, training=False) == "flash"


def test_the_layer_is_left_alone():
    attention = mha(backend="sdpa").eval()
    resolve_backend(attention, "cpu", torch.bfloat16, CAUSAL)
    kernel_of_layer(attention, "cpu", torch.bfloat16, CAUSAL)
    assert not attention.training
    assert attention.q_proj.weight.dtype == torch.float32


def test_the_kernel_is_asked_what_the_layer_will_ask(monkeypatch):
    attention, mask, asked = gqa(backend="sdpa", window=3), AttentionMask(True, documents=documents(2, 9)), []
    resolve_backend(attention, "cpu", torch.float32, mask)

    def attend(self, q, k, v, mask, is_cross=False):
        asked.append((q.shape, k.shape, v.shape, mask))

    monkeypatch.setattr(BaseAttention, "softmax_attention", attend)
    kernel_of_layer(attention, "cpu", torch.float32, mask)
    assert asked == [((2, 4, 9, 8), (2, 2, 9, 8), (2, 2, 9, 8), mask.within(3))]
