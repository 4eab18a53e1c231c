"""Seeded losses of a fixed list of short runs, to show that a refactoring changed no arithmetic.

    python benchmarks/losses.py --shakespeare shakespeare.txt --out before.json
    python benchmarks/losses.py --shakespeare shakespeare.txt --compare before.json

Each run is `train.py` with overrides, in float32 on one thread of the CPU with seed 0, and each of its figures is
deterministic: the training loss of every step, the final figures of validation and test, and, for the runs named with
"measures", the last measures of every head. `--compare` runs what the file holds and asks for equality to the last
bit; it prints a table of what differs, and then exits with 1. The same text, machine and versions are needed for that;
where a version differs, it says so. Without `--shakespeare` the text is that of `data=pydoc`. Nothing is downloaded.
About 3 minutes of one core.
"""

import argparse
import csv
import hashlib
import json
import multiprocessing
import os
import platform
import runpy
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

SAME = [
    "seed=0",
    "trainer=cpu",
    "trainer.precision=32-true",
    "trainer.log_every_n_steps=1",
    "trainer.limit_val_batches=8",
    "trainer.enable_progress_bar=false",
    "generate.num_tokens=1",
]
"""The overrides that all runs share."""

SMALL = [
    "experiment=gpt2",
    "model=nano",
    "model.num_layers=2",
    "model.d_model=32",
    "model.max_seq_len=64",
    "model.init_std=0.2",
    "data.batch_size=4",
    "schedule.warmup_steps=5",
    "trainer.max_steps=20",
    "trainer.val_check_interval=10",
]
"""A small model with weights so large that scores differ from the first step, for which 20 steps are a second."""

NO_MEASURES = ["callbacks.attention=null"]

MEASURED = ("shakespeare_cpu", "mha", "gqa", "differential", "mla", "masked_lm", "induction")
"""Runs whose measures of each head are recorded, too: those of the others would cost more time than their steps."""

VARIANTS = {
    "mha": [],
    "gqa": ["attention=gqa"],
    "mqa": ["attention=mqa"],
    "mla": ["attention=mla"],
    "mla, q_rank": ["attention=mla", "attention.q_rank=16"],
    "mla, rotary": ["attention=mla", "position=rotary"],
    "differential": ["attention=differential"],
    "differential, rotary": ["attention=differential", "position=rotary"],
    "mha, eager": ["attention.backend=eager"],
    "mha, sdpa": ["attention.backend=sdpa"],
    "mha, flash": ["attention.backend=flash"],
    "gqa, eager": ["attention=gqa", "attention.num_kv_heads=2", "attention.backend=eager"],
    "gqa, sdpa": ["attention=gqa", "attention.num_kv_heads=2", "attention.backend=sdpa"],
    "gqa, flash": ["attention=gqa", "attention.num_kv_heads=2", "attention.backend=flash"],
    "position none": ["position=none"],
    "position sinusoidal": ["position=sinusoidal"],
    "position rotary": ["position=rotary"],
    "position alibi": ["position=alibi"],
    "position relative": ["position=relative"],
    "position relative, keys only": ["position=relative", "position.relative.values=false"],
    "position t5": ["position=t5"],
    "score dot": ["attention.score=dot"],
    "score general": ["attention.score=general"],
    "score additive": ["attention.score=additive"],
    "window": ["attention.window=16"],
    "window pattern": ["attention.window=[16,null]"],
    "window, local_gaussian": ["attention.window=16", "attention.local_gaussian=true"],
    "softcap": ["attention.softcap=5.0"],
    "sink": ["attention.sink=true"],
    "gate": ["attention.gate=true"],
    "qk_norm": ["attention.qk_norm=true"],
    "attention dropout": ["attention.dropout=0.1"],
    "ablated heads": ["attention.ablated_heads=[[0,1],[1,3]]"],
    "pruned heads": ["model.pruned_heads=[[0,1],[1,3]]"],
    "post_norm": ["block=post_norm"],
    "skip": ["block.attention_residual.skip=[0.5,0]", "block.feed_forward_residual.skip=[1,0.5]"],
    "branch": ["block.attention_residual.branch=[0.5,1]", "block.feed_forward_residual.branch=[1,0]"],
    "swiglu": ["feed_forward=swiglu"],
    "relu2": ["feed_forward=relu2"],
    "rms_norm": ["norm=rms_norm"],
    "bias": ["model.bias=true"],
    "untied readout": ["model.tied_readout=false"],
    "dropout": ["model.dropout=0.1"],
    "checkpointed activations": ["model.checkpoint_activations=true", "model.dropout=0.1"],
    "muon": ["optimizer=muon", "optimizer.adamw_lr=0.003"],
    "wsd": ["schedule=wsd", "schedule.warmup_steps=5", "schedule.decay_fraction=0.2"],
    "accumulated batches": ["trainer.accumulate_grad_batches=2"],
    "masked_lm": ["task=masked_lm"],
    "masked_lm, whole words": ["task=masked_lm", "task.masking.whole_words=true"],
    "masked_lm_bert": ["task=masked_lm_bert", "block=post_norm", "model.embedding_norm=true"],
}
"""Runs on the text, by character."""

