"""The descriptions of the families, beside what `transformers` says of them."""

import importlib
import inspect
import re
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import BERT, GPT2, LLAMA, transformers

from tinyformer.interop import FAMILIES, Family
from tinyformer.interop.bert import OUTPUT, OUTPUT_BIAS, POSITIONS, read_weights, write_weights
from tinyformer.interop.family import ACTIVATIONS, ANYWHERE, NEEDED

SIZES: dict[str, dict[str, Any]] = {
    "gpt2": GPT2 | {"vocab_size": 53},
    "llama": LLAMA | {"vocab_size": 53},
    "mistral": LLAMA | {"vocab_size": 53},
    "bert": BERT | {"vocab_size": 53},
}

ALIASES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
"""GPT-2's, by which its code calls its fields, too."""

WITHOUT_EFFECT = {
    "use_cache",
    "pad_token_id",  # whose embedding is not trained
    "type_vocab_size",  # the weights say it
    "chunk_size_feed_forward",  # the same, piece by piece
    "is_encoder_decoder",
    "rope_parameters",  # read apart
}
ANOTHER_OUTPUT = {"num_labels", "problem_type", "classifier_dropout", "hidden_dropout"}
"""Fields that models have for something else than tokens; summaries are among them."""

by_type = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)


def known(family: Family) -> set[str]:
    return {field.theirs for field in family.fields} | family.fixed.keys() | ANYWHERE.keys()


@by_type
def test_every_field_that_their_code_reads_is_known(family: Family) -> None:
    module = importlib.import_module(f"transformers.models.{family.model_type}.modeling_{family.model_type}")
    read = {name for name in re.findall(r"config\.([a-z]\w*)", inspect.getsource(module)) if "summary" not in name}
    if family.model_type == "gpt2":
        read = {ALIASES.get(name, name) for name in read}
    assert {"vocab_size"} < read
    assert read - known(family) - WITHOUT_EFFECT - ANOTHER_OUTPUT == set()


@by_type
def test_a_missing_field_has_their_default(family: Family) -> None:
    config = getattr(transformers(), family.architecture).config_class()
    defaults = {field.theirs: field.default for field in family.fields if field.default is not NEEDED}
    theirs = config.to_dict() | {"rope_theta": 10_000.0}
    filled = {"num_key_value_heads": None, "head_dim": None} if family.model_type == "llama" else {"head_dim": None}
    assert {name: (theirs | filled)[name] for name in defaults} == defaults
    assert all(theirs[name] == only for name, only in family.fixed.items() if name in theirs)


def settings(model_type: str, **changes: Any) -> dict[str, Any]:
    family = next(family for family in FAMILIES if family.model_type == model_type)
    return family.settings(SIZES[model_type] | changes)


def test_theta_is_read_where_old_and_new_files_have_it() -> None:
    key, plain = "position.relative.base", {"rope_parameters": None}
    assert settings("llama")[key] == 700.0
    assert settings("llama", **plain)[key] == 10_000.0
    assert settings("llama", **plain, rope_theta=500)[key] == 500
    assert settings("llama", **plain, rope_theta=500, rope_scaling={"type": "default"})[key] == 500


def test_null_is_our_default() -> None:
    values = settings("mistral", sliding_window=None, num_key_value_heads=None, head_dim=None)
    assert not {"attention.window", "attention.num_kv_heads", "attention.head_dim"} & values.keys()
    assert settings("mistral")["attention.window"] == 4096


