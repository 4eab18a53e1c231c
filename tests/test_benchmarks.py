"""The benchmarks, tried out on little: what they write, and that memory grows as it should."""

import json
import os
import runpy
import statistics
import subprocess
import sys
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path

import pytest
import torch
from commands import ROOT, SMALL
from measure import PLAIN
from peers import PEERS

import tinyformer
from tinyformer.generation.beam_search import Beam


def run_benchmark(name: str, folder: Path, arguments: Sequence[str]) -> str:
    """What a benchmark prints on the CPU, in a folder."""
    command = [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.nightly
def test_memory_grows_with_the_square_for_eager_alone(tmp_path: Path) -> None:
    arguments = ["--axes", "seq", "depth", "--longest=2048", "--repeats=1", "--output", str(tmp_path / "growth.json")]
    out = run_benchmark("growth", tmp_path, arguments)
    record = json.loads((tmp_path / "growth.json").read_text())
    by_length = {backend: kinds["bytes"] for backend, kinds in record["exponents"]["seq"].items()}
    assert 1.7 <= by_length["eager"] <= 2.1
    assert 0.8 <= by_length["flash"] <= 1.2
    assert by_length["flex"] is None  # which trains on CUDA only
    assert 0.5 <= record["exponents"]["depth"]["flash"]["bytes"] <= 1.1
    times = [row["seconds"] for row in record["rows"] if (row["axis"], row["backend"]) == ("seq", "flash")]
    assert times == sorted(times)
    assert (tmp_path / "growth.png").stat().st_size > 10_000
    assert "seq^" in out


@pytest.mark.nightly
def test_blocks_with_telemetry_alternate_with_blocks_without(tmp_path: Path, book: Path) -> None:
    settings = f"{SMALL} data=text data.files={book} callbacks.attention.every_n_steps=4 trainer.max_steps=20"
    out = run_benchmark("telemetry", tmp_path, ["--blocks=6", "--output=out.json", *settings.split()])
    record = json.loads((tmp_path / "out.json").read_text())
    assert f"data.files={book.name}" in record["command"]
    in_turn, whole = record["in_turn"], record["whole_run"]
    for kind in ("seconds", "processor_seconds"):
        blocks = in_turn[kind]["blocks"]
        assert [len(blocks["with"]), len(blocks["without"])] == [3, 3]
        assert sorted(blocks["with"])[1] == in_turn[kind]["medians"]["with"]
    assert 0 < in_turn["median_seconds_of_measuring"] < sum(in_turn["seconds"]["blocks"]["with"])
    assert whole["steps"] == 20
    assert 0 < whole["telemetry/seconds"] < whole["seconds"]
    assert "whole run" in out


@pytest.mark.nightly
def test_the_losses_of_backends_are_compared_step_by_step(tmp_path: Path, book: Path) -> None:
    settings = (
        f"{SMALL} data=text data.files={book} model.dropout=0.1 --backends=eager,flash --steps=20 --output=out.json"
    )
    out = run_benchmark("curves", tmp_path, settings.split())
    record = json.loads((tmp_path / "out.json").read_text())
    assert "data.files=book.txt" in record["overrides"]
    eager, flash = record["losses"]["eager"], record["losses"]["flash"]
    assert len(eager) == len(set(eager)) == 20
    assert eager == pytest.approx(flash, abs=1e-4)
    assert f"flash - eager: {abs(eager[0] - flash[0]):.1e} at step 1" in out
    assert (tmp_path / "out.png").stat().st_size > 10_000


@pytest.mark.nightly
def test_everything_can_be_tried_out(tmp_path: Path, book: Path) -> None:
    run_benchmark("run", tmp_path, ["--quick", "--output=out/peers.json", "data=text", f"data.files={book}"])
    record = json.loads((tmp_path / "out/peers.json").read_text())
    assert {"machine", "versions", "commit", "rows"} <= set(record)
    assert record["versions"]["torch"] == torch.__version__
    names = {"bench", "shape", "peer", "precision", "ratio", "low", "high"}
    assert all(set(row) == names and row["low"] <= row["ratio"] <= row["high"] for row in record["rows"])
    compared = {row["peer"] for row in record["rows"] if (row["bench"], row["precision"]) == ("training step", "fp32")}
    assert compared == {PLAIN, *(peer.name for peer in PEERS)}
    assert {row["bench"] for row in record["rows"]} == {"training step", "generation", "loading", "tokenising"}
    for evidence in record["evidence"]:
        assert evidence["our_milliseconds"] > 0
        if evidence["bench"] == "training step":
            # In bf16 our own network takes plain products where they are faster: for sequences as short as these.
            unfused = (evidence["peer"], evidence["precision"]) == (PLAIN, "bf16")
            assert evidence["attention_kernel"] == ("math" if unfused else "flash")
            assert evidence["loss"] == pytest.approx(evidence["our_loss"], rel=0.02)
    assert (tmp_path / "out/peers.png").read_bytes().startswith(b"\x89PNG")
    assert statistics.median(row["ratio"] for row in record["rows"] if row["bench"] == "loading") > 1


@pytest.mark.slow
def test_a_language_model_translates_by_continuing(tmp_path: Path) -> None:
    english = {"uno": "one", "dos": "two", "tres": "three", "cuatro": "four", "cinco": "five"}
    pairs = [(" ".join(few), " ".join(map(english.get, few))) for n in (2, 3, 4) for few in permutations(english, n)]
    rows = [("source", "target"), *pairs]
    (tmp_path / "pairs").mkdir()
    for split in ("train", "validation", "test"):
        (tmp_path / "pairs" / f"{split}.tsv").write_text("".join(f"{source}\t{target}\n" for source, target in rows))
    sizes = "model.num_layers=2 model.num_heads=2 model.d_model=32 model.max_seq_len=64 tokenizer.vocab_size=270"
    command = f"experiment=translate_lm_cpu data.files=pairs hydra.run.dir=lm trainer.max_steps=300 {sizes}"
    subprocess.run([sys.executable, str(ROOT / "train.py"), *command.split()], cwd=tmp_path, check=True)
    printed = run_benchmark("translation", tmp_path, ["pairs", "lm/checkpoints/last.ckpt"])
    scores = [float(line.split("BLEU ")[1].split(",")[0]) for line in printed.splitlines()]
    assert scores[2] > 90 > scores[0]
    assert len(scores) == 5
    translate = runpy.run_path(str(ROOT / "benchmarks" / "translation.py"))["translate"]
    model, sources = tinyformer.load(tmp_path / "lm/checkpoints/last.ckpt"), [source for source, _ in pairs[::20]]
    continued = model.generate([f"{source}\n" for source in sources], num_tokens=32, temperature=0)
    found = translate(model, sources, Beam(1))
    assert [f"{source}\n{target}" for source, target in zip(sources, found, strict=True)] == continued
    assert len(set(found)) > 1
    assert translate(model, sources, Beam(3)) == translate(model, sources, Beam(3), use_cache=False)


@pytest.mark.slow
def test_a_name_says_more_of_a_summary_than_the_first_sentence_does(tmp_path: Path) -> None:
    printed = run_benchmark("summaries", tmp_path, [])
    sentence, constant, name = (float(line.split("ROUGE-L ")[1].split(",")[0]) for line in printed.splitlines())
    assert name > sentence > constant > 5
    words_of = runpy.run_path(str(ROOT / "benchmarks" / "summaries.py"))["words_of"]
    names = ["get_content_type", "HTTPServer", "__init__", "sha256", "readIntoBuffer"]
    assert list(map(words_of, names)) == ["get content type", "http server", "init", "sha 256", "read into buffer"]
