"""Llama and its successors: models that predict the next token, with rotary positions, RMSNorm and gated networks.

| family | paper | what differs from Llama |
|---|---|---|
| Llama | Touvron et al. 2023, arXiv 2302.13971; 3: arXiv 2407.21783 | |
| Mistral | Jiang et al. 2023, arXiv 2310.06825 | a sliding window |
| Qwen 2 | Yang et al. 2024, arXiv 2407.10671 | biases of q, k and v |
| Qwen 3 | Yang et al. 2025, arXiv 2505.09388 | norms of queries and keys |
| SmolLM3 | Bakouch et al. 2025 | no positions in every fourth layer |
| OLMo 2 and 3 | arXiv 2501.00656, 2512.13961 | norms after the sublayers, of whole projections; 3: windows |
| Gemma 2 and 3 | arXiv 2408.00118, 2503.19786 | norms before and after the sublayers, windows; 2: bounded scores |
| Phi 1 to 2 | Gunasekar et al. 2023, arXiv 2306.11644 | GPT-J's block, with LayerNorm |
| Phi 3 | Abdin et al. 2024, arXiv 2404.14219 | Llama with joined matrices |
| nanochat | Karpathy 2025 | norms without weights, ReLU squared, bounded logits |
"""

from collections.abc import Mapping
from dataclasses import replace

from jaxtyping import Int
from torch import Tensor, arange

from tinyformer.interop.family import ACTIVATIONS, SIZES, Family, Field, Fields, Module, in_layers
from tinyformer.interop.gpt import BUFFERS, EMBEDDING, FINAL_NORM, GPT_J, GROUPS, OUTPUT, QKV
from tinyformer.interop.layers import (
    DEPTH,
    FRACTION,
    FULL,
    LAYERED_ROPE,
    ROPE,
    SLIDING,
    WINDOWS,
    in_each_layer,
    pattern_of,
    read_layered_rope,
    read_rope,
    read_windows,
    write_layered_rope,
    write_rope,
    write_windows,
)
from tinyformer.nn.attention import BaseAttention

ROPE_NAMES = tuple(field.theirs for field in ROPE)

PROJECTIONS = {f"self_attn.{name}_proj": f"attention.{name}_proj" for name in "qkvo"}
PROJECTIONS |= {f"mlp.{name}_proj": f"feed_forward.{name}_proj" for name in ("gate", "up", "down")}
NORMS = {"input_layernorm": "attention_norm", "post_attention_layernorm": "feed_forward_norm"}
LAYER = PROJECTIONS | NORMS
"""The modules of a layer of Llama."""

MLP = {"mlp.fc1": "feed_forward.up_proj", "mlp.fc2": "feed_forward.down_proj"}
"""The feed-forward network of Phi and nanochat, which is not gated."""

QK_NORMS = {f"self_attn.{name}_norm": f"attention.{name}_norm" for name in "qk"}


def modules_of(layer: Mapping[str, str], final_norm: str = "norm") -> tuple[Module, ...]:
    """All modules of a model, given the modules of its layers and the name of the final norm."""
    ends = (Module("embed_tokens", EMBEDDING), Module(final_norm, FINAL_NORM), Module("lm_head", OUTPUT))
    return (*ends, *in_layers("layers.{}.", layer))


LLAMA = Family(
    name="Llama",
    model_type="llama",
    architecture="LlamaForCausalLM",
    prefix="model.",
    groups=GROUPS | {"position": "rotary", "norm": "rms_norm", "feed_forward": "swiglu"},
    fields=(
        *SIZES,
        Field("max_position_embeddings", "model.max_seq_len", int, 2048),
        Field("num_key_value_heads", "attention.num_kv_heads", int, None, nullable=True),
        Field("head_dim", "attention.head_dim", int, None, nullable=True),
        Field("hidden_act", "feed_forward.activation", str, "silu", ACTIVATIONS),
        Field("rms_norm_eps", "norm.eps", float, 1e-6),
        *ROPE,
        Field("attention_bias", "attention.bias", bool, False),
        Field("mlp_bias", "feed_forward.bias", bool, False),
        Field("tie_word_embeddings", "model.tied_readout", bool, False),
        Field("attention_dropout", "attention.dropout", float, 0.0),
    ),
    fixed={"partial_rotary_factor": 1.0},
    modules=modules_of(LAYER),
    unused=BUFFERS,
    read_fields=read_rope,
    write_fields=write_rope,
)

