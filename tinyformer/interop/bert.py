"""BERT (Devlin et al. 2019, arXiv 1810.04805), with its masked-LM head or without a head: post-norm, biases everywhere.

All tokens have token type 0, as in a single text. An import adds that type's embedding to the learned positional
embeddings and drops the embeddings of other types; an export writes zeros for all types.
"""

from dataclasses import replace

import torch

from tinyformer.interop.family import ACTIVATIONS, SIZES, Family, Field, Fields, Module, Weights, in_layers

TYPES, POSITIONS = "embeddings.token_type_embeddings.weight", "embeddings.position_embeddings.weight"

NUM_TYPES = 2
"""Number of token types of an exported model: BERT tokenizers produce two, for pairs of texts."""

OLD_NAMES = {".gamma": ".weight", ".beta": ".bias"}
"""Suffixes of norm weights in files that were converted from TensorFlow, and their new names."""

OUTPUT, OUTPUT_BIAS = "cls.predictions.decoder", "cls.predictions.bias"


def read_weights(weights: Weights) -> Weights:
    """Add the embedding of token type 0 to the positional embeddings, and move the output bias to the output layer."""
    for old, new in OLD_NAMES.items():
        weights = {
            name.removesuffix(old) + new if name.endswith(old) else name: tensor for name, tensor in weights.items()
        }
    weights[POSITIONS] = weights[POSITIONS] + weights.pop(TYPES)[0]
    bias = weights.pop(OUTPUT_BIAS, None)
    # A tied output layer uses this bias, even if another one is stored under the layer's own name.
    if bias is not None and not {f"{OUTPUT}.weight", f"{OUTPUT}.bias"} <= weights.keys():
        weights[f"{OUTPUT}.bias"] = bias
    return weights


def write_weights(weights: Weights) -> Weights:
    """Add zeros as the embeddings of token types, and a copy of an output bias under the name `OUTPUT_BIAS`."""
    types = torch.zeros(NUM_TYPES, weights[POSITIONS].shape[1], dtype=weights[POSITIONS].dtype)
    bias = weights.get(f"{OUTPUT}.bias")
    return weights | {TYPES: types} | ({} if bias is None else {OUTPUT_BIAS: bias.clone()})


def is_of(architecture: str, fields: Fields) -> bool:
    """Return True if a `config.json` names this class of `transformers`, such as BertModel, and no other."""
    return fields.get("architectures") == [architecture]


def without_head(family: Family, architecture: str) -> Family:
    """The encoders of a family without their prediction head, as sentence encoders are, of the class `architecture`.

    The family itself must not cover this class, see `is_of`; its `write_weights` must accept weights without a head.
    """
    return replace(
        family,
        name=f"{family.name} without a head",
        architecture=architecture,
        # Every name starts with "": an export leaves the prefix out of all names, as the class does.
        outside="",
        groups={**family.groups, "task": "states"},
        modules=tuple(module for module in family.modules if not module.ours.startswith("readout.")),
        note=f"{family.note} The weights of a pooler are left out: the final states do not depend on them.".strip(),
        covers=lambda fields: is_of(architecture, fields),
    )


BERT = Family(
    name="BERT",
    model_type="bert",
    architecture="BertForMaskedLM",
    prefix="bert.",
    outside="cls.",
    groups={
        "attention": "mha",
        "position": "learned",
        "block": "post_norm",
        "norm": "layer_norm",
        "feed_forward": "gelu",
        "task": "masked_lm_bert",
    },
    values={"model.bias": True, "model.embedding_norm": True},
    fields=(
        *SIZES,
        Field("max_position_embeddings", "model.max_seq_len", int, 512),
        Field("hidden_act", "feed_forward.activation", str, "gelu", ACTIVATIONS),
        Field("layer_norm_eps", "norm.eps", float, 1e-12),
        Field("tie_word_embeddings", "model.tied_readout", bool, True),
        Field("hidden_dropout_prob", "model.dropout", float, 0.1),
        Field("attention_probs_dropout_prob", "attention.dropout", float, 0.1),
    ),
    fixed={"position_embedding_type": "absolute", "is_decoder": False, "add_cross_attention": False},
    modules=(
        Module("embeddings.word_embeddings", "encoder.token_embedding"),
        Module("embeddings.position_embeddings", "encoder.position.embedding"),
        Module("embeddings.LayerNorm", "encoder.embedding_norm"),
        *in_layers(
            "encoder.layer.{}.",
            "encoder.layers.{}.",
            {
                "attention.self.query": "attention.q_proj",
                "attention.self.key": "attention.k_proj",
                "attention.self.value": "attention.v_proj",
                "attention.output.dense": "attention.o_proj",
                "attention.output.LayerNorm": "attention_norm",
                "intermediate.dense": "feed_forward.up_proj",
                "output.dense": "feed_forward.down_proj",
                "output.LayerNorm": "feed_forward_norm",
            },
        ),
        Module("cls.predictions.transform.dense", "readout.dense"),
        Module("cls.predictions.transform.LayerNorm", "readout.norm"),
        Module(OUTPUT, "readout.proj"),
    ),
    # Parts of next-sentence prediction, which is not supported.
    unused=("embeddings.position_ids", "pooler.", "cls.seq_relationship."),
    write_fields=lambda fields: fields | {"type_vocab_size": NUM_TYPES},
    read_weights=read_weights,
    write_weights=write_weights,
    generates=False,
    note="All tokens have token type 0, whose embedding is now part of the positional embeddings.",
    covers=lambda fields: not is_of("BertModel", fields),
)
BERT_ENCODER = without_head(BERT, "BertModel")
