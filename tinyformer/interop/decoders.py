"""GPT-2, GPT-NeoX, Llama and Mistral: models that predict the next token, with norms before each sublayer.

| family | paper | architecture |
|---|---|---|
| GPT-2 | Radford et al. 2019 | learned positional embeddings, biases everywhere |
| GPT-NeoX | Black et al. 2022, arXiv 2204.06745 | GPT-2 with rotary positions |
| Llama | Touvron et al. 2023, arXiv 2302.13971 | rotary positions, RMSNorm, SwiGLU, grouped-query attention |
| Mistral | Jiang et al. 2023, arXiv 2310.06825 | Llama with a sliding window |

In GPT-NeoX here, the feed-forward network follows attention; files in which both run side by side, such as Pythia's,
are rejected.
"""

from dataclasses import replace

from tinyformer.errors import ArgumentError
from tinyformer.interop.family import ACTIVATIONS, SIZES, Family, Field, Fields, Module, in_layers

GROUPS = {"attention": "mha", "block": "pre_norm", "task": "causal_lm"}

QKV = "attention.q_proj attention.k_proj attention.v_proj"

EMBEDDING, FINAL_NORM, OUTPUT = "encoder.token_embedding", "encoder.final_norm", "readout.proj"

GPT2 = Family(
    name="GPT-2",
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    prefix="transformer.",
    groups=GROUPS | {"position": "learned", "norm": "layer_norm", "feed_forward": "gelu"},
    values={"model.bias": True},
    fields=(
        Field("vocab_size", "model.vocab_size", int),
        Field("n_positions", "model.max_seq_len", int),
        Field("n_embd", "model.d_model", int),
        Field("n_layer", "model.num_layers", int),
        Field("n_head", "model.num_heads", int),
        Field("n_inner", "model.d_ff", int, None, nullable=True),
        Field("activation_function", "feed_forward.activation", str, "gelu_new", ACTIVATIONS),
        Field("layer_norm_epsilon", "norm.eps", float, 1e-5),
        Field("scale_attn_weights", "attention.score", bool, True, {True: "scaled_dot", False: "dot"}),
        Field("tie_word_embeddings", "model.tied_readout", bool, True),
        Field("embd_pdrop", "model.embedding_dropout", float, 0.1),
        Field("resid_pdrop", "model.dropout", float, 0.1),
        Field("attn_pdrop", "attention.dropout", float, 0.1),
        Field("initializer_range", "model.init_std", float, 0.02),
    ),
    # `reorder_and_upcast_attn` computes the same scores in another order, in fp32.
    fixed={"scale_attn_by_inverse_layer_idx": False, "reorder_and_upcast_attn": False, "add_cross_attention": False},
    modules=(
        Module("wte", EMBEDDING),
        Module("wpe", "encoder.position.embedding"),
        *in_layers("h.{}.", "encoder.layers.{}.", {"ln_1": "attention_norm", "ln_2": "feed_forward_norm"}),
        *in_layers(
            "h.{}.",
            "encoder.layers.{}.",
            {
                "attn.c_attn": QKV,
                "attn.c_proj": "attention.o_proj",
                "mlp.c_fc": "feed_forward.up_proj",
                "mlp.c_proj": "feed_forward.down_proj",
            },
            transposed=True,
        ),
        Module("ln_f", FINAL_NORM),
        Module("lm_head", OUTPUT),
    ),
    unused=(".attn.bias", ".attn.masked_bias"),  # the causal mask, which older files contain
)

ROPE = ("rope_parameters", "rope_scaling")
"""Fields with the parameters of rotary positions, in newer and in older files."""

PLAIN_ROPE = {"rope_type": "default", "type": "default", "partial_rotary_factor": 1.0}


def read_rope(fields: Fields) -> Fields:
    """Move `rope_theta` to the top level, where older files have it; refuse values that differ from `PLAIN_ROPE`."""
    fields = dict(fields)
    for name in ROPE:
        for parameter, value in (fields.pop(name, None) or {}).items():
            if parameter == "rope_theta":
                fields[parameter] = value
            elif value != PLAIN_ROPE.get(parameter):
                raise ArgumentError(f"fields.{name}.{parameter}", value, "is not supported")
    return fields


def write_rope(fields: Fields) -> Fields:
    """Add the field `rope_parameters`, which contains `rope_theta` in newer files."""
    theta = {name: value for name, value in fields.items() if name == "rope_theta"}
    return fields | {"rope_parameters": {"rope_type": "default", **theta}}


NEOX_DEFAULTS: Fields = {"rotary_emb_base": 10_000.0, "rotary_pct": 0.25, "use_parallel_residual": True}
"""Defaults of fields that a file may omit; the defaults of the last two fields are not supported."""


