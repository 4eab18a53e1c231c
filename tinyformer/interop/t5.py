"""T5 (Raffel et al. 2019, arXiv 1910.10683): relative position biases, no other biases, RMSNorm, unscaled scores.

The first version has a ReLU, and a readout that is tied to the embedding and scaled. In version 1.1, which Flan-T5 also
uses, the feed-forward network is gated (Shazeer 2020, arXiv 2002.05202), and the readout is neither tied nor scaled.
"""

import re
from dataclasses import replace

from tinyformer.errors import ArgumentError
from tinyformer.interop.encoder_decoder import (
    GROUPS,
    OF_STACKS,
    OUTPUT,
    join_embedding,
    read_tokens,
    spread_embedding,
    token_fields,
)
from tinyformer.interop.family import ACTIVATIONS, Family, Field, Fields, Module, Weights

TABLE = re.compile(r"(encoder|decoder)\.block\.(\d+)\.layer\.0\.SelfAttention\.relative_attention_bias\.weight")
"""The name of a table of position biases; all layers of a stack use the table of its first layer."""

GATED = "gated-"

GATED_ACTIVATIONS = {"gated-gelu": "gelu_tanh"} | {
    f"{GATED}{name}": ours for name, ours in ACTIVATIONS.items() if name != "gelu"
}
"""Activations of the gate: "gated-gelu" is the tanh approximation of GELU, "gated-gelu_python" the exact GELU."""


def is_gated(fields: Fields) -> bool:
    """Whether the feed-forward network is gated, as in version 1.1."""
    return str(fields.get("feed_forward_proj")).startswith(GATED)


def read_fields(fields: Fields) -> Fields:
    """Fill in what follows from other fields.

    Raises:
        ArgumentError: fields contradict each other.
    """
    fields = read_tokens(fields)
    if fields.get("num_decoder_layers") is None:
        fields = fields | {"num_decoder_layers": fields.get("num_layers", 6)}
    proj, gated = str(fields.get("feed_forward_proj", "relu")), is_gated(fields)
    act = "gelu_new" if proj == "gated-gelu" else proj.removeprefix(GATED)
    for name, follows in (("is_gated_act", gated), ("dense_act_fn", act)):
        if fields.get(name, follows) != follows:
            reason = f"contradicts feed_forward_proj={proj[:100]}"
            raise ArgumentError(f"fields.{name}", fields[name], reason)
    tied = fields.get("tie_word_embeddings")
    # Newer files have tie_word_embeddings=true for every model, and a separate field for whether the readout is scaled.
    tied = fields.get("scale_decoder_outputs", True if tied is None else tied)
    return {"decoder_start_token_id": fields.get("pad_token_id", 0)} | fields | {"tie_word_embeddings": tied}


