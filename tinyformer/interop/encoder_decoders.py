"""T5, BART and Marian: encoder–decoders, whose stacks share one embedding.

- T5 (Raffel et al. 2019, arXiv 1910.10683): relative position biases, no other biases, RMSNorm, unscaled scores. The
  first version has a ReLU, and a readout that is tied to the embedding and scaled. In version 1.1, which Flan-T5 also
  uses, the feed-forward network is gated (Shazeer 2020, arXiv 2002.05202), and the readout is neither tied nor scaled.
- BART (Lewis et al. 2019, arXiv 1910.13461): norms after each sublayer, learned positions, normalised embeddings.
- Marian (Junczys-Dowmunt et al. 2018, arXiv 1804.00344): sinusoidal positions and scaled embeddings. Its models, such
  as Helsinki-NLP's, come with two SentencePiece models instead of a `tokenizer.json`, so that they are imported without
  a tokenizer.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch

from tinyformer.errors import ArgumentError
from tinyformer.interop.family import ACTIVATIONS, Family, Field, Fields, Module, Weights, in_layers

# Special tokens, and the embedding of both stacks.

GROUPS = {"network": "encoder_decoder", "attention": "mha", "cross_attention": "mha", "task": "seq2seq"}

SHARED, OUTPUT = "shared.weight", "lm_head.weight"
OF_STACKS = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
"""Names of the embedding: shared by both stacks, in the output layer, and in each stack."""

SUPPRESSED = "suppress_tokens"


def token_fields(**defaults: Any) -> tuple[Field, ...]:
    """The fields of special tokens, with their defaults in `transformers`."""
    names = {"eos_token_id": "eos", "decoder_start_token_id": "decoder_start", "forced_bos_token_id": "forced_bos"}
    ids = (
        Field(theirs, f"model.special_tokens.{ours}", int, defaults.get(theirs), nullable=True)
        for theirs, ours in names.items()
    )
    return (*ids, Field(SUPPRESSED, "model.special_tokens.suppressed", list, None, nullable=True))


def read_tokens(fields: Fields) -> Fields:
    """Replace a list of one end token by this token; add `bad_words_ids` to the tokens that are never generated."""
    if isinstance(end := fields.get("eos_token_id"), list):
        if len(end) != 1:
            raise ArgumentError("fields.eos_token_id", end, "must be a single token, the one that ends a target")
        fields = fields | {"eos_token_id": end[0]}
    words, others = fields.get("bad_words_ids") or [], fields.get(SUPPRESSED) or []
    if any(len(word) != 1 for word in words):
        raise ArgumentError("fields.bad_words_ids", words, "supports words of one token only, such as [[0],[5]]")
    tokens = others + [word[0] for word in words if word[0] not in others]
    return fields | ({SUPPRESSED: tokens} if words else {})


def special_ids(tokens: Mapping[str, Any], eos: int | None) -> tuple[Fields, Fields]:
    """The fields of special tokens for `config.json`, and the fields for `generation_config.json`.

    `tokens` are arguments of `SpecialTokens`; `eos` is the tokenizer's end-of-text id, or None without a tokenizer.
    """
    eos = eos if tokens["eos"] is None else tokens["eos"]
    start = eos if tokens["decoder_start"] is None else tokens["decoder_start"]
    ids = {"bos_token_id": tokens["bos"], "eos_token_id": eos, "pad_token_id": start, "decoder_start_token_id": start}
    decoding = {"forced_bos_token_id": tokens["forced_bos"], SUPPRESSED: tokens["suppressed"] or None}
    # BART's default is 2; null means that no token is forced, as in our models.
    unforced = {"forced_eos_token_id": None}
    return unforced | ids, {name: value for name, value in (ids | decoding).items() if value is not None}


def spread_embedding(weights: Weights) -> Weights:
    """Give each stack the shared embedding, which files store under different names."""
    known = next(weights[name] for name in (SHARED, *OF_STACKS, OUTPUT) if name in weights)
    spread = dict.fromkeys(OF_STACKS, known) | weights
    if all(torch.equal(spread[name], known) for name in OF_STACKS):
        spread.pop(SHARED, None)
    return spread


def join_embedding(weights: Weights) -> Weights:
    """Store the embedding of both stacks once, as `SHARED`."""
    others = {name: tensor for name, tensor in weights.items() if name not in OF_STACKS}
    return others | {SHARED: weights[OF_STACKS[0]]}


# T5.

TABLE = "{}.block.{}.layer.0.SelfAttention.relative_attention_bias"
"""The table of position biases of a layer; all layers of a stack use the table of its first layer."""

GATED = "gated-"

GATED_ACTIVATIONS = {"gated-gelu": "gelu_tanh"} | {
    f"{GATED}{name}": ours for name, ours in ACTIVATIONS.items() if name != "gelu"
}
"""Activations of the gate: "gated-gelu" is the tanh approximation of GELU, "gated-gelu_python" the exact GELU."""


def is_gated(fields: Fields) -> bool:
    """Return True if the feed-forward network is gated, as in version 1.1 of T5."""
    return str(fields.get("feed_forward_proj")).startswith(GATED)


def read_t5_fields(fields: Fields) -> Fields:
    """Fill in missing fields that follow from other fields, such as the number of decoder layers."""
    fields = read_tokens(fields)
    if fields.get("num_decoder_layers") is None:
        fields = fields | {"num_decoder_layers": fields.get("num_layers", 6)}
    tied = fields.get("tie_word_embeddings")
    # Newer files have tie_word_embeddings=true for every model, and a separate field for whether the readout is scaled.
    tied = fields.get("scale_decoder_outputs", True if tied is None else tied)
    return {"decoder_start_token_id": fields.get("pad_token_id", 0)} | fields | {"tie_word_embeddings": tied}


def read_t5_weights(weights: Weights) -> Weights:
    """Give each layer the position biases of its stack; if the output layer has no weights, give it the embedding."""
    weights = spread_embedding(weights)
    layers = {match.groups() for name in weights if (match := re.match(r"(encoder|decoder)\.block\.(\d+)\.", name))}
    for stack, layer in layers:
        table = f"{TABLE}.weight"
        if (first := table.format(stack, 0)) in weights:
            weights.setdefault(table.format(stack, layer), weights[first])
    if OF_STACKS[1] in weights:
        weights.setdefault(OUTPUT, weights[OF_STACKS[1]])
    return weights


def write_t5_weights(weights: Weights) -> Weights:
    """Leave out the position biases of all layers except the first, and store the embedding once."""
    tables = {name for name in weights if name.endswith("relative_attention_bias.weight")}
    others = tables - {f"{TABLE}.weight".format(stack, 0) for stack in ("encoder", "decoder")}
    return join_embedding({name: tensor for name, tensor in weights.items() if name not in others})


def t5_modules(inner: Mapping[str, str]) -> tuple[Module, ...]:
    """All modules of T5, given those before the activation of the feed-forward network."""
    modules = [Module("lm_head", "readout.proj")]
    for stack, attentions in (("encoder", ["attention"]), ("decoder", ["attention", "cross_attention"])):
        theirs, ours = f"{stack}.block.{{}}.layer", f"{stack}.layers.{{}}"
        for index, attention in enumerate(attentions):
            kind = "SelfAttention" if attention == "attention" else "EncDecAttention"
            modules += in_layers(f"{theirs}.{index}.{kind}.", {x: f"{x}_proj" for x in "qkvo"}, f"{ours}.{attention}.")
            modules.append(Module(f"{theirs}.{index}.layer_norm", f"{ours}.{attention}_norm"))
        names = {**inner, "wo": "down_proj"}
        modules += [
            Module(f"{stack}.embed_tokens", f"{stack}.token_embedding"),
            Module(TABLE.format(stack, "{}"), f"{ours}.attention.position.embedding"),
            Module(f"{theirs}.{len(attentions)}.layer_norm", f"{ours}.feed_forward_norm"),
            *in_layers(f"{theirs}.{len(attentions)}.DenseReluDense.", names, f"{ours}.feed_forward."),
            Module(f"{stack}.final_layer_norm", f"{stack}.final_norm"),
        ]
    return tuple(modules)


T5 = Family(
    name="T5",
    model_type="t5",
    architecture="T5ForConditionalGeneration",
    prefix="",
    groups=GROUPS | {"position": "t5", "block": "pre_norm", "norm": "rms_norm", "feed_forward": "relu"},
    values={"attention.score": "dot", "cross_attention.score": "dot"},
    fields=(
        Field("vocab_size", "model.vocab_size", int, 32_128),
        Field("n_positions", "model.max_seq_len", int, 512),  # in some files; nothing in T5 depends on it
        Field("d_model", "model.d_model", int, 512),
        *(Field("d_kv", f"{attention}.head_dim", int, 64) for attention in ("attention", "cross_attention")),
        Field("d_ff", "model.d_ff", int, 2048),
        Field("num_layers", "model.num_encoder_layers", int, 6),
        Field("num_decoder_layers", "model.num_layers", int, None),
        Field("num_heads", "model.num_heads", int, 8),
        Field("relative_attention_num_buckets", "position.num_buckets", int, 32),
        Field("relative_attention_max_distance", "position.max_distance", int, 128),
        Field("feed_forward_proj", "feed_forward.activation", str, "relu", ACTIVATIONS),
        Field("layer_norm_epsilon", "norm.eps", float, 1e-6),
        *(Field("tie_word_embeddings", f"model.{kind}_readout", bool, True) for kind in ("tied", "scaled")),
        *(Field("dropout_rate", f"{x}.dropout", float, 0.1) for x in ("attention", "cross_attention", "model")),
        *token_fields(eos_token_id=1),
    ),
    fixed={"is_encoder_decoder": True},
    modules=t5_modules({"wi": "up_proj"}),
    # Cross-attention has no positions; older files contain a table for it, which is not used.
    unused=("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",),
    read_fields=read_t5_fields,
    # The default of the dimension of heads does not depend on the width in `transformers`.
    write_fields=lambda fields: {"d_kv": fields["d_model"] // fields["num_heads"]} | fields,
    read_weights=read_t5_weights,
    write_weights=write_t5_weights,
    covers=lambda fields: not is_gated(fields),
)

T5_GATED = T5.like(
    ("T5 v1.1", T5.model_type, T5.architecture),
    Field("feed_forward_proj", "feed_forward.activation", str, "gated-gelu", GATED_ACTIVATIONS),
    without=("feed_forward_proj",),
    groups={**T5.groups, "feed_forward": "swiglu"},
    modules=t5_modules({"wi_0": "gate_proj", "wi_1": "up_proj"}),
    covers=is_gated,
)

# BART and Marian.

OUTPUT_BIAS, LAYER_BIAS = "final_logits_bias", "lm_head.bias"
"""Names of the bias of the logits: in `transformers`, and in the modules that `bart_modules` returns."""

NUM_BEFORE = 2
"""Number of unused rows in BART's table of positions, before the row of the first position."""

