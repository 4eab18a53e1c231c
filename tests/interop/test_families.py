"""The descriptions of the families, compared with the configs and the code of `transformers`."""

import importlib
import inspect
import json
import re
from typing import Any

import pytest

from interop.models import VARIANTS, VOCAB, transformers
from tinyformer.errors import ArgumentError
from tinyformer.interop import FAMILIES
from tinyformer.interop.family import REQUIRED, Family

WITHOUT_EFFECT = {
    *("use_cache", "chunk_size_feed_forward", "pad_token_id", "type_vocab_size", "is_decoder"),
    *("dtype", "output_attentions", "output_hidden_states", "return_dict"),
    "attention_layers",  # of GPT-Neo, follow from `attention_types`
    "original_max_position_embeddings",  # of Phi 3, has an effect in `longrope` only
    *("is_gated_act", "dense_act_fn"),  # of T5, follow from `feed_forward_proj`
    # What acts in training only.
    *("activation_dropout", "encoder_layerdrop", "decoder_layerdrop", "layerdrop", "initializer_factor"),
    *("initializer_cutoff_factor", "mlp_dropout", "sparse_prediction", "sparse_pred_ignore_index"),
    *("deterministic_flash_attn", "sinusoidal_pos_embds"),
}
ANOTHER_OUTPUT = {"num_labels", "problem_type", "classifier_dropout", "classifier_pooling", "hidden_dropout"}
ANOTHER_OUTPUT |= {"qa_dropout", "seq_classif_dropout", "summary_use_proj", "summary_first_dropout"}
ANOTHER_OUTPUT |= {"summary_proj_to_labels"}
"""Fields of models with another output layer."""

SUPPORTED: dict[str, dict[str, Any]] = {"marian": {"scale_embedding": True}, "gpt_neo": {"num_layers": 24}}
"""Values that a `config.json` needs because the default is not supported, or does not fit small sizes."""

OF_NAME = {
    **{name: {"tie_word_embeddings"} for name in ("T5", "T5 v1.1")},  # `scale_decoder_outputs` says so, too
    "ModernBERT without a head": {"classifier_bias", "classifier_activation"},
    "SmolLM3": {"use_sliding_window"},  # `layer_types` says so, too
    "GPT-2": {"reorder_and_upcast_attn"},  # computes the same scores in another order
}
"""Fields without effect in a family with this name."""

OF_KIND = {
    "sequential GPT-NeoX": {"use_parallel_residual": False},
    "T5 v1.1": {"feed_forward_proj": "gated-gelu"},
}
"""Fields by the name of a family that shares its class."""

by_type = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


def fields_of(family: Family) -> dict[str, Any]:
    """All fields of a small model of a family, as `transformers` writes them."""
    config = getattr(transformers(), family.architecture).config_class
    special = dict.fromkeys(["pad_token_id", "bos_token_id", "eos_token_id"])
    of_class = (fields for name, fields in VARIANTS.values() if getattr(transformers(), f"{name}Config") is config)
    made = (config(**({"vocab_size": VOCAB} | special | fields)).to_json_string(use_diff=False) for fields in of_class)
    named = (json.loads(fields) | {"architectures": [family.architecture]} for fields in made)
    *_, last = filter(family.covers, named)
    return last


@by_type
def test_a_missing_field_has_the_default_of_transformers(family: Family) -> None:
    """A `config.json` may omit any field with a default."""
    full, config = fields_of(family), getattr(transformers(), family.architecture).config_class
    kept = {entry.theirs: full[entry.theirs] for entry in family.fields if entry.default is REQUIRED}
    kept |= SUPPORTED.get(family.model_type, {}) | OF_KIND.get(family.name, {})
    filled = json.loads(config(**kept).to_json_string(use_diff=False))
    ours, theirs = family.settings(kept), family.settings(kept | filled)
    filled = {"attention.num_kv_heads": ours["model.num_heads"]}  # what our keys are by default
    filled["attention.head_dim"] = ours["model.d_model"] // ours["model.num_heads"]
    assert filled | ours == filled | theirs


