"""Conversion from and to Hugging Face on the command line, and the programs on converted checkpoints."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import BOOK, Program, ran, spawned
from hub_server import HubServer
from interop.models import BERT, GPT2, LLAMA, MARIAN, T5, VOCAB, change_config, theirs, tokens
from interop.test_encoder_decoders import t5_tokenizer

import tinyformer
from tinyformer.checkpoint.file import load_checkpoint
from tinyformer.data import BPETokenizer
from tinyformer.programs.convert.conversion import compare

slow = pytest.mark.slow
SIZES: dict[str, dict[str, Any]] = {"GPT2": GPT2, "Llama": LLAMA, "Bert": BERT}


def save_model(folder: Path, family: str = "GPT2") -> Any:
    """A random model with a tokenizer, in a folder."""
    tokenizer = BPETokenizer(280).build([BOOK]).with_mask()
    model = theirs(family, **SIZES[family], vocab_size=tokenizer.vocab_size + 3)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(tokenizer.to_json())
    return model


def test_in_and_out(call: Program, program: Program) -> None:
    num_parameters = sum(weight.numel() for weight in save_model(Path("gpt2")).parameters())
    ended = call("convert hf gpt2 in.ckpt")
    assert (ended.code, ended.err) == (0, "")
    first, last = ended.out.splitlines()
    assert first == f"GPT-2, {num_parameters:,} parameters in 2 layers of 7 heads, saved in in.ckpt."
    assert last.endswith("python evaluate.py checkpoint=in.ckpt data=text data.files=FILE analysis=heads")
    ended = program("evaluate.py", "checkpoint=in.ckpt")  # never scored on default data
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.endswith("has no data of its own; add data=text data.files=book.txt, or choose data=.\n")
    ended = call("convert export in.ckpt out")
    assert (ended.code, ended.err) == (0, "")
    assert ended.out == "GPT-2, saved in out: transformers loads it as GPT2LMHeadModel.\n"
    names = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert sorted(path.name for path in Path("out").iterdir()) == names


def test_models_without_a_tokenizer_take_token_ids_in_python_alone(call: Program, program: Program) -> None:
    theirs("Bert", **BERT).bfloat16().save_pretrained("bert")
    theirs("Marian", **MARIAN).save_pretrained("marian")
    Path("marian/source.spm").write_bytes(b"x")
    told = [call(f"convert hf {name} {name}.ckpt").out for name in ("bert", "marian")]
    assert "type 0" in told[0]
    assert "Marian's two SentencePiece models are not read: the tokenizers library cannot load them." in told[1]
    assert all("It has no tokenizer.json, so programs that read text refuse it" in out for out in told)
    bert, marian = tinyformer.load("bert.ckpt"), tinyformer.load("marian.ckpt")
    assert bert.logits(tokens()).shape == (*tokens().shape, VOCAB)
    assert len(marian.generate_ids(tokens(), [3, 4], beams=1)) == 2
    with pytest.raises(ValueError, match="as generate_ids does"):
        marian.generate("a text")
    for sentence, *arguments in (
        (f"token ids must be from 0 to {VOCAB - 1}", tokens() + VOCAB),
        ("token ids must be integers", tokens() > 0),
        ("must hold 2 lengths from 1 to 19", tokens(), torch.tensor([3])),
    ):
        with pytest.raises(ValueError, match=sentence):
            marian.generate_ids(*arguments)
    ended = program("evaluate.py", "checkpoint=bert.ckpt")
    assert (ended.code, len(ended.err.splitlines())) == (2, 1)
    assert "checkpoint=bert.ckpt: has no tokenizer" in ended.err
    assert "The checkpoint has no tokenizer, so the folder has none." in call("convert export bert.ckpt out").out


@pytest.mark.slow
def test_an_encoder_decoder_is_scored_prompted_fine_tuned_and_exported(call: Program, program: Program) -> None:
    theirs("T5", **T5).save_pretrained("t5")
    t5_tokenizer().save_pretrained("t5")  # of fewer tokens than the embedding has rows, as T5's own
    change_config(Path("t5"), n_positions=40)
    ended = call("convert hf t5 in.ckpt")
    assert (ended.code, ended.err) == (0, "")
    rows = [f"the cat sees {letter}\tthe bird and {letter}" for letter in "abcdefghijklmnopqrstuvwxyz"]
    Path("pairs.tsv").write_text("\n".join(["source\ttarget", *rows]))
    data = "data=text data.files=pairs.tsv generate.beams=1"
    out = ran(program, "evaluate.py", f"checkpoint=in.ckpt {data} generate.prompt=bird hydra.run.dir=scored")
    assert out.rstrip().endswith(tinyformer.load("in.ckpt").generate("bird", beams=1)[0].strip())
    assert Path("scored/attention/cross_000000.png").is_file()
    steps = "trainer.max_steps=2 trainer.val_check_interval=2 callbacks.attention=null hydra.run.dir=tuned"
    ran(program, "train.py", f"init_from=in.ckpt task=seq2seq {data} {steps}")
    assert len(load_checkpoint("tuned/checkpoints/last.ckpt").weights["encoder.token_embedding.weight"]) == VOCAB
    ended = call("convert export tuned/checkpoints/last.ckpt out")
    assert (ended.code, ended.out) == (0, "T5, saved in out: transformers loads it as T5ForConditionalGeneration.\n")


@pytest.mark.parametrize(("family", "maps"), [("Llama", "12 maps"), pytest.param("T5", "21 maps", marks=slow)])
def test_check_shows_the_differences_from_transformers(
    family: str, maps: str, call: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(Path("model"), "Llama")
    if family == "T5":
        theirs("T5", **T5).save_pretrained("model")
        t5_tokenizer().save_pretrained("model")
    ended = call("convert hf model in.ckpt --check 'the cat'")
    assert (ended.code, ended.err) == (0, "")
    _, _, head, logits, attention = ended.out.splitlines()
    assert head.endswith("tokens (equal token ids):")
    of_logits = re.fullmatch(r"  largest difference of logits: (\S+), where the largest is \S+", logits)
    of_maps = re.fullmatch(rf"  largest difference of {maps}: (\S+), of head \(.*\d, \d\)", attention)
    assert of_logits
    assert of_maps
    assert max(float(of_logits[1]), float(of_maps[1])) <= 1e-5
    change_config(Path("model"), rms_norm_eps=0.1, layer_norm_epsilon=0.1)  # the checkpoint is of other files
    difference = compare("model", Path("in.ckpt"), "the cat", None)[1]
    assert float(difference.split(": ")[1].split(",")[0]) > 1e-3
    monkeypatch.setitem(sys.modules, "transformers", None)
    ended = call("convert hf model none.ckpt --check 'the cat'")
    assert ended.err == "Error: --check='the cat': needs the package transformers: pip install transformers.\n"
    assert (ended.code, Path("none.ckpt").exists()) == (2, False)


WITHOUT_TRANSFORMERS = """
import sys
import torchmetrics  # of lightning's, which imports transformers where it is installed
for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
    del sys.modules[name]