MISTRAL = LLAMA.like(
    ("Mistral", "mistral", "MistralForCausalLM"),
    Field("sliding_window", "attention.window", int, 4096, nullable=True),
    without=("attention_bias", "mlp_bias"),
    defaults={"max_position_embeddings": 131_072, "num_key_value_heads": 8},
)


def read_qwen_fields(fields: Fields) -> Fields:
    """Replace `max_window_layers`, the number of first layers without a window, by the windows of the layers."""
    if not fields.get("use_sliding_window"):
        return read_rope(fields) | {"windows": None}
    full = fields.get("max_window_layers", 28)
    pattern = [FULL if layer < full else SLIDING for layer in range(DEPTH.read(fields))]
    return read_windows(read_rope(fields), pattern, 4096)


def write_qwen_fields(fields: Fields) -> Fields:
    """The inverse of `read_qwen_fields`."""
    return write_rope(write_windows(fields)) | {"use_sliding_window": fields.get("windows") is not None}


QWEN2 = LLAMA.like(
    ("Qwen 2", "qwen2", "Qwen2ForCausalLM"),
    WINDOWS,
    without=("attention_bias", "mlp_bias", "head_dim"),
    defaults={"max_position_embeddings": 32_768, "num_key_value_heads": 32},
    values={"attention.bias": "qkv"},
    read_fields=read_qwen_fields,
    write_fields=write_qwen_fields,
)

QK_EPS = Field("rms_norm_eps", "attention.qk_norm_eps", float, 1e-6)

QWEN3 = LLAMA.like(
    ("Qwen 3", "qwen3", "Qwen3ForCausalLM"),
    QK_EPS,
    WINDOWS,
    without=("mlp_bias",),
    defaults={"max_position_embeddings": 32_768, "num_key_value_heads": 32, "head_dim": 128},
    values={"attention.qk_norm": True},
    modules=modules_of(LAYER | QK_NORMS),
    read_fields=read_qwen_fields,
    write_fields=write_qwen_fields,
)


def read_smollm3_fields(fields: Fields) -> Fields:
    """Replace the layers without positions by the kinds of positions of the layers."""
    interval, depth = fields.get("no_rope_layer_interval", 4), DEPTH.read(fields)
    rotated = fields.get("no_rope_layers") or [int((layer + 1) % interval != 0) for layer in range(depth)]
    positions = pattern_of(["rotary" if flag else "none" for flag in rotated[:depth]])
    fields = {"rope_theta": 2_000_000.0} | fields | {"positions": positions}
    sliding = SLIDING if fields.get("use_sliding_window") else FULL  # has no effect on a given `layer_types`
    return read_windows(read_rope(fields), [FULL if flag else sliding for flag in rotated])


def write_smollm3_fields(fields: Fields) -> Fields:
    """The inverse of `read_smollm3_fields`."""
    rotated = [int(kind == "rotary") for kind in in_each_layer(fields.pop("positions", "rotary"), DEPTH.read(fields))]
    return write_qwen_fields(fields) | {"no_rope_layers": rotated}


SMOLLM3 = LLAMA.like(
    ("SmolLM3", "smollm3", "SmolLM3ForCausalLM"),
    Field("positions", "position.relative.pattern", list, ["rotary", "rotary", "rotary", "none"]),
    WINDOWS,
    without=("head_dim",),
    defaults={"max_position_embeddings": 32_768, "num_key_value_heads": 4, "tie_word_embeddings": True},
    groups={**LLAMA.groups, "position": "by_layer"},
    read_fields=read_smollm3_fields,
    write_fields=write_smollm3_fields,
)

