"""Full disks, folders that cannot be made, closed pipes, early Ctrl-C, any overrides: never a traceback."""

import os
import random
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import ROOT, SMALL, TEXT, Program

from tinyformer.checkpoint.file import load_checkpoint
from tinyformer.config.conf import config_dir, register_resolvers, values_of_keys

TRAIN = [sys.executable, str(ROOT / "train.py")]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 700 KB."""
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=700k", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.nightly
@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts a file system")
def test_a_full_disk_is_reported_and_leaves_what_was_whole(program: Program, book: Path, small_disk: Path) -> None:
    run = f"hydra.run.dir={small_disk}/run"
    assert program("train.py", SMALL, TEXT, run, "callbacks=default callbacks.attention=null").code == 0
    last = small_disk / "run" / "checkpoints" / "last.ckpt"
    step = load_checkpoint(last).step
    for number, free in enumerate((200_000, 100_000, 20_000, 0)):
        filler = small_disk / f"filler-{free}"
        with filler.open("wb") as file:
            left = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize
            file.write(bytes(max(0, left - free)))
        ended = program("train.py", f"resume={small_disk}/run trainer.max_steps={50 + number}")
        assert ended.code in (0, 2), ended.err
        if ended.code:
            assert "No space left on device" in ended.err, ended.err
            assert str(small_disk) in ended.err, ended.err
            assert len(ended.err.strip().splitlines()) == 1, ended.err
        assert load_checkpoint(last).step >= step
    assert ended.code == 2


@pytest.mark.parametrize("folder", ["book.txt/run", "/sys/run"])
def test_a_folder_that_cannot_be_made_is_reported(program: Program, book: Path, folder: str) -> None:
    ended = program("train.py", SMALL, TEXT, f"hydra.run.dir={folder}")
    assert (ended.code, len(ended.err.strip().splitlines())) == (2, 1), ended.err
    assert folder.partition("/run")[0] in ended.err


FILES = (
    *("config.yaml", "metrics.csv", "events.csv", "results.json", "attention/heads.csv", "attention/step_000004.png"),
    *("checkpoints/best.ckpt", "checkpoints/previous.ckpt", "fit-profile.txt"),
)
FOLDERS = ("attention", "checkpoints", ".hydra")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FILES, *FOLDERS])
def test_a_file_that_cannot_be_written_is_reported(name: str, program: Program, book: Path) -> None:
    """A folder is in its place, or a file in that of a folder: rights would not stop root."""
    path = Path("run", name)
    path.parent.mkdir(parents=True, exist_ok=True)
    if name in FOLDERS:
        path.write_text("here first")
    else:
        (path / "here first").mkdir(parents=True)
    settings = "trainer.profiler=simple trainer.val_check_interval=2 hydra.run.dir=run"
    ended = program("train.py", SMALL, TEXT, settings)
    assert (ended.code, len(ended.err.strip().splitlines())) == (2, 1), ended.err
    assert "/run/" + name.replace("previous", "last") in ended.err
    assert path.read_text() == "here first" if name in FOLDERS else (path / "here first").is_dir()


@pytest.mark.slow
def test_nobody_reads_the_output(tmp_path: Path, book: Path) -> None:
    train = shlex.join([*TRAIN, *SMALL.split(), *TEXT.split(), "hydra.run.dir=run", "trainer.max_steps=300"])
    command = ["bash", "-c", f"{train} | true; exit ${{PIPESTATUS[0]}}"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGPIPE, "")


@pytest.mark.nightly
@pytest.mark.parametrize("seconds", [2.0, 5.0])
def test_ctrl_c_before_the_first_step_is_silent(tmp_path: Path, book: Path, seconds: float) -> None:
    after = ["timeout", "--preserve-status", "--signal=INT", str(seconds)]
    command = [*after, *TRAIN, *SMALL.split(), *TEXT.split(), "hydra.run.dir=run", "trainer.max_steps=1000000"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGINT, "")


# Overrides drawn at random: a run, or one sentence, within a minute.

NUMBER, BLOCK, LIMIT_SECONDS = 2000, 100, 60

SANE = "0 1 2 3 4 8 16 0.1 0.5 1.0 true false null auto"
HOSTILE = """
    -1 1e30 -1e30 1e-30 inf -inf nan abc '' [] {} [1,2] [[0]] {a:1} 1.5 1000000000000000000 100000
    00:00:00:00 '${model.d_model}' '${nope}' mine.Nope torch.nn.Linear é a/b [null] [abc]
"""
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


def drawn_override(draw: random.Random) -> str:
    """A change, of any key or of the choice of any group."""
    if draw.random() < 1 / 3:
        files = sorted(config_dir().glob("*/[!_]*.yaml"))
        chosen = draw.choice([file for file in files if file.parent.name not in ("experiment", "analysis")])
        return f"{chosen.parent.name}={chosen.stem}"
    key = draw.choice([key for key in values_of_keys() if not key.startswith(OUTSIDE)])
    values = SANE if draw.random() < 1 / 2 or any(name in key for name in UNBOUNDED) else HOSTILE
    return draw.choice(["", "", "", "", "++", "+", "~"]) + f"{key}={draw.choice(values.split())}"


@pytest.mark.nightly
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("seed", range(NUMBER // BLOCK))
def test_no_override_ends_in_a_traceback(seed: int, tmp_path: Path, book: Path, program: Program) -> None:
    register_resolvers()
    rows = (f"film {n} is {('dull', 'fine')[n % 2]},{n % 2}\n" for n in range(99))
    (tmp_path / "reviews.csv").write_text("text,label\n" + "".join(rows))
    draw, bad = random.Random(seed), []
    signal.signal(signal.SIGALRM, signal.default_int_handler)  # what takes too long ends as after Ctrl-C
    for number in range(BLOCK):
        base, words = draw.choice(BASES), [drawn_override(draw) for _ in range(draw.choice([1, 1, 1, 2, 3]))]
        settings = f"{SMALL} {base} trainer.limit_val_batches=2 hydra.run.dir=run-{number}"
        signal.alarm(LIMIT_SECONDS)
        ended = program("train.py", *settings.split(), *words, split=False)
        signal.alarm(0)
        if ended.code not in (0, 2) or "Traceback" in ended.err:
            last = (ended.err.strip().splitlines() or ["nothing was said"])[-1]
            bad.append(f"{ended.code}, {base} {words}: {last[:200]}")
    assert not bad, "\n".join(bad)