def other(value: Any) -> Any:
    """Another value of the same kind."""
    match value:
        case bool() | None:
            return not value
        case int() | float():
            return value + 1
        case str():
            return "relu" if value != "relu" else "silu"
        case list():
            return [other(part) for part in value]
        case dict():
            return {key: part if isinstance(part, str) else other(part) for key, part in value.items()}


@by_type
def test_every_field_that_their_code_reads_changes_our_config(family: Family) -> None:
    """Or is refused: an import that ignores a field would compute another function."""
    config = getattr(transformers(), family.architecture).config_class
    name = config.__module__.removeprefix("transformers.models.").partition(".")[0]
    source = inspect.getsource(importlib.import_module(f"transformers.models.{name}.modeling_{name}"))
    read = {config.attribute_map.get(field, field) for field in re.findall(r"config\.([a-z]\w*)", source)}
    fields = fields_of(family)
    settings = family.settings(fields)
    unnoticed = set()
    ignored = WITHOUT_EFFECT | ANOTHER_OUTPUT | OF_NAME.get(family.name, set())
    for field in (read & fields.keys()) - ignored:
        try:
            if family.settings(fields | {field: other(fields[field])}) == settings:
                unnoticed.add(field)
        except (ArgumentError, ValueError):
            continue
    assert unnoticed == set()


UNSUPPORTED = "changes what the model computes and is not supported"
REFUSALS: list[tuple[str, dict[str, Any], str]] = [
    ("GPT-2", {"scale_attn_by_inverse_layer_idx": True}, f"scale_attn_by_inverse_layer_idx=True: {UNSUPPORTED}."),
    ("GPT-2", {"activation_function": "tanh"}, "activation_function='tanh': must be one of gelu_new, "),
    ("GPT-NeoX", {"max_position_embeddings": "many"}, "max_position_embeddings='many': must be int."),
    ("Qwen 2", {"num_hidden_layers": "many"}, "num_hidden_layers='many': must be int."),
    (
        "Llama",
        {"rope_parameters": {"rope_type": "longrope"}},
        "rope_parameters.rope_type='longrope': is not supported; supported types are default, linear, llama3, yarn.",
    ),
    (
        "Llama",
        {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 2.0}},
        "rope_parameters.high_freq_factor=2.0: is not supported with rope_type=llama3.",
    ),
    ("OLMo 3", {"layer_types": ["chunked_attention"]}, "layer_types='chunked_attention': must be one of "),
    ("BERT", {"position_embedding_type": "relative_key"}, f"position_embedding_type='relative_key': {UNSUPPORTED}."),
    (
        "Gemma 3",
        {
            "rope_parameters": {kind: {"rope_type": "linear", "factor": 2} for kind in ("full_attention",)}
            | {"sliding_attention": {"rope_type": "yarn", "factor": 2}}
        },
        "rope_parameters={",
    ),
    ("RoBERTa", {"pad_token_id": 3}, "pad_token_id=3: must be 1"),
    ("OPT", {"word_embed_proj_dim": 7}, f"word_embed_proj_dim=7: {UNSUPPORTED}."),
    ("BART", {"decoder_attention_heads": 6}, "decoder_attention_heads=6: must be 1, the value of "),
    ("Marian", {"scale_embedding": False}, f"scale_embedding=False: {UNSUPPORTED}."),
]


def test_unsupported_values_are_refused_by_name() -> None:
    families = {family.name: family for family in FAMILIES}
    for name, changes, sentence in REFUSALS:
        with pytest.raises(ArgumentError) as caught:
            families[name].settings(fields_of(families[name]) | changes)
        assert str(caught.value).startswith(f"fields.{sentence}")
        assert "works" not in str(caught.value)  # with another value, the weights compute another function
    with pytest.raises(ArgumentError, match=r"^fields\.\w+=None: is missing\.$"):
        FAMILIES[0].settings({"vocab_size": 53})
