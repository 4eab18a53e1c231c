"""The descriptions of the families, compared with `transformers`."""

import importlib
import inspect
import re
from typing import Any

import pytest

from interop.models import BART, BERT, GPT2, LLAMA, MARIAN, NEOX, T5, transformers
from tinyformer.errors import ArgumentError
from tinyformer.interop import FAMILIES
from tinyformer.interop.gpt import NEOX_DEFAULTS as DEFAULTS
from tinyformer.interop.family import ANYWHERE, REQUIRED, Family

SIZES: dict[str, dict[str, Any]] = {
    **{"gpt2": GPT2, "gpt_neox": NEOX, "llama": LLAMA, "bert": BERT},
    **{"t5": T5, "bart": BART, "marian": MARIAN},
}

ALIASES = {
    "gpt2": {"hidden_size": "n_embd", "max_position_embeddings": "n_positions"}
    | {"num_attention_heads": "n_head", "num_hidden_layers": "n_layer"},
    **{model_type: {"hidden_size": "d_model"} for model_type in ("t5", "bart", "marian")},
}
"""Other names that a family's code uses for its fields."""

WITHOUT_EFFECT = {
    "use_cache",
    "pad_token_id",
    "type_vocab_size",  # follows from the weights
    "chunk_size_feed_forward",  # saves memory
    "is_encoder_decoder",
    "is_decoder",  # of models that always are
    "rope_parameters",  # see `read_rope`
    *("is_gated_act", "dense_act_fn", "scale_decoder_outputs"),  # see `read_t5_fields`
    *("activation_dropout", "encoder_layerdrop", "decoder_layerdrop", "initializer_factor"),  # act in training only
}
ANOTHER_OUTPUT = {"num_labels", "problem_type", "classifier_dropout", "hidden_dropout"}
"""Fields of models with another output layer."""

by_type = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)


@by_type
def test_every_field_that_their_code_reads_is_handled(family: Family) -> None:
    module = importlib.import_module(f"transformers.models.{family.model_type}.modeling_{family.model_type}")
    read = {name for name in re.findall(r"config\.([a-z]\w*)", inspect.getsource(module)) if "summary" not in name}
    read = {ALIASES.get(family.model_type, {}).get(name, name) for name in read}
    assert {"vocab_size"} < read
    known = {field.theirs for field in family.fields} | family.fixed.keys() | ANYWHERE.keys()
    assert read - known - WITHOUT_EFFECT - ANOTHER_OUTPUT == set()


@by_type
def test_defaults_are_those_of_transformers(family: Family) -> None:
    config = getattr(transformers(), family.architecture).config_class()
    defaults = {field.theirs: field.default for field in family.fields if field.default is not REQUIRED}
    # Their config classes lack the last two, of which one is T5's default in older versions.
    theirs = config.to_dict() | {"rope_theta": 10_000.0, "n_positions": 512, "forced_bos_token_id": None}
    filled = {"num_key_value_heads": None, "head_dim": None} if family.model_type == "llama" else {"head_dim": None}
    if family.model_type in ("t5", "marian"):  # sizes of the decoder are those of the encoder
        filled = {"num_decoder_layers": None, "decoder_vocab_size": None}
    if family.covers({"feed_forward_proj": "gated-gelu"}):
        defaults.pop("feed_forward_proj", None)
    assert {name: (theirs | filled).get(name) for name in defaults} == defaults
    unsupported = DEFAULTS | {"scale_embedding": False}
    expected = family.fixed | {name: value for name, value in unsupported.items() if name in family.fixed}
    assert all(theirs[name] == only for name, only in expected.items() if name in theirs)


UNSUPPORTED = "changes what the model computes and is not supported"
REFUSALS: list[tuple[str, dict[str, Any], str]] = [
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, f"scale_attn_by_inverse_layer_idx=True: {UNSUPPORTED}."),
    ("gpt2", {"activation_function": "tanh"}, "activation_function='tanh': must be one of gelu_new, "),
    ("gpt_neox", {"rope_parameters": None}, "rope_parameters.partial_rotary_factor=0.25: is not supported."),
    ("gpt_neox", {"max_position_embeddings": "many"}, "max_position_embeddings='many': must be int."),
    ("llama", {"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling.rope_type='yarn': is not supported."),
    ("bert", {"position_embedding_type": "relative_key"}, f"position_embedding_type='relative_key': {UNSUPPORTED}."),
    (
        "bart",
        {"decoder_attention_heads": 6},
        "decoder_attention_heads=6: must be 7, the value of encoder_attention_heads: ",
    ),
    ("marian", {"scale_embedding": False}, f"scale_embedding=False: {UNSUPPORTED}."),
]


def test_unsupported_values_are_refused_by_name() -> None:
    for model_type, changes, sentence in REFUSALS:
        fields = {"vocab_size": 53} | SIZES[model_type] | changes
        covering = (family for family in FAMILIES if family.model_type == model_type and family.covers(fields))
        with pytest.raises(ArgumentError) as caught:
            next(covering).settings(fields)
        assert str(caught.value).startswith(f"fields.{sentence}")
        assert "works" not in str(caught.value)  # with another value, the weights compute another function
    with pytest.raises(ArgumentError, match=r"^fields\.\w+=None: is missing\.$"):
        FAMILIES[0].settings({"vocab_size": 53})
