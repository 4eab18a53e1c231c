"""Exported models, loaded by `transformers`: the same logits and text, or a refusal that names the key."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import tinyformer
from interop.models import (
    SEQ,
    checkpoint_of,
    exported,
    network_of,
    our_checkpoint,
    our_logits,
    their_logits,
    tokens,
    transformers,
)
from tinyformer.checkpoint.file import load_raw
from tinyformer.data import BPETokenizer
from tinyformer.generation.generation import Sampling, generate
from tinyformer.programs.convert.conversion import export_model

slow = pytest.mark.slow

TEXT = "the cat sees the birds and the mice see the cat. " * 9
AS_LLAMA = ("position=rotary", "norm=rms_norm", "feed_forward=swiglu")
AS_BERT = ("position=learned", "task=masked_lm_bert", "block=post_norm", "model.embedding_norm=true")
AS_GATED_T5 = (
    *("task=seq2seq", "position=t5", "norm=rms_norm", "feed_forward=swiglu", "model.tied_readout=false"),
    *("attention.score=dot", "cross_attention.score=dot"),
)
AS_T5 = (*AS_GATED_T5[:3], "feed_forward=relu", *AS_GATED_T5[5:], "model.scaled_readout=true")
AS_BART = ("task=seq2seq", "position=learned", "block=post_norm", "model.embedding_norm=true")
AS_MARIAN = ("task=seq2seq", "position=sinusoidal", "block=post_norm", "position.absolute.interleaved=false")
BASES = {
    **{"gpt2": ("position=learned",), "gpt_neox": (), "llama": AS_LLAMA, "bert": AS_BERT},
    **{"t5": AS_T5, "t5-gated": AS_GATED_T5, "bart": AS_BART, "marian": AS_MARIAN},
}
DECODERS_AND_BERT, ENCODER_DECODERS = list(BASES)[:4], list(BASES)[4:]

EXPORTS: dict[str, tuple[str, ...]] = {
    "gpt2": ("position=learned", "feed_forward=relu2", "attention.score=dot", "model.d_ff=50", "attention.head_dim=8"),
    "gpt_neox": ("model.d_ff=50", "model.tied_readout=false", "position.relative.base=700"),
    "gpt_neox-bias": ("model.bias=true", "norm.eps=0.1"),
    "llama-gqa": (*AS_LLAMA, "attention=gqa", "attention.head_dim=10", "position.relative.base=700"),
    "llama-qkv-bias": (*AS_LLAMA, "attention.bias=qkv", "feed_forward.bias=true"),
    "llama-mqa-bias": (*AS_LLAMA, "attention=mqa", "model.bias=true", "model.tied_readout=false"),
    "mistral": (*AS_LLAMA, "attention=gqa", "attention.window=5"),
    "bert-bias": (*AS_BERT, "model.bias=true", "model.tied_readout=false", "norm.eps=0.1"),
    **{name: (*BASES[name], "model.num_encoder_layers=3", "model.d_ff=50") for name in ENCODER_DECODERS},
}


def some(names: Any, *fast: str) -> list[Any]:
    """Names for `parametrize`, all of them slow but some."""
    return [name if name in fast else pytest.param(name, marks=slow) for name in names]


def require_same_logits(overrides: tuple[str, ...], tmp_path: Path) -> Any:
    is_pair = "task=seq2seq" in overrides
    named = ("model.special_tokens.eos=1", *overrides) if is_pair else overrides
    tmp_path.mkdir(exist_ok=True)
    checkpoint = our_checkpoint(tmp_path / "ours.ckpt", *named)
    model, target = exported(tmp_path / "ours.ckpt", tmp_path / "theirs"), tokens().flip(0)[:, :7]
    if is_pair:
        with torch.no_grad():
            ours = network_of(checkpoint)(tokens(), target)
            expected = model(input_ids=tokens(), decoder_input_ids=target).logits
    else:
        ours, expected = our_logits(checkpoint, tokens()), their_logits(model, tokens())
    assert expected.std() > 0.05
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)
    return model


@pytest.mark.parametrize("name", some(EXPORTS, "llama-gqa", "bert-bias", "t5"))
def test_logits_text_and_weights_are_the_same(name: str, tmp_path: Path) -> None:
    model = require_same_logits(EXPORTS[name], tmp_path)
    assert model.config.model_type == name.partition("-")[0]
    imported = network_of(checkpoint_of(tmp_path / "theirs", tmp_path / "imported.ckpt"))
    stored = load_raw(tmp_path / "ours.ckpt")["state_dict"]
    weights, own = imported.state_dict(), {key.removeprefix("network."): weight for key, weight in stored.items()}
    assert all(torch.equal(weights[name], weight) for name, weight in own.items())
    added = weights.keys() - own.keys()  # biases of zeros
    assert all(name.endswith(".bias") and not weights[name].any() for name in added)
    if name.partition("-")[0] in ("gpt2", "gpt_neox", "llama", "mistral"):
        prompt = tokens()[:, :4]
        new = generate(imported, prompt.tolist(), SEQ - 4, Sampling(temperature=0))
        made = model.generate(prompt, max_new_tokens=SEQ - 4, attention_mask=torch.ones_like(prompt), pad_token_id=0)
        assert made[:, 4:].tolist() == new


def test_a_prompt_is_continued_with_the_same_text(tmp_path: Path) -> None:
    tokenizer, folder, prompt = BPETokenizer(300).build([TEXT]), tmp_path / "theirs", "the cat"
    our_checkpoint(tmp_path / "ours.ckpt", tokenizer=tokenizer)
    model = exported(tmp_path / "ours.ckpt", folder)
    with pytest.raises(ValueError, match="theirs': already exists"):
        export_model(tmp_path / "ours.ckpt", folder)
    their_tokenizer = transformers().AutoTokenizer.from_pretrained(folder)
    encoded, settings = their_tokenizer(prompt, return_tensors="pt"), model.generation_config
    assert encoded["input_ids"].tolist() == [[tokenizer.eos_id, *tokenizer.encode(prompt)]]
    assert {their_tokenizer.eos_token_id, settings.eos_token_id, settings.bos_token_id} == {tokenizer.eos_id}
    assert (settings.pad_token_id, their_tokenizer.model_max_length) == (tokenizer.eos_id, SEQ + 2)
    num_tokens = SEQ + 2 - encoded["input_ids"].shape[1]
    made = model.generate(**encoded, max_new_tokens=num_tokens)[0]
    checkpoint_of(folder, tmp_path / "imported.ckpt")
    for name in ("ours.ckpt", "imported.ckpt"):
        ours = tinyformer.load(tmp_path / name).generate(prompt, num_tokens, temperature=0)
        assert ours == [their_tokenizer.decode(made, skip_special_tokens=True)]


def values(text: str) -> dict[str, str]:
    """Keys and their values, which may be empty."""
    return {key: value for key, _, value in (override.partition("=") for override in text.split())}


REFUSED = {
    "gpt2": values(
        """
        model.embedding_norm=true attention.num_kv_heads=2 attention.head_dim=6 attention.scale=0.3
        attention.score=general attention.window=[5,null] attention.local_gaussian=true
        attention.qk_norm=projection attention.softcap=3.0 attention.sink=true attention.gate=true
        attention.convolution=qkv attention.shifted_keys=true block.feed_forward_convolution=true
        feed_forward.convolution=true attention.forget=true
        model.scaled_embedding=true model.readout_softcap=3.0 attention.ablated_heads=[[0,1]]
        model.pruned_heads=[[0,1]] block.attention_residual.skip=0.5 block.feed_forward_residual.branch=[1,0.5]
        """
    ),
    "llama": values("norm.weight=false"),
    "bert": values("task.readout.activation=silu"),
    "bart": values(
        """
        cross_attention.num_kv_heads=2 cross_attention.v_head_dim=6 cross_attention.window=3
        cross_attention.softcap=3.0 block.cross_attention_residual.skip=0.5 model.shared_embedding=false
        model.scaled_readout=true model.tied_readout=false norm.eps=0.1 attention.ablated_heads=[[cross,0,1]]
        """
    ),
    "marian": values("position.absolute.base=500 position.absolute.interleaved=true model.special_tokens.bos=3"),
    "t5": values("model.embedding_norm=true"),
}
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
ONLY_IN = {"position.relative.base": ("gpt_neox", "llama"), "norm.bias": ("gpt2", "gpt_neox", "bert")}
"""The bases of keys that not all of those with one stack have."""

EXACT_IN = {
    "t5": values(
        """
        position.num_buckets=8 position.max_distance=9 attention.head_dim=10 cross_attention.head_dim=10 norm.eps=0.1
        model.num_encoder_layers=1 cross_attention.dropout=0.25 model.special_tokens.decoder_start=4
        model.special_tokens.suppressed=[5,6] model.special_tokens.eos=7 cross_attention.backend=eager
        """
    ),
    "t5-gated": values("feed_forward.activation=gelu_tanh model.dropout=0.25 model.d_ff=30"),
    "bart": values(
        """
        model.bias=true model.readout_bias=true cross_attention.bias=o model.scaled_embedding=true
        model.special_tokens.bos=4 model.special_tokens.forced_bos=4 model.special_tokens.decoder_start=8
        feed_forward.activation=gelu_tanh
        """
    ),
    "marian": values("model.bias=true feed_forward.activation=silu model.special_tokens.suppressed=[5]"),
}
CASES = {f"{base}-{key}": (base, key) for base, keys in REFUSED.items() for key in keys}


@pytest.mark.parametrize("case", some(CASES, "gpt2-attention.softcap", "bart-cross_attention.softcap"))
def test_a_key_without_counterpart_is_refused_by_name(case: str, tmp_path: Path) -> None:
    base, key = CASES[case]
    needed = ["attention.window=5"] if key == "attention.local_gaussian" else []
    others = [override for override in BASES[base] if not override.startswith(key)]
    our_checkpoint(tmp_path / "ours.ckpt", *others, f"{key}={REFUSED[base][key]}", *needed)
    with pytest.raises(ValueError, match=rf"^{re.escape(key)}=.*nearest") as caught:
        export_model(tmp_path / "ours.ckpt", tmp_path / "theirs")
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["ours.ckpt"]


@slow
@pytest.mark.parametrize("base", BASES)
def test_any_other_key_is_exported_exactly(base: str, tmp_path: Path) -> None:
    exact = EXACT_IN.get(base) or {key: EXACT[key] for key in EXACT if base in ONLY_IN.get(key, BASES)}
    overrides = [f"{key}={value}" for key, value in exact.items()]
    for half in (overrides,) if base in EXACT_IN else (overrides[::2], overrides[1::2]):
        model = require_same_logits((*BASES[base], *half), tmp_path / half[0])
    if start := exact.get("model.special_tokens.decoder_start"):
        assert model.generation_config.decoder_start_token_id == int(start)
