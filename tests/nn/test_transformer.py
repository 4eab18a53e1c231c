from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nn.model_cases import make_transformer, token_ids
from tinyformer.nn import AttentionMask, PostNormBlock, PreNormBlock, RotaryPosition
from tinyformer.nn.kernels.observe import KernelObserver

CAUSAL = AttentionMask(causal=True)


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of the next token."""
    return F.cross_entropy(model(ids[:, :-1], CAUSAL).flatten(0, 1), ids[:, 1:].flatten())


# Sizes.


@pytest.mark.parametrize(("tied", "expected"), [(True, 124_439_808), (False, 124_439_808 + 50_257 * 768)])
def test_gpt2_has_its_published_number_of_parameters(tied, expected):
    with torch.device("meta"):
        model = make_transformer(
            tied=tied,
            vocab_size=50_257,
            num_layers=12,
            d_model=768,
            num_heads=12,
            max_seq_len=1024,
            bias=True,
        )
    assert model.num_parameters() == expected


def test_frozen_parameters_are_not_counted():
    model = make_transformer()
    whole = model.num_parameters()
    model.encoder.token_embedding.weight.requires_grad_(False)
    assert model.num_parameters() == whole - 50 * 32


# Initial weights.


@pytest.mark.parametrize("init_std", [None, 0.1], ids=["default", "given"])
def test_initial_weights_follow_gpt2(init_std):
    torch.manual_seed(0)
    model = make_transformer(vocab_size=500, num_layers=8, d_model=128, max_seq_len=256, bias=True, tied=False)
    if init_std is not None:
        model = type(model)(model.encoder, lambda embedding: model.readout, init_std)
    std = init_std or 0.02
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert (parameter == (0 if name.endswith("bias") else 1)).all(), name
        elif name.endswith("bias"):
            assert torch.count_nonzero(parameter) == 0, name
        else:
            is_residual = "o_proj" in name or "down_proj" in name
            # √(2 · 8) = 4. The smallest matrix has 16,384 numbers: the standard error of their std is 0.6 %.
            expected = std / 4 if is_residual else std
            assert parameter.std().item() == pytest.approx(expected, rel=0.03), name
            assert abs(parameter.mean().item()) < 4 * expected / parameter.numel() ** 0.5, name


# Tying and the state.


def test_tied_readout_and_embedding_are_one_parameter():
    model = make_transformer()
    loss_of(model, token_ids()).backward()
    assert model.readout.proj.weight is model.encoder.token_embedding.weight
    assert sum(p.shape == (50, 32) for p in model.parameters()) == 1
    assert sum(p.shape == (50, 32) for p in make_transformer(tied=False).parameters()) == 2


def test_the_state_holds_no_positions_and_no_gates():
    model = make_transformer(position=False, ablated_heads=[[0, 1]], qk_norm=True)
    names = set(model.state_dict())
    assert names == {name for name, _ in model.named_parameters(remove_duplicate=False)}
    assert not any("head_gate.factors" in name or "cos" in name or "table" in name for name in names)
    make_transformer(position=False, qk_norm=True).load_state_dict(model.state_dict())


# Backends.


def test_different_backends_are_all_named():
    model = make_transformer(backend="eager")
    model.attentions()[1].backend = "flash"
    assert model.resolve_backends("cpu", torch.float32, CAUSAL) == "eager, flash"


def test_auto_resolves_for_the_longest_sequence():
    wide = {"d_model": 128, "num_heads": 2, "num_layers": 1}
    short, long = (make_transformer(**wide, max_seq_len=n) for n in (64, 1024))
    assert short.resolve_backends("cpu", torch.bfloat16, CAUSAL) == "eager"
    assert long.resolve_backends("cpu", torch.bfloat16, CAUSAL) == "sdpa"


@pytest.mark.parametrize(
    ("dtype", "max_seq_len", "is_fused"),
    [(torch.float32, 256, True), (torch.bfloat16, 256, True), (torch.bfloat16, 128, False)],
    ids=["fp32", "bf16-mixed", "bf16-mixed-short"],
)
def test_the_default_cpu_run_is_on_the_kernel_that_was_measured(dtype, max_seq_len, is_fused):
    # The shape of `conf/model/nano.yaml`, and half its context.
    model = make_transformer(num_layers=4, d_model=128, num_heads=4, max_seq_len=max_seq_len)
    model.resolve_backends("cpu", dtype, CAUSAL)
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16),
        KernelObserver() as kernels,
    ):
        loss_of(model, token_ids(seq=max_seq_len + 1)).backward()
    forward = "_scaled_dot_product_flash_attention_for_cpu"
    assert kernels.names == ([forward] * 4 + [f"{forward}_backward"] * 4 if is_fused else [])


# Training.


def test_one_batch_is_learned_by_heart():
    torch.manual_seed(0)
    model = make_transformer(
        num_layers=1,
        num_kv_heads=2,
        qk_norm=True,
        position=False,
        attention_position=partial(RotaryPosition, 16),
    )
    ids = token_ids(batch=4, seq=12)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for _ in range(40):
        optimizer.zero_grad()
        loss = loss_of(model, ids)
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.05


@pytest.mark.parametrize("kind", [PreNormBlock, PostNormBlock], ids=["pre", "post"])
def test_24_layers_train(kind):
    torch.manual_seed(0)
    model = make_transformer(kind=kind, num_layers=24, bias=True)
    ids = token_ids(batch=4, seq=12)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        losses.append(loss_of(model, ids))
        losses[-1].backward()
        norms = torch.stack([parameter.grad.norm() for parameter in model.parameters()])
        assert norms.isfinite().all()
        # Every layer learns: no part is cut off, and none explodes.
        assert norms.max() < 100
        assert all(layer.attention.o_proj.weight.grad.norm() > 0 for layer in model.encoder.layers)
        optimizer.step()
    assert losses[-1] < losses[0] - 0.1
