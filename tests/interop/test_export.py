"""Exported models, loaded by `transformers`: the same logits and text, or a refusal that names the key."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import tinyformer
from interop.models import (
    SEQ,
    checkpoint_of,
    composed,
    exported,
    network_of,
    our_checkpoint,
    our_logits,
    their_logits,
    tokens,
    transformers,
)
from tinyformer.data import BPETokenizer, CharTokenizer
from tinyformer.generation.sampling import Sampling, generate
from tinyformer.interop.folder import write_folder
from tinyformer.programs.convert.exporting import export_model

slow = pytest.mark.slow

TEXT = "the cat sees the birds and the mice see the cat. " * 9
AS_LLAMA = ("position=rotary", "norm=rms_norm", "feed_forward=swiglu")
AS_BERT = ("position=learned", "task=masked_lm_bert", "block=post_norm", "model.embedding_norm=true")

EXPORTS: dict[str, tuple[str, ...]] = {
    "gpt2": ("position=learned", "feed_forward=relu2", "attention.score=dot", "model.d_ff=50", "attention.head_dim=8"),
    "gpt_neox": ("model.d_ff=50", "model.tied_readout=false", "position.relative.base=700"),
    "gpt_neox-bias": ("model.bias=true", "norm.eps=0.1"),
    "llama-gqa": (*AS_LLAMA, "attention=gqa", "attention.head_dim=10", "position.relative.base=700"),
    "llama-mqa-bias": (*AS_LLAMA, "attention=mqa", "model.bias=true", "model.tied_readout=false"),
    "mistral": (*AS_LLAMA, "attention=gqa", "attention.window=5"),
    "bert-bias": (*AS_BERT, "model.bias=true", "model.tied_readout=false", "norm.eps=0.1"),
}


def require_same_logits(overrides: tuple[str, ...], tmp_path: Path) -> Any:
    ours = our_checkpoint(tmp_path / "ours.ckpt", *overrides)
    model = exported(tmp_path / "ours.ckpt", tmp_path / "theirs")
    expected = our_logits(ours, tokens())
    assert expected.std() > 0.1
    assert (their_logits(model, tokens()) - expected).abs().max() <= 1e-5
    return model


FAST = ("llama-gqa", "bert-bias")


@pytest.mark.parametrize("name", [name if name in FAST else pytest.param(name, marks=slow) for name in EXPORTS])
def test_logits_text_and_weights_are_the_same(name: str, tmp_path: Path) -> None:
    model = require_same_logits(EXPORTS[name], tmp_path)
    assert model.config.model_type == name.partition("-")[0]
    imported = network_of(checkpoint_of(tmp_path / "theirs", tmp_path / "imported.ckpt"))
    weights, own = imported.state_dict(), our_checkpoint(tmp_path / "own.ckpt", *EXPORTS[name]).weights
    assert all(torch.equal(weights[name], weight) for name, weight in own.items())
    added = weights.keys() - own.keys()  # biases of zeros
    assert all(name.endswith(".bias") and not weights[name].any() for name in added)
    if model.config.model_type != "bert":
        prompt = tokens()[:, :4]
        new = generate(imported, prompt.tolist(), SEQ - 4, Sampling(temperature=0))
        made = model.generate(prompt, max_new_tokens=SEQ - 4, attention_mask=torch.ones_like(prompt), pad_token_id=0)
        assert made[:, 4:].tolist() == new


def change_checkpoint(path: Path, change: Any) -> None:
    stored = torch.load(path)
    change(stored)
    torch.save(stored, path)


# The tokenizer.


def test_a_prompt_is_continued_with_the_same_text(tmp_path: Path) -> None:
    tokenizer = BPETokenizer(300).build([TEXT])
    our_checkpoint(tmp_path / "ours.ckpt", tokenizer=tokenizer)
    export_model(tmp_path / "ours.ckpt", tmp_path / "theirs")
    library, folder, prompt = transformers(), tmp_path / "theirs", "the cat"
    model = library.AutoModelForCausalLM.from_pretrained(folder)
    their_tokenizer = library.AutoTokenizer.from_pretrained(folder)
    encoded = their_tokenizer(prompt, return_tensors="pt")
    assert encoded["input_ids"].tolist() == [[tokenizer.eos_id, *tokenizer.encode(prompt)]]
    assert (their_tokenizer.eos_token_id, model.generation_config.eos_token_id) == (tokenizer.eos_id,) * 2
    assert model.generation_config.bos_token_id == model.generation_config.pad_token_id == tokenizer.eos_id
    assert their_tokenizer.model_max_length == SEQ + 2
    num_tokens = SEQ + 2 - encoded["input_ids"].shape[1]
    made = model.generate(**encoded, max_new_tokens=num_tokens)[0]
    expected = tinyformer.load(tmp_path / "ours.ckpt").generate(prompt, num_tokens, temperature=0)
    assert [their_tokenizer.decode(made, skip_special_tokens=True)] == expected
    checkpoint_of(folder, tmp_path / "imported.ckpt")
    assert tinyformer.load(tmp_path / "imported.ckpt").generate(prompt, num_tokens, temperature=0) == expected


def test_the_mask_token_and_pairs_of_texts(tmp_path: Path) -> None:
    tokenizer = CharTokenizer().build([TEXT]).with_mask()
    our_checkpoint(tmp_path / "ours.ckpt", *AS_BERT, tokenizer=tokenizer)
    export_model(tmp_path / "ours.ckpt", tmp_path / "theirs")
    loaded = transformers().AutoTokenizer.from_pretrained(tmp_path / "theirs")
    assert (loaded.mask_token_id, loaded.unk_token_id) == (tokenizer.mask_id, tokenizer.unk_id)
    eos, first, second = tokenizer.eos_id, tokenizer.encode("cat"), tokenizer.encode("mice")
    assert loaded("cat", "mice")["input_ids"] == [eos, *first, eos, *second]
    assert not (tmp_path / "theirs" / "generation_config.json").exists()


# Every key of the config: refused by name, or exported exactly.


def values(text: str) -> dict[str, str]:
    """Keys and their values, which may be empty."""
    return {key: value for key, _, value in (override.partition("=") for override in text.split())}


REFUSED = values(
    """
    model.embedding_norm=true model.pruned_heads=[[0,1]] attention.num_kv_heads=2 attention.head_dim=6
    attention.v_head_dim=6 attention.scale=0.3
    attention.qk_norm=true attention.score=general attention.window=[5,null] attention.local_gaussian=true
    attention.softcap=3.0 attention.sink=true attention.gate=true attention.ablated_heads=[[0,1]]
    block.attention_residual.skip=0.5 block.attention_residual.branch=[1,0.5]
    block.feed_forward_residual.skip=[1,0.5] block.feed_forward_residual.branch=0.5 task.readout.activation=silu
    """
)
EXACT = values(
    """
    model.num_layers=1 model.num_heads=4 model.d_model=60 model.max_seq_len=20 model.d_ff=30 model.dropout=0.25
    model.embedding_dropout=0.25 model.bias=true model.tied_readout=false model.init_std=0.5 model.init=xavier
    model.checkpoint_activations=true model.autocast_residual=true attention.bias=true attention.dropout=0.25
    attention.backend=eager
    position.relative.base=500 block.dropout=0.25 feed_forward.activation=relu2 feed_forward.bias=true norm.eps=0.1
    norm.bias=true
    """
)
REFERENCES = values(
    """
    model.vocab_size attention.d_model attention.num_heads attention.position position.absolute position.relative
    position.absolute.max_seq_len position.absolute.d_model position.relative.max_seq_len block.d_model block.attention
    block.feed_forward block.norm feed_forward.d_model feed_forward.d_ff task.labels task.masking task.masking.rate
    task.masking.mask_share task.masking.random_share task.masking.whole_words task.readout.tied task.readout.norm
    task.objective.pseudo_perplexity_tokens task.datamodule model.num_encoder_layers model.shared_embedding
    block.cross_attention_residual.skip block.cross_attention_residual.branch model.readout_bias model.scaled_readout
    model.special_tokens.eos model.special_tokens.decoder_start model.special_tokens.bos
    model.special_tokens.forced_bos model.special_tokens.suppressed task.num_texts
    """
)
"""Keys that only refer to another key, or do not concern the network."""

BASES = {"gpt2": ("position=learned",), "gpt_neox": (), "llama": AS_LLAMA, "bert": AS_BERT}
ONLY_IN = {
    "position.relative.base": ("gpt_neox", "llama"),
    "norm.bias": ("gpt2", "gpt_neox", "bert"),
    "task.readout.activation": ("bert",),
}
"""The bases of keys that not all of them have."""

AXES = ("model", "attention", "position", "block", "feed_forward", "norm", "task")


def leaves(node: Any, path: str) -> set[str]:
    if not isinstance(node, dict):
        return {path}
    return {key for name in node if not name.startswith("_") for key in leaves(node[name], f"{path}.{name}")}


def test_the_tables_have_every_key() -> None:
    keys = set()
    for base, overrides in BASES.items():
        config = composed(*overrides)
        own = {key for axis in AXES for key in leaves(config[axis], axis)}
        assert {key for key in (*REFUSED, *EXACT) if base in ONLY_IN.get(key, BASES)} <= own
        keys |= own
    assert keys == REFUSED.keys() | EXACT.keys() | REFERENCES.keys()


@pytest.mark.parametrize(
    "key", [key if key == "attention.softcap" else pytest.param(key, marks=slow) for key in REFUSED]
)
def test_a_key_without_counterpart_is_refused_by_name(key: str, tmp_path: Path) -> None:
    base = ONLY_IN.get(key, ("gpt2",))[0]
    needed = ["attention.window=5"] if key == "attention.local_gaussian" else []
    our_checkpoint(tmp_path / "ours.ckpt", *BASES[base], f"{key}={REFUSED[key]}", *needed)
    with pytest.raises(ValueError, match=rf"^{re.escape(key)}=.*nearest") as caught:
        export_model(tmp_path / "ours.ckpt", tmp_path / "theirs")
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["ours.ckpt"]


@slow
@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("base", BASES)
def test_any_other_key_is_exported_exactly(base: str, half: int, tmp_path: Path) -> None:
    keys = [key for key in EXACT if base in ONLY_IN.get(key, BASES)][half::2]
    require_same_logits((*BASES[base], *(f"{key}={EXACT[key]}" for key in keys)), tmp_path)


def test_a_class_that_only_the_checkpoint_names_is_not_imported(tmp_path: Path) -> None:
    our_checkpoint(tmp_path / "ours.ckpt")

    def change(stored: dict[str, Any]) -> None:
        stored["tinyformer"]["overrides"]["attention._target_"] = "antigravity.Attention"
        stored["tinyformer"]["overrides"]["attention.score"] = "this.Score"

    change_checkpoint(tmp_path / "ours.ckpt", change)
    with pytest.raises(ValueError, match=r"attention=antigravity\.Attention"):
        export_model(tmp_path / "ours.ckpt", tmp_path / "theirs")
    assert "antigravity" not in sys.modules


def test_a_folder_is_new_and_written_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = {"config.json": {}}, {"a": torch.zeros(1)}
    write_folder(tmp_path / "out", *arguments)
    with pytest.raises(ValueError, match=r"out': already exists"):
        write_folder(tmp_path / "out", *arguments)
    with pytest.raises(ValueError, match=r"none/out': its parent folder does not exist"):
        write_folder(tmp_path / "none" / "out", *arguments)
    monkeypatch.setattr("tinyformer.interop.folder.save_file", lambda *args, **options: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_folder(tmp_path / "other", *arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
