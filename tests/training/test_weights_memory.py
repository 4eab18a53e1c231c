"""Memory of attention weights: what autograd stores, and the warning before it does not fit."""

from functools import partial

import pytest
import torch
from nn.model_cases import make_encoder_decoder, make_transformer, token_ids
from nn.variants import differential

from tinyformer.nn import Attention, AttentionMask
from tinyformer.training.weights_memory import find_memory_shortage, stored_bytes

CAUSAL = AttentionMask(causal=True)
SEQ, HEADS, ROWS = 64, 4, 3
BACKEND = ("network", "encoder", "block", "attention", "backend")
RECOMPUTE, LENGTH = ("network", "encoder", "checkpoint_activations"), ("network", "encoder", "max_seq_len")
BATCH, ACCUMULATE = ("datamodule", "batch_size"), ("trainer", "accumulate_grad_batches")


def bytes_of_maps(model, autocast=False):
    """Bytes of all tensors that autograd stores with a number for each head, query and key, each counted once."""
    sizes = {}

    def pack(tensor):
        if tensor.numel() >= ROWS * HEADS * SEQ * SEQ:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
    ):
        assert model(token_ids(ROWS, SEQ), CAUSAL).requires_grad
    return sum(sizes.values())


@pytest.mark.parametrize(
    ("dropout", "autocast", "bytes_per_weight"), [(0.0, False, 4), (0.0, True, 6), (0.1, False, 12), (0.1, True, 8)]
)
def test_the_estimate_is_what_autograd_stores(dropout, autocast, bytes_per_weight):
    model = make_transformer(max_seq_len=SEQ, num_layers=3, backend="eager", dropout=0.0).train()
    for layer in model.attentions():
        layer.dropout = dropout
    dtype = torch.bfloat16 if autocast else torch.float32
    estimate = 3 * ROWS * stored_bytes(model.attentions()[0], SEQ, "cpu", dtype)
    assert estimate == bytes_of_maps(model, autocast) == 3 * ROWS * HEADS * SEQ * SEQ * bytes_per_weight


def test_the_estimate_for_cuda_other_dtypes_and_two_softmaxes():
    layer = make_transformer(backend="eager").attentions()[0]
    layer.dropout = 0.1
    square = layer.num_heads * SEQ * SEQ
    # The softmax, the weights after dropout in the values' dtype, and on CUDA a boolean for each.
    assert stored_bytes(layer, SEQ, "cuda", torch.bfloat16) == square * (4 + 2 + 1)
    assert stored_bytes(layer, SEQ, "cuda", torch.float64) == square * (8 + 8 + 1)
    assert stored_bytes(differential(), SEQ, "cpu", torch.float32) == 2 * 4 * SEQ * SEQ * 4


ROW = 4 * 4 * 4 * 1024 * 1024
"""Bytes that a sequence takes in 4 layers with 4 heads: 67.1 MB in fp32."""


@pytest.mark.parametrize(
    ("free", "dropout", "recompute", "works"),
    [
        (8 * ROW, 0.0, False, None),
        (8 * ROW - 1, 0.0, False, {BACKEND: "flash"}),
        (2 * ROW, 0.0, True, None),
        # Flash has no dropout on CPU; with it, weights take 12 bytes instead of 4.
        (6 * ROW, 0.1, False, {RECOMPUTE: True}),
        (ROW, 0.1, True, {BATCH: 1, ACCUMULATE: 8}),
        (ROW * 3 // 8, 0.1, True, {LENGTH: 256}),
    ],
)
def test_what_does_not_fit_is_reported_with_settings_that_help(free, dropout, recompute, works):
    model = make_transformer(num_layers=4, max_seq_len=1024, backend="eager", checkpoint_activations=recompute)
    for layer in model.attentions():
        layer.dropout = dropout
    found = find_memory_shortage(model, ["eager"] * 4, "cpu", torch.float32, CAUSAL, 8, free)
    assert (found and found.works) == works


def test_the_layers_of_both_stacks_are_counted_and_each_has_its_key():
    eager = partial(Attention, 32, 4, backend="eager")
    model, mask = make_encoder_decoder(cross=eager, backend="eager"), AttentionMask(lengths=torch.tensor([9, 5]))
    needed = 8 * 3 * 2 * 4 * 16 * 16 * 4  # sequences, layers, heads, and a context of 16 in fp32

    def found(free, longest=None, kernels=("eager",) * 3 * 2):
        return find_memory_shortage(model, kernels, "cpu", torch.float32, mask, 8, free, longest)

    inner = [("network", stack, "block", "attention", "backend") for stack in ("encoder", "decoder")]
    cross = ("network", "decoder", "cross_attention", "backend")
    assert found(needed - 1).works == dict.fromkeys([*inner, cross], "flash")
    assert (found(needed), found(needed // 4, longest=8)) == (None, None)
    assert found(needed // 4, longest=9) is not None
    assert list(found(1, kernels=["flash"] * 4 + ["eager"] * 2).works) == [cross]
    model.requires_grad_(False)
    assert found(0) is None  # autograd stores nothing for weights that are not trained