OWN_DATA = {
    "pydoc, bpe": ["data=pydoc", "tokenizer=bpe"],
    "documents": ["data=pydoc", "tokenizer=byte", "data.document_mask=true"],
    "packed by document": ["data=pydoc", "tokenizer=byte", "data.pack=document"],
    "classification": ["task=classification"],
    "classification, cls": ["task=classification", "task.readout.pooling=cls"],
    "classification, attention": ["task=classification", "task.readout.pooling=attention"],
    "classification, regularised": [
        "task=classification",
        "data.token_dropout=0.3",
        "task.objective.label_smoothing=0.1",
        "model.dropout=0.1",
    ],
    "induction": ["data=induction", "data.num_sequences=1024"],
}
"""Runs on other data, whose overrides say which."""


def runs(text: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """The names of all runs and their overrides; `text` are those that choose the text."""
    shakespeare = ["experiment=shakespeare_cpu", *text, "trainer.max_steps=50", "trainer.val_check_interval=25"]
    yield "shakespeare_cpu", [*SAME, *shakespeare]
    for name, overrides in VARIANTS.items():
        measures = [] if name in MEASURED else NO_MEASURES
        yield name, [*SAME, *SMALL, *text, "tokenizer=char", *measures, *overrides]
    for name, overrides in OWN_DATA.items():
        measures = [] if name in MEASURED else NO_MEASURES
        yield name, [*SAME, *SMALL, *measures, *overrides]


def figures(folder: Path) -> dict[str, Any]:
    """The losses in a run's folder, and the measures of its heads where they were recorded."""
    with (folder / "metrics.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    final = {key: value for key, value in results.items() if key.startswith(("val/", "best/", "test/"))}
    measures = {key: float(value) for key, value in rows[-1].items() if key.startswith("attention/") and value}
    return {
        "train/loss": [float(row["train/loss"]) for row in rows if row["train/loss"]],
        **{key: value for key, value in final.items() if isinstance(value, int | float)},
        **measures,
    }


def _train(overrides: list[str], folder: Path) -> None:
    """Run, in a process of its own, `python train.py` with these overrides, its output going to a file."""
    import torch

    torch.set_num_threads(1)
    with (folder / "printed.txt").open("w", encoding="utf-8") as printed:
        os.dup2(printed.fileno(), 1)
        os.dup2(printed.fileno(), 2)
    sys.path.insert(0, str(ROOT))
    sys.argv = ["train.py", *overrides, f"hydra.run.dir={folder / 'run'}"]
    try:
        runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
    except SystemExit:
        raise
    except BaseException:
        traceback.print_exc()
        raise


def train(overrides: list[str], folder: Path) -> dict[str, Any]:
    """The figures of a run.

    Its process is forked from this one, in which the libraries are imported already: that is most of a short run's
    time.

    Raises:
        RuntimeError: the run failed.
    """
    folder.mkdir()
    process = multiprocessing.get_context("fork").Process(target=_train, args=(overrides, folder))
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"train.py {' '.join(overrides)}\n{(folder / 'printed.txt').read_text(encoding='utf-8')}")
    return figures(folder / "run")


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[tuple[str, str, str]]:
    """The figures of one run that are not equal: the name, and both values."""
    found = []
    for key in dict.fromkeys([*before, *after]):
        old, new = before.get(key), after.get(key)
        if old == new:
            continue
        if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
            step = next(n for n, (a, b) in enumerate(zip(old, new, strict=True)) if a != b)
            found.append((f"{key}, first at step {step + 1}", repr(old[step]), repr(new[step])))
        else:
            found.append((key, repr(old), repr(new)))
    return found


def environment() -> dict[str, str]:
    """The versions and the machine that floating-point results may depend on, apart from the code."""
    import torch

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Seeded losses of a fixed list of short runs.")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write the figures")
    parser.add_argument("--compare", type=Path, metavar="FILE.json", help="exit with 1 where a figure differs from it")
    parser.add_argument("--shakespeare", type=Path, metavar="FILE.txt", help="the text; otherwise that of data=pydoc")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="of the runs, these alone")
    return parser.parse_args()