@pytest.mark.parametrize(
    ("model_type", "changes", "sentence"),
    [
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True changes what"),
        ("gpt2", {"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn=True changes what"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention=True changes what"),
        ("gpt2", {"quantization_config": {"bits": 4}}, "quantization_config={'bits': 4} changes what"),
        ("gpt2", {"auto_map": {"AutoModel": "x.py"}}, "auto_map={'AutoModel': 'x.py'} changes what"),
        ("gpt2", {"pruned_heads": {"0": [1]}}, "pruned_heads={'0': [1]} changes what"),
        ("gpt2", {"activation_function": "relu"}, "activation_function=relu has no counterpart here; gelu_new, "),
        ("llama", {"hidden_act": "relu"}, "hidden_act=relu has no counterpart here; gelu_new, "),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 changes what"),
        ("llama", {"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling.rope_type=yarn has no counterpart"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.type=linear has no counterpart"),
        ("mistral", {"rope_parameters": {"rope_type": "dynamic"}}, "rope_parameters.rope_type=dynamic has no"),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary_factor=0.5 has"),
        ("llama", {"rope_parameters": [1]}, "rope_parameters.rope_type=[1] has no counterpart"),
        ("llama", {"rope_scaling": "linear"}, "rope_scaling.rope_type=linear has no counterpart"),
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type=relative_key changes what"),
        ("bert", {"is_decoder": True}, "is_decoder=True changes what"),
        ("gpt2", {"n_head": "seven"}, "n_head='seven' is not a whole number"),
        ("gpt2", {"n_head": True}, "n_head=True is not a whole number"),
        ("gpt2", {"n_head": None}, "n_head=None is not a whole number"),
        ("gpt2", {"tie_word_embeddings": 1}, "tie_word_embeddings=1 is not true or false"),
        ("gpt2", {"layer_norm_epsilon": [1]}, "layer_norm_epsilon=[1] is not a number"),
        ("gpt2", {"activation_function": []}, "activation_function=[] is not a name"),
    ],
)
def test_what_has_no_counterpart_is_refused_by_name(model_type: str, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"config.json: {sentence}")) as caught:
        settings(model_type, **changes)
    assert "\n" not in str(caught.value)


def test_a_size_that_is_missing_is_named() -> None:
    fields = {name: value for name, value in SIZES["gpt2"].items() if name != "n_embd"}
    with pytest.raises(ValueError, match=r"config.json has no n_embd\."):
        FAMILIES[0].settings(fields)


def test_null_is_written_where_theirs_has_another_default() -> None:
    fields = next(family for family in FAMILIES if family.model_type == "mistral").describe({"attention.window": 5})
    assert (fields["sliding_window"], fields["num_key_value_heads"], fields["head_dim"]) == (5, None, None)


def test_activations_are_theirs() -> None:
    transformers()
    from transformers.activations import ACT2FN

    ours = {
        "gelu": F.gelu,
        "gelu_tanh": partial(F.gelu, approximate="tanh"),
        "silu": F.silu,
        "relu2": lambda x: F.relu(x) ** 2,
    }
    x = torch.linspace(-3, 3, 50)
    for name, our in ACTIVATIONS.items():
        torch.testing.assert_close(ACT2FN[name](x), ours[our](x), atol=1e-6, rtol=0)


def test_what_changes_nothing_is_no_reason_to_refuse() -> None:
    settings("gpt2", add_cross_attention=None, quantization_config=None)
    settings("llama", rope_parameters={"rope_type": "default", "partial_rotary_factor": 1.0})
    with pytest.raises(ValueError, match="is_encoder_decoder=True"):
        settings("gpt2", is_encoder_decoder=True)


def test_frequencies_that_old_files_hold_are_left_out() -> None:
    llama = next(family for family in FAMILIES if family.model_type == "llama")
    assert llama.read({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(5)}, 1) == ({}, [])


def test_of_berts_two_names_of_the_output_bias_the_tied_one_counts() -> None:
    read = read_weights({OUTPUT_BIAS: torch.ones(3), f"{OUTPUT}.bias": torch.zeros(3)})
    assert read[f"{OUTPUT}.bias"].tolist() == [1, 1, 1]


def test_what_bert_is_given_beside_our_weights_has_their_dtype() -> None:
    ours = {POSITIONS: torch.zeros(3, 4).bfloat16(), f"{OUTPUT}.bias": torch.zeros(5).bfloat16()}
    assert {tensor.dtype for tensor in write_weights(ours).values()} == {torch.bfloat16}
