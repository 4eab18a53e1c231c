"""GGUF files: the logits and tokens of `transformers`, which reads them as well, or a refusal in a sentence."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from commands import BOOK
from tokenizers import Regex, pre_tokenizers

import tinyformer
from interop.models import ROTARY, checkpoint_of, our_logits, their_logits, theirs, tokens, transformers
from tinyformer.data import BPETokenizer
from tinyformer.errors import ArgumentError
from tinyformer.interop.gguf import GGUFFile
from tinyformer.run.importing import import_model

SIZES: dict[str, Any] = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "max_position_embeddings": 21},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-3, "vocab_size": 320},
    **{"rope_parameters": ROTARY, "tie_word_embeddings": False},
}
KEYS = {
    **{"embedding_length": 64, "feed_forward_length": 96, "block_count": 2, "context_length": 21, "vocab_size": 320},
    **{"attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-3},
    "rope.freq_base": 700.0,
}
NAMES = gguf.TensorNameMap(gguf.MODEL_ARCH.QWEN3, 2)  # which has the names of the others, too
TOKENIZER = BPETokenizer(290).build([BOOK])


def write(path: Path, kind: str, model: Any, kept: str = "F32", pre: str = "gpt-2", **others: Any) -> Path:
    """A file as llama.cpp's script converts a model; `others` are keys after the name of the architecture."""
    writer, described = gguf.GGUFWriter(path, kind), KEYS | others
    for name, value in described.items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(f"{kind}.{name}", value)
    vocabulary = TOKENIZER.reader.get_vocab()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(sorted(vocabulary, key=vocabulary.__getitem__))
    writer.add_token_types([3 if i == TOKENIZER.eos_id else 1 for i in range(len(vocabulary))])
    writer.add_token_merges([" ".join(pair) for pair in json.loads(TOKENIZER.to_json())["model"]["merges"]])
    writer.add_eos_token_id(TOKENIZER.eos_id)
    writer.add_bos_token_id(TOKENIZER.eos_id)
    for name, weight in model.named_parameters():
        stem, part = name.rsplit(".", 1)
        heads = {"q_proj": 4, "k_proj": 2}.get(stem.rpartition(".")[2], 0) if kind == "llama" else 0
        rows = weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2) if heads else weight
        dtype = gguf.GGMLQuantizationType[kept if weight.ndim > 1 else "F32"]
        writer.add_tensor(
            f"{NAMES.get_name(stem)}.{part}", gguf.quants.quantize(rows.detach().numpy(), dtype), raw_dtype=dtype
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


WIDE = {"attention.key_length": 32, "rope.dimension_count": 32}  # of Llama; the library reads no such key of Qwen 3
CASES: list[tuple[str, str, str, dict[str, Any], dict[str, Any]]] = [
    ("llama", "Llama", "F32", {"head_dim": 32}, WIDE),
    ("llama", "Llama", "Q8_0", {"head_dim": 32}, WIDE),
    ("qwen2", "Qwen2", "F32", {}, {"rope.dimension_count": 16}),
    ("qwen3", "Qwen3", "F16", {"head_dim": 128}, {"attention.key_length": 128}),
]


@pytest.mark.parametrize(("kind", "family", "kept", "fields", "keys"), CASES)
def test_logits_and_tokens_are_those_of_transformers(
    kind: str, family: str, kept: str, fields: dict[str, Any], keys: dict[str, Any], tmp_path: Path
) -> None:
    model = theirs(family, **SIZES | fields)
    path, named = write(tmp_path / "model.gguf", kind, model, kept, **keys), {"gguf_file": "model.gguf"}
    read = transformers().AutoModelForCausalLM.from_pretrained(tmp_path, **named, dtype=torch.float32)
    checkpoint = checkpoint_of(path, tmp_path / "in.ckpt")
    ours, expected = our_logits(checkpoint, tokens()), their_logits(read, tokens())
    assert expected.std() > 0.1
    assert (ours - expected).abs().max() <= 1e-5
    tokenizer, loaded = transformers().AutoTokenizer.from_pretrained(tmp_path, **named), tinyformer.load(path)
    for text in ("The cat sees\n\n 12 mice.", "é 猫 🙂", "a<eos>b"):
        assert loaded.tokenize(text)[0].tolist() == [tokenizer(text)["input_ids"]]


def test_scaled_positions_biases_and_a_tied_readout(tmp_path: Path) -> None:
    """Which transformers does not read in a GGUF file: our logits are those of the model that was written."""
    scaled = {"rope_parameters": ROTARY | {"rope_type": "linear", "factor": 4.0}}
    model = theirs("Llama", **SIZES | scaled, attention_bias=True, mlp_bias=True)
    model.lm_head.weight = model.model.embed_tokens.weight
    keys = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    checkpoint = checkpoint_of(write(tmp_path / "model.gguf", "llama", model, **keys), tmp_path / "in.ckpt")
    assert "readout.proj.weight" in checkpoint.weights
    assert (our_logits(checkpoint, tokens()) - their_logits(model, tokens())).abs().max() <= 1e-5


def test_texts_are_split_as_in_the_tokenizer_files_of_the_models(tmp_path: Path) -> None:
    from transformers.convert_slow_tokenizer import TikTokenConverter
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    model, bytes_ = theirs("Llama", **SIZES), pre_tokenizers.ByteLevel(add_prefix_space=False)
    splitters = {"gpt-2": [bytes_], "smollm": [pre_tokenizers.Digits(individual_digits=True), bytes_]}
    for name, pattern in {"qwen2": PRETOKENIZE_REGEX, "llama-bpe": TikTokenConverter().pattern}.items():
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        splitters[name] = [pre_tokenizers.Split(Regex(pattern), "isolated"), to_bytes]
    text = "I'LL say it's  1234567½² \n\n\tx = y**2;\r\n\r\n  猫、🙂 é" + BOOK[:100]
    for name, parts in splitters.items():
        path = write(tmp_path / f"{name}.gguf", "llama", model, pre=name)
        ours = GGUFFile(path).read_tokenizer().reader.pre_tokenizer.pre_tokenize_str(text)
        assert ours == pre_tokenizers.Sequence(parts).pre_tokenize_str(text)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "falcon": ({}, "its general.architecture is falcon; llama, qwen2, qwen3 are supported."),
    "scaling": ({"rope.scaling.type": "yarn"}, "its llama.rope.scaling.type is yarn; none, linear are supported."),
    "partial": ({"rope.dimension_count": 8}, "metadata: partial_rotary_factor=0.5: "),
    "short": ({}, "cannot be read: a file is cut short, damaged, or of an unknown type ("),
    "keys": ({"block_count": 3}, "does not match the LlamaForCausalLM of its metadata: model.layers.2."),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_files_are_refused_in_a_sentence(name: str, tmp_path: Path) -> None:
    keys, sentence = REFUSED[name]
    kind = "falcon" if name == "falcon" else "llama"
    path = write(tmp_path / "model.gguf", kind, theirs("Llama", **SIZES), **keys)
    if name == "short":
        path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(ArgumentError, match=re.escape(sentence)):
        import_model(str(path), tmp_path / "in.ckpt")
    assert list(tmp_path.iterdir()) == [path]


def test_without_a_known_tokenizer_or_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "model.gguf", "llama", theirs("Llama", **SIZES), pre="another")
    told = import_model(str(path), tmp_path / "in.ckpt")[-1]
    assert told.startswith("Its tokenizer is not imported, since its pre-tokenizer is none of gpt-2, smollm, qwen2, ")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ArgumentError, match=r"needs the package gguf: pip install 'tinyformer\[gguf\]'"):
        import_model(str(path), tmp_path / "other.ckpt")
