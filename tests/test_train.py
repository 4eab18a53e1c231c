"""`python train.py`, as its users run it."""

import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import ROOT, SMALL, TEXT, Program, Trained, column, ran, results_of, spawned, table, weights_of, without
from wandb_file import read_history

RESULT_KEYS = {
    *("val/loss", "val/perplexity", "val/bits_per_byte", "val/num_tokens", "val/num_bytes", "train/num_tokens"),
    *("throughput/tokens_per_second", "throughput/mfu", "throughput/peak_tflops", "throughput/memory_gb"),
    *("throughput/data_wait", "num_parameters", "device", "attention_kernel", "steps", "seconds"),
    *("telemetry/seconds", "telemetry/share"),
}
MEASURED = (
    *("entropy", "entropy_share", "distance", "first_token", "previous_token", "self", "near", "vertical", "block"),
    *("offset_share", "offset", "segment_vertical", "horizontal", "phrases"),
    *("largest_logit", "rank", "similarity", "mean_similarity", "induction", "duplicate_token"),
)


def train(program: Program, run: str, *overrides: str) -> dict[str, Any]:
    ran(program, "train.py", SMALL, TEXT, *overrides, f"hydra.run.dir={run}")
    return results_of(run)


def assert_same_weights(run: str, other: str) -> None:
    weights, others = weights_of(run), weights_of(other)
    assert all(torch.equal(weights[name], others[name]) for name in weights)


def test_a_run_leaves_all_that_was_promised(trained: Trained) -> None:
    run, results = trained.folder, trained.results
    assert results == results_of(run)
    assert results.keys() >= RESULT_KEYS
    assert results["steps"] == 30
    assert results["attention_kernel"] == "flash"
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"last.ckpt", "previous.ckpt", "best.ckpt"}
    pictures = {f"{name}_{step:06d}.png" for name in ("step", "measures") for step in (15, 30)}
    assert {path.name for path in (run / "attention").iterdir()} == pictures | {"heads.csv"}
    assert (run / "attention" / "heads.csv").read_text().startswith("layer,head,entropy,")
    assert (run / "events.csv").read_text().startswith("step,layer,head,event,")
    assert results["telemetry/seconds"] > 0
    assert "backend: auto" in (run / "config.yaml").read_text()
    assert "${" not in (run / "config.yaml").read_text()
    assert float(column(run, "val/loss")[30]) == pytest.approx(results["val/loss"])
    assert math.isfinite(float(column(run, "attention/layer_01/head_01/entropy")[15]))
    assert re.search(r"^telemetry .*\d s for 3 measurements", trained.out, re.MULTILINE)
    suggested = "checkpoint=run/checkpoints/last.ckpt data.files=book.txt analysis=maps"
    assert trained.out.endswith(f"\n\nTo see its heads:\n  tinyformer evaluate {suggested}\n")
    for line in ("checkpoints/last.ckpt", "attention/step_000030.png", "flash kernel"):
        assert line in trained.out
    speed = f"{results['throughput/tokens_per_second']:,.0f}"
    assert re.search(rf"^speed +{speed} tokens/s, 30 steps in \d+ s$", trained.out, re.MULTILINE)
    assert all(0 < float(value) < 1 for value in column(run, "throughput/mfu").values())


SWITCHES = (
    *("model.num_heads=4 attention=gqa", "position=none", "position=learned", "block=post_norm", "norm=rms_norm"),
    *("'block.attention_residual.skip=[1,0]'", "block.feed_forward_residual.branch=0", "feed_forward=swiglu"),
    *("attention.qk_norm=true", "'attention.ablated_heads=[[0,1],[1,0]]'", "model.bias=true model.tied_readout=false"),
    *("model.dropout=0.5", "model.embedding_norm=true", "attention.dropout=0.5", "optimizer=adamw", "seed=1"),
    *("schedule=wsd schedule.warmup_steps=1 schedule.decay_fraction=0.5", "trainer.accumulate_grad_batches=2"),
    *("block=sandwich", "block=reordered", "block=parallel", "block=parallel block.shared_norm=true"),
    *("data.pack=document", "feed_forward=relu", "feed_forward=relu2", "norm=none", "schedule=inverse_sqrt"),
)


@pytest.mark.slow
def test_each_switch_changes_the_run(program: Program, book: Path) -> None:
    short = "callbacks.attention=null"
    losses = {word: train(program, f"run-{n}", short, word)["val/loss"] for n, word in enumerate(("", *SWITCHES))}
    assert len(set(losses.values())) == len(losses), losses


