"""The analytic costs are those that torch counts, that a real cache holds, and that papers print."""

import functools

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from programs import ROOT
from torch.utils.flop_counter import FlopCounterMode

from tinyformer.analysis.costs import Costs, TrainingFlops, count_costs, visible_pairs
from tinyformer.app.sweep import compose_sweep
from tinyformer.nn import AttentionMask, Cache, Transformer

SEQ = 16
TINY = ("model.num_layers=2", "model.num_heads=4", "model.d_model=32", "model.max_seq_len=16", "model.vocab_size=50")
SHARINGS = ("mha", "gqa", "mqa", "mla", "differential")
VARIANTS = (
    *(f"attention={sharing}" for sharing in SHARINGS),
    *(f"attention={sharing} attention.score=general position=rotary model.bias=true" for sharing in SHARINGS),
    *(f"attention={sharing} attention.score=additive attention.qk_norm=true" for sharing in SHARINGS),
    "attention=gqa position=relative",
    "attention=mla position=relative position.relative.values=false",
    "attention=differential attention.window=[4,null] attention.local_gaussian=true",
    "attention=mha position=alibi attention.sink=true attention.softcap=30",
    "attention=mqa position=t5 attention.score=dot attention.ablated_heads=[[0,1]]",
    "attention=mla attention.q_rank=24 attention.kv_rank=20 attention.rope_head_dim=6",
    "attention=gqa attention.gate=true attention.head_dim=12 model.tied_readout=false position=none",
    *(f"attention={sharing} attention.score=general model.pruned_heads=[[0,1],[0,0],[1,3]]" for sharing in SHARINGS),
    "attention=gqa position=t5 attention.sink=true attention.gate=true model.bias=true model.pruned_heads=[[1,1]]",
    "attention=mha feed_forward=swiglu block=post_norm norm=rms_norm position=sinusoidal",
)


@functools.cache
def composed(*overrides: str) -> DictConfig:
    [(_, config)] = compose_sweep(ROOT / "conf", "card", overrides)
    return config.network


def network(*overrides: str, device: str = "cpu") -> Transformer:
    with torch.device(device):
        return instantiate(composed(*overrides), _convert_="all")


def tiny(overrides: str = "", device: str = "cpu") -> Transformer:
    return network(*TINY, "attention.backend=eager", *overrides.split(), device=device)


def costs(overrides: str, dtype: str = "bf16") -> Costs:
    """Of a variant, without memory for its weights."""
    return count_costs(network("model.vocab_size=50257", *overrides.split(), device="meta"), dtype)


def counted(model: Transformer, backward: bool = False) -> dict[str, int]:
    """What torch's counter sees, by the name of the module; "Global" is all."""
    tokens = torch.zeros(1, SEQ, dtype=torch.long)
    counter = FlopCounterMode(display=False)
    with counter, torch.set_grad_enabled(backward):
        out = model(tokens, AttentionMask(causal=True))
        if backward:
            out.sum().backward()
    return {name: sum(by_operator.values()) for name, by_operator in counter.get_flop_counts().items()}


def numel(model: Transformer, *parts: str, ending: str = "") -> int:
    """The parameters with one of some parts in their names."""
    named = model.named_parameters()
    return sum(p.numel() for name, p in named if any(part in name for part in parts) and name.endswith(ending))


# Floating-point operations.


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_forward_pass_takes_the_flops_that_torch_counts(variant: str) -> None:
    model = tiny(variant)
    found, seen = count_costs(model), counted(model)
    assert found.seq_len == SEQ
    assert found.flops_per_token * SEQ == seen["Global"]
    by_part = {part: flops * SEQ for part, flops in found.flops_per_token_by_part.items()}
    attention = sum(flops for name, flops in seen.items() if name.endswith(".attention"))
    projections = sum(flops for name, flops in seen.items() if ".attention." in name and name.endswith("proj"))
    assert by_part == {
        "attention_projections": projections,
        "attention_scores_and_values": attention - projections,
        "feed_forward": sum(flops for name, flops in seen.items() if name.endswith(".feed_forward")),
        "readout": seen["Transformer.readout"],
    }


