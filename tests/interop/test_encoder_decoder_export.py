"""Encoder–decoders of ours, exported as T5, BART and Marian: the same logits, or a refusal that names the key."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from interop.models import (
    checkpoint_of,
    composed,
    exported,
    network_of,
    our_checkpoint,
    tokens,
    transformers,
)
from interop.test_export import TEXT, leaves, values
from tinyformer.data import BPETokenizer
from tinyformer.model.loading import load
from tinyformer.programs.convert.exporting import export_model

slow = pytest.mark.slow

AS_T5 = (
    *("task=seq2seq", "position=t5", "norm=rms_norm", "feed_forward=relu", "attention.score=dot"),
    *("cross_attention.score=dot", "model.scaled_readout=true"),
)
AS_GATED = (*AS_T5[:3], "feed_forward=swiglu", *AS_T5[4:6], "model.tied_readout=false")
AS_BART = ("task=seq2seq", "position=learned", "block=post_norm", "model.embedding_norm=true")
AS_MARIAN = ("task=seq2seq", "position=sinusoidal", "block=post_norm", "position.absolute.interleaved=false")
BASES = {"T5": AS_T5, "T5 v1.1": AS_GATED, "BART": AS_BART, "Marian": AS_MARIAN}


def require_same_logits(overrides: tuple[str, ...], tmp_path: Path) -> Any:
    checkpoint = our_checkpoint(tmp_path / "ours.ckpt", "model.special_tokens.eos=1", *overrides)
    model, target = exported(tmp_path / "ours.ckpt", tmp_path / "theirs"), tokens().flip(0)[:, :7]
    with torch.no_grad():
        ours = network_of(checkpoint)(tokens(), target)
        expected = model(input_ids=tokens(), decoder_input_ids=target).logits
    assert expected.std() > 0.05
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)
    return model


@pytest.mark.parametrize("base", [base if base == "T5" else pytest.param(base, marks=slow) for base in BASES])
def test_logits_and_weights_are_the_same(base: str, tmp_path: Path) -> None:
    require_same_logits((*BASES[base], "model.num_encoder_layers=3", "model.d_ff=50"), tmp_path)
    imported = network_of(checkpoint_of(tmp_path / "theirs", tmp_path / "imported.ckpt")).state_dict()
    own = load_weights_of(tmp_path / "ours.ckpt")
    assert all(torch.equal(imported[name], weight) for name, weight in own.items())
    added = imported.keys() - own.keys()  # biases of zeros
    assert all(name.endswith(".bias") and not imported[name].any() for name in added)


def load_weights_of(path: Path) -> dict[str, torch.Tensor]:
    return {name.removeprefix("network."): weight for name, weight in torch.load(path)["state_dict"].items()}


@slow
def test_a_translator_of_ours_answers_a_text_with_the_same_text(tmp_path: Path) -> None:
    tokenizer = BPETokenizer(280).build([TEXT])
    our_checkpoint(tmp_path / "ours.ckpt", *AS_BART, "model.init_std=0.5", tokenizer=tokenizer)
    export_model(tmp_path / "ours.ckpt", tmp_path / "theirs")
    theirs = transformers().AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "theirs")
    their_tokenizer = transformers().AutoTokenizer.from_pretrained(tmp_path / "theirs")
    ours, found = load(tmp_path / "ours.ckpt"), set()
    for prompt in ("the cat sees", "mice and birds", "the birds"):
        encoded = their_tokenizer(prompt, return_tensors="pt")
        assert encoded["input_ids"].tolist() == [[*tokenizer.encode(prompt), tokenizer.eos_id]]
        target = theirs.generate(**encoded, num_beams=2, max_length=ours.network.max_seq_len + 1)[0]
        assert [their_tokenizer.decode(target, skip_special_tokens=True)] == ours.generate(prompt, beams=2)
        found |= set(ours.generate(prompt, beams=2))
    assert max(map(len, found)) > 3
    checkpoint_of(tmp_path / "theirs", tmp_path / "in.ckpt")
    assert load(tmp_path / "in.ckpt").generate(prompt, beams=2) == ours.generate(prompt, beams=2)


# Every key that an encoder–decoder has and a single stack has not: refused by name, or exported exactly.

REFUSED = values(
    """
    cross_attention.num_kv_heads=2 cross_attention.head_dim=6 cross_attention.qk_norm=true
    cross_attention.v_head_dim=6 cross_attention.scale=0.3
    cross_attention.score=general cross_attention.softcap=3.0 cross_attention.sink=true cross_attention.gate=true
    block.cross_attention_residual.skip=0.5 block.cross_attention_residual.branch=0.5 model.shared_embedding=false
    model.scaled_readout=true model.tied_readout=false position.absolute.base=500 model.embedding_norm=true
    position.absolute.interleaved=true model.special_tokens.bos=3 norm.eps=0.1 attention.ablated_heads=[[cross,0,1]]
    """
)
OF = {"position.absolute.base": "Marian", "model.special_tokens.bos": "Marian"}
OF |= {"position.absolute.interleaved": "Marian", "model.embedding_norm": "T5"}
"""The bases of keys that BART does not have, or can express; of the others, BART is taken."""

EXACT = {
    "T5": """
        position.num_buckets=8 position.max_distance=9 attention.head_dim=10 cross_attention.head_dim=10 norm.eps=0.1
        model.num_encoder_layers=1 cross_attention.dropout=0.25 model.special_tokens.decoder_start=4
        model.special_tokens.suppressed=[5,6] model.special_tokens.eos=7 cross_attention.backend=eager
    """,
    "T5 v1.1": "feed_forward.activation=gelu_tanh model.dropout=0.25 model.d_ff=30",
    "BART": """
        model.bias=true model.readout_bias=true cross_attention.bias=false model.special_tokens.bos=4
        model.special_tokens.forced_bos=4 model.special_tokens.decoder_start=8 feed_forward.activation=gelu_tanh
    """,
    "Marian": "model.bias=true feed_forward.activation=silu model.special_tokens.suppressed=[5]",
}
REFERENCES = {
    *("cross_attention.d_model", "cross_attention.num_heads", "cross_attention.ablated_heads"),
    *("cross_attention.position", "cross_attention.window", "cross_attention.local_gaussian"),
}
"""Keys that only refer to another key, or have no effect between two sequences or are refused there."""


def test_the_tables_have_every_key() -> None:
    config = composed("task=seq2seq")
    keys = leaves(config["cross_attention"], "cross_attention")
    own = ("num_encoder_layers", "shared_embedding", "scaled_readout", "readout_bias", "special_tokens")
    keys |= {key for key in leaves(config["model"], "model") if key.split(".")[1] in own}
    keys |= leaves(config["block"]["cross_attention_residual"], "block.cross_attention_residual")
    exact = {key for text in EXACT.values() for key in values(text)}
    assert keys <= {*REFUSED, *exact, *REFERENCES}


@pytest.mark.parametrize("key", [key if key.endswith("softcap") else pytest.param(key, marks=slow) for key in REFUSED])
def test_a_key_without_counterpart_is_refused_by_name(key: str, tmp_path: Path) -> None:
    base = BASES[OF.get(key, "BART")]
    our_checkpoint(tmp_path / "ours.ckpt", *(one for one in base if not one.startswith(key)), f"{key}={REFUSED[key]}")
    with pytest.raises(ValueError, match=rf"^{re.escape(key)}=.*nearest") as caught:
        export_model(tmp_path / "ours.ckpt", tmp_path / "theirs")
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["ours.ckpt"]


@slow
@pytest.mark.parametrize("base", BASES)
def test_any_other_key_is_exported_exactly(base: str, tmp_path: Path) -> None:
    model = require_same_logits((*BASES[base], *EXACT[base].split()), tmp_path)
    settings = values(EXACT[base])
    start = settings.get("model.special_tokens.decoder_start")
    assert start is None or model.generation_config.decoder_start_token_id == int(start)


def test_without_a_tokenizer_the_end_of_a_text_has_to_be_known(tmp_path: Path) -> None:
    our_checkpoint(tmp_path / "ours.ckpt", *AS_BART, "model.vocab_size=53")
    for use in (load, lambda path: export_model(path, tmp_path / "theirs")):
        with pytest.raises(ValueError, match="has no tokenizer, and does not say which token ends a text"):
            use(tmp_path / "ours.ckpt")


def test_a_network_of_one_stack_is_compared_with_its_own_kind(tmp_path: Path) -> None:
    overrides = ("attention.softcap=3.0", "attention.sink=true", "attention.gate=true", "attention.qk_norm=true")
    our_checkpoint(tmp_path / "ours.ckpt", *overrides)
    with pytest.raises(ValueError, match=r"^attention\..* has no counterpart in GPT-NeoX, the nearest of GPT-2, "):
        export_model(tmp_path / "ours.ckpt", tmp_path / "theirs")