def main() -> int:
    """Run all, print, write, and compare.

    Returns:
        The exit code: 0, 1 where a figure differs or a run failed, 2 for a mistake in the arguments.
    """
    arguments = parse()
    text, digest = ["data=pydoc"], "pydoc"
    if arguments.shakespeare:
        text = ["data=text", f"data.files={arguments.shakespeare.resolve()}"]
        digest = hashlib.sha256(arguments.shakespeare.read_bytes()).hexdigest()
    before = json.loads(arguments.compare.read_text(encoding="utf-8")) if arguments.compare else None
    if before and before["text"] != digest:
        print(f"{arguments.compare} was made from another text; --shakespeare names the file.", file=sys.stderr)
        return 2
    if unknown := set(arguments.only or ()) - {name for name, _ in runs(text)}:
        print(f"--only: no run is named {', '.join(sorted(unknown))}.", file=sys.stderr)
        return 2

    os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported
    import lightning  # noqa: F401 -- for the processes to come
    import matplotlib.pyplot  # noqa: F401

    start, found, failed = time.perf_counter(), {}, []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TINYFORMER_CACHE"] = f"{folder}/cache"
        os.chdir(folder)  # and no file of the user's is in the way
        for number, (name, overrides) in enumerate(runs(text)):
            if arguments.only and name not in arguments.only:
                continue
            began = time.perf_counter()
            try:
                found[name] = train(overrides, Path(folder) / f"run-{number:02d}")
            except RuntimeError as error:
                failed.append(name)
                print(f"{name:<30} failed: {error}", flush=True)
                continue
            loss, validation = found[name]["train/loss"][-1], found[name]["val/loss"]
            took = time.perf_counter() - began
            print(f"{name:<30} train {loss!r:<20} val {validation!r:<20} {took:4.1f} s", flush=True)
    seconds = time.perf_counter() - start
    print(f"\n{len(found)} runs in {seconds:.0f} s; failed: {', '.join(failed) or 'none'}")
    if arguments.out:
        record = {"text": digest, "environment": environment(), "seconds": round(seconds), "runs": found}
        arguments.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if not before:
        return 1 if failed else 0

    if before["environment"] != environment():
        print(f"The environment differs: {before['environment']} before, {environment()} now.")
    compared = [name for name in before["runs"] if not arguments.only or name in arguments.only]
    rows = [(name, *row) for name in compared for row in differences(before["runs"][name], found.get(name, {}))]
    for name, key, old, new in rows:
        print(f"{name:<30} {key:<48} {old:>24} {new:>24}")
    for name in sorted(found.keys() - before["runs"].keys()):
        print(f"{name:<30} is not in {arguments.compare}")
    print(f"{len({row[0] for row in rows})} of {len(compared)} runs differ.")
    return 1 if rows or failed else 0


if __name__ == "__main__":
    sys.exit(main())
