"""Full disks, folders that cannot be made, closed pipes, early Ctrl-C: a sentence or silence, never a traceback."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import ROOT, SMALL, TEXT, Program

from tinyformer.checkpoint.file import load_checkpoint

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
    for filler in small_disk.glob("filler-*"):
        filler.unlink()
    ended = program("train.py", f"resume={small_disk}/run trainer.max_steps=60")
    assert ended.code == 0, ended.err


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
    command = [*TRAIN, *SMALL.split(), *TEXT.split(), "hydra.run.dir=run", "trainer.max_steps=300"]
    with (tmp_path / "errors").open("w") as errors:
        process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=errors)
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait() == 128 + signal.SIGPIPE
    assert (tmp_path / "errors").read_text() == ""


@pytest.mark.nightly
@pytest.mark.parametrize("seconds", [2.0, 5.0])
def test_ctrl_c_before_the_first_step_is_silent(tmp_path: Path, book: Path, seconds: float) -> None:
    command = [*TRAIN, *SMALL.split(), *TEXT.split(), "hydra.run.dir=run", "trainer.max_steps=1000000"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        time.sleep(seconds)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGINT
    assert error == ""
