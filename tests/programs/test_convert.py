"""Conversion from and to Hugging Face on the command line, and the programs on converted checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Ended, Program, spawned
from hub_server import HubServer
from interop.models import (
    BERT,
    GPT2,
    LLAMA,
    MARIAN,
    T5,
    VOCAB,
    change_config,
    our_checkpoint,
    their_logits,
    theirs,
    tokens,
)
from interop.test_encoder_decoders import t5_tokenizer

import tinyformer
from tinyformer.checkpoint.file import load_checkpoint
from tinyformer.data import BPETokenizer
from tinyformer.model.model import Model

TEXT = "In a line the cat sees seven birds and eleven mice.\n"
SIZES: dict[str, dict[str, Any]] = {"GPT2": GPT2, "Llama": LLAMA, "Bert": BERT}


def save_model(folder: Path, family: str = "GPT2") -> Any:
    """A random model with a tokenizer, in a folder."""
    tokenizer = BPETokenizer(280).build([TEXT * 9]).with_mask()
    model = theirs(family, **SIZES[family], vocab_size=tokenizer.vocab_size + 3)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(tokenizer.to_json())
    return model


def test_in_and_out(call: Program) -> None:
    num_parameters = sum(weight.numel() for weight in save_model(Path("gpt2")).parameters())
    ended = call("convert hf gpt2 in.ckpt")
    assert (ended.code, ended.err) == (0, "")
    first, last = ended.out.splitlines()
    assert first == f"GPT-2, {num_parameters:,} parameters in 2 layers of 7 heads, saved in in.ckpt."
    assert last.endswith("python evaluate.py checkpoint=in.ckpt data=text data.files=FILE analysis=heads")
    ended = call("convert export in.ckpt out")
    assert (ended.code, ended.err) == (0, "")
    assert ended.out == "GPT-2, saved in out: transformers loads it as GPT2LMHeadModel.\n"
    names = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert sorted(path.name for path in Path("out").iterdir()) == names


def test_the_report_names_changes_to_the_model(call: Program) -> None:
    theirs("Bert", **BERT).bfloat16().save_pretrained("bert")
    ended = call("convert hf bert in.ckpt")
    assert "Its weights were converted from bf16 to fp32." in ended.out
    assert "type 0" in ended.out
    assert "It has no tokenizer, so programs that read text refuse it; in Python it takes token ids." in ended.out
    assert "The checkpoint has no tokenizer, so the folder has none." in call("convert export in.ckpt out").out


MISTAKES = {
    "hf none/of/these in.ckpt": "DIR_OR_NAME=none/of/these: ",
    "hf gpt2 none/in.ckpt": "OUT.ckpt=none/in.ckpt: is in a folder that does not exist.",
    "hf gpt2 ours.ckpt": "OUT.ckpt=ours.ckpt: exists already.",
    "hf gpt2 in.ckpt": "model.num_heads=5",
    "export none.ckpt out": "FILE.ckpt=none.ckpt: ",
    "export ours.ckpt out": "attention.softcap=3.0 has no counterpart in GPT-NeoX, the nearest of",
}


def test_a_mistake_exits_with_2_and_one_sentence(call: Program) -> None:
    save_model(Path("gpt2"))
    change_config(Path("gpt2"), n_head=5)
    our_checkpoint(Path("ours.ckpt"), "attention.softcap=3.0")
    for words, sentence in MISTAKES.items():
        ended = call(f"convert {words}")
        assert (ended.code, ended.out) == (2, ""), words
        assert sentence in ended.err
        assert len(ended.err.splitlines()) == 1


def test_a_model_without_a_tokenizer_takes_token_ids_in_python_alone(call: Program, program: Program) -> None:
    model = theirs("GPT2", **GPT2)
    model.save_pretrained("gpt2")
    assert call("convert hf gpt2 in.ckpt").code == 0
    ours = tinyformer.load("in.ckpt")
    torch.testing.assert_close(ours.logits(tokens()), their_logits(model, tokens()), atol=1e-5, rtol=0)
    for ask in (ours.logits, ours.generate):
        with pytest.raises(ValueError, match="has no tokenizer, so it takes a tensor of token ids"):
            ask("a text")
    ended = program("evaluate.py", "checkpoint=in.ckpt")
    assert (ended.code, len(ended.err.splitlines())) == (2, 1)
    assert ended.err.startswith("Error: checkpoint=in.ckpt")
    assert "tokenizer" in ended.err


@pytest.mark.slow
def test_an_encoder_decoder_is_scored_prompted_fine_tuned_and_exported(call: Program, program: Program) -> None:
    theirs("T5", **T5).save_pretrained("t5")
    t5_tokenizer().save_pretrained("t5")  # of fewer tokens than the embedding has rows, as T5's own
    change_config(Path("t5"), n_positions=40)
    ended = call("convert hf t5 in.ckpt")
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.startswith("T5, ")
    assert "in 3 + 2 layers of 3 heads" in ended.out
    rows = [f"the cat sees {letter}\tthe bird and {letter}" for letter in "abcdefghijklmnopqrstuvwxyz"]
    Path("pairs.tsv").write_text("\n".join(["source\ttarget", *rows]))
    data = "data=text data.files=pairs.tsv generate.beams=1"
    ended = program("evaluate.py", f"checkpoint=in.ckpt {data} generate.prompt=bird hydra.run.dir=scored")
    assert ended.code == 0, ended.err
    assert ended.out.rstrip().endswith(tinyformer.load("in.ckpt").generate("bird", beams=1)[0].strip())
    assert Path("scored/attention/cross_000000.png").is_file()
    steps = "trainer.max_steps=2 trainer.val_check_interval=2 callbacks.attention=null hydra.run.dir=tuned"
    ended = program("train.py", f"init_from=in.ckpt task=seq2seq {data} {steps}")
    assert ended.code == 0, ended.err
    assert len(load_checkpoint("tuned/checkpoints/last.ckpt").weights["encoder.token_embedding.weight"]) == VOCAB
    ended = program("evaluate.py", f"checkpoint=tuned/checkpoints/last.ckpt {data} hydra.run.dir=again")
    assert ended.code == 0, ended.err
    ended = call("convert export tuned/checkpoints/last.ckpt out")
    assert (ended.code, ended.out) == (0, "T5, saved in out: transformers loads it as T5ForConditionalGeneration.\n")


def test_marian_takes_token_ids(call: Program) -> None:
    theirs("Marian", **MARIAN).save_pretrained("marian")
    Path("marian/source.spm").write_bytes(b"x")
    ended = call("convert hf marian in.ckpt")
    assert "Marian's two SentencePiece models are not read: the tokenizers library cannot load them." in ended.out
    assert "in Python it takes token ids" in ended.out
    ours = tinyformer.load("in.ckpt")
    assert isinstance(ours, Model)
    assert len(ours.generate_ids(tokens(), beams=1)) == 2
    for ask, sentence in (
        (lambda: ours.generate("a text"), "the model has no tokenizer; generate_ids takes token ids"),
        (lambda: ours.generate_ids(tokens() + VOCAB), f"token ids go from 0 to {VOCAB - 1}"),
        (lambda: ours.generate_ids(tokens(), torch.tensor([3])), "must hold 2 lengths from 1 to 19"),
        (lambda: ours.generate_ids(tokens()[:, :0]), "must hold 2 lengths"),
        (lambda: ours.generate_ids(tokens().repeat(1, 2)), "must be at most max_seq_len=21 tokens"),
    ):
        with pytest.raises(ValueError, match=sentence):
            ask()


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
    with HubServer(repositories) as hub:
        environment = hub.environment(tmp_path / "hf")

        def converted(*lines: str) -> list[Ended]:
            commands = [f"convert {line}" for line in lines]
            return spawned(commands, tmp_path, WITHOUT_TRANSFORMERS, environment)

        found, unknown, bare = converted("hf owner/model in.ckpt", "hf owner/none none.ckpt", "hf owner/bare none.ckpt")
        assert found.code == 0, found.err
        assert found.out.startswith("Llama, ")
        assert hub.bytes_served < 10**6
        for ended, said in ((unknown, "owner/none"), (bare, "has no config.json")):
            assert (ended.code, said in ended.err) == (2, True), ended.err
    # Without the Hub, only what was downloaded is available.
    again, other, exported = converted("hf owner/model again.ckpt", "hf owner/other none.ckpt", "export in.ckpt out")
    assert again.code == 0, again.err
    first, second = (load_checkpoint(tmp_path / name).weights for name in ("in.ckpt", "again.ckpt"))
    assert all(torch.equal(first[name], weight) for name, weight in second.items())
    assert (other.code, "the Hugging Face Hub cannot be reached" in other.err) == (2, True)
    assert exported.code == 0, exported.err


@pytest.mark.slow
def test_every_analysis_of_an_imported_model(call: Program, program: Program) -> None:
    save_model(Path("model"), "Bert")
    assert call("convert hf model in.ckpt").code == 0
    Path("book.txt").write_text(TEXT * 40)
    options = "data=text data.files=book.txt callbacks.attention=null generate.num_tokens=3 generate.temperature=0"
    for analysis in ("heads", "importance", "prune", "residual", "maps"):
        choice = f"analysis={analysis} analysis.num_windows=6 hydra.run.dir={analysis}"
        ended = program("evaluate.py", f"checkpoint=in.ckpt {options} {choice}")
        assert ended.code == 0, ended.err
    assert len(Path("heads/ablation.csv").read_text().splitlines()) == 1 + 2 * BERT["num_attention_heads"]
    # A pruned model is a checkpoint like any other, but belongs to no family.
    assert program("evaluate.py", f"checkpoint=prune/pruned.ckpt {options} hydra.run.dir=again").code == 0
    ended = call("convert export prune/pruned.ckpt out")
    assert ended.code == 2
    assert ended.err.startswith("Error: model.pruned_heads=[[")
