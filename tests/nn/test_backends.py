"""Every backend computes the same function, gradient included, for every variant, mask, size and precision, or refuses.

Eager is compared with the definition; all backends with eager in float64, as the doctor does.
"""

import copy
from itertools import product

import pytest
import torch
from torch import nn

from nn.variants import CAUSAL, EITHER_WAY, NAMES, ON_CPU, able, documents, error, make, prepared, small, tokens
from tinyformer.errors import ArgumentError
from tinyformer.nn import BACKENDS, ALiBi, Attention, AttentionMask, Scoring, attention_weights, resolve_backend
from tinyformer.nn.kernels.eager import eager
from tinyformer.nn.maps import KernelObserver
from tinyformer.programs.doctor.cells import Cell, check_exactness
from tinyformer.programs.doctor.exactness import DTYPES, MASKS, Problem, Shape, factory_of

FUSED = ON_CPU[1:]
NIGHTLY = pytest.mark.nightly
SMALL = Shape(11, 8, 3)


def pattern(*shape: int) -> torch.Tensor:
    """Half of all pairs at random, and no key for the third query."""
    allowed = torch.rand(*shape, generator=torch.Generator().manual_seed(0)) < 0.5
    allowed[:, :, 2] = False
    return allowed


def lengths(seq: int) -> torch.Tensor:
    return torch.tensor([seq, seq // 2, 0])


EVERY_MASK = MASKS | {
    "documents+full": lambda rows, seq, device: AttentionMask(documents=documents(rows, seq)),
    "documents+padded": lambda rows, seq, device: AttentionMask(False, lengths(seq), documents(rows, seq)),
    "pattern": lambda rows, seq, device: AttentionMask(allowed=pattern(1, 1, SMALL.seq, seq)),
    "pattern of heads+causal+padded": lambda rows, seq, device: AttentionMask(
        True, lengths(seq), allowed=pattern(rows, 4, SMALL.seq, seq)
    ),
}


# The definition.


@pytest.mark.parametrize(("q_seq", "k_seq"), [(5, 5), (2, 6), (6, 3)])
@pytest.mark.parametrize("num_kv_heads", [4, 2, 1], ids=["mha", "gqa", "mqa"])
def test_eager_is_the_definition(num_kv_heads, q_seq, k_seq):
    random = torch.Generator().manual_seed(0)
    q = torch.randn(3, 4, q_seq, 8, generator=random, dtype=torch.float64)
    k, v = torch.randn(2, 3, num_kv_heads, k_seq, 8, generator=random, dtype=torch.float64)
    keys, values = (x.repeat_interleave(4 // num_kv_heads, dim=1) for x in (k, v))
    num_keys = torch.tensor([k_seq, 2, 0])
    for causal, padded in product((False, True), repeat=2):
        hidden = torch.ones(q_seq, k_seq).triu(1 + k_seq - q_seq).bool() & causal
        hidden = hidden | (torch.arange(k_seq) >= num_keys.view(3, 1, 1, 1)) & padded
        exponentials = (0.3 * torch.einsum("bhid,bhjd->bhij", q, keys)).exp().masked_fill(hidden, 0)
        expected = exponentials / exponentials.sum(-1, keepdim=True).clamp(min=1e-30)
        mask, scoring = AttentionMask(causal, num_keys if padded else None), Scoring(0.3)
        torch.testing.assert_close(attention_weights(q, k, mask, scoring), expected, rtol=0, atol=1e-13)
        torch.testing.assert_close(eager(q, k, v, mask, scoring), expected @ values, rtol=0, atol=1e-13)


def test_weights_of_low_precision_queries_are_normalised_in_fp32():
    q = torch.randn(2, 4, 63, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    weights = attention_weights(q, q, CAUSAL, Scoring(32**-0.5))
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 63), rtol=0, atol=1e-6)


# The law.


def assert_exact(
    name: str, mask: str, dtype: str, *backends: str, cross: bool = False, shape: Shape = SMALL, **options: object
) -> None:
    """All backends that compute a variant are as exact as the dtype allows, and the promised ones do compute it."""
    attention = prepared(lambda: factory_of(small(name))(shape.d_model, 4, **options))
    problem = Problem(attention, EVERY_MASK[mask], shape, torch.device("cpu"), cross)
    for backend in backends or ON_CPU:
        cell = check_exactness(problem, Cell(backend, name, mask, dtype), DTYPES.get(dtype, torch.float64))
        assert cell.failure is None, cell
        assert (cell.status == "ran") >= (backend == "eager" or backend in able(name, training=False)), cell
        assert cell.has_backward >= (backend == "eager" or backend in able(name)), cell


def grid():
    """Every variant with every mask; one mask of each variant is fast, the others are nightly."""
    for number, name in enumerate(NAMES):
        masks = [mask for mask in EVERY_MASK if name in EITHER_WAY or "causal" in mask or mask == "documents"]
        for index, mask in enumerate(masks):
            is_fast = index == number % len(masks)
            yield pytest.param(name, mask, marks=[] if is_fast else NIGHTLY, id=f"{name}-{mask}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "mask"), list(grid()))
def test_every_variant_is_exact_under_every_mask(name, mask, dtype):
    assert_exact(name, mask, dtype)


SIZES = list(product((1, 63, 257, 800), (32, 64, 128), ("full", "causal", "padded", "causal+padded"), (False, True)))
"""Numbers of tokens, head sizes, masks, and whether the keys are those of another sequence. Torch's kernel for CPUs
reads 512 keys at a time, and rescales what it has summed before."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("seq", "head_dim", "mask", "cross"),
    [pytest.param(*size, marks=[] if index % 13 == 0 and index < 90 else NIGHTLY) for index, size in enumerate(SIZES)],
)
def test_every_size_is_exact(seq, head_dim, mask, cross, dtype):
    assert_exact("gqa", mask, dtype, cross=cross, shape=Shape(seq, head_dim, 2))


@pytest.mark.parametrize("name", [name for name in NAMES if "differential" in name])
def test_gradients_that_cancel_in_fp32_are_exact_in_float64(name):
    """λ and the sinks of differential attention only shift what is normalised next."""
    assert_exact(name, "causal+padded", "float64", "sdpa", "flash")


CROSS = ("gqa", "mla+rotary", "differential", "gqa+general", "gqa+additive", "gqa+softcap", "sink", "gqa+sink+window")


@pytest.mark.parametrize("mask", ["full", "causal", "padded", "causal+padded", "pattern"])
@pytest.mark.parametrize("name", [*CROSS, "gate"])
def test_cross_attention_is_exact(name, mask):
    assert_exact(name, mask, "fp32", cross=True)


@pytest.mark.parametrize("name", ["gqa", "gqa+sink", "gqa+sink+window", "mla+rotary", "differential"])
def test_a_scale_of_zero_is_uniform_attention(name):
    assert_exact(name, "causal+padded", "float64", "eager", "sdpa", "flash", scale=0.0)


def test_a_bias_keeps_its_small_differences_in_low_precision():
    # Padding hides all near keys of the last queries: ALiBi's bias of the others is -500 and below, where bf16 knows
    # every second whole number alone.
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, 1024, 32, generator=random, requires_grad=True) for _ in range(3))
    mask = AttentionMask(lengths=torch.tensor([1024, 100]))
    scoring = Scoring(32**-0.5, mods=(ALiBi(2).score_mod(q, 1024, 32**-0.5, causal=False),))
    exact = eager(q.double(), k.double(), v.double(), mask, scoring)
    for backend in ("sdpa", "flash"):
        out = BACKENDS[backend].compute(q.bfloat16(), k.bfloat16(), v.bfloat16(), mask, scoring)
        assert error(out.double(), exact) < 0.02, backend


@pytest.mark.slow
@pytest.mark.parametrize("training", [False, True])
def test_forgetting_is_exact_after_thousands_of_tokens_in_low_precision(training):
    # f is about 0.9, so c is -430 at the end. The gradient of a gate adds up the gradients of all later tokens.
    layer = prepared(lambda: Attention(32, 1, forget=True, sink="zero"))
    nn.init.constant_(layer.forget.proj.bias, 2.2)
    x = tokens(1, 1024 if training else 4096)

    def solved(layer, x, backend="sdpa", dtype=None):
        layer.backend = backend
        with torch.set_grad_enabled(training), torch.autocast("cpu", dtype, enabled=dtype is not None):
            out = layer(x, CAUSAL)
        if not training:
            return [out]
        gate, others = layer.forget.proj, [layer.q_proj.weight, layer.k_proj.weight, layer.v_proj.weight]
        gradients = torch.autograd.grad(out.double().sin().sum(), [gate.weight, gate.bias, *others])
        # A gate's bias is the weight of an input of 1; alone, its gradient may be a small difference of large sums.
        return [out, torch.cat([gradients[0].flatten(), gradients[1]]), *gradients[2:]]

    exact = solved(copy.deepcopy(layer).double(), x.double())
    for backend, dtype in product(("eager", "sdpa", "flash", "flex")[: 4 - training], (None, torch.bfloat16)):
        errors = [error(*pair) for pair in zip(solved(layer, x, backend, dtype), exact, strict=True)]
        assert max(errors) < (1e-4 if dtype is None else 1e-2), (backend, dtype, errors)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_dropout_keeps_the_expectation_and_drops_its_share(backend, dtype):
    # All keys alike and identity values: the output is the weights themselves, 1/64 each before dropout.
    q, v = torch.zeros(4, 8, 64, 64, dtype=dtype), torch.eye(64, dtype=dtype).expand(4, 8, 64, 64)
    torch.manual_seed(0)
    weights = BACKENDS[backend].compute(q, q, v, AttentionMask(), Scoring(), 0.25).float() * 64
    # 131,072 independent weights: the standard error of the share is 0.0012.
    assert abs((weights == 0).float().mean().item() - 0.25) < 0.006
    assert abs(weights.mean().item() - 1) < 0.01
    torch.testing.assert_close(weights[weights != 0].unique(), torch.tensor([4 / 3]), rtol=2**-7, atol=0)
    attention = make("gqa", backend, dropout=0.5)
    assert not torch.equal(attention(tokens()), attention(tokens()))
    assert torch.equal(attention.weights(tokens()), attention.weights(tokens()))
    assert torch.equal(attention.eval()(tokens()), make("gqa", backend)(tokens()))


# What is refused.


@pytest.mark.parametrize("name", NAMES)
def test_a_backend_is_refused_exactly_where_it_is_not_promised(name):
    """At construction or when it is resolved, and before a kernel runs."""
    for training, backend in product((True, False), FUSED):
        if backend in able(name, training):
            chosen = resolve_backend(make(name, backend), "cpu", torch.float32, CAUSAL, None, training)
            assert chosen is BACKENDS[backend]
            continue
        with torch.set_grad_enabled(training), KernelObserver() as kernels, pytest.raises(ArgumentError) as caught:
            make(name, backend)(tokens(), CAUSAL)
        assert (caught.value.path, caught.value.works) == (("backend",), {"backend": "auto"})
        assert kernels.names == []
        if backend in able(name, training=False):
            with pytest.raises(ArgumentError):
                resolve_backend(make(name, backend), "cpu", torch.float32, CAUSAL)
