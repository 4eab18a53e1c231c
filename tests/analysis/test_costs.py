"""Analytic costs, against torch's counter, a real cache, a real training step and published numbers."""

import functools
from contextlib import nullcontext

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from tinyformer.config.launch import compose_sweep
from tinyformer.costs.memory import count_batch, count_gpus
from tinyformer.costs.network import Costs, TrainingFlops, batch_sizes, count_costs, pair_multiply_adds, visible_pairs
from tinyformer.nn import AttentionMask, Cache, Transformer
from tinyformer.training import AdamW

SEQ = 16
CAUSAL = AttentionMask(causal=True)
TINY = "model.num_layers=2 model.num_heads=4 model.d_model=32 model.max_seq_len=16 model.vocab_size=50 "
TINY += "attention.backend=eager"
VARIANTS = (
    "attention=[gqa,mla] position=[relative,rotary] attention.window=[null,5]",
    "attention=mla attention.score=general position=rotary model.bias=true",
    *(f"attention={name} attention.v_head_dim=20 model.pruned_heads=[[0,1]]" for name in ("mqa", "differential")),
    "attention=gqa position=relative model.pruned_heads=[[0,1],[0,0],[1,3]] attention.score=general model.bias=true",
    "attention=differential attention.window=[4,null] attention.local_gaussian=true",
    "attention=mqa position=t5 attention.score=dot attention.sink=true attention.forget=true",
    "attention=mla attention.q_rank=24 attention.kv_rank=20 attention.rope_head_dim=6 attention.ablated_heads=[[0,1]]",
    "attention=gqa attention.gate=true attention.head_dim=12 model.tied_readout=false position=none",
    "attention=mha feed_forward=swiglu block=post_norm norm=rms_norm position=sinusoidal",
)


@functools.cache
def composed(overrides: str) -> DictConfig:
    [(_, config)] = compose_sweep("card", overrides.split())
    return config.network


def network(overrides: str, device: str = "meta") -> Transformer:
    with torch.device(device):
        return instantiate(composed(overrides), _convert_="all")


def tiny(overrides: str, device: str = "cpu") -> Transformer:
    return network(f"{TINY} {overrides}", device)


@functools.cache
def costs(overrides: str) -> Costs:
    """The costs of a variant with GPT-2's vocabulary."""
    return count_costs(network(f"model.vocab_size=50257 {overrides}"))


@torch.no_grad()
def counted(model: nn.Module, *inputs: object) -> dict[str, int]:
    """The FLOPs that torch counts in a forward pass, by the name of the module; "Global" is the total."""
    with FlopCounterMode(display=False) as counter:
        model(*inputs)
    return {name: sum(by_operator.values()) for name, by_operator in counter.get_flop_counts().items()}


def numel(model: Transformer, *parts: str, ending: str = "") -> int:
    """The number of parameters whose names contain one of the parts."""
    named = model.named_parameters()
    return sum(p.numel() for name, p in named if any(part in name for part in parts) and name.endswith(ending))


@pytest.mark.parametrize("variant", VARIANTS)
def test_costs_are_those_of_the_network_the_counter_and_the_cache(variant: str) -> None:
    model = tiny(variant).eval()
    ids = torch.zeros(1, SEQ, dtype=torch.long)
    found, seen = count_costs(model, "fp32"), counted(model, ids, CAUSAL)
    assert count_costs(tiny(variant, "meta"), "fp32") == found
    # Parameters.
    assert found.num_parameters == sum(p.numel() for p in model.parameters())
    assert found.attention_parameters == numel(model, ".attention.")
    assert found.attention_weights == numel(model, ".attention.", ending="proj.weight")
    assert found.attention_weights_per_layer * 2 == found.attention_weights
    assert found.feed_forward_parameters == numel(model, ".feed_forward.")
    assert found.embedding_parameters == numel(model, "token_embedding", "encoder.position")
    assert (found.vocab_size, found.seq_len) == (50, SEQ)
    # Floating-point operations.
    assert found.flops_per_token * SEQ == seen["Global"]
    attention = sum(flops for name, flops in seen.items() if name.endswith(".attention"))
    projections = sum(flops for name, flops in seen.items() if ".attention." in name and name.endswith("proj"))
    assert {part: flops * SEQ for part, flops in found.flops_per_token_by_part.items()} == {
        "attention_projections": projections,
        "attention_scores_and_values": attention - projections,
        "feed_forward": sum(flops for name, flops in seen.items() if name.endswith(".feed_forward")),
        "readout": seen["Transformer.readout"],
    }
    # The cache, in both dtypes.
    for dtype, name in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
        cache, expected = Cache(2), count_costs(model, name)
        with torch.no_grad():
            model.to(dtype)(ids, CAUSAL, cache)
        assert cache.num_bytes == expected.cache_bytes
        if "window" not in variant:
            assert cache.num_bytes == SEQ * expected.cache_bytes_per_token


