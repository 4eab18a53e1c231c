"""Metrics in a CSV file, and in Weights & Biases without a key."""

import csv
from itertools import pairwise
from urllib.parse import urlparse

import pytest
import torch

from tinyformer.errors import ArgumentError
from tinyformer.training import RunCSVLogger, RunWandbLogger, loggers
from tinyformer.training.loggers import has_wandb_key

# The CSV file.


def make_logger(path, entries, **options):
    logger = RunCSVLogger(path, **options)
    for step, name, value in entries:
        logger.log_metrics({name: value}, step=step)
    return logger


def test_a_resumed_run_continues_from_its_step_without_a_truncated_line(tmp_path):
    path = tmp_path / "metrics.csv"
    make_logger(path, [(step, "loss", step / 10) for step in (10, 20, 30)]).finalize("success")
    with path.open("a") as file:
        file.write("4")
    assert RunCSVLogger(path).rows == {}
    assert list(RunCSVLogger(path, first_step=100).rows) == [10, 20, 30]
    make_logger(path, [(30, "loss", 9.0), (30, "new", 4.0), (20, "new", 5.0)], first_step=20).save()
    assert path.read_text().split() == ["step,loss,new", "10,1.0,", "20,2.0,5.0", "30,9.0,4.0"]


def test_the_file_is_written_atomically(tmp_path, monkeypatch):
    logger = make_logger(tmp_path / "metrics.csv", [(1, "loss", 1.0)])
    logger.save()
    before = logger.path.read_bytes()
    logger.log_metrics({"other": 2.0}, step=2)
    monkeypatch.setattr(csv.DictWriter, "writerows", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        logger.save()
    assert logger.path.read_bytes() == before
    monkeypatch.undo()
    logger.save()
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.csv"]


def test_saving_often_and_once_write_the_same(tmp_path):
    """New steps are appended; a new metric, or another one for an old step, rewrites the file."""
    entries = [
        (1, "a", 1.0),
        (2, "a", 2.0),
        (3, "b", 1 / 3),
        (4, "a", 4.0),
        (2, "b", 5.0),
        (5, "a", 6.0),
        (5, "a", 7.0),
    ]
    often, once, inodes = RunCSVLogger(tmp_path / "often.csv"), make_logger(tmp_path / "once.csv", entries), []
    for step, name, value in entries:
        often.log_metrics({name: torch.tensor(value, dtype=torch.float64)}, step=step)
        often.save()
        inodes.append(often.path.stat().st_ino)
    once.save()
    assert often.path.read_text() == once.path.read_text()
    assert once.path.read_text().split() == f"step,a,b 1,1.0, 2,2.0,5.0 3,,{1 / 3} 4,4.0, 5,7.0,".split()
    appended = [inode == following for inode, following in pairwise(inodes)]
    assert appended == [True, False, True, False, True, False]


# The key.


@pytest.fixture(autouse=True)
def no_key(monkeypatch, tmp_path):
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def test_an_api_key_is_found_in_the_environment_and_in_netrc(tmp_path, monkeypatch):
    ours = f"machine {urlparse(loggers.wandb_url()).hostname} login user password secret\n"
    other = "machine wandb.example.org login a password b\n"
    netrc = tmp_path / "netrc"
    assert not has_wandb_key()
    for text, found in ((ours, True), (other, False), ("machine", False)):
        netrc.write_text(text)
        netrc.chmod(0o600)
        assert has_wandb_key() is found
    netrc.write_text(other)
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org:8080")
    assert has_wandb_key()
    netrc.unlink()
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    assert has_wandb_key()


# Weights & Biases.


@pytest.mark.parametrize(
    ("mode", "key", "offline"),
    [("", "", True), ("", "x" * 40, False), ("offline", "x" * 40, True), ("online", "", False)],
)
def test_online_only_with_a_key(tmp_path, monkeypatch, mode, key, offline):
    monkeypatch.setattr(loggers, "unreachable", lambda url, seconds: None)
    monkeypatch.setenv("WANDB_MODE", mode)
    monkeypatch.setenv("WANDB_API_KEY", key)
    assert RunWandbLogger(tmp_path, "id").is_offline is offline


def test_what_wandb_would_refuse_is_refused_with_its_argument(tmp_path):
    for name, value in {"project": "a/b", "tags": [""]}.items():
        with pytest.raises(ArgumentError, match=rf"^{name}=.*; {name}=.* works\.$"):
            RunWandbLogger(tmp_path, "id", **{name: value})
