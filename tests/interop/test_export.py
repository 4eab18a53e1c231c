"""Models of ours, loaded by `transformers` after they went out: the same logits and text, or a refusal by name."""

import functools
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models import (
    BERT,
    CONF,
    GPT2,
    LLAMA,
    SEQ,
    checkpoint_of,
    composed,
    exported,
    network_of,
    our_checkpoint,
    our_logits,
    their_logits,
    theirs,
    tokens,
    transformers,
)

import tinyformer
from tinyformer.convert.exporting import export_model
from tinyformer.data import BPETokenizer, ByteTokenizer, CharTokenizer
from tinyformer.generation import Sampling, generate
from tinyformer.interop.folder import write_folder

slow = pytest.mark.slow

TEXT = "the cat sees the birds and the mice see the cat. " * 9
AS_LLAMA = ("position=rotary", "norm=rms_norm", "feed_forward=swiglu")
AS_BERT = ("task=masked_lm_bert", "block=post_norm", "model.embedding_norm=true")

EXPORTS: dict[str, tuple[str, ...]] = {
    "gpt2": (),
    "gpt2-bias": ("model.bias=true", "model.tied_readout=false", "norm.eps=0.1"),
    "gpt2-other-parts": ("feed_forward=relu2", "attention.score=dot", "model.d_ff=50", "attention.head_dim=8"),
    "llama": AS_LLAMA,
    "llama-gqa": (*AS_LLAMA, "attention=gqa", "attention.head_dim=10", "position.relative.base=700"),
    "llama-mqa-bias": (*AS_LLAMA, "attention=mqa", "model.bias=true", "model.tied_readout=false"),
    "llama-attention-bias": (*AS_LLAMA, "attention.bias=true", "feed_forward.activation=gelu_tanh", "norm.eps=0.1"),
    "mistral": (*AS_LLAMA, "attention=gqa", "attention.window=5"),
    "bert": AS_BERT,
    "bert-bias": (*AS_BERT, "model.bias=true", "model.tied_readout=false", "norm.eps=0.1"),
}


def same_logits(overrides: tuple[str, ...], tmp_path: Path) -> Any:
    ours = our_checkpoint(tmp_path / "ours.ckpt", *overrides)
    model = exported(tmp_path / "ours.ckpt", tmp_path / "theirs")
    expected = our_logits(ours, tokens())
    assert expected.std() > 0.1
    assert (their_logits(model, tokens()) - expected).abs().max() <= 1e-5
    return model


ONE_OF_EACH = ("gpt2", "llama-gqa", "mistral", "bert")


@pytest.mark.parametrize("name", [name if name in ONE_OF_EACH else pytest.param(name, marks=slow) for name in EXPORTS])
def test_logits_and_greedy_text_are_the_same_and_the_weights_come_back(name: str, tmp_path: Path) -> None:
    model = same_logits(EXPORTS[name], tmp_path)
    assert model.config.model_type == name.partition("-")[0]
    again = checkpoint_of(tmp_path / "theirs", tmp_path / "again.ckpt")
    ours = network_of(again).state_dict()
    own = our_checkpoint(tmp_path / "own.ckpt", *EXPORTS[name]).weights
    assert all(torch.equal(ours[name], weight) for name, weight in own.items())
    assert not any(ours[name].any() for name in ours.keys() - own.keys())
    assert all(name.endswith(".bias") for name in ours.keys() - own.keys())
    if model.config.model_type != "bert":
        prompt = tokens()[:, :4]
        new = generate(network_of(again), prompt.tolist(), SEQ - 4, Sampling(temperature=0))
        made = model.generate(prompt, max_new_tokens=SEQ - 4, attention_mask=torch.ones_like(prompt), pad_token_id=0)
        assert made[:, 4:].tolist() == new


@pytest.mark.parametrize(
    ("family", "fields"),
    [("GPT2", GPT2), ("Llama", LLAMA), ("Mistral", LLAMA | {"sliding_window": 5}), ("Bert", BERT)],
)
def test_what_came_in_goes_out_as_it_was(family: str, fields: dict[str, Any], tmp_path: Path) -> None:
    model = theirs(family, **fields)
    model.save_pretrained(tmp_path / "model")
    checkpoint_of(tmp_path / "model", tmp_path / "in.ckpt")
    out = exported(tmp_path / "in.ckpt", tmp_path / "out")
    assert torch.allclose(their_logits(out, tokens()), their_logits(model, tokens()), atol=1e-6)
    before, after = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("model", "out"))
    assert {name for name in after if name in before and after[name] != before[name]} <= {"rope_parameters"}
    if family != "Bert":
        kept = out.state_dict()
        assert all(torch.equal(kept[name], weight) for name, weight in model.state_dict().items())