@pytest.mark.parametrize("frozen", [False, True])
def test_training_steps_take_the_flops_that_torch_counts(frozen: bool) -> None:
    model = tiny("attention=gqa attention.score=general model.tied_readout=false")
    model.encoder.requires_grad_(not frozen)
    counter = FlopCounterMode(display=False)
    with counter:
        model(torch.zeros(3, 5, dtype=torch.long), CAUSAL).sum().backward()
    found = TrainingFlops.of(model)
    assert found.count({"tokens": 3 * 5, "pairs": 3 * 5 * 5}, 3 * 5) == counter.get_total_flops()


GPT = "experiment=gpt2 model.bias=true"
"""GPT-2 and GPT-3 have learned positions and biases."""


@pytest.mark.slow
def test_published_numbers() -> None:
    base, gpt2 = costs("model=base"), costs(f"model=base {GPT}")
    assert base.attention_weights == 12 * 2_359_296
    assert gpt2.num_parameters == 124_439_808
    assert gpt2.embedding_parameters == (50_257 + 1024) * 768
    # PaLM's 6 N + 12 L H Q T.
    weights = base.attention_weights + 12 * 2 * 768 * 3072 + 50257 * 768
    assert base.training_flops_per_token == 6 * weights + 12 * 12 * 12 * 64 * 1024
    # Brown et al. 2020, arXiv 2005.14165, table 2.1.
    gpt3 = costs(f"model=gpt3 {GPT}")
    assert gpt3.attention_weights_per_layer == 603_979_776
    # A layer has 12 d² weights and 13 d biases and scales.
    assert gpt3.num_parameters == 96 * (12 * 12_288**2 + 13 * 12_288) + (50_257 + 2048 + 2) * 12_288
    # The weights of meta-llama/Meta-Llama-3-8B; its cache is a quarter of multi-head's.
    llama = count_costs(network("experiment=llama_gqa"))
    assert (llama.num_parameters, llama.cache_reduction, llama.seq_len) == (8_030_261_248, 4, 8192)
    # DeepSeek-V2 (arXiv 2405.04434, table 1): 9/2 head_dim elements for each token in a layer.
    deepseek = "model.num_heads=128 model.d_model=5120 attention.head_dim=128 attention.kv_rank=512"
    assert costs(f"attention=mla {deepseek} attention.rope_head_dim=64").cache_reduction == 2 * 128 / (9 / 2)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("seq", "window"), [(16, None), (16, 1), (16, 5), (16, 6), (16, 99), (1, 3), (7, 7)])
def test_visible_pairs_are_those_of_the_mask(seq: int, window: int | None, causal: bool) -> None:
    mask = AttentionMask(causal=causal, window=window)
    dense = mask.dense(seq, seq, torch.device("cpu"))
    assert visible_pairs(seq, mask) == (seq * seq if dense is None else int(dense.sum()))


@pytest.mark.parametrize(
    "variant",
    [
        "attention=gqa cross_attention=mqa cross_attention.score=general model.num_encoder_layers=3",
        "attention=mla cross_attention=mla model.shared_embedding=false model.tied_readout=false",
        "cross_attention=differential cross_attention.gate=true block=post_norm position=relative",
    ],
)
def test_both_stacks_of_an_encoder_decoder_are_counted(variant: str) -> None:
    model = tiny(f"task=seq2seq {variant} cross_attention.backend=eager").eval()
    found, ids = count_costs(model, "fp32"), torch.zeros(1, SEQ, dtype=torch.long)
    assert found.attention_parameters == numel(model, ".attention.", ".cross_attention.")
    assert found.feed_forward_parameters == numel(model, ".feed_forward.")
    assert found.embedding_parameters == numel(model, "token_embedding", "coder.position")
    assert found.flops_per_token * SEQ == counted(model, ids, ids)["Global"]
    sizes = batch_sizes({"source": ids[:, :5], "inputs": ids})
    assert TrainingFlops.of(model).count(sizes, SEQ) == 3 * counted(model, ids[:, :5], ids)["Global"]
    # A causal mask hides pairs of the decoder's own attention alone.
    hidden = sum(pair_multiply_adds(layer) for layer in model.attentions_by_kind()["decoder"]) * SEQ * (SEQ - 1)
    assert found.attended_flops_per_token == found.flops_per_token - hidden // SEQ
    cache = Cache(2)
    with torch.no_grad():
        model.decode(ids, model.encode(ids), cache=cache)
    assert cache.num_bytes == found.cache_bytes == SEQ * found.cache_bytes_per_token