OLMO_NORMS = {"post_attention_layernorm": "attention_norm", "post_feedforward_layernorm": "feed_forward_norm"}

OLMO2 = LLAMA.like(
    ("OLMo 2", "olmo2", "Olmo2ForCausalLM"),
    replace(QK_EPS, default=1e-5),
    without=("mlp_bias", "head_dim"),
    defaults={"rms_norm_eps": 1e-5},
    groups={**LLAMA.groups, "block": "reordered"},
    values={"attention.qk_norm": "projection"},
    modules=modules_of(PROJECTIONS | QK_NORMS | OLMO_NORMS),
)

OLMO3_LAYERS = (SLIDING, SLIDING, SLIDING, FULL)
OLMO3_BASES = dict.fromkeys((FULL, SLIDING), ("rope_theta", 500_000.0))

OLMO3 = OLMO2.like(
    ("OLMo 3", "olmo3", "Olmo3ForCausalLM"),
    *LAYERED_ROPE,
    WINDOWS,
    without=ROPE_NAMES,
    read_fields=lambda fields: read_windows(read_layered_rope(fields, OLMO3_LAYERS, OLMO3_BASES), OLMO3_LAYERS, 4096),
    write_fields=lambda fields: write_layered_rope(write_windows(fields)),
)

DROPOUTS = (
    Field("embd_pdrop", "model.embedding_dropout", float, 0.0),
    Field("resid_pdrop", "model.dropout", float, 0.0),
)

SCALAR = "query_pre_attn_scalar"


def read_gemma_fields(fields: Fields) -> Fields:
    """Replace the number s of `SCALAR` by the factor of the scores, 1 / sqrt(s), or by null if s is the head's size."""
    scalar = fields.get(SCALAR, 256)
    return fields | {"score_scale": None if scalar == fields.get("head_dim", 256) else float(scalar) ** -0.5}


def write_gemma_fields(fields: Fields) -> Fields:
    """The inverse of `read_gemma_fields`."""
    scale = fields.pop("score_scale", None)
    head_dim = fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]
    return fields | {SCALAR: head_dim if scale is None else round(scale**-2), "head_dim": head_dim}


GEMMA2_LAYERS = (SLIDING, FULL)

GEMMA_NORMS = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "attention_output_norm",
    "pre_feedforward_layernorm": "feed_forward_norm",
    "post_feedforward_layernorm": "feed_forward_output_norm",
}

