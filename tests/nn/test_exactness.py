"""Every variant under every mask by every backend is exact in output and gradients, or is refused, as promised."""

import pytest
import torch

from nn.attention_cases import error
from nn.variants import NAMES, able, documents, make, mla, prepared, shaw, shaw_keys, small, tokens
from tinyformer.errors import ArgumentError
from tinyformer.nn import BACKENDS, AttentionMask, resolve_backend
from tinyformer.nn.kernels.observe import KernelObserver
from tinyformer.programs.doctor.cases import MASKS, Shape, factory_of
from tinyformer.programs.doctor.exactness import Problem
from tinyformer.programs.doctor.verdict import Cell, check_exactness

CPU, SHAPE = torch.device("cpu"), Shape(11, 8, 3)
FUSED = ("sdpa", "flash", "flex")
EVERY_MASK = MASKS | {
    "documents+full": lambda rows, seq, device: AttentionMask(documents=documents(rows, seq)),
    "documents+padded": lambda rows, seq, device: AttentionMask(
        lengths=torch.tensor([seq, seq // 2, 0]), documents=documents(rows, seq)
    ),
    "pattern": lambda rows, seq, device: AttentionMask(allowed=pattern(1, 1, SHAPE.seq, seq)),
    "pattern of heads+causal+padded": lambda rows, seq, device: AttentionMask(
        True, torch.tensor([seq, seq // 2, 0]), allowed=pattern(rows, 4, SHAPE.seq, seq)
    ),
}


def pattern(*shape: int) -> torch.Tensor:
    """Half of all pairs at random, and no key for the third query."""
    allowed = torch.rand(*shape, generator=torch.Generator().manual_seed(0)) < 0.5
    allowed[:, :, 2] = False
    return allowed


def assert_exact(
    name: str, mask: str, dtype: torch.dtype, *backends: str, cross: bool = False, shape: Shape = SHAPE
) -> None:
    """All backends that compute a variant are as exact as the dtype allows, and the promised ones do compute it."""
    attention = prepared(lambda: factory_of(small(name))(shape.d_model, 4))
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


@pytest.mark.parametrize("name", ["gqa", "sink"])
def test_two_blocks_of_keys_are_exact(name):
    """Torch's kernel for CPUs reads 512 keys at a time, and rescales what it has summed before."""
    assert_exact(name, "causal+padded", torch.float32, "flash", shape=Shape(800, 8, 2))


CROSS = ("gqa", "mla+rotary", "differential", "gqa+general", "gqa+additive", "gqa+softcap", "sink", "gqa+sink+window")


@pytest.mark.parametrize("mask", ["full", "causal", "padded", "causal+padded", "pattern"])
@pytest.mark.parametrize("name", [*CROSS, "gate"])
def test_cross_attention_is_exact(name, mask):
    assert_exact(name, mask, torch.float32, cross=True)


@pytest.mark.parametrize("name", ["rotary", "alibi", "t5", "relative"])
@torch.no_grad()
def test_positions_have_no_effect_across_two_sequences(name):
    attention, plain, context = make(name), make("mha"), tokens(seq=14, seed=3)
    plain.load_state_dict(attention.state_dict(), strict=False)
    assert error(attention(tokens(), context=context), plain(tokens(), context=context)) <= 1e-6


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
            with torch.set_grad_enabled(training), KernelObserver() as kernels, pytest.raises(ArgumentError) as caught:
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