def test_a_kernel_that_skips_hidden_pairs_takes_less() -> None:
    full, local = costs("model=small"), costs("model=small attention.window=[16,16,16,null]")
    pair, square, triangle, band = 2 * 2 * 512, 512 * 512, 512 * 513 // 2, 16 * 512 - 120
    assert full.attended_flops_per_token == full.flops_per_token - 8 * pair * (square - triangle) // 512
    assert full.attended_flops_per_token - local.attended_flops_per_token == 6 * pair * (triangle - band) // 512


# The memory of a training step.

BATCH = 3


def stored(overrides: str, dtype: str) -> int:
    """Bytes that autograd stores of a real pass through the layers, each storage once and without parameters."""
    model, ids = tiny(overrides).train(), torch.zeros(BATCH, SEQ, dtype=torch.long)
    own = {tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    found: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    casts = torch.autocast("cpu", torch.bfloat16) if dtype == "bf16" else nullcontext()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), casts:
        if "seq2seq" in overrides:
            model.decoder(ids, CAUSAL, None, model.encode(ids))
        else:
            model.encoder(ids, CAUSAL)
    sizes = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in found}
    return sum(size for place, size in sizes.items() if place not in own)


DROPOUT = "model.dropout=0.1 attention.dropout=0.1 attention.backend=eager"
FUSED = "attention=differential attention.backend=sdpa attention.num_kv_heads=4 position=none"
PAIRS = "task=seq2seq cross_attention.backend=eager feed_forward=swiglu model.num_encoder_layers=1"


@pytest.mark.parametrize(
    ("overrides", "dtype"), [(DROPOUT, "fp32"), (DROPOUT, "bf16"), (FUSED, "fp32"), (PAIRS, "bf16")]
)
def test_activations_are_what_autograd_stores(overrides: str, dtype: str) -> None:
    """In fp32 alone for a fused kernel: torch's on CPU computes short sequences of bf16 in fp32."""
    found = count_batch(lambda: tiny(overrides), AdamW(), BATCH, dtype)
    assert found.activation_bytes == stored(overrides, dtype)


@pytest.mark.parametrize(("choice", "frozen"), [("adamw", False), ("adamw", True), ("muon", False)])
def test_the_state_is_that_of_an_optimizer_after_a_step(choice: str, frozen: bool) -> None:
    def make() -> Transformer:
        model = tiny("attention=gqa model.tied_readout=false")
        model.encoder.requires_grad_(not frozen)
        return model

    [(_, config)] = compose_sweep("card", [f"optimizer={choice}"])
    model, make_optimizer = make(), instantiate(config.optimizer)
    optimizer = make_optimizer(model)
    model(torch.zeros(1, SEQ, dtype=torch.long), CAUSAL).sum().backward()
    optimizer.step()
    own = [part.state for part in getattr(optimizer, "optimizers", [optimizer])]
    state = [value for part in own for of_one in part.values() for value in of_one.values()]
    found = count_batch(make, make_optimizer, BATCH)
    assert found.weight_bytes == 4 * numel(model, "")
    assert found.gradient_bytes == sum(4 * weight.numel() for weight in model.parameters() if weight.grad is not None)
    assert found.optimizer_bytes == sum(value.numel() * value.element_size() for value in state)
    parts = found.weight_bytes + found.gradient_bytes + found.optimizer_bytes + found.activation_bytes
    assert found.training_bytes == parts


@pytest.mark.parametrize("position", ["rotary", "t5"])
def test_gpus_gather_two_blocks_and_send_as_many_bytes_as_rings_do(position: str) -> None:
    """Blocks that share T5's table are not gathered one by one."""
    model = tiny(f"position={position}")
    found, total = count_gpus(lambda: tiny(f"position={position}"), AdamW(), 4), numel(model, "")
    block = numel(model, "encoder.layers.0.") if position == "rotary" else 0
    blocks = len(model.encoder.layers) * block
    assert found.whole_weight_bytes == 4 * (total - blocks) + 2 * 2 * block
    assert found.whole_gradient_bytes == 4 * (total - blocks) + 2 * block
    assert found.sent_bytes == 2 * 4 * total * 3 // 4
    assert found.sharded_sent_bytes == (2 * 2 * blocks + 4 * (total - blocks) + 4 * total) * 3 // 4
    parts = found.sharded_weight_bytes + found.sharded_gradient_bytes + found.sharded_optimizer_bytes
    assert found.sharded_bytes == parts + found.whole_weight_bytes + found.whole_gradient_bytes
