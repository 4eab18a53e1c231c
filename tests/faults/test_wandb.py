"""Weights & Biases without a network, and in the folder of a stranger."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import ROOT, SMALL, TEXT, Program, results_of
from wandb_file import read_config_and_summary

from tinyformer.training import loggers


def silent_server() -> socket.socket:
    """It accepts connections and never answers."""
    server = socket.create_server(("127.0.0.1", 0))
    server.listen()
    return server


def refusing_server() -> socket.socket:
    """It does not accept connections."""
    server = socket.socket()
    server.bind(("127.0.0.1", 0))
    return server


@pytest.mark.parametrize("make_server", [pytest.param(silent_server, marks=pytest.mark.slow), refusing_server])
def test_a_run_continues_offline(
    make_server: Callable[[], socket.socket], program: Program, book: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert loggers.WAIT_SECONDS <= 10  # twice: for a connection, and for an answer
    monkeypatch.setattr(loggers, "WAIT_SECONDS", 1.0)
    with make_server() as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("WANDB_BASE_URL", url)
        monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
        monkeypatch.delenv("WANDB_MODE", raising=False)
        started = time.perf_counter()
        ended = program("train.py", SMALL, TEXT, "logger=wandb hydra.run.dir=run")
    assert ended.code == 0, ended.err
    assert time.perf_counter() - started < 60
    assert ended.out.count("the run is logged offline.") == 1
    assert f"{url} cannot be reached (" in ended.out
    assert list(Path("run/wandb").glob("offline-run-*/run-*.wandb"))


def logged(run: Path) -> tuple[dict[str, Any], dict[str, Any], str]:
    """The configuration and the summary of the newest run of a folder, and all that wandb stores of it as text."""
    (file,) = (run / "wandb/latest-run").resolve().glob("run-*.wandb")
    config, summary = read_config_and_summary(file)
    return config, summary, file.read_text(errors="replace")


def test_the_config_and_the_results_are_logged(program: Program, book: Path) -> None:
    ended = program("train.py", f"{SMALL} {TEXT}", "logger=wandb hydra.run.dir=run")
    assert ended.code == 0, ended.err
    config, summary, _ = logged(Path("run"))
    costs, _ = config.pop("costs"), config.pop("_wandb")
    assert config == yaml.safe_load(Path("run/config.yaml").read_text())
    assert results_of("run").items() <= summary.items()
    assert costs["num_parameters"] == summary["num_parameters"]
    assert costs["flops_per_token"] == sum(costs["flops_per_token_by_part"].values())


@pytest.mark.slow
def test_a_sweep_and_a_resumed_run_log_theirs_without_paths_and_secrets(
    program: Program, book: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_of_mine")
    own = f"data.files={book} logger=wandb logger.tags=[hf_of_mine] hydra.sweep.dir={Path.cwd() / 'sweep'}"
    assert program("train.py", "-m", SMALL, TEXT, own, "seed=3,4").code == 0
    for job, seed in enumerate((3, 4)):
        config, summary, text = logged(Path(f"sweep/{job}"))
        assert (config["seed"], config["data"]["files"], config["logger"]["tags"]) == (seed, "book.txt", ["…"])
        assert str(book.parent) not in text
        assert results_of(f"sweep/{job}").items() <= summary.items()
    ended = program("train.py", f"resume={Path.cwd() / 'sweep/0'} trainer.max_steps=6 optimizer.lr=0.5")
    assert ended.code == 0, ended.err
    config, summary, text = logged(Path("sweep/0"))
    assert (config["trainer"]["max_steps"], config["optimizer"]["lr"], summary["steps"]) == (6, 0.5, 6)
    assert (config["resume"], config["seed"]) == ("0", 3)
    assert results_of("sweep/0").items() <= summary.items()


def git(*arguments: str) -> None:
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments], check=True, capture_output=True)


@pytest.mark.slow
def test_a_strangers_repository_and_settings_are_not_read(program: Program, book: Path, tmp_path: Path) -> None:
    """In a Git repository whose configuration names a command; resumed within the run, by a user who saves code."""
    assert program("train.py", SMALL, TEXT, "logger=wandb hydra.run.dir=run").code == 0
    git("init")
    git("add", "book.txt")
    git("commit", "-m", "first")
    git("config", "diff.external", f"touch {tmp_path / 'mark'}; true")
    book.write_text(book.read_text() + "changed")
    with pytest.raises(subprocess.CalledProcessError):
        git("diff", "--exit-code", "HEAD")
    (tmp_path / "mark").unlink()  # which Git's own command makes
    Path("run/wandb/settings").write_text(
        "[default]\nbase_url = http://127.0.0.1:1\nproject = theirs\nsave_code = true\n"
    )
    Path("run/config-defaults.yaml").write_text("a: '")
    Path("run/book.txt").write_text(book.read_text().removesuffix("changed"))
    environment = os.environ | {"WANDB_MODE": "offline", "WANDB_SAVE_CODE": "true", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "train.py"), "resume=.", "trainer.max_steps=6"]
    ended = subprocess.run(command, cwd="run", env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert not (tmp_path / "mark").exists()
    (newest,) = Path("run/wandb/latest-run").resolve().glob("*.wandb")
    assert b"theirs" not in newest.read_bytes()
