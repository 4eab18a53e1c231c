"""The memory of a training step: what autograd and the optimizer of a real network store."""

from contextlib import nullcontext

import pytest
import torch
from commands import ROOT
from hydra.utils import instantiate

from analysis.test_costs import CAUSAL, SEQ, tiny
from tinyformer.analysis.memory import BatchCosts, count_batch
from tinyformer.config.compose import compose_sweep
from tinyformer.errors import ArgumentError
from tinyformer.nn import Transformer
from tinyformer.training import AdamW

BATCH = 3
VARIANTS = {
    "eager": "attention.backend=eager",
    "eager, additive": "attention.score=additive position=t5",
    "fused": "attention.backend=sdpa",
    "fused, differential": "attention=differential attention.backend=sdpa attention.num_kv_heads=4 position=none",
    "dropout": "model.dropout=0.1 attention.dropout=0.1 attention.backend=eager",
    "translator": "task=seq2seq cross_attention.backend=eager feed_forward=swiglu model.num_encoder_layers=1",
}


def counted(overrides: str, dtype: str = "fp32", optimizer: object = AdamW()) -> BatchCosts:
    return count_batch(lambda: tiny(overrides), optimizer, BATCH, dtype)


def stored(overrides: str, dtype: str) -> int:
    """Bytes that autograd stores of a real pass through the layers, each storage once and without parameters."""
    model, ids = tiny(overrides).train(), torch.zeros(BATCH, SEQ, dtype=torch.long)
    own = {tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    found: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    casts = torch.autocast("cpu", torch.bfloat16) if dtype == "bf16" else nullcontext()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), casts:
        if "seq2seq" in overrides:
            out = model.decoder(ids, CAUSAL, None, model.encode(ids))
        else:
            out = model.encoder(ids, CAUSAL)
    assert out.requires_grad
    return sum(storage.nbytes() for place, storage in found.items() if place not in own)


# Torch's fused kernel on CPU computes short sequences of bf16 in fp32.
CASES = [(name, dtype) for name in VARIANTS for dtype in ("fp32", "bf16") if dtype == "fp32" or "fused" not in name]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_activations_are_what_autograd_stores(name: str, dtype: str) -> None:
    assert counted(VARIANTS[name], dtype).activation_bytes == stored(VARIANTS[name], dtype)


def test_shared_keys_and_values_are_stored_once_by_a_fused_kernel() -> None:
    whole, shared = (counted(f"attention=gqa attention.num_kv_heads={n} attention.backend=flash") for n in (4, 1))
    # Of 32 numbers for a token in keys and in values, 8 are left, in 2 layers; rotary keeps tables, not keys.
    assert whole.activation_bytes - shared.activation_bytes == 2 * 2 * BATCH * SEQ * 24 * 4


def test_activation_checkpointing_stores_inputs_and_one_layer() -> None:
    two, three = (counted(f"model.num_layers={n}").activation_bytes for n in (2, 3))
    recomputed = counted("model.num_layers=3 model.checkpoint_activations=true").activation_bytes
    layer, inputs = three - two, BATCH * SEQ * 32 * 4
    outside = three - 3 * layer
    assert recomputed == outside + 3 * inputs + layer


@pytest.mark.parametrize("choice", ["adamw", "muon"])
def test_the_state_is_that_of_an_optimizer_after_a_step(choice: str) -> None:
    [(_, config)] = compose_sweep(ROOT / "conf", "card", [f"optimizer={choice}"])
    model, make = tiny("attention=gqa"), instantiate(config.optimizer)
    optimizer = make(model)
    model(torch.zeros(1, SEQ, dtype=torch.long), CAUSAL).sum().backward()
    optimizer.step()
    own = [part.state for part in getattr(optimizer, "optimizers", [optimizer])]
    state = [value for part in own for of_one in part.values() for value in of_one.values()]
    found = counted("attention=gqa", optimizer=make)
    assert found.optimizer_bytes == sum(value.numel() * value.element_size() for value in state)
    assert found.weight_bytes == found.gradient_bytes == 4 * model.num_parameters()
    parts = (found.weight_bytes, found.gradient_bytes, found.optimizer_bytes, found.activation_bytes)
    assert found.training_bytes == sum(parts)
    assert (found.batch, found.tokens) == (BATCH, BATCH * SEQ)


def test_frozen_weights_have_no_gradients() -> None:
    def make() -> Transformer:
        model = tiny("model.tied_readout=false")
        model.encoder.requires_grad_(False)
        return model

    found = count_batch(make, AdamW(), BATCH)
    assert found.gradient_bytes == 4 * make().readout.proj.weight.numel() < found.weight_bytes


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"^batch=0: must be at least 1; batch=8 works"):
        count_batch(lambda: tiny(""), AdamW(), 0)