def test_bf16_weights_stay_bf16(tmp_path: Path) -> None:
    our_checkpoint(tmp_path / "ours.ckpt")
    stored = torch.load(tmp_path / "ours.ckpt")
    stored["state_dict"] = {name: tensor.bfloat16() for name, tensor in stored["state_dict"].items()}
    torch.save(stored, tmp_path / "ours.ckpt")
    assert exported(tmp_path / "ours.ckpt", tmp_path / "theirs").dtype == torch.bfloat16


# The tokenizer.


@pytest.mark.parametrize("recipe", [ByteTokenizer(), CharTokenizer(), BPETokenizer(300)], ids=lambda one: one.name)
def test_the_same_prompt_gives_the_same_greedy_text(recipe: Any, tmp_path: Path) -> None:
    tokenizer = recipe.build([TEXT])
    our_checkpoint(tmp_path / "ours.ckpt", tokenizer=tokenizer)
    export_model(tmp_path / "ours.ckpt", tmp_path / "theirs", CONF)
    library, folder, prompt = transformers(), tmp_path / "theirs", "the cat"
    model, their_tokenizer = (
        kind.from_pretrained(folder) for kind in (library.AutoModelForCausalLM, library.AutoTokenizer)
    )
    encoded = their_tokenizer(prompt, return_tensors="pt")
    assert encoded["input_ids"].tolist() == [[tokenizer.eos_id, *tokenizer.encode(prompt)]]
    assert (their_tokenizer.eos_token_id, model.generation_config.eos_token_id) == (tokenizer.eos_id,) * 2
    assert model.generation_config.bos_token_id == model.generation_config.pad_token_id == tokenizer.eos_id
    assert their_tokenizer.model_max_length == SEQ + 2
    num_tokens = SEQ + 2 - encoded["input_ids"].shape[1]
    made = model.generate(**encoded, max_new_tokens=num_tokens)[0]
    expected = tinyformer.load(tmp_path / "ours.ckpt").generate(prompt, num_tokens, temperature=0)
    assert [their_tokenizer.decode(made, skip_special_tokens=True)] == expected
    again = checkpoint_of(folder, tmp_path / "again.ckpt")
    assert again.tokenizer == tokenizer.to_json()


def test_masks_and_pairs(tmp_path: Path) -> None:
    tokenizer = CharTokenizer().build([TEXT]).with_mask()
    our_checkpoint(tmp_path / "ours.ckpt", *AS_BERT, tokenizer=tokenizer)
    export_model(tmp_path / "ours.ckpt", tmp_path / "theirs", CONF)
    loaded = transformers().AutoTokenizer.from_pretrained(tmp_path / "theirs")
    assert (loaded.mask_token_id, loaded.unk_token_id) == (tokenizer.mask_id, tokenizer.unk_id)
    eos, first, second = tokenizer.eos_id, tokenizer.encode("cat"), tokenizer.encode("mice")
    assert loaded("cat", "mice")["input_ids"] == [eos, *first, eos, *second]
    assert not (tmp_path / "theirs" / "generation_config.json").exists()


# What has no counterpart.

