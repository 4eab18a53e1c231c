"""BERT and its successors, with their masked-LM heads or, as sentence encoders, without a head.

| family | paper | architecture |
|---|---|---|
| BERT | Devlin et al. 2019, arXiv 1810.04805 | post-norm, biases everywhere |
| RoBERTa | Liu et al. 2019, arXiv 1907.11692; XLM-R: 1911.02116 | BERT |
| DistilBERT | Sanh et al. 2019, arXiv 1910.01108 | BERT without token types |
| ModernBERT | Warner et al. 2024, arXiv 2412.13663 | pre-norm, rotary positions, windows, gated, no biases |

All tokens of BERT and RoBERTa have token type 0, as in a single text. An import adds that type's embedding to the
learned positional embeddings and drops the embeddings of other types; an export writes zeros for all types.
"""

from dataclasses import dataclass, replace

from tinyformer.errors import ArgumentError
from tinyformer.interop.family import ACTIVATIONS, SIZES, Family, Field, Fields, Module, Weights, in_layers
from tinyformer.interop.layers import (
    FULL,
    LAYERED_ROPE,
    SLIDING,
    WINDOWS,
    read_layered_rope,
    read_windows,
    write_layered_rope,
    write_windows,
)

TYPES, POSITIONS = "embeddings.token_type_embeddings.weight", "embeddings.position_embeddings.weight"


@dataclass(frozen=True)
class Conversion:
    """The conversion of the weights of BERT or RoBERTa, which differ in the names of the output layer."""

    output: str = "cls.predictions.decoder"  # the output layer
    output_bias: str = "cls.predictions.bias"  # the other name of its bias
    num_types: int = 2  # token types of an exported model; BERT tokenizers produce two, for pairs of texts

    def read(self, weights: Weights) -> Weights:
        """Add the embedding of token type 0 to those of the positions, and move the output bias to the output layer."""
        # Files that were converted from TensorFlow have other names for the weights of norms.
        weights = {name.replace(".gamma", ".weight").replace(".beta", ".bias"): weights[name] for name in weights}
        weights[POSITIONS] = weights[POSITIONS] + weights.pop(TYPES)[0]
        bias = weights.pop(self.output_bias, None)
        # A tied output layer uses this bias, even if another one is stored under the layer's own name.
        if bias is not None and not {f"{self.output}.weight", f"{self.output}.bias"} <= weights.keys():
            weights[f"{self.output}.bias"] = bias
        return weights

    def write(self, weights: Weights) -> Weights:
        """Add zeros as embeddings of token types, and a copy of the output bias."""
        weights = weights | {TYPES: weights[POSITIONS].new_zeros(self.num_types, weights[POSITIONS].shape[1])}
        bias = weights.get(f"{self.output}.bias")
        return weights if bias is None else weights | {self.output_bias: bias.clone()}


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
        Module("cls.predictions.decoder", "readout.proj"),
    ),
    # Parts of next-sentence prediction, which is not supported.
    unused=("embeddings.position_ids", "pooler.", "cls.seq_relationship."),
    write_fields=lambda fields: fields | {"type_vocab_size": Conversion.num_types},
    read_weights=Conversion().read,
    write_weights=Conversion().write,
    generates=False,
    note="All tokens have token type 0, whose embedding is now part of the positional embeddings.",
)

OF_ROBERTA = Conversion("lm_head.decoder", "lm_head.bias", num_types=1)

NUM_BEFORE = 2
"""Number of rows before the first position in RoBERTa's table: the id of the padding token, which is 1, and 1 more."""


def read_roberta_fields(fields: Fields) -> Fields:
    """Subtract the unused rows of the table of positions from `max_position_embeddings`."""
    longest, pad = fields.get("max_position_embeddings", 512), fields.get("pad_token_id", 1)
    if pad != NUM_BEFORE - 1:
        raise ArgumentError("fields.pad_token_id", pad, "must be 1: the position of the first token is one more")
    return fields | {"max_position_embeddings": longest - NUM_BEFORE}


def write_roberta_fields(fields: Fields) -> Fields:
    """The inverse of `read_roberta_fields`."""
    longest = fields["max_position_embeddings"] + NUM_BEFORE
    return fields | {"max_position_embeddings": longest, "type_vocab_size": 1, "pad_token_id": 1}


ROBERTA = BERT.like(
    ("RoBERTa", "roberta", "RobertaForMaskedLM"),
    prefix="roberta.",
    outside="lm_head.",
    modules=(
        *(module for module in BERT.modules if not module.theirs.startswith(("cls.", "embeddings.position_"))),
        Module("embeddings.position_embeddings", "encoder.position.embedding", skipped=NUM_BEFORE),
        Module("lm_head.dense", "readout.dense"),
        Module("lm_head.layer_norm", "readout.norm"),
        Module("lm_head.decoder", "readout.proj"),
    ),
    read_fields=read_roberta_fields,
    write_fields=write_roberta_fields,
    read_weights=OF_ROBERTA.read,
    write_weights=OF_ROBERTA.write,
)

XLM_ROBERTA = ROBERTA.like(("XLM-RoBERTa", "xlm-roberta", "XLMRobertaForMaskedLM"))