IN_TRAINING = "Dropout inside the feed-forward network and of whole layers, used in training only, is left out."


def read_bart_weights(weights: Weights) -> Weights:
    """Spread the embedding, and move the bias of the logits to the output layer."""
    weights = spread_embedding(weights)
    embedding = weights[OF_STACKS[1]]
    bias = weights.get(OUTPUT_BIAS, embedding.new_zeros(1, len(embedding)))
    return {name: tensor for name, tensor in weights.items() if name != OUTPUT_BIAS} | {LAYER_BIAS: bias[0]}


def write_bart_weights(weights: Weights) -> Weights:
    """The inverse of `read_bart_weights`."""
    weights = join_embedding(weights)
    bias = {OUTPUT_BIAS: weights[LAYER_BIAS].unsqueeze(0)}
    return {name: tensor for name, tensor in weights.items() if name != LAYER_BIAS} | bias


def bart_modules(with_embeddings: bool) -> tuple[Module, ...]:
    """Modules of BART or, without `with_embeddings`, of Marian, which lacks learned positions and embedding norm."""
    modules = [Module("lm_head", "readout.proj")]
    for stack, attentions in (("encoder", ["self_attn"]), ("decoder", ["self_attn", "encoder_attn"])):
        names = {"fc1": "feed_forward.up_proj", "fc2": "feed_forward.down_proj"}
        names["final_layer_norm"] = "feed_forward_norm"
        for theirs in attentions:
            ours = "attention" if theirs == "self_attn" else "cross_attention"
            names |= {f"{theirs}.{name}_proj": f"{ours}.{name}_proj" for name in "qkv"}
            names |= {f"{theirs}.out_proj": f"{ours}.o_proj", f"{theirs}_layer_norm": f"{ours}_norm"}
        modules.append(Module(f"{stack}.embed_tokens", f"{stack}.token_embedding"))
        modules += in_layers(f"{stack}.layers.{{}}.", names, f"{stack}.layers.{{}}.")
        if with_embeddings:
            modules.append(Module(f"{stack}.embed_positions", f"{stack}.position.embedding", skipped=NUM_BEFORE))
            modules.append(Module(f"{stack}.layernorm_embedding", f"{stack}.embedding_norm"))
    return tuple(modules)


