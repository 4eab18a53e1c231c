"""GPT-2 and its successors: models that predict the next token, with LayerNorm and an ungated feed-forward network.

| family | paper | architecture |
|---|---|---|
| GPT-2 | Radford et al. 2019 | learned positional embeddings, biases everywhere |
| GPT-Neo | Black et al. 2021 | unscaled scores, windows in every second layer, no biases of q, k and v |
| GPT-J | Wang & Komatsuzaki 2021 | rotary positions, attention in parallel with the feed-forward network |
| GPT-NeoX | Black et al. 2022, arXiv 2204.06745 | GPT-J with a norm for each sublayer; Pythia (arXiv 2304.01373) |
| OPT | Zhang et al. 2022, arXiv 2205.01068 | GPT-2 with ReLU |
"""

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from tinyformer.interop.family import ACTIVATIONS, SIZES, Family, Field, Fields, Module, in_layers
from tinyformer.interop.layers import FRACTION, ROPE, WINDOWS, in_each_layer, one_or_pattern, read_rope, write_rope
from tinyformer.nn import RotaryPosition
from tinyformer.nn.attention import BaseAttention

GROUPS = {"attention": "mha", "block": "pre_norm", "task": "causal_lm"}

QKV = "attention.q_proj attention.k_proj attention.v_proj"

EMBEDDING, FINAL_NORM, OUTPUT = "encoder.token_embedding", "encoder.final_norm", "readout.proj"