@pytest.mark.parametrize("variant", [f"attention={sharing} attention.score=general" for sharing in SHARINGS])
def test_training_takes_three_times_as_many(variant: str) -> None:
    model = tiny(variant)
    assert count_costs(model).training_flops_per_token * SEQ == counted(model, backward=True)["Global"]


@pytest.mark.parametrize("seq", [5, SEQ])
@pytest.mark.parametrize("frozen", [False, True], ids=["all", "readout"])
def test_steps_take_the_flops_that_torch_counts(seq: int, frozen: bool) -> None:
    model = tiny("attention=gqa attention.score=general model.tied_readout=false")
    model.encoder.requires_grad_(not frozen)
    counter = FlopCounterMode(display=False)
    with counter:
        model(torch.zeros(3, seq, dtype=torch.long), AttentionMask(causal=True)).sum().backward()
    found = TrainingFlops.of(model)
    assert found.count(3 * seq, 3 * seq * seq, 3 * seq) == counter.get_total_flops()
    assert found.count(0, 0, 1) == (2 if frozen else 3) * 2 * 50 * 32


def test_training_takes_what_palm_says() -> None:
    found = costs("model=base")
    weights = found.attention_weights + 12 * 2 * 768 * 3072 + 50257 * 768
    assert found.training_flops_per_token == 6 * weights + 12 * 12 * 12 * 64 * 1024  # 6 N + 12 L H Q T


def test_a_differential_head_mixes_all_its_values_twice() -> None:
    plain, differential = (costs(f"model=base attention={name}") for name in ("mha", "differential"))
    one, two = (found.flops_per_token_by_part["attention_scores_and_values"] for found in (plain, differential))
    assert one == 12 * 2 * 1024 * (768 + 768)
    assert two == 12 * 2 * 1024 * (768 + 2 * 768)


@pytest.mark.parametrize("num_heads", [2, 8, 64])
def test_many_small_heads_cost_what_a_large_one_costs(num_heads: int) -> None:
    one, many = (costs(f"model=small model.num_heads={heads}") for heads in (1, num_heads))
    assert one == many


@pytest.mark.parametrize(("seq", "window"), [(16, None), (16, 1), (16, 5), (16, 16), (16, 99), (1, 3), (7, 7)])
def test_visible_pairs_are_those_of_the_mask(seq: int, window: int | None) -> None:
    mask = AttentionMask(causal=True).within(window).dense(seq, seq, torch.device("cpu"))
    assert mask is not None
    assert visible_pairs(seq, window) == int(mask.sum())


def test_a_kernel_that_skips_hidden_pairs_takes_less() -> None:
    full, local = costs("model=small"), costs("model=small attention.window=[16,16,16,null]")
    assert local.flops_per_token == full.flops_per_token
    pair, square, triangle, band = 2 * 2 * 512, 512 * 512, 512 * 513 // 2, 16 * 512 - 120
    assert full.attended_flops_per_token == full.flops_per_token - 8 * pair * (square - triangle) // 512
    assert full.attended_flops_per_token - local.attended_flops_per_token == 6 * pair * (triangle - band) // 512


# Parameters.


@pytest.mark.parametrize("variant", VARIANTS)
def test_parameters_are_those_of_the_network_with_or_without_memory(variant: str) -> None:
    model = tiny(variant)
    found = count_costs(model)
    assert found.num_parameters == sum(p.numel() for p in model.parameters())
    assert found.attention_parameters == numel(model, ".attention.")
    assert found.attention_weights == numel(model, ".attention.", ending="proj.weight")
    assert found.attention_weights_per_layer * 2 == found.attention_weights
    assert found.feed_forward_parameters == numel(model, ".feed_forward.")
    assert found.embedding_parameters == numel(model, "token_embedding", "encoder.position")
    assert found.vocab_size == 50
    # Without memory, the same.
    assert count_costs(tiny(variant, "meta")) == found