def write_fields(fields: Fields) -> Fields:
    """Fill in the dimension of heads, whose default in `transformers` does not depend on the width."""
    return {"d_kv": fields["d_model"] // fields["num_heads"]} | fields


def read_weights(weights: Weights) -> Weights:
    """Give each layer the position biases of its stack, and the output layer the embedding unless it has its own."""
    weights = spread_embedding(weights)
    layers = {match.groups() for name in weights if (match := re.match(r"(encoder|decoder)\.block\.(\d+)\.", name))}
    for stack, layer in layers:
        table = "{}.block.{}.layer.0.SelfAttention.relative_attention_bias.weight"
        if (first := table.format(stack, 0)) in weights:
            weights.setdefault(table.format(stack, layer), weights[first])
    if OF_STACKS[1] in weights:
        weights.setdefault(OUTPUT, weights[OF_STACKS[1]])
    return weights


def write_weights(weights: Weights) -> Weights:
    """Leave out the position biases of all layers but the first."""
    tables = {name: match for name in weights if (match := TABLE.fullmatch(name))}
    first = {name: tensor for name, tensor in weights.items() if name not in tables or tables[name][2] == "0"}
    return join_embedding(first)


def _stack(stack: str, kinds: tuple[str, ...]) -> tuple[Module, ...]:
    """The modules of a stack whose layers have attention of these kinds, named as in T5."""
    ours = {
        "SelfAttention": ("attention", "attention_norm"),
        "EncDecAttention": ("cross_attention", "cross_attention_norm"),
    }
    layer = f"{stack}.layers.{{}}"
    modules = [Module(f"{stack}.embed_tokens", (f"{stack}.token_embedding",))]
    for index, kind in enumerate(kinds):
        theirs, (attention, norm) = f"{stack}.block.{{}}.layer.{index}", ours[kind]
        modules += [Module(f"{theirs}.{kind}.{name}", (f"{layer}.{attention}.{name}_proj",)) for name in "qkvo"]
        modules.append(Module(f"{theirs}.layer_norm", (f"{layer}.{norm}",)))
    table = f"{stack}.block.{{}}.layer.0.SelfAttention.relative_attention_bias"
    theirs = f"{stack}.block.{{}}.layer.{len(kinds)}"
    return (
        *modules,
        Module(table, (f"{layer}.attention.position.embedding",)),
        Module(f"{theirs}.layer_norm", (f"{layer}.feed_forward_norm",)),
        Module(f"{theirs}.DenseReluDense.wi", (f"{layer}.feed_forward.up_proj",)),
        Module(f"{theirs}.DenseReluDense.wi_0", (f"{layer}.feed_forward.gate_proj",)),
        Module(f"{theirs}.DenseReluDense.wi_1", (f"{layer}.feed_forward.up_proj",)),
        Module(f"{theirs}.DenseReluDense.wo", (f"{layer}.feed_forward.down_proj",)),
        Module(f"{stack}.final_layer_norm", (f"{stack}.final_norm",)),
    )


def _modules(absent: tuple[str, ...]) -> tuple[Module, ...]:
    """All modules except the matrices that a kind of feed-forward network does not have."""
    stacks = (*_stack("encoder", ("SelfAttention",)), *_stack("decoder", ("SelfAttention", "EncDecAttention")))
    return (*(module for module in stacks if not module.theirs.endswith(absent)), Module("lm_head", ("readout.proj",)))


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
        Field("d_kv", "attention.head_dim", int, 64),
        Field("d_kv", "cross_attention.head_dim", int, 64),
        Field("d_ff", "model.d_ff", int, 2048),
        Field("num_layers", "model.num_encoder_layers", int, 6),
        Field("num_decoder_layers", "model.num_layers", int, None),
        Field("num_heads", "model.num_heads", int, 8),
        Field("relative_attention_num_buckets", "position.num_buckets", int, 32),
        Field("relative_attention_max_distance", "position.max_distance", int, 128),
        Field("feed_forward_proj", "feed_forward.activation", str, "relu", ACTIVATIONS),
        Field("layer_norm_epsilon", "norm.eps", float, 1e-6),
        Field("tie_word_embeddings", "model.tied_readout", bool, True),
        Field("tie_word_embeddings", "model.scaled_readout", bool, True),
        *(
            Field("dropout_rate", key, float, 0.1)
            for key in ("attention.dropout", "cross_attention.dropout", "model.dropout")
        ),
        *token_fields(eos_token_id=1),
    ),
    fixed={"is_encoder_decoder": True},
    modules=_modules((".wi_0", ".wi_1")),
    # Cross-attention has no positions; older files contain a table for it, which is not used.
    unused=("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",),
    read_fields=read_fields,
    write_fields=write_fields,
    read_weights=read_weights,
    write_weights=write_weights,
    covers=lambda fields: not is_gated(fields),
)

T5_GATED = replace(
    T5,
    name="T5 v1.1",
    groups={**T5.groups, "feed_forward": "swiglu"},
    fields=tuple(
        replace(field, default="gated-gelu", choices=GATED_ACTIVATIONS)
        if field.theirs == "feed_forward_proj"
        else field
        for field in T5.fields
    ),
    modules=_modules((".wi",)),
    covers=is_gated,
)