@pytest.mark.smoke
def test_epochs_end_as_steps_do(program: Program, book: Path) -> None:
    settings = f"{SMALL} {TEXT} callbacks.attention=null trainer.limit_train_batches=6 trainer.log_every_n_steps=1"
    for run, limit in {"epochs": "trainer.max_epochs=1 trainer.max_steps=-1", "steps": "trainer.max_steps=6"}.items():
        out = ran(program, "train.py", settings, limit, f"hydra.run.dir={run}")
        assert "length: 6 steps, 1 epoch of 6 batches\n" in out
        assert "schedule.warmup_steps=100: the run of 6 steps ends before its peak learning rate.\n" in out
    assert_same_weights("epochs", "steps")
    assert column("epochs", "train/learning_rate") == column("steps", "train/learning_rate")
    assert results_of("epochs")["val/loss"] == results_of("steps")["val/loss"]


@pytest.mark.slow
def test_a_finished_run_is_made_longer_and_never_written_over(program: Program, book: Path) -> None:
    cosine = "experiment=gpt2 callbacks.attention=null tokenizer=byte schedule.warmup_steps=0 schedule.final_factor=0"
    train(program, "run", cosine, "trainer.log_every_n_steps=1")
    shutil.copytree("run", "before")
    text = book.read_text()
    book.write_text(text[500:])
    for words, cure in (("", "trainer.max_steps=8"), ("trainer.max_steps=8", "init_from=run/checkpoints/last.ckpt")):
        refused = program("train.py", "resume=run", words)
        assert (refused.code, cure in refused.err) == (2, True)
    assert_same_weights("before", "run")
    book.write_text(text)
    ran(program, "train.py", "resume=run trainer.max_steps=8")
    # The seventh step is three quarters into a cosine over 8 steps.
    assert float(column("run", "train/learning_rate")[7]) == pytest.approx(5e-4 * (1 + math.cos(math.pi * 6 / 8)))


@pytest.mark.slow
def test_offline_wandb_holds_every_head_the_figures_and_the_events(program: Program, book: Path) -> None:
    """A head's share on the first token crosses a threshold that is put where it will."""
    settings = "trainer.max_steps=20 optimizer.lr=3e-2 callbacks.attention.every_n_steps=5 attention=differential"
    train(program, "first", settings)
    series = {step: float(value) for step, value in column("first", "attention/layer_01/head_01b/first_token").items()}
    sink = (series[0] + series[20]) / 2
    found = f"callbacks.attention.thresholds.first_token={sink} callbacks.attention.hysteresis=0"
    out = ran(program, "train.py", SMALL, TEXT, settings, found, "logger=wandb hydra.run.dir=run")
    events = table("run/events.csv")
    at = next(step for step, value in series.items() if (value >= sink) != (series[0] >= sink))
    (row,) = [row for row in events if (row["layer"], row["head"], row["step"]) == ("1", "01b", str(at))]
    assert float(row["value"]) == pytest.approx(series[at], abs=1e-6)
    sentence = (
        f"layer {events[0]['layer']} head {events[0]['head'][1:]} {events[0]['event']} at step {events[0]['step']}"
    )
    assert re.search(rf"^events +{sentence}$", out, re.MULTILINE)
    assert "offline; `wandb sync run/wandb/offline-run-" in out
    (file,) = Path("run/wandb").glob("offline-run-*/run-*.wandb")
    last = {key: value for row in read_history(file) for key, value in row.items()}
    files, heads = file.parent / "files", ["00a", "00b", "01a", "01b"]
    for layer, head, name in itertools.product(range(2), heads, MEASURED):
        assert math.isfinite(last[f"attention/layer_{layer:02d}/head_{head}/{name}"])
    assert last["val/loss"] == pytest.approx(results_of("run")["val/loss"])
    for key, name in (("maps", "step"), ("measures", "measures")):
        (path,) = last[f"attention/{key}"]["filenames"]
        assert (files / path).read_bytes() == Path(f"run/attention/{name}_000020.png").read_bytes()
    stored = {key: json.loads((files / last[f"attention/{key}"]["path"]).read_text()) for key in ("heads", "events")}
    assert stored["heads"]["columns"] == ["layer", "head", *MEASURED, "label"]
    assert [row[:2] for row in stored["heads"]["data"]] == [[layer, head] for layer in range(2) for head in heads]
    assert stored["heads"]["data"][-1][2] == last[f"attention/layer_01/head_{heads[-1]}/entropy"]
    logged = [[str(value) for value in row[:5]] for row in stored["events"]["data"]]
    assert logged == [list(row.values())[:5] for row in events]