CHANGES: dict[str, str | None] = {
    "model.num_layers": "1",
    "model.num_heads": "4",
    "model.d_model": "60",
    "model.max_seq_len": "20",
    "model.vocab_size": None,  # the tokenizer's
    "model.d_ff": "30",
    "model.dropout": "0.25",
    "model.embedding_dropout": "0.25",
    "model.bias": "true",
    "model.embedding_norm": "true",
    "model.tied_readout": "false",
    "model.init_std": "0.5",
    "model.pruned_heads": "[[0,1]]",
    "model.checkpoint_activations": "true",
    "attention.d_model": None,  # the model's
    "attention.num_heads": None,
    "attention.num_kv_heads": "2",
    "attention.head_dim": "6",
    "attention.bias": "true",
    "attention.dropout": "0.25",
    "attention.qk_norm": "true",
    "attention.score": "general",
    "attention.window": "[5,null]",
    "attention.local_gaussian": "true attention.window=5",
    "attention.softcap": "3.0",
    "attention.sink": "true",
    "attention.gate": "true",
    "attention.backend": "eager",
    "attention.position": None,  # that of its axis
    "attention.ablated_heads": "[[0,1]]",
    "position.absolute": None,  # of what another base has
    "position.relative": None,
    "position.absolute.max_seq_len": None,
    "position.absolute.d_model": None,
    "position.relative.max_seq_len": None,
    "position.relative.base": "500",
    "block.d_model": None,
    "block.attention": None,
    "block.feed_forward": None,
    "block.norm": None,
    "block.dropout": "0.25",
    "block.attention_residual.skip": "0.5",
    "block.attention_residual.branch": "[1,0.5]",
    "block.feed_forward_residual.skip": "[1,0.5]",
    "block.feed_forward_residual.branch": "0.5",
    "feed_forward.d_model": None,
    "feed_forward.d_ff": None,
    "feed_forward.activation": "relu2",
    "feed_forward.bias": "true",
    "norm.eps": "0.1",
    "norm.bias": "true",
    "task.labels": None,  # of classes
    "task.masking": None,  # of the data
    **dict.fromkeys(f"task.masking.{name}" for name in ("rate", "mask_share", "random_share", "whole_words")),
    "task.objective.pseudo_perplexity_tokens": None,
    "task.readout.tied": None,
    "task.readout.norm": None,
    "task.readout.activation": "silu",
    "task.datamodule": None,
}
"""Another value of every key of a network's axes; None where the key only passes on another's, or is no network's."""

NO_COUNTERPART = {
    "model.embedding_norm",
    "model.pruned_heads",
    "attention.num_kv_heads",
    "attention.head_dim",
    "attention.qk_norm",
    "attention.score",
    "attention.window",
    "attention.local_gaussian",
    "attention.softcap",
    "attention.sink",
    "attention.gate",
    "attention.ablated_heads",
    "block.attention_residual.skip",
    "block.attention_residual.branch",
    "block.feed_forward_residual.skip",
    "block.feed_forward_residual.branch",
    "task.readout.activation",
}
"""Keys whose change is refused; that of any other goes out and computes the same."""

BASES = {"gpt2": (), "llama": AS_LLAMA, "bert": AS_BERT}
GOES_OUT = {"gpt2": set(), "llama": {"attention.num_kv_heads", "attention.head_dim"}, "bert": {"model.embedding_norm"}}
AXES = ("model", "attention", "position", "block", "feed_forward", "norm", "task")
FAMILIES = "GPT-2, Llama, Mistral and BERT"
REASON = rf"\S+=\S+ has no counterpart in (GPT-2|Llama|Mistral|BERT), the nearest of {FAMILIES}: there it is \S+\."


def leaves(node: Any, path: str) -> Iterator[str]:
    if isinstance(node, dict):
        for name, value in node.items():
            yield from () if name.startswith("_") else leaves(value, f"{path}.{name}")
    else:
        yield path


@functools.cache
def keys_of(base: str) -> set[str]:
    """The keys of all axes that a base has."""
    config = composed(*BASES[base])
    return {key for axis in AXES for key in leaves(config[axis], axis)}


def named(overrides: tuple[str, ...], tmp_path: Path) -> str:
    """The key that a refusal names, or nothing where the export computes the same."""
    said = ""
    try:
        same_logits(overrides, tmp_path)
    except ValueError as error:
        said = str(error)
    if said:
        assert re.fullmatch(REASON, said), said
        assert not list(tmp_path.glob("*theirs*"))
    return said.partition("=")[0]


@pytest.mark.parametrize("base", BASES)
def test_every_key_of_the_axes_is_tried(base: str) -> None:
    """A key that is new in conf is to be listed here, so that one sees what becomes of it."""
    assert keys_of(base) - CHANGES.keys() == set()


@pytest.mark.slow
@pytest.mark.parametrize("key", sorted(NO_COUNTERPART))
@pytest.mark.parametrize("base", ["gpt2", pytest.param("llama", marks=slow), pytest.param("bert", marks=slow)])
def test_a_key_without_counterpart_is_named(base: str, key: str, tmp_path: Path) -> None:
    if key in keys_of(base) - GOES_OUT[base]:
        assert named((*BASES[base], *f"{key}={CHANGES[key]}".split()), tmp_path) == key


