"""BART (Lewis et al. 2019, arXiv 1910.13461) and Marian (Junczys-Dowmunt et al. 2018, arXiv 1804.00344): post-norm.

BART has learned positions and normalises its embeddings. Marian has sinusoidal positions and scaled embeddings, and its
models, such as Helsinki-NLP's, come with two SentencePiece models instead of a `tokenizer.json`, so that they are
imported without a tokenizer.
"""

from dataclasses import replace

import torch

from tinyformer.interop.encoder_decoder import (
    GROUPS,
    OF_STACKS,
    join_embedding,
    read_tokens,
    spread_embedding,
    token_fields,
)
from tinyformer.interop.family import ACTIVATIONS, Family, Field, Fields, Module, Weights

OUTPUT_BIAS, LAYER_BIAS = "final_logits_bias", "lm_head.bias"
"""Names of the bias of the logits: in `transformers`, and the one that `modules` expects."""

POSITIONS = ("encoder.embed_positions.weight", "decoder.embed_positions.weight")

NUM_BEFORE = 2
"""Unused rows of BART's table of positions, before that of the first position."""

IN_TRAINING = "Dropout inside the feed-forward network and of whole layers, used in training only, is left out."


def read_weights(weights: Weights) -> Weights:
    """Leave out the rows before the first position, and move the bias of the logits to the output layer."""
    weights = _read_bias(spread_embedding(weights))
    tables = {name: weights[name][NUM_BEFORE:] for name in POSITIONS if name in weights and weights[name].ndim == 2}
    return weights | tables


def write_weights(weights: Weights) -> Weights:
    """Add rows of zeros before the first position, and give the bias of the logits its name in the family."""
    tables = {name: torch.nn.functional.pad(weights[name], (0, 0, NUM_BEFORE, 0)) for name in POSITIONS}
    return _write_bias(join_embedding(weights | tables))


def read_marian_weights(weights: Weights) -> Weights:
    """Leave out the positions, which are not trained, and move the bias of the logits to the output layer."""
    weights = _read_bias(spread_embedding(weights))
    return {name: tensor for name, tensor in weights.items() if name not in POSITIONS}


def write_marian_weights(weights: Weights) -> Weights:
    """Give the bias of the logits its name in the family."""
    return _write_bias(join_embedding(weights))


def read_marian_fields(fields: Fields) -> Fields:
    """Fill in the default of `scale_embedding`, which is refused: positions would outweigh unscaled embeddings."""
    return read_tokens({"scale_embedding": False} | fields)


def write_marian_fields(fields: Fields) -> Fields:
    """Add the field that says that embeddings are scaled."""
    return fields | {"scale_embedding": True}


def _read_bias(weights: Weights) -> Weights:
    bias, embedding = weights.get(OUTPUT_BIAS), weights.get(OF_STACKS[1])
    if bias is None and embedding is not None and embedding.ndim == 2:
        bias = embedding.new_zeros(1, len(embedding))
    named = {} if bias is None else {LAYER_BIAS: bias[0] if bias.ndim == 2 and len(bias) == 1 else bias}
    return {name: tensor for name, tensor in weights.items() if name != OUTPUT_BIAS} | named


def _write_bias(weights: Weights) -> Weights:
    bias = {OUTPUT_BIAS: weights[LAYER_BIAS].unsqueeze(0)}
    return {name: tensor for name, tensor in weights.items() if name != LAYER_BIAS} | bias


def _stack(stack: str) -> tuple[Module, ...]:
    ours = {"self_attn": "attention", "encoder_attn": "cross_attention"}
    kinds = ("self_attn",) if stack == "encoder" else ("self_attn", "encoder_attn")
    pairs = [(f"{kind}.{name}_proj", f"{ours[kind]}.{name}_proj") for kind in kinds for name in "qkv"]
    pairs += [(f"{kind}.out_proj", f"{ours[kind]}.o_proj") for kind in kinds]
    pairs += [(f"{kind}_layer_norm", f"{ours[kind]}_norm") for kind in kinds]
    pairs += [("fc1", "feed_forward.up_proj"), ("fc2", "feed_forward.down_proj")]
    pairs += [("final_layer_norm", "feed_forward_norm")]
    return (
        Module(f"{stack}.embed_tokens", (f"{stack}.token_embedding",)),
        *(Module(f"{stack}.layers.{{}}.{theirs}", (f"{stack}.layers.{{}}.{our}",)) for theirs, our in pairs),
    )


def _embedding(stack: str) -> tuple[Module, ...]:
    return (
        Module(f"{stack}.embed_positions", (f"{stack}.position.embedding",)),
        Module(f"{stack}.layernorm_embedding", (f"{stack}.embedding_norm",)),
    )


STACKS = (*_stack("encoder"), *_stack("decoder"), Module("lm_head", ("readout.proj",)))

SIZES = (
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
)

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
        *SIZES,
        Field("bos_token_id", "model.special_tokens.bos", int, 0, nullable=True),
        *token_fields(eos_token_id=2, decoder_start_token_id=2),
    ),
    fixed={"is_encoder_decoder": True, "tie_word_embeddings": True, "scale_embedding": False},
    modules=(*STACKS, *_embedding("encoder"), *_embedding("decoder")),
    unused=("encoder.version", "decoder.version"),
    read_fields=read_tokens,
    read_weights=read_weights,
    write_weights=write_weights,
    note=IN_TRAINING,
)

MARIAN = replace(
    BART,
    name="Marian",
    model_type="marian",
    architecture="MarianMTModel",
    groups={**BART.groups, "position": "sinusoidal"},
    values={
        "model.bias": True,
        "model.readout_bias": True,
        "model.tied_readout": True,
        "position.absolute.interleaved": False,
    },
    fields=(
        Field("vocab_size", "model.vocab_size", int, 58_101),
        Field("decoder_vocab_size", "model.vocab_size", int, None, nullable=True),
        *SIZES,
        *token_fields(eos_token_id=0, decoder_start_token_id=58_100),
    ),
    fixed={
        "is_encoder_decoder": True,
        "tie_word_embeddings": True,
        "share_encoder_decoder_embeddings": True,
        "scale_embedding": True,
    },
    modules=STACKS,
    note=f"{IN_TRAINING} Marian's two SentencePiece models are not read: the tokenizers library cannot load them.",
    read_fields=read_marian_fields,
    write_fields=write_marian_fields,
    read_weights=read_marian_weights,
    write_weights=write_marian_weights,
)