BUFFERS = (".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq")
"""Suffixes of the causal mask and of the frequencies, which older files contain."""

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
    fixed={"scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
    modules=(
        Module("wte", EMBEDDING),
        Module("wpe", "encoder.position.embedding"),
        *in_layers("h.{}.", {"ln_1": "attention_norm", "ln_2": "feed_forward_norm"}),
        *in_layers(
            "h.{}.",
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
    unused=BUFFERS,
)


def read_gpt_neo_fields(fields: Fields) -> Fields:
    """Replace the types of attention, as in [[["global", "local"], 12]], by the windows of the layers."""
    fields = dict[str, Any](window_size=256, attention_types=[[["global", "local"], 12]]) | fields
    types = [kind for kinds, times in fields.pop("attention_types") for kind in kinds * times]
    return fields | {"windows": one_or_pattern([fields["window_size"] if kind == "local" else None for kind in types])}


def write_gpt_neo_fields(fields: Fields) -> Fields:
    """The inverse of `read_gpt_neo_fields`."""
    windows = in_each_layer(fields.pop("windows", None), fields["num_layers"])
    types = ["global" if window is None else "local" for window in windows]
    size = next(filter(None, windows), 256)
    return fields | {"attention_types": [[types, 1]], "window_size": size}


GPT_NEO = GPT2.like(
    ("GPT-Neo", "gpt_neo", "GPTNeoForCausalLM"),
    values={"model.bias": True, "attention.bias": "o", "attention.score": "dot"},
    fields=(
        Field("vocab_size", "model.vocab_size", int),
        Field("max_position_embeddings", "model.max_seq_len", int, 2048),
        Field("hidden_size", "model.d_model", int),
        Field("num_layers", "model.num_layers", int),
        Field("num_heads", "model.num_heads", int),
        Field("intermediate_size", "model.d_ff", int, None, nullable=True),
        Field("activation_function", "feed_forward.activation", str, "gelu_new", ACTIVATIONS),
        Field("layer_norm_epsilon", "norm.eps", float, 1e-5),
        Field("tie_word_embeddings", "model.tied_readout", bool, True),
        Field("embed_dropout", "model.embedding_dropout", float, 0.0),
        Field("resid_dropout", "model.dropout", float, 0.0),
        Field("attention_dropout", "attention.dropout", float, 0.0),
        Field("initializer_range", "model.init_std", float, 0.02),
        WINDOWS,
    ),
    fixed={},
    modules=(
        *(module for module in GPT2.modules if not module.transposed),
        *in_layers(
            "h.{}.",
            {
                **{f"attn.attention.{name}_proj": f"attention.{name}_proj" for name in "qkv"},
                "attn.attention.out_proj": "attention.o_proj",
                "mlp.c_fc": "feed_forward.up_proj",
                "mlp.c_proj": "feed_forward.down_proj",
            },
        ),
    ),
    read_fields=read_gpt_neo_fields,
    write_fields=write_gpt_neo_fields,
)


def interleaved(attention: BaseAttention) -> Int[Tensor, " head_dim"]:
    """GPT-J's order of the rows of a head, in which the two dimensions of a rotation are neighbours."""
    assert isinstance(attention.position, RotaryPosition)
    rotary_dim, rows = attention.position.dim, torch.arange(attention.head_dim)
    return torch.cat([rows[:rotary_dim:2], rows[1:rotary_dim:2], rows[rotary_dim:]])


def read_gpt_j_fields(fields: Fields) -> Fields:
    """Replace the number of rotated dimensions by their share."""
    head_dim = fields.get("n_embd", 4096) // fields.get("n_head", 16)
    rotary_dim = fields.get("rotary_dim", 64)
    return fields | {"partial_rotary_factor": (rotary_dim or head_dim) / head_dim}


def write_gpt_j_fields(fields: Fields) -> Fields:
    """The inverse of `read_gpt_j_fields`."""
    share = fields.pop("partial_rotary_factor", 1.0)
    return fields | {"rotary_dim": round(share * fields["n_embd"] / fields["n_head"])}


GPT_J = GPT2.like(
    ("GPT-J", "gptj", "GPTJForCausalLM"),
    FRACTION,
    without=("scale_attn_weights",),
    defaults={"tie_word_embeddings": False} | dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop"), 0.0),
    groups={**GPT2.groups, "position": "rotary", "block": "parallel"},
    values={"model.bias": True, "attention.bias": False, "model.readout_bias": True, "block.shared_norm": True},
    fixed={},
    modules=(
        Module("wte", EMBEDDING),
        *(Module(f"h.{{}}.attn.{x}_proj", f"encoder.layers.{{}}.attention.{x}_proj", order=interleaved) for x in "qk"),
        *in_layers(
            "h.{}.",
            {
                "attn.v_proj": "attention.v_proj",
                "attn.out_proj": "attention.o_proj",
                "ln_1": "attention_norm",
                "mlp.fc_in": "feed_forward.up_proj",
                "mlp.fc_out": "feed_forward.down_proj",
            },
        ),
        Module("ln_f", FINAL_NORM),
        Module("lm_head", OUTPUT),
    ),
    read_fields=read_gpt_j_fields,
    write_fields=write_gpt_j_fields,
)


def read_neox_fields(fields: Fields) -> Fields:
    """Rename the parameters of rotary positions to their names in Llama's files, and move them: see `read_rope`."""
    fields = {"rotary_emb_base": 10_000.0, "rotary_pct": 0.25} | fields
    theirs = {"rope_theta": fields.pop("rotary_emb_base"), "partial_rotary_factor": fields.pop("rotary_pct")}
    return read_rope(theirs | fields)


def write_neox_fields(fields: Fields) -> Fields:
    """Store the parameters of rotary positions under their names in older and in newer versions of `transformers`."""
    older = {"rotary_emb_base": fields.get("rope_theta"), "rotary_pct": fields.get("partial_rotary_factor")}
    return write_rope(fields) | {name: value for name, value in older.items() if value is not None}


GPT_NEOX = GPT2.like(
    ("GPT-NeoX", "gpt_neox", "GPTNeoXForCausalLM"),
    prefix="gpt_neox.",
    outside="embed_out.",
    groups={**GPT2.groups, "position": "rotary", "block": "parallel"},
    fields=(
        *SIZES,
        Field("max_position_embeddings", "model.max_seq_len", int, 2048),
        Field("hidden_act", "feed_forward.activation", str, "gelu", ACTIVATIONS),
        Field("layer_norm_eps", "norm.eps", float, 1e-5),
        *ROPE,
        FRACTION,
        Field("attention_bias", "attention.bias", bool, True),
        Field("tie_word_embeddings", "model.tied_readout", bool, False),
        Field("attention_dropout", "attention.dropout", float, 0.0),
        Field("hidden_dropout", "model.dropout", float, 0.0),
    ),
    fixed={"use_parallel_residual": True},
    modules=(
        Module("embed_in", EMBEDDING),
        Module(
            "layers.{}.attention.query_key_value",
            " ".join(f"encoder.layers.{{}}.{name}" for name in QKV.split()),
            by_head=True,
        ),
        *in_layers(
            "layers.{}.",
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
    read_fields=read_neox_fields,
    write_fields=write_neox_fields,
    # The output layer gets its older name, which all versions of `transformers` support.
    read_weights=lambda weights: {name.replace("lm_head.", "embed_out."): tensor for name, tensor in weights.items()},
    covers=lambda fields: fields.get("use_parallel_residual") is not False,
)

GPT_NEOX_SEQUENTIAL = GPT_NEOX.like(
    ("sequential GPT-NeoX", GPT_NEOX.model_type, GPT_NEOX.architecture),
    groups={**GPT_NEOX.groups, "block": "pre_norm"},
    fixed={"use_parallel_residual": False},
    write_fields=lambda fields: write_neox_fields(fields) | {"use_parallel_residual": False},
    covers=lambda fields: fields.get("use_parallel_residual") is False,
)


def read_opt_fields(fields: Fields) -> Fields:
    """Leave out the width of the embeddings if it is that of the layers."""
    width = fields.get("word_embed_proj_dim")
    return fields | {"word_embed_proj_dim": None if width == fields.get("hidden_size") else width}


OPT = GPT2.like(
    ("OPT", "opt", "OPTForCausalLM"),
    prefix="model.decoder.",
    groups={**GPT2.groups, "feed_forward": "relu"},
    fields=(
        *SIZES[:4],
        Field("ffn_dim", "model.d_ff", int, 3072),
        Field("max_position_embeddings", "model.max_seq_len", int, 2048),
        Field("activation_function", "feed_forward.activation", str, "relu", ACTIVATIONS),
        Field("tie_word_embeddings", "model.tied_readout", bool, True),
        Field("dropout", "model.dropout", float, 0.1),
        Field("attention_dropout", "attention.dropout", float, 0.0),
        Field("init_std", "model.init_std", float, 0.02),
    ),
    fixed={
        **dict.fromkeys(("do_layer_norm_before", "enable_bias", "layer_norm_elementwise_affine"), True),
        **{"_remove_final_layer_norm": False, "word_embed_proj_dim": None},
    },
    modules=(
        Module("embed_tokens", EMBEDDING),
        Module("embed_positions", "encoder.position.embedding", skipped=2),  # unused
        *in_layers(
            "layers.{}.",
            {
                "self_attn_layer_norm": "attention_norm",
                **{f"self_attn.{name}_proj": f"attention.{name}_proj" for name in "qkv"},
                "self_attn.out_proj": "attention.o_proj",
                "final_layer_norm": "feed_forward_norm",
                "fc1": "feed_forward.up_proj",
                "fc2": "feed_forward.down_proj",
            },
        ),
        Module("final_layer_norm", FINAL_NORM),
        Module("lm_head", OUTPUT),
    ),
    # An OPTModel, which has no output layer, has a shorter prefix.
    read_weights=lambda weights: {name.removeprefix("decoder."): tensor for name, tensor in weights.items()},
    read_fields=read_opt_fields,
)

FAMILIES = (GPT2, GPT_NEO, GPT_J, GPT_NEOX, GPT_NEOX_SEQUENTIAL, OPT)
