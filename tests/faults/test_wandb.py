"""Weights & Biases with a key and no network: offline after some seconds, said in one line."""

import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from programs import SMALL, TEXT, Program

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
def test_a_run_goes_on_offline(
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