def test_base_with_biases_is_gpt2() -> None:
    found = costs("model=base model.bias=true")
    assert found.num_parameters == 124_439_808
    assert found.embedding_parameters == (50_257 + 1024) * 768
    assert found.attention_parameters - found.attention_weights == 12 * 4 * 768
    assert found.feed_forward_parameters == 12 * (2 * 768 * 3072 + 3072 + 768)


def test_a_layer_of_gpt2_has_2_359_296_attention_weights() -> None:
    found = costs("model=base")
    assert found.attention_weights_per_layer == 2_359_296
    assert found.attention_weights == 12 * 2_359_296


def test_a_layer_of_gpt3_has_603_979_776_attention_weights() -> None:
    found = costs("model.d_model=12288 model.num_heads=96 model.num_layers=96 model.max_seq_len=2048 model.bias=true")
    assert found.attention_weights_per_layer == 603_979_776
    assert found.num_parameters == pytest.approx(175e9, rel=0.01)  # Brown et al. 2020, arXiv 2005.14165, table 2.1


# The cache.


@pytest.mark.parametrize(("dtype", "name"), [(torch.float32, "fp32"), (torch.bfloat16, "bf16")], ids=["fp32", "bf16"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_cache_holds_the_bytes_that_are_told(variant: str, dtype: torch.dtype, name: str) -> None:
    model = tiny(variant).to(dtype).eval()
    cache = Cache(len(model.encoder.layers))
    with torch.no_grad():
        model(torch.zeros(1, SEQ, dtype=torch.long), AttentionMask(causal=True), cache)
    found = count_costs(model, name)
    assert cache.num_bytes == found.cache_bytes
    if "window" not in variant:
        assert cache.num_bytes == SEQ * found.cache_bytes_per_token


@pytest.mark.parametrize(
    "variant",
    [
        *(f"attention={sharing} position=rotary" for sharing in SHARINGS),
        *(
            pytest.param(f"attention={sharing} {options}", marks=pytest.mark.slow)
            for sharing in SHARINGS
            for options in ("attention.window=100", "attention.score=general position=rotary", "position=t5")
        ),
    ],
)
def test_a_step_behind_1000_tokens_costs_a_hundredth_of_them(variant: str) -> None:
    model = tiny(f"model.max_seq_len=1000 {variant}", "meta").eval()
    tokens, mask = torch.zeros(1, 1000, dtype=torch.long, device="meta"), AttentionMask(causal=True)
    cache, full, step = Cache(2), FlopCounterMode(display=False), FlopCounterMode(display=False)
    with torch.no_grad():
        with full:
            model(tokens, mask)
        model(tokens[:, 1:], mask, cache)
        with step:
            model(tokens[:, :1], mask, cache)
    assert 0 < step.get_total_flops() <= full.get_total_flops() / 100


@pytest.mark.parametrize(
    ("overrides", "reduction"),
    [
        ("attention=mha model.num_heads=32 model.d_model=4096", 1),
        ("attention=gqa model.num_heads=32 model.d_model=4096 attention.num_kv_heads=8", 4),
        ("attention=mqa model.num_heads=32 model.d_model=4096", 32),
        ("attention=differential model.num_heads=32 model.d_model=4096 attention.num_kv_heads=8", 4),
        # DeepSeek-V2 (arXiv 2405.04434, table 1): 9/2 head_dim numbers for each token in a layer.
        (
            "attention=mla model.num_heads=128 model.d_model=5120 attention.head_dim=128 attention.kv_rank=512 "
            "attention.rope_head_dim=64",
            2 * 128 / (9 / 2),
        ),
    ],
    ids=["mha", "gqa", "mqa", "differential", "mla"],
)
def test_sharing_makes_the_cache_smaller_by(overrides: str, reduction: float) -> None:
    assert costs(overrides).cache_reduction == reduction


def test_a_dtype_that_there_is_not() -> None:
    with pytest.raises(ValueError, match=r"^dtype=fp8: choose one of bf16, fp32\.$"):
        costs("model=nano", "fp8")