TRANSLATES = "task=seq2seq data.files=pairs.tsv"
REFUSED = {
    "data.source.separator=x": "data.source.separator: follows from data.separator, and cannot be ",
    "generate.prompt=a\udcff": r"generate.prompt='a\udcff': contains half of a surrogate pair",
    "+logger.mine._target_=lightning.pytorch.loggers.CometLogger": "logger.mine: Requirement 'comet-ml",
    "data.files=short.txt": "model.max_seq_len=16: ",
    "model.vocab_size=3": "model.vocab_size=3: must be at least ",
    "position=rotary position.relative.max_seq_len=8": "model.max_seq_len=16: must be at most 8, the number of ",
    "task=masked_lm generate.prompt=a": "generate.prompt=a: MaskedLM cannot generate text; ",
    "task=span": "data.source=text: has no questions about contexts",
    "task=span data=induction": "data=induction: does not have what task=span needs.",
    "cross_attention=gqa": "cross_attention: only an encoder–decoder has it",
    "network=encoder_decoder": "network: its decoder needs a cross_attention",
    "network=encoder_decoder cross_attention=mha": "network: CausalLM needs",
    "task=seq2seq data=text data.files=pairs.tsv init_from=causal.ckpt": "init_from=causal.ckpt: is of class Trans",
    f"{TRANSLATES} network=transformer": "network: Seq2Seq needs EncoderDecoder",
    f"{TRANSLATES} freeze_encoder=true": "freeze_encoder=true: trains the readout alone, ",
    f"{TRANSLATES} cross_attention.score=additive cross_attention.backend=flash": "cross_attention.backend=flash: ",
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_refused_run_leaves_no_folder(words: str, program: Program, book: Path, trained: Trained) -> None:
    Path("causal.ckpt").symlink_to(trained.last)
    Path("short.txt").write_text("short")
    Path("pairs.tsv").write_text("source\ttarget\n" + "".join(f"{n}\t{n} mice\n" for n in range(80)))
    ended = program("train.py", SMALL, "" if "data=" in words else TEXT, words)
    assert (ended.code, ended.out) == (2, ""), ended.err
    assert ended.err.startswith(f"Error: {REFUSED[words]}"), ended.err
    assert len(ended.err.strip().splitlines()) <= 4
    assert not Path("outputs").exists()


def test_a_bug_of_a_users_class_keeps_its_traceback(
    program: Program, book: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("theirs.py").write_text(
        "import os\n"
        "from tinyformer.nn import Attention\n"
        "class Broken(Attention):\n"
        "    def forward(self, x, mask=None, **others):\n"
        "        raise ValueError('a bug of theirs', os.environ.get('HYDRA_FULL_ERROR'))\n"
    )
    monkeypatch.syspath_prepend(str(Path.cwd()))
    ended = program("train.py", SMALL, TEXT, "attention._target_=theirs.Broken")
    assert ended.code == 1
    assert "Traceback" in ended.err
    assert "('a bug of theirs', None)" in ended.err  # so that mistakes have none in processes that a run starts


def test_loggers_of_lightning_get_scalars(program: Program, book: Path) -> None:
    csv = "{_target_: lightning.pytorch.loggers.CSVLogger, name: own, version: v"
    words = [f"+logger.{name}={csv}, save_dir: {name}}}" for name in ("a", "b")]
    ran(program, "train.py", *f"{SMALL} {TEXT} hydra.run.dir=run".split(), *words, f"+logger.c={csv}}}", split=False)
    losses = {float(column(folder, "val/loss")[4]) for folder in ("run", "a/own/v", "b/own/v", "run/own/v")}
    assert losses == {results_of("run")["val/loss"]}


@pytest.mark.slow
def test_on_request_errors_are_told_in_full(tmp_path: Path) -> None:
    command, options = [sys.executable, str(ROOT / "train.py")], {"cwd": tmp_path, "capture_output": True, "text": True}
    environment = os.environ | {"HYDRA_FULL_ERROR": "1"}
    full = subprocess.run([*command, "model.num_heads=3"], check=False, env=environment, **options)
    assert (full.returncode, "Traceback" in full.stderr) == (2, True)


TOLD = {
    "train --help": (0, "multi-query: all query heads share"),
    "evaluate --help": (0, "how text is generated"),
    "train modle.d_model=8": (2, "Error: modle.d_model: there is no such key."),
    "train hydra.mode=MULTIRUN": (2, "Error: hydra.mode=MULTIRUN: does not start a sweep; use -m."),
    "train ~norm": (2, "Error: ~norm: a run needs this axis; "),
}


@pytest.mark.slow
def test_help_and_what_a_config_shows_is_told_without_torch(tmp_path: Path) -> None:
    ended = spawned([*TOLD], tmp_path, without("torch", "lightning", "wandb", "datasets", "matplotlib"))
    for (code, words), each in zip(TOLD.values(), ended, strict=True):
        assert (each.code, words in each.out + each.err) == (code, True), each