BART = Family(
    name="BART",
    model_type="bart",
    architecture="BartForConditionalGeneration",
    prefix="model.",
    outside=("lm_head.", OUTPUT_BIAS),
    groups=GROUPS | {"position": "learned", "block": "post_norm", "norm": "layer_norm", "feed_forward": "gelu"},
    values={"model.bias": True, "model.readout_bias": True, "model.embedding_norm": True, "model.tied_readout": True},
    fields=(
        Field("vocab_size", "model.vocab_size", int, 50_265),
        Field("max_position_embeddings", "model.max_seq_len", int, 1024),
        Field("d_model", "model.d_model", int, 1024),
        Field("encoder_layers", "model.num_encoder_layers", int, 12),
        Field("decoder_layers", "model.num_layers", int, 12),
        *(Field(f"{stack}_attention_heads", "model.num_heads", int, 16) for stack in ("encoder", "decoder")),
        *(Field(f"{stack}_ffn_dim", "model.d_ff", int, 4096) for stack in ("encoder", "decoder")),
        Field("activation_function", "feed_forward.activation", str, "gelu", ACTIVATIONS),
        Field("dropout", "model.dropout", float, 0.1),
        Field("attention_dropout", "attention.dropout", float, 0.0),
        Field("attention_dropout", "cross_attention.dropout", float, 0.0),
        Field("init_std", "model.init_std", float, 0.02),
        Field("scale_embedding", "model.scaled_embedding", bool, False),
        Field("bos_token_id", "model.special_tokens.bos", int, 0, nullable=True),
        *token_fields(eos_token_id=2, decoder_start_token_id=2),
    ),
    fixed={"is_encoder_decoder": True, "tie_word_embeddings": True},
    modules=bart_modules(with_embeddings=True),
    unused=("encoder.version", "decoder.version"),
    read_fields=read_tokens,
    read_weights=read_bart_weights,
    write_weights=write_bart_weights,
    note=IN_TRAINING,
)

MARIAN = BART.like(
    ("Marian", "marian", "MarianMTModel"),
    Field("decoder_vocab_size", "model.vocab_size", int, None, nullable=True),
    without=("scale_embedding", "bos_token_id"),
    defaults={"vocab_size": 58_101, "eos_token_id": 0, "decoder_start_token_id": 58_100},
    groups={**BART.groups, "position": "sinusoidal"},
    values={**BART.values, "model.embedding_norm": False, "position.absolute.interleaved": False},
    fixed={**BART.fixed, "share_encoder_decoder_embeddings": True, "scale_embedding": True},
    modules=bart_modules(with_embeddings=False),
    unused=(*BART.unused, "encoder.embed_positions.", "decoder.embed_positions."),  # which are not trained
    note=f"{IN_TRAINING} Marian's two SentencePiece models are not read: the tokenizers library cannot load them.",
    # The default of `scale_embedding` is refused: positions would outweigh unscaled embeddings.
    read_fields=lambda fields: read_tokens({"scale_embedding": False} | fields),
    write_fields=lambda fields: fields | {"scale_embedding": True},
)

FAMILIES = (T5, T5_GATED, BART, MARIAN)