GEMMA2 = LLAMA.like(
    ("Gemma 2", "gemma2", "Gemma2ForCausalLM"),
    Field("hidden_activation", "feed_forward.activation", str, "gelu_pytorch_tanh", ACTIVATIONS),
    Field("attn_logit_softcapping", "attention.softcap", float, 50.0, nullable=True),
    Field("final_logit_softcapping", "model.readout_softcap", float, 30.0, nullable=True),
    Field("score_scale", "attention.scale", float, None, nullable=True),
    WINDOWS,
    without=("mlp_bias", "hidden_act"),
    defaults={"max_position_embeddings": 8192, "num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True},
    groups={**LLAMA.groups, "block": "sandwich"},
    values={"norm.zero_centered": True, "model.scaled_embedding": True},
    fixed={"use_bidirectional_attention": False},
    modules=modules_of(PROJECTIONS | GEMMA_NORMS),
    read_fields=lambda fields: read_rope(read_windows(read_gemma_fields(fields), GEMMA2_LAYERS, 4096)),
    write_fields=lambda fields: write_rope(write_windows(write_gemma_fields(fields))),
)

GEMMA3_BASES = {FULL: ("rope_theta", 1_000_000.0), SLIDING: ("rope_local_base_freq", 10_000.0)}


def read_gemma3_fields(fields: Fields) -> Fields:
    """Replace types of layers by windows and rotary positions of the layers."""
    pattern = (*[SLIDING] * (fields.get("sliding_window_pattern", 6) - 1), FULL)
    return read_windows(read_layered_rope(read_gemma_fields(fields), pattern, GEMMA3_BASES), pattern, 4096)


GEMMA3 = GEMMA2.like(
    ("Gemma 3", "gemma3_text", "Gemma3ForCausalLM"),
    *LAYERED_ROPE,
    QK_EPS,
    without=ROPE_NAMES,
    defaults={"max_position_embeddings": 131_072, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    values={**GEMMA2.values, "attention.qk_norm": "zero_centered"},
    modules=modules_of(PROJECTIONS | GEMMA_NORMS | QK_NORMS),
    read_fields=read_gemma3_fields,
    write_fields=lambda fields: write_layered_rope(write_windows(write_gemma_fields(fields))),
)

PHI = LLAMA.like(
    ("Phi", "phi", "PhiForCausalLM"),
    FRACTION,
    Field("layer_norm_eps", "norm.eps", float, 1e-5),
    *DROPOUTS,
    without=("attention_bias", "mlp_bias", "head_dim", "rms_norm_eps"),
    defaults={"hidden_act": "gelu_new"},
    groups=GPT_J.groups,
    values={"model.bias": True, "model.readout_bias": True, "block.shared_norm": True},
    fixed={"qk_layernorm": False},
    modules=modules_of(
        {
            "input_layernorm": "attention_norm",
            **{f"self_attn.{name}_proj": f"attention.{name}_proj" for name in "qkv"},
            "self_attn.dense": "attention.o_proj",
            **MLP,
        },
        final_norm="final_layernorm",
    ),
    read_fields=lambda fields: read_rope({"partial_rotary_factor": 0.5} | fields),
)

JOINED = {"self_attn.qkv_proj": QKV, "mlp.gate_up_proj": "feed_forward.gate_proj feed_forward.up_proj"}
JOINED |= {"self_attn.o_proj": "attention.o_proj", "mlp.down_proj": "feed_forward.down_proj"}

PHI3 = LLAMA.like(
    ("Phi 3", "phi3", "Phi3ForCausalLM"),
    FRACTION,
    *DROPOUTS,
    Field("sliding_window", "attention.window", int, None, nullable=True),
    without=("attention_bias", "mlp_bias", "head_dim"),
    defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    fixed={},
    modules=modules_of(JOINED | NORMS),
)


def opposite(attention: BaseAttention) -> Int[Tensor, " head_dim"]:
    """The order of the rows of a head that is rotated in the opposite direction: the halves are swapped."""
    return arange(attention.head_dim).roll(attention.head_dim // 2)


NANOCHAT = LLAMA.like(
    ("nanochat", "nanochat", "NanoChatForCausalLM"),
    QK_EPS,
    Field("final_logit_softcapping", "model.readout_softcap", float, 15.0, nullable=True),
    without=("mlp_bias", "head_dim"),
    defaults={"hidden_act": "relu2"},
    groups={**LLAMA.groups, "feed_forward": "relu2"},
    # nanochat normalises queries and keys after the rotation, which does not change their root mean square.
    values={"norm.weight": False, "attention.qk_norm": "unscaled", "model.embedding_norm": True},
    modules=(
        *(
            Module(f"layers.{{}}.self_attn.{x}_proj", f"encoder.layers.{{}}.attention.{x}_proj", order=opposite)
            for x in "qk"
        ),
        *modules_of({f"self_attn.{name}_proj": f"attention.{name}_proj" for name in "vo"} | MLP),
    ),
)

FAMILIES = (PHI, LLAMA, MISTRAL, QWEN2, QWEN3, SMOLLM3, OLMO2, OLMO3, GEMMA2, GEMMA3, PHI3, NANOCHAT)
