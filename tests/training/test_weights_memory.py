"""What attention weights take: as autograd keeps them, and what is said before they do not fit."""

import re

import pytest
import torch
from nn.model_cases import make_transformer, token_ids
from nn.variants import differential

from tinyformer.nn import AttentionMask
from tinyformer.training.hardware import free_memory
from tinyformer.training.weights_memory import kept_bytes, warn_of_weights

CAUSAL = AttentionMask(causal=True)
SEQ, HEADS, ROWS = 64, 4, 3


def squares(model, seq=SEQ, autocast=False):
    """Bytes of all tensors with a number for each head, query and key that autograd keeps, each counted once."""
    sizes = {}

    def pack(tensor):
        if tensor.numel() >= ROWS * HEADS * seq * seq:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    ids = token_ids(ROWS, seq)
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
    ):
        out = model(ids, CAUSAL)
    assert out.requires_grad
    return sum(sizes.values())


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_autograd_keeps_what_is_expected(dropout, autocast):
    model = make_transformer(max_seq_len=SEQ, num_layers=3, backend="eager", dropout=0.0).train()
    for layer in model.attentions():
        layer.dropout = dropout
    dtype = torch.bfloat16 if autocast else torch.float32
    expected = 3 * ROWS * kept_bytes(model.attentions()[0], SEQ, "cpu", dtype)
    assert expected == squares(model, autocast=autocast)
    assert (
        expected
        == 3
        * ROWS
        * HEADS
        * SEQ
        * SEQ
        * {
            (0.0, False): 4,
            (0.0, True): 4 + 2,
            (0.1, False): 4 + 4 + 4,
            (0.1, True): 4 + 2 + 2,
        }[dropout, autocast]
    )


def test_a_fused_kernel_keeps_none():
    assert squares(make_transformer(max_seq_len=SEQ, backend="flash").train()) == 0


def warned(free, kernels=("eager",) * 4, batch_size=8, again=False, dropout=0.0, seq=1024):
    """Of 4 layers with 4 heads: 4 x 4 x 4 x 1024 x 1024 bytes = 67.1 MB for each row of a batch in fp32."""
    model = make_transformer(num_layers=4, max_seq_len=seq, backend="eager", checkpoint_activations=again)
    for layer in model.attentions():
        layer.dropout = dropout
    return warn_of_weights(model, kernels, "cpu", torch.float32, CAUSAL, batch_size, free)


OF_A_ROW = 4 * 4 * 4 * 1024 * 1024


def test_what_fits_is_not_warned_of():
    assert warned(8 * OF_A_ROW) is None
    assert warned(8 * OF_A_ROW - 1) is not None
    assert warned(2 * OF_A_ROW, again=True) is None
    assert warned(2 * OF_A_ROW - 1, again=True) is not None
    assert warned(8 * OF_A_ROW // 4, kernels=("eager", "flash", "flash", "flash")) is None
    assert warned(0, kernels=("flash",) * 4) is None
    assert warned(None) is None


def test_the_sentence_names_what_is_needed_and_what_there_is():
    said = warned(10**8)
    assert said == (
        "The eager kernel keeps at least 0.5 GB of attention weights for the backward pass, and 0.1 GB of memory are "
        "free: attention.backend=flash keeps none."
    )


@pytest.mark.parametrize(
    ("free", "again", "remedy"),
    [
        (6 * OF_A_ROW, False, "model.checkpoint_activations=true keeps one layer's at a time"),
        (OF_A_ROW, True, "data.batch_size=1 trainer.accumulate_grad_batches=8 keeps fewer"),
        (3 * OF_A_ROW, True, "data.batch_size=4 trainer.accumulate_grad_batches=2 keeps fewer"),
        (OF_A_ROW * 3 // 8, True, "model.max_seq_len=256 keeps fewer"),
    ],
)
def test_where_no_fused_kernel_can_others_help(free, again, remedy):
    """Flash drops no weights on CPU; dropped in fp32, they take 12 bytes in place of 4."""
    said = warned(free, again=again, dropout=0.1)
    assert said.endswith(f": {remedy}."), said


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("share", [0.9, 0.3, 0.1, 0.01, 0.001])
def test_what_is_recommended_fits(share, dropout, again):
    free = int(share * 8 * OF_A_ROW)
    said = warned(free, dropout=dropout, again=again)
    if said is None:
        return
    changed = {key: int(value) if value.isdigit() else value for key, value in re.findall(r"([\w.]+)=(\w+)", said)}
    assert (
        warned(
            free,
            kernels=("flash" if "attention.backend" in changed else "eager",) * 4,
            batch_size=changed.get("data.batch_size", 8),
            again=again or "model.checkpoint_activations" in changed,
            seq=changed.get("model.max_seq_len", 1024),
            dropout=dropout,
        )
        is None
    )


def test_a_frozen_encoder_keeps_nothing():
    model = make_transformer(backend="eager", tied=False)
    model.encoder.requires_grad_(False)
    assert warn_of_weights(model, ["eager"] * 2, "cpu", torch.float32, CAUSAL, 8, 0) is None


def test_free_memory_is_what_can_be_had():
    free = free_memory("cpu")
    assert free is None or 2**20 < free < 2**50


def test_bytes_of_other_dtypes_devices_and_softmaxes():
    layer = make_transformer(backend="eager").attentions()[0]
    layer.dropout = 0.1
    square = layer.num_heads * SEQ * SEQ
    # The softmax, a copy in the values' dtype, and on CUDA a boolean for each weight that may be dropped.
    assert kept_bytes(layer, SEQ, "cuda", torch.bfloat16) == square * (4 + 2 + 1)
    assert kept_bytes(layer, SEQ, "cuda", torch.float64) == square * (8 + 8 + 1)
    assert kept_bytes(differential(), SEQ, "cpu", torch.float32) == 2 * 4 * SEQ * SEQ * 4


def test_the_remedy_is_one_of_the_device_and_the_dtype():
    model = make_transformer(num_layers=2, max_seq_len=1024, backend="eager")
    for dtype, backend in ((torch.float32, "flex"), (torch.bfloat16, "flash")):
        said = warn_of_weights(model, ["eager"] * 2, "cuda", dtype, CAUSAL, 8, 10**6)
        assert said.endswith(f": attention.backend={backend} keeps none.")


def test_the_remedy_goes_down_to_one():
    three_rows = 3 * (3 * OF_A_ROW // 4)  # of one of 4 layers; dropped in fp32, weights take 12 bytes in place of 4
    said = warned(three_rows, dropout=0.1, again=True)
    assert "data.batch_size=3 trainer.accumulate_grad_batches=3 keeps fewer" in said
    assert warned(1, dropout=0.1).endswith("model.max_seq_len=1 keeps fewer.")


def test_the_kernel_that_torch_falls_back_on_counts_and_is_named():
    assert warned(10**6, kernels=("flash", "math", "flash", "flash")).startswith("The math kernel keeps")


def test_of_unequal_layers_the_largest_counts():
    row = HEADS * SEQ * SEQ * 12
    for again in (True, False):
        model = make_transformer(num_layers=2, max_seq_len=SEQ, backend="eager", checkpoint_activations=again)
        model.attentions()[0].num_heads = 1
        for layer in model.attentions():
            layer.dropout = 0.1
        said = warn_of_weights(model, ["eager"] * 2, "cpu", torch.float32, CAUSAL, 1, row // 2)
        assert "checkpoint" not in said
