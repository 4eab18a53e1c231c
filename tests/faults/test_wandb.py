"""Weights & Biases without a network, and in the folder of a stranger."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import pytest
from commands import ROOT, SMALL, TEXT, Program, results_of
from wandb_file import read_config_and_summary

from tinyformer.errors import ArgumentError
from tinyformer.training import loggers


@pytest.fixture
def no_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def test_an_api_key_is_found_in_netrc(no_key: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = f"machine {urlparse(loggers.wandb_url()).hostname} login user password secret\n"
    other = "machine wandb.example.org login a password b\n"
    netrc = tmp_path / "netrc"
    assert not loggers.has_wandb_key()
    for text, found in ((ours, True), ("machine", False), (other, False)):
        netrc.write_text(text)
        netrc.chmod(0o600)
        assert loggers.has_wandb_key() is found
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org:8080")
    assert loggers.has_wandb_key()


@pytest.mark.parametrize(
    ("mode", "key", "offline"),
    [("", "", True), ("", "x" * 40, False), ("offline", "x" * 40, True), ("online", "", False)],
)
def test_online_only_with_a_key(
    no_key: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, key: str, offline: bool
) -> None:
    monkeypatch.setattr(loggers, "unreachable", lambda url, seconds: None)
    monkeypatch.setenv("WANDB_MODE", mode)
    monkeypatch.setenv("WANDB_API_KEY", key)
    assert loggers.RunWandbLogger(tmp_path, "id").is_offline is offline


def test_what_wandb_would_refuse_is_refused_with_its_argument(tmp_path: Path) -> None:
    for name, value in {"project": "a/b", "tags": [""]}.items():
        with pytest.raises(ArgumentError, match=rf"^{name}=.*; {name}=.* works\.$"):
            loggers.RunWandbLogger(tmp_path, "id", **{name: value})


@pytest.mark.parametrize("is_silent", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_run_continues_offline(
    is_silent: bool, program: Program, book: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a server that accepts connections and never answers, or accepts none."""
    assert loggers.WAIT_SECONDS <= 10  # twice: for a connection, and for an answer
    monkeypatch.setattr(loggers, "WAIT_SECONDS", 1.0)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if is_silent:
            server.listen()
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
        assert config["costs"]["num_parameters"] == summary["num_parameters"]
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