sys.modules["transformers"] = None
"""


@pytest.mark.slow
def test_a_name_is_downloaded_from_the_hub(tmp_path: Path) -> None:
    save_model(tmp_path / "model", "Llama")
    files = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    too_many = {"pytorch_model.bin": b"x" * 10**6, "onnx/model.safetensors": b"x" * 10**6}
    repositories = {"models/owner/model": files | too_many, "models/owner/bare": {"pytorch_model.bin": b"x"}}
    repositories["models/owner/model@step1"] = files
    with HubServer(repositories) as hub:
        process = (tmp_path, WITHOUT_TRANSFORMERS, hub.environment(tmp_path / "hf"))
        lines = ["hf owner/model in.ckpt --revision step1", "hf owner/none none.ckpt", "hf owner/bare none.ckpt"]
        lines += ["hf owner/model none.ckpt --revision step2", "hf owner/model main.ckpt"]
        found, unknown, bare, other, _ = spawned([f"convert {line}" for line in lines], *process)
        assert found.code == 0, found.err
        assert found.out.startswith("Llama, ")
        assert hub.bytes_served < 10**6
    assert (other.code, "--revision=step2: owner/model has no such" in other.err) == (2, True), other.err
    assert (unknown.code, "owner/none" in unknown.err) == (2, True), unknown.err
    assert (bare.code, "has no config.json" in bare.err) == (2, True), bare.err
    # Without the Hub, only what was downloaded is available.
    lines = ["hf owner/model again.ckpt", "hf owner/other none.ckpt", "export in.ckpt out"]
    again, other, exported = spawned([f"convert {line}" for line in lines], *process)
    assert again.code == 0, again.err
    first, second = (load_checkpoint(tmp_path / name).weights for name in ("in.ckpt", "again.ckpt"))
    assert all(torch.equal(first[name], weight) for name, weight in second.items())
    assert (other.code, "the Hugging Face Hub cannot be reached" in other.err) == (2, True)
    assert exported.code == 0, exported.err