def read_neox_fields(fields: Fields) -> Fields:
    """Rename the parameters of rotary positions to their names in Llama's files, and move them: see `read_rope`."""
    fields = NEOX_DEFAULTS | fields
    theirs = {"rope_theta": fields.pop("rotary_emb_base"), "partial_rotary_factor": fields.pop("rotary_pct")}
    return read_rope(fields | {"rope_parameters": theirs | (fields.get("rope_parameters") or {})})


def write_neox_fields(fields: Fields) -> Fields:
    """Store the parameters of rotary positions under their names in older and in newer versions of `transformers`."""
    fields = {"rope_theta": NEOX_DEFAULTS["rotary_emb_base"]} | write_rope(fields)
    fields["rope_parameters"] = fields["rope_parameters"] | {"partial_rotary_factor": 1.0}
    return fields | {"rotary_pct": 1.0, "rotary_emb_base": fields["rope_theta"], "use_parallel_residual": False}


GPT_NEOX = Family(
    name="GPT-NeoX",
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    prefix="gpt_neox.",
    outside="embed_out.",
    groups=GROUPS | {"position": "rotary", "norm": "layer_norm", "feed_forward": "gelu"},
    values={"model.bias": True},
    fields=(
        *SIZES,
        Field("max_position_embeddings", "model.max_seq_len", int, 2048),
        Field("hidden_act", "feed_forward.activation", str, "gelu", ACTIVATIONS),
        Field("layer_norm_eps", "norm.eps", float, 1e-5),
        Field("rope_theta", "position.relative.base", float, 10_000.0),
        Field("attention_bias", "attention.bias", bool, True),
        Field("tie_word_embeddings", "model.tied_readout", bool, False),
        Field("attention_dropout", "attention.dropout", float, 0.0),
        Field("hidden_dropout", "model.dropout", float, 0.0),
    ),
    fixed={"use_parallel_residual": False},
    modules=(
        Module("embed_in", EMBEDDING),
        Module(
            "layers.{}.attention.query_key_value",
            " ".join(f"encoder.layers.{{}}.{name}" for name in QKV.split()),
            by_head=True,
        ),
        *in_layers(
            "layers.{}.",
            "encoder.layers.{}.",
            {
                "input_layernorm": "attention_norm",
                "attention.dense": "attention.o_proj",
                "post_attention_layernorm": "feed_forward_norm",
                "mlp.dense_h_to_4h": "feed_forward.up_proj",
                "mlp.dense_4h_to_h": "feed_forward.down_proj",
            },
        ),
        Module("final_layer_norm", FINAL_NORM),
        Module("embed_out", OUTPUT),
    ),
    # The causal mask and the frequencies, which older files contain.
    unused=(".attention.bias", ".attention.masked_bias", ".attention.rotary_emb.inv_freq"),
    read_fields=read_neox_fields,
    write_fields=write_neox_fields,
    # The output layer gets its older name, which all versions of `transformers` support.
    read_weights=lambda weights: {name.replace("lm_head.", "embed_out."): tensor for name, tensor in weights.items()},
)

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
        Field("rope_theta", "position.relative.base", float, 10_000.0),
        Field("attention_bias", "attention.bias", bool, False),
        Field("mlp_bias", "feed_forward.bias", bool, False),
        Field("tie_word_embeddings", "model.tied_readout", bool, False),
        Field("attention_dropout", "attention.dropout", float, 0.0),
    ),
    fixed={"partial_rotary_factor": 1.0},
    modules=(
        Module("embed_tokens", EMBEDDING),
        *in_layers(
            "layers.{}.",
            "encoder.layers.{}.",
            {
                "input_layernorm": "attention_norm",
                **{f"self_attn.{name}_proj": f"attention.{name}_proj" for name in "qkvo"},
                "post_attention_layernorm": "feed_forward_norm",
                **{f"mlp.{name}_proj": f"feed_forward.{name}_proj" for name in ("gate", "up", "down")},
            },
        ),
        Module("norm", FINAL_NORM),
        Module("lm_head", OUTPUT),
    ),
    unused=(".rotary_emb.inv_freq",),  # follows from rope_theta
    read_fields=read_rope,
    write_fields=write_rope,
)

MISTRAL_DEFAULTS = {"max_position_embeddings": 131_072, "num_key_value_heads": 8}

MISTRAL = replace(
    LLAMA,
    name="Mistral",
    model_type="mistral",
    architecture="MistralForCausalLM",
    fields=(
        *(
            replace(field, default=MISTRAL_DEFAULTS.get(field.theirs, field.default))
            for field in LLAMA.fields
            if field.theirs not in ("attention_bias", "mlp_bias")
        ),
        Field("sliding_window", "attention.window", int, 4096, nullable=True),
    ),
)