DISTILBERT = BERT.like(
    ("DistilBERT", "distilbert", "DistilBertForMaskedLM"),
    prefix="distilbert.",
    outside="vocab_",
    values={**BERT.values, "norm.eps": 1e-12},
    fields=(
        Field("vocab_size", "model.vocab_size", int, 30_522),
        Field("dim", "model.d_model", int, 768),
        Field("n_layers", "model.num_layers", int, 6),
        Field("n_heads", "model.num_heads", int, 12),
        Field("hidden_dim", "model.d_ff", int, 3072),
        Field("max_position_embeddings", "model.max_seq_len", int, 512),
        Field("activation", "feed_forward.activation", str, "gelu", ACTIVATIONS),
        Field("tie_word_embeddings", "model.tied_readout", bool, True),
        Field("dropout", "model.dropout", float, 0.1),
        Field("attention_dropout", "attention.dropout", float, 0.1),
        Field("initializer_range", "model.init_std", float, 0.02),
    ),
    fixed={},
    modules=(
        *(module for module in BERT.modules if module.theirs.startswith("embeddings.")),
        *in_layers(
            "transformer.layer.{}.",
            {
                **{f"attention.{name}_lin": f"attention.{name}_proj" for name in "qkv"},
                "attention.out_lin": "attention.o_proj",
                "sa_layer_norm": "attention_norm",
                "ffn.lin1": "feed_forward.up_proj",
                "ffn.lin2": "feed_forward.down_proj",
                "output_layer_norm": "feed_forward_norm",
            },
        ),
        Module("vocab_transform", "readout.dense"),
        Module("vocab_layer_norm", "readout.norm"),
        Module("vocab_projector", "readout.proj"),
    ),
    unused=("embeddings.position_ids",),
    write_fields=dict,
    read_weights=dict,
    write_weights=dict,
    note="",
)

BASES = {FULL: ("global_rope_theta", 160_000.0), SLIDING: ("local_rope_theta", 10_000.0)}


def read_modernbert_fields(fields: Fields) -> Fields:
    """Replace types of layers by the windows and rotary positions of the layers.

    The window of `local_attention` reaches half of its size to each side, in addition to the query's own position.
    """
    pattern = [FULL, *[SLIDING] * (fields.get("global_attn_every_n_layers", 3) - 1)]
    window = 2 * (fields.get("local_attention", 128) // 2) + 1
    return read_windows(read_layered_rope(fields, pattern, BASES, (FULL, SLIDING)), pattern, window)


def write_modernbert_fields(fields: Fields) -> Fields:
    """The inverse of `read_modernbert_fields`."""
    fields = write_layered_rope(write_windows(fields))
    size = fields.pop("sliding_window")
    return fields | ({} if size is None else {"local_attention": size - 1})


MODERNBERT = Family(
    name="ModernBERT",
    model_type="modernbert",
    architecture="ModernBertForMaskedLM",
    prefix="model.",
    outside=("head.", "decoder."),
    groups={**BERT.groups, "position": "rotary", "block": "pre_norm", "feed_forward": "swiglu"},
    values={"model.embedding_norm": True, "block.first_norm": False},
    fields=(
        *SIZES,
        Field("max_position_embeddings", "model.max_seq_len", int, 8192),
        Field("hidden_activation", "feed_forward.activation", str, "gelu", ACTIVATIONS),
        Field("norm_eps", "norm.eps", float, 1e-5),
        Field("norm_bias", "norm.bias", bool, False),
        *LAYERED_ROPE,
        Field("attention_bias", "attention.bias", bool, False),
        Field("mlp_bias", "feed_forward.bias", bool, False),
        Field("classifier_bias", "task.readout.dense_bias", bool, False),
        Field("classifier_activation", "task.readout.activation", str, "gelu", ACTIVATIONS),
        Field("tie_word_embeddings", "model.tied_readout", bool, True),
        Field("embedding_dropout", "model.embedding_dropout", float, 0.0),
        Field("attention_dropout", "attention.dropout", float, 0.0),
        WINDOWS,
    ),
    fixed={"decoder_bias": True},
    modules=(
        Module("embeddings.tok_embeddings", "encoder.token_embedding"),
        Module("embeddings.norm", "encoder.embedding_norm"),
        *in_layers(
            "layers.{}.",
            {
                "attn_norm": "attention_norm",
                "attn.Wqkv": "attention.q_proj attention.k_proj attention.v_proj",
                "attn.Wo": "attention.o_proj",
                "mlp_norm": "feed_forward_norm",
                "mlp.Wi": "feed_forward.gate_proj feed_forward.up_proj",
                "mlp.Wo": "feed_forward.down_proj",
            },
        ),
        Module("final_norm", "encoder.final_norm"),
        Module("head.dense", "readout.dense"),
        Module("head.norm", "readout.norm"),
        Module("decoder", "readout.proj"),
    ),
    read_fields=read_modernbert_fields,
    write_fields=write_modernbert_fields,
    generates=False,
)


def without_head(family: Family) -> Family:
    """The family of the encoders of `family` without their prediction head, which have a class of their own."""
    architecture = family.architecture.replace("ForMaskedLM", "Model")
    return replace(
        family,
        name=f"{family.name} without a head",
        architecture=architecture,
        outside="",  # an export leaves the prefix out of all names, as the class does
        groups={**family.groups, "task": "states"},
        fields=tuple(field for field in family.fields if not field.ours.startswith("task.readout.")),
        modules=tuple(module for module in family.modules if not module.ours.startswith("readout.")),
        note=f"{family.note} The weights of a pooler are left out: the final states do not depend on them.".strip(),
        covers=lambda fields: fields.get("architectures") == [architecture],
    )


WITH_HEAD = (BERT, ROBERTA, XLM_ROBERTA, DISTILBERT, MODERNBERT)

FAMILIES = (*map(without_head, WITH_HEAD), *WITH_HEAD)
