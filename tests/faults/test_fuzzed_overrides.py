"""Overrides drawn at random: a run, or one sentence; never a traceback, never a minute."""

import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import SMALL, Program

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


def drawn_overrides(draw: random.Random) -> Iterator[list[str]]:
    """Between one and three changes, of all keys and of all choices of all groups."""
    register_resolvers()
    keys = [key for key in values_of_keys() if not key.startswith(OUTSIDE)]
    files = [file for file in config_dir().glob("*/[!_]*.yaml") if file.parent.name not in ("experiment", "analysis")]
    choices = [f"{file.parent.name}={file.stem}" for file in files]
    while True:
        words = []
        for _ in range(draw.choice([1, 1, 1, 2, 3])):
            kind = draw.choice(["choice", "sane", "hostile"])
            if kind == "choice":
                words.append(draw.choice(choices))
                continue
            key = draw.choice(keys)
            is_sane = kind == "sane" or any(name in key for name in UNBOUNDED)
            value = draw.choice((SANE if is_sane else HOSTILE).split())
            words.append(draw.choice(["", "", "", "", "++", "+", "~"]) + f"{key}={value}")
        yield words


def run_out_of_time(number: int, frame: Any) -> None:
    raise TimeoutError


@pytest.mark.nightly
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("seed", range(NUMBER // BLOCK))
def test_no_override_ends_in_a_traceback(seed: int, tmp_path: Path, book: Path, program: Program) -> None:
    rows = (f"film {n} is {('dull', 'fine')[n % 2]},{n % 2}\n" for n in range(99))
    (tmp_path / "reviews.csv").write_text("text,label\n" + "".join(rows))
    draw, bad = random.Random(seed), []
    signal.signal(signal.SIGALRM, run_out_of_time)
    for number, words in zip(range(BLOCK), drawn_overrides(draw), strict=False):
        base = draw.choice(BASES)
        settings = f"{SMALL} {base} trainer.limit_val_batches=2 hydra.run.dir=run-{number}"
        started = time.monotonic()
        signal.alarm(LIMIT_SECONDS)
        ended = program("train.py", *settings.split(), *words, split=False)
        signal.alarm(0)
        seconds = time.monotonic() - started
        if ended.code not in (0, 2) or "Traceback" in ended.err or seconds > LIMIT_SECONDS:
            last = (ended.err.strip().splitlines() or ["nothing was said"])[-1]
            bad.append(f"{ended.code} after {seconds:.0f} s, {base} {words}: {last[:200]}")
    assert not bad, "\n".join(bad)
