"""GPT-NeoX (Black et al. 2022, arXiv 2204.06745): GPT-2 with rotary positions.

The feed-forward network follows attention here; files in which both run side by side, such as Pythia's, are rejected.
"""

from tinyformer.interop.family import ACTIVATIONS, Family, Field, Fields, Module, Weights
from tinyformer.interop.llama import read_rope, write_rope

DEFAULTS: Fields = {"rotary_emb_base": 10_000.0, "rotary_pct": 0.25, "use_parallel_residual": True}
"""Defaults of fields that a file may leave out; those of the last two are not supported."""


def read_fields(fields: Fields) -> Fields:
    """Give the parameters of rotary positions the names that they have in Llama's files."""
    fields = DEFAULTS | fields
    theirs = {"rope_theta": fields.pop("rotary_emb_base"), "partial_rotary_factor": fields.pop("rotary_pct")}
    parameters = fields.get("rope_parameters") or {}
    return read_rope(fields | {"rope_parameters": theirs | parameters if isinstance(parameters, dict) else parameters})


def write_fields(fields: Fields) -> Fields:
    """Store the parameters of rotary positions under the names that older and newer `transformers` read."""
    fields = {"rope_theta": DEFAULTS["rotary_emb_base"]} | write_rope(fields)
    fields["rope_parameters"] = fields["rope_parameters"] | {"partial_rotary_factor": 1.0}
    return fields | {"rotary_pct": 1.0, "rotary_emb_base": fields["rope_theta"], "use_parallel_residual": False}


def read_weights(weights: Weights) -> Weights:
    """Give the output layer its older name, which all versions of `transformers` read."""
    return {name.replace("lm_head.", "embed_out."): tensor for name, tensor in weights.items()}


GPT_NEOX = Family(
    name="GPT-NeoX",
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    prefix="gpt_neox.",
    outside="embed_out.",
    groups={
        "attention": "mha",
        "position": "rotary",
        "block": "pre_norm",
        "norm": "layer_norm",
        "feed_forward": "gelu",
        "task": "causal_lm",
    },
    values={"model.bias": True},
    fields=(
        Field("vocab_size", "model.vocab_size", int),
        Field("max_position_embeddings", "model.max_seq_len", int, 2048),
        Field("hidden_size", "model.d_model", int),
        Field("num_hidden_layers", "model.num_layers", int),
        Field("num_attention_heads", "model.num_heads", int),
        Field("intermediate_size", "model.d_ff", int),
        Field("hidden_act", "feed_forward.activation", str, "gelu", ACTIVATIONS),
        Field("layer_norm_eps", "norm.eps", float, 1e-5),
        Field("rope_theta", "position.relative.base", float, 10_000.0),
        Field("attention_bias", "attention.bias", bool, True),
        Field("tie_word_embeddings", "model.tied_readout", bool, False),
        Field("attention_dropout", "attention.dropout", float, 0.0),
        Field("hidden_dropout", "model.dropout", float, 0.0),
        Field("initializer_range", "model.init_std", float, 0.02),
    ),
    fixed={"use_parallel_residual": False},
    modules=(
        Module("embed_in", ("encoder.token_embedding",)),
        Module("layers.{}.input_layernorm", ("encoder.layers.{}.attention_norm",)),
        Module(
            "layers.{}.attention.query_key_value",
            (
                "encoder.layers.{}.attention.q_proj",
                "encoder.layers.{}.attention.k_proj",
                "encoder.layers.{}.attention.v_proj",
            ),
            by_head=True,
        ),
        Module("layers.{}.attention.dense", ("encoder.layers.{}.attention.o_proj",)),
        Module("layers.{}.post_attention_layernorm", ("encoder.layers.{}.feed_forward_norm",)),
        Module("layers.{}.mlp.dense_h_to_4h", ("encoder.layers.{}.feed_forward.up_proj",)),
        Module("layers.{}.mlp.dense_4h_to_h", ("encoder.layers.{}.feed_forward.down_proj",)),
        Module("final_layer_norm", ("encoder.final_norm",)),
        Module("embed_out", ("readout.proj",)),
    ),
    # The causal mask and the frequencies, which older files contain.
    unused=(".attention.bias", ".attention.masked_bias", ".attention.rotary_emb.inv_freq"),
    read_fields=read_fields,
    write_fields=write_fields,
    read_weights=read_weights,
)
