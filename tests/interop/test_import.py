"""Imported models of `transformers`: the same logits, or a refusal that names the problem."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from interop.models import (
    BERT,
    GPT2,
    LLAMA,
    VOCAB,
    change_config,
    checkpoint_of,
    our_logits,
    their_logits,
    theirs,
    tokens,
)
from tinyformer.checkpoint import load_checkpoint

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", GPT2),
    "gpt2-untied": ("GPT2", GPT2 | {"tie_word_embeddings": False, "activation_function": "gelu", "n_inner": None}),
    "gpt2-eps-and-score": ("GPT2", GPT2 | {"layer_norm_epsilon": 0.1, "scale_attn_weights": False}),
    "llama": ("Llama", LLAMA),
    "llama-tied": ("Llama", LLAMA | {"tie_word_embeddings": True, "num_key_value_heads": 6, "hidden_act": "gelu_new"}),
    "llama-attention-bias": ("Llama", LLAMA | {"attention_bias": True, "num_key_value_heads": 1}),
    "llama-mlp-bias": ("Llama", LLAMA | {"mlp_bias": True, "rms_norm_eps": 1e-6}),
    "mistral": ("Mistral", LLAMA | {"sliding_window": 5}),
    "mistral-without-window": ("Mistral", LLAMA | {"sliding_window": None, "tie_word_embeddings": True}),
    "bert": ("Bert", BERT),
    "bert-untied": ("Bert", BERT | {"tie_word_embeddings": False, "hidden_act": "gelu_new", "layer_norm_eps": 0.1}),
}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out.ckpt"


def same_logits(model: Any, source: Path, out: Path) -> None:
    checkpoint = checkpoint_of(source, out)
    ours, expected = our_logits(checkpoint, tokens()), their_logits(model, tokens())
    assert expected.std() > 0.1
    assert (ours - expected).abs().max() <= 1e-5


ONE_OF_EACH = ("gpt2", "llama", "mistral", "bert")
slow = pytest.mark.slow


@pytest.mark.parametrize("variant", [one if one in ONE_OF_EACH else pytest.param(one, marks=slow) for one in VARIANTS])
def test_logits_are_the_same(variant: str, tmp_path: Path, out: Path) -> None:
    family, fields = VARIANTS[variant]
    model = theirs(family, **fields)
    model.save_pretrained(tmp_path / "model")
    same_logits(model, tmp_path / "model", out)


def test_fields_for_training_are_imported(tmp_path: Path, out: Path) -> None:
    dropouts = {"embd_pdrop": 0.2, "resid_pdrop": 0.3, "attn_pdrop": 0.4}
    theirs("GPT2", **GPT2, **dropouts, initializer_range=0.5).save_pretrained(tmp_path / "model")
    config = checkpoint_of(tmp_path / "model", out).config
    assert (config["model"]["embedding_dropout"], config["model"]["dropout"]) == (0.2, 0.3)
    assert (config["attention"]["dropout"], config["model"]["init_std"]) == (0.4, 0.5)


def test_sharded_weights(tmp_path: Path, out: Path) -> None:
    model = theirs("Llama", **LLAMA)
    model.save_pretrained(tmp_path / "model", max_shard_size="20KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 2
    same_logits(model, tmp_path / "model", out)


def test_older_files_with_masks_and_tensorflow_names(tmp_path: Path, out: Path) -> None:
    """As the files of GPT-2 and BERT on the Hub: with buffers, gamma and beta, and a pooler."""
    model = theirs("Bert", "BertForPreTraining", **BERT)
    model.save_pretrained(tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    renamed = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in load_file(file).items()
    }
    output = renamed["bert.embeddings.word_embeddings.weight"].clone()
    save_file(
        renamed
        | {
            "bert.embeddings.position_ids": torch.arange(21)[None],
            "cls.predictions.decoder.weight": output,
            "cls.predictions.decoder.bias": renamed["cls.predictions.bias"].clone(),
        },
        file,
    )
    expected = model(input_ids=tokens()).prediction_logits
    assert (our_logits(checkpoint_of(tmp_path / "model", out), tokens()) - expected).abs().max() <= 1e-5

    gpt2 = theirs("GPT2", **GPT2)
    gpt2.save_pretrained(tmp_path / "gpt2")
    file = tmp_path / "gpt2" / "model.safetensors"
    masks = {"h.0.attn.bias": torch.ones(1, 1, 21, 21, dtype=torch.uint8), "h.1.attn.masked_bias": torch.tensor(-1e4)}
    plain = {name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}
    save_file(plain | masks, file)
    same_logits(gpt2, tmp_path / "gpt2", tmp_path / "gpt2.ckpt")


def test_half_precision_becomes_fp32(tmp_path: Path, out: Path) -> None:
    model = theirs("GPT2", **GPT2).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "model")
    same_logits(model.float(), tmp_path / "model", out)
    assert {tensor.dtype for tensor in load_checkpoint(out).weights.values()} == {torch.float32}


def test_an_older_config(tmp_path: Path, out: Path) -> None:
    """transformers 4 wrote rope_theta at the top level, and had fewer fields."""
    model = theirs("Llama", **(LLAMA | {"hidden_size": 48, "head_dim": 8, "num_key_value_heads": 6}))
    model.save_pretrained(tmp_path / "model")
    unknown = ("head_dim", "num_key_value_heads", "attention_bias", "mlp_bias")
    missing = ("rope_parameters", "tie_word_embeddings", *unknown)
    change_config(tmp_path / "model", without=missing, rope_theta=700.0, rope_scaling=None, pretraining_tp=1)
    same_logits(model, tmp_path / "model", out)


def test_a_tied_output_layer_that_differs_is_refused(tmp_path: Path, out: Path) -> None:
    theirs("Llama", **LLAMA).save_pretrained(tmp_path / "model")
    change_config(tmp_path / "model", tie_word_embeddings=True)
    with pytest.raises(ValueError, match=r"lm_head.weight .* model.embed_tokens.weight"):
        checkpoint_of(tmp_path / "model", out)
    assert not out.exists()


def test_weights_that_do_not_fit_the_config_are_refused(tmp_path: Path, out: Path) -> None:
    folder = tmp_path / "model"
    theirs("GPT2", **GPT2).save_pretrained(folder)
    original = json.loads((folder / "config.json").read_text())
    for change, name in (
        ({"n_layer": 3}, "transformer.h.2.attn.c_attn.bias"),
        ({"n_layer": 1}, "transformer.h.1.attn.c_attn.bias"),
        ({"n_inner": 51}, "transformer.h.0.mlp.c_fc.weight"),
        ({"vocab_size": 54}, "transformer.wte.weight"),
        ({"model_type": "opt"}, "opt"),
        ({"model_type": {}}, "model_type"),
        ({"n_head": "seven"}, "model/config.json: n_head"),
    ):
        change_config(folder, **original | change)
        with pytest.raises(ValueError, match=re.escape(name)) as caught:
            checkpoint_of(folder, out)
        assert "\n" not in str(caught.value)
        assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize(
    ("family", "architecture", "sentence"),
    [
        ("Bert", "BertModel", "cls.predictions.*BertForMaskedLM.*BertModel"),
        pytest.param("Llama", "LlamaForSequenceClassification", "lm_head.weight", marks=slow),
        pytest.param("GPT2", "GPT2ForSequenceClassification", "score.weight.*GPT2LMHeadModel", marks=slow),
    ],
)
def test_models_with_another_output_layer_are_refused(
    family: str, architecture: str, sentence: str, tmp_path: Path, out: Path
) -> None:
    sizes = {"Bert": BERT, "Llama": LLAMA, "GPT2": GPT2}[family]
    theirs(family, architecture, **sizes).save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=sentence):
        checkpoint_of(tmp_path / "model", out)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("GPT2", "transformer.h.0.attn.c_attn.bias"),
        ("Bert", "bert.embeddings.token_type_embeddings.weight"),
        pytest.param("Bert", "bert.embeddings.position_embeddings.weight", marks=slow),
    ],
)
def test_a_tensor_of_another_shape_is_refused(family: str, name: str, tmp_path: Path, out: Path) -> None:
    theirs(family, **{"Bert": BERT, "GPT2": GPT2}[family]).save_pretrained(tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    original = load_file(file)
    for shape in ((), (1,), (7, 3)):
        save_file(original | {name: torch.ones(shape)}, file)
        with pytest.raises(ValueError, match=r"config\.json|transformer\.h\.0\.attn\.c_attn"):
            checkpoint_of(tmp_path / "model", out)


def test_gpt2_without_its_tied_output_layer_is_imported(tmp_path: Path, out: Path) -> None:
    model = theirs("GPT2", **GPT2)
    model.transformer.save_pretrained(tmp_path / "model")
    assert json.loads((tmp_path / "model" / "config.json").read_text())["architectures"] == ["GPT2Model"]
    same_logits(model, tmp_path / "model", out)


def test_damaged_folders_are_refused(tmp_path: Path, out: Path) -> None:
    folder = tmp_path / "model"

    def sentence() -> str:
        with pytest.raises(ValueError, match=r"\.$") as caught:
            checkpoint_of(folder, out)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    folder.mkdir()
    assert "has no config.json" in sentence()
    (folder / "config.json").write_text("{")
    assert "config.json': cannot be read as JSON" in sentence()
    (folder / "config.json").write_bytes(b"\xff")
    assert "config.json': cannot be read as JSON" in sentence()
    (folder / "config.json").write_text("[]")
    assert "is not a JSON object" in sentence()
    (folder / "config.json").write_text("{}")
    assert "model_type" in sentence()
    theirs("GPT2", **GPT2).save_pretrained(folder)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    assert "model.safetensors cannot be read: it is cut short" in sentence()
    weights.rename(folder / "pytorch_model.bin")
    assert "pickle files such as pytorch_model.bin are not read" in sentence()
    index = folder / "model.safetensors.index.json"
    for contents in ({}, {"weight_map": []}, {"weight_map": {}}):
        index.write_text(json.dumps(contents))
        assert "lists no files" in sentence()
    for name in ("none.safetensors", "../model.safetensors"):
        index.write_text(json.dumps({"weight_map": {"wte.weight": name}}))
        assert f"lists {name}, which does not exist" in sentence()
    index.unlink()
    save_file({"wte.weight": torch.zeros(VOCAB, 42, dtype=torch.int8)}, weights)
    assert "wte.weight is quantised (int8)" in sentence()
    folder = tmp_path / "none"
    assert "is not a folder" in sentence()
    folder = out
    out.write_text("")
    assert "exists" in sentence()