@slow
@pytest.mark.parametrize("key", sorted(key for key in CHANGES.keys() - NO_COUNTERPART if CHANGES[key]))
@pytest.mark.parametrize("base", BASES)
def test_any_other_key_goes_out_exactly(base: str, key: str, tmp_path: Path) -> None:
    if key in keys_of(base):
        assert named((*BASES[base], f"{key}={CHANGES[key]}"), tmp_path) == ""


CHOICES = [f"{axis}={file.stem}" for axis in AXES[1:] for file in sorted((CONF / axis).glob("[!_]*.yaml"))]
TAKEN = {"attention=mha", "position=learned", "block=pre_norm", "norm=layer_norm", "task=causal_lm"}
"""Choices that GPT-2 has made, and those of its feed-forward network that it knows."""


@slow
@pytest.mark.parametrize("choice", CHOICES)
def test_a_choice_of_an_axis_goes_out_exactly_or_is_named(choice: str, tmp_path: Path) -> None:
    taken = {*TAKEN, "feed_forward=gelu", "feed_forward=relu2"}
    labels = ("task.labels=[cat,mouse]",) if choice == "task=classification" else ()
    key = named((choice, *labels), tmp_path)
    assert key.partition(".")[0] == ("" if choice in taken else choice.partition("=")[0])


def test_what_is_for_training_is_said_to_be_left_out(tmp_path: Path) -> None:
    our_checkpoint(tmp_path / "ours.ckpt", *AS_LLAMA, "model.dropout=0.25", "attention.dropout=0.5")
    lines = export_model(tmp_path / "ours.ckpt", tmp_path / "theirs", CONF)
    said = [line for line in lines if "left out" in line]
    assert said == ["model.dropout=0.25 affects training only and is left out: Llama has no field for it."]
    assert json.loads((tmp_path / "theirs" / "config.json").read_text())["attention_dropout"] == 0.5


def test_a_score_of_the_users_own_is_named(tmp_path: Path) -> None:
    """Nothing that only a checkpoint names is imported."""
    our_checkpoint(tmp_path / "ours.ckpt")
    stored = torch.load(tmp_path / "ours.ckpt")
    stored["tinyformer"]["config"]["attention"] |= {"_target_": "antigravity.Attention", "score": "this.Score"}
    torch.save(stored, tmp_path / "ours.ckpt")
    with pytest.raises(ValueError, match=r"attention=antigravity.Attention has no counterpart in GPT-2"):
        export_model(tmp_path / "ours.ckpt", tmp_path / "theirs", CONF)
    assert "antigravity" not in sys.modules


# The folder.


def test_a_folder_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    our_checkpoint(tmp_path / "ours.ckpt")
    folder = tmp_path / "theirs"
    folder.mkdir()
    with pytest.raises(ValueError, match="theirs exists already"):
        export_model(tmp_path / "ours.ckpt", folder, CONF)
    assert not list(folder.iterdir())
    with pytest.raises(ValueError, match="none/theirs lies in no folder that exists"):
        export_model(tmp_path / "ours.ckpt", tmp_path / "none" / "theirs", CONF)

    def no_space(*args: Any, **options: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("tinyformer.interop.folder.save_file", no_space)
    with pytest.raises(OSError, match="no space"):
        export_model(tmp_path / "ours.ckpt", tmp_path / "other", CONF)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours.ckpt", "theirs"]


def test_what_a_killed_export_left_behind_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / ".out.partial").mkdir()
    write_folder(tmp_path / "out", {"config.json": {}}, {"a": torch.zeros(1)})
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]


def test_weights_that_are_not_the_configs_are_refused(tmp_path: Path) -> None:
    our_checkpoint(tmp_path / "ours.ckpt")
    stored = torch.load(tmp_path / "ours.ckpt")
    del stored["state_dict"]["network.encoder.layers.1.attention.q_proj.weight"]
    torch.save(stored, tmp_path / "ours.ckpt")
    with pytest.raises(ValueError, match=r"it has no encoder.layers.1.attention.q_proj.weight"):
        export_model(tmp_path / "ours.ckpt", tmp_path / "theirs", CONF)
