"""Llama (Touvron et al. 2023, arXiv 2302.13971) and Mistral (Jiang et al. 2023, arXiv 2310.06825).

Rotary positions, pre-norm with RMSNorm, a gated feed-forward network and grouped-query attention; Mistral adds a
sliding window.
"""

from dataclasses import replace

from tinyformer.errors import ArgumentError
from tinyformer.interop.family import ACTIVATIONS, Family, Field, Fields, Module

ROPE = ("rope_parameters", "rope_scaling")
"""Fields with the parameters of rotary positions, in newer and in older files."""

PLAIN_ROPE = {"rope_type": "default", "type": "default", "partial_rotary_factor": 1.0}


def read_rope(fields: Fields) -> Fields:
    """Move `rope_theta` to the top level, where older files have it.

    Raises:
        ArgumentError: positions are scaled, or only part of each head is rotated.
    """
    fields = dict(fields)
    for name in ROPE:
        parameters = fields.pop(name, None) or {}
        pairs = parameters.items() if isinstance(parameters, dict) else [("rope_type", parameters)]
        for parameter, value in pairs:
            if parameter == "rope_theta":
                fields[parameter] = value
            elif value != PLAIN_ROPE.get(parameter):
                raise ArgumentError(f"fields.{name}.{parameter}", value, "is not supported")
    return fields


def write_rope(fields: Fields) -> Fields:
    """Add `rope_theta` where newer files have it."""
    theta = {name: value for name, value in fields.items() if name == "rope_theta"}
    return fields | {"rope_parameters": {"rope_type": "default", **theta}}


LLAMA = Family(
    name="Llama",
    model_type="llama",
    architecture="LlamaForCausalLM",
    prefix="model.",
    groups={
        "attention": "mha",
        "position": "rotary",
        "block": "pre_norm",
        "norm": "rms_norm",
        "feed_forward": "swiglu",
        "task": "causal_lm",
    },
    fields=(
        Field("vocab_size", "model.vocab_size", int),
        Field("max_position_embeddings", "model.max_seq_len", int, 2048),
        Field("hidden_size", "model.d_model", int),
        Field("intermediate_size", "model.d_ff", int),
        Field("num_hidden_layers", "model.num_layers", int),
        Field("num_attention_heads", "model.num_heads", int),
        Field("num_key_value_heads", "attention.num_kv_heads", int, None, nullable=True),
        Field("head_dim", "attention.head_dim", int, None, nullable=True),
        Field("hidden_act", "feed_forward.activation", str, "silu", ACTIVATIONS),
        Field("rms_norm_eps", "norm.eps", float, 1e-6),
        Field("rope_theta", "position.relative.base", float, 10_000.0),
        Field("attention_bias", "attention.bias", bool, False),
        Field("mlp_bias", "feed_forward.bias", bool, False),
        Field("tie_word_embeddings", "model.tied_readout", bool, False),
        Field("attention_dropout", "attention.dropout", float, 0.0),
        Field("initializer_range", "model.init_std", float, 0.02),
    ),
    fixed={"partial_rotary_factor": 1.0},
    modules=(
        Module("embed_tokens", ("encoder.token_embedding",)),
        Module("layers.{}.input_layernorm", ("encoder.layers.{}.attention_norm",)),
        *(
            Module(f"layers.{{}}.self_attn.{name}", (f"encoder.layers.{{}}.attention.{name}",))
            for name in ("q_proj", "k_proj", "v_proj", "o_proj")
        ),
        Module("layers.{}.post_attention_layernorm", ("encoder.layers.{}.feed_forward_norm",)),
        *(
            Module(f"layers.{{}}.mlp.{name}", (f"encoder.layers.{{}}.feed_forward.{name}",))
            for name in ("gate_proj", "up_proj", "down_proj")
        ),
        Module("norm", ("encoder.final_norm",)),
        Module("lm_head", ("readout.proj",)),
    ),
    unused=(".rotary_emb.inv_freq",),  # follows from rope_theta
    read_fields=read_rope,
    write_fields=write_rope,
)

OTHER_DEFAULTS = {"max_position_embeddings": 131_072, "num_key_value_heads": 8}

MISTRAL = replace(
    LLAMA,
    name="Mistral",
    model_type="mistral",
    architecture="MistralForCausalLM",
    fields=(
        *(
            replace(field, default=OTHER_DEFAULTS.get(field.theirs, field.default))
            for field in LLAMA.fields
            if field.theirs not in ("attention_bias", "mlp_bias")
        ),
        Field("sliding_window", "attention.window", int, 4096, nullable=True),
    ),
)
