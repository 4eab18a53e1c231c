"""Overrides drawn at random: a run, or one sentence; never a traceback, never a minute."""

import multiprocessing
import os
import random
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from commands import ROOT, SMALL, Ended
from omegaconf import OmegaConf

from tinyformer.config.conf import config_dir, register_resolvers, values_of_keys

NUMBER, BLOCK, LIMIT_SECONDS = 2000, 100, 60

HOSTILE = """
    0 -1 1e30 -1e30 1e-30 inf -inf nan null true abc '' [] {} [1,2] [[0]] {a:1} 1.5 1000000000000000000 100000
    00:00:00:00 '${model.d_model}' '${nope}' mine.Nope torch.nn.Linear é a/b [null] [abc]
"""
SANE = "0 1 2 3 4 8 16 0.1 0.5 1.0 true false null auto"
UNBOUNDED = ("max_steps", "max_epochs", "num_tokens", "max_seq_len", "num_sequences", "num_windows", "num_workers")
"""Keys whose large values mean a long run."""

OUTSIDE = ("hydra", "trainer.devices", "trainer.num_nodes")
"""Keys that start other processes, or wait for other machines."""

BASES = (
    "data=text data.files=book.txt tokenizer=char",
    "data=text data.files=book.txt tokenizer=byte task=masked_lm",
    "data=text data.files=reviews.csv data.label_column=label tokenizer=byte task=classification",
    "data=induction data.seq_len=16 data.max_period=4",
)


def leaves(node: Any, path: str) -> Iterator[str]:
    if isinstance(node, dict):
        for name in node:
            if name != "defaults":
                yield f"{path}.{name}"
                yield from leaves(node[name], f"{path}.{name}")


def drawn_overrides(draw: random.Random) -> Iterator[list[str]]:
    """Between one and three changes, of all keys and of all choices of all groups."""
    register_resolvers()
    keys = [key for key in values_of_keys() if not key.startswith(OUTSIDE)]
    files = [file for file in config_dir().glob("*/[!_]*.yaml") if file.parent.name not in ("experiment", "analysis")]
    keys_of = {
        f"{file.parent.name}={file.stem}": list(leaves(OmegaConf.to_container(OmegaConf.load(file)), file.parent.name))
        for file in files
    }
    while True:
        words = []
        for _ in range(draw.choice([1, 1, 1, 2, 3])):
            kind, choice, key = draw.choice(["choice", "own", "sane", "hostile"]), draw.choice([*keys_of]), None
            if kind in ("choice", "own"):
                words.append(choice)
                key = draw.choice([None, *keys_of[choice]]) if kind == "own" else None
            else:
                key = draw.choice(keys)
            if key is not None:
                is_sane = kind == "sane" or any(name in key for name in UNBOUNDED)
                value = draw.choice((SANE if is_sane else HOSTILE).split())
                words.append(draw.choice(["", "", "", "", "++", "+", "~"]) + f"{key}={value}")
        yield words


def run_forked(words: Sequence[str], folder: Path) -> tuple[Ended, float]:
    """Run `train.py` in a copy of this process, which has imported everything already."""
    import tinyformer.run.pipeline  # noqa: F401
    from tinyformer.programs.run import train_program

    started = time.monotonic()
    outputs = [folder / "out", folder / "err"]
    process = os.fork()
    if process == 0:
        code: Any = 1
        try:
            os.setsid()
            warnings.resetwarnings()  # pytest makes errors of them
            for number, path in enumerate(outputs, start=1):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
            sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
            sys.argv = [str(ROOT / "train.py"), *words]
            code = train_program("python train.py")
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    while not (ended := os.waitpid(process, os.WNOHANG))[0]:
        time.sleep(0.02)
        if time.monotonic() - started > LIMIT_SECONDS:
            os.killpg(process, signal.SIGKILL)
    out, err = (path.read_text() for path in outputs)
    return Ended(os.waitstatus_to_exitcode(ended[1]), out, err), time.monotonic() - started


def try_overrides(seed: int, folder: Path) -> list[str]:
    """What went wrong, of a block of random overrides."""
    os.chdir(folder)
    draw, bad = random.Random(seed), []
    for number, words in zip(range(BLOCK), drawn_overrides(draw), strict=False):
        base = draw.choice(BASES)
        settings = f"{SMALL} {base} trainer.limit_val_batches=2 hydra.run.dir=run-{number}"
        ended, seconds = run_forked([*settings.split(), *words], folder)
        if ended.code not in (0, 2) or "Traceback" in ended.err or seconds > LIMIT_SECONDS:
            last = (ended.err.strip().splitlines() or ["nothing was said"])[-1]
            bad.append(f"{ended.code} after {seconds:.0f} s, {base} {words}: {last[:200]}")
    return bad


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(NUMBER // BLOCK))
def test_no_override_ends_in_a_traceback(seed: int, tmp_path: Path, book: Path) -> None:
    rows = (f"film {n} is {('dull', 'fine')[n % 2]},{n % 2}\n" for n in range(99))
    (tmp_path / "reviews.csv").write_text("text,label\n" + "".join(rows))
    # In a new process: this one may have threads by now, whose locks stay locked in a fork.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as new:
        bad = new.submit(try_overrides, seed, tmp_path).result()
    assert not bad, "\n".join(bad)
