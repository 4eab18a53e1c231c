"""The fixtures that all tests share, such as programs run as a user runs them, and the skips that are allowed."""

import contextlib
import functools
import gc
import io
import logging
import os
import pickle
import runpy
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import omegaconf
import pytest
import torch
from browser import chromium
from commands import BOOK, ROOT, SMALL, TEXT, Ended, Program, Trained
from hydra._internal import defaults_list
from hydra._internal.hydra import Hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import settings
from omegaconf import OmegaConf
from playwright.sync_api import Browser

# The models of the tests are so small that a second thread only waits, and on a busy machine it waits long.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)

# How long an example takes says more about the machine than about the code.
settings.register_profile("tinyformer", deadline=None)
settings.load_profile("tinyformer")

# In each run the same few interpolations and overrides are parsed a thousand times; what parsers return is only read.
for module in (omegaconf.base, omegaconf._utils):
    module.parse = functools.cache(module.parse)
parse_override = functools.cache(OverridesParser.create().parse_override)
OverridesParser.parse_override = lambda self, text: parse_override(text)

# Hydra reads each config file anew for each run, and all of them once more to learn whether one sets `hydra.mode`.
read = OmegaConf.load
pickled = functools.cache(lambda text: pickle.dumps(read(io.StringIO(text))))
OmegaConf.load = lambda file: pickle.loads(pickled(file.read())) if hasattr(file, "read") else read(file)
Hydra.get_mode = lambda self, config_name, overrides: None
defaults_list._create_interpolation_map = lambda *arguments: None  # no list of defaults of ours has interpolations

SKIPS = {"Skipped: needs CUDA"}
"""The reasons for which a test may be skipped in CI."""


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """One cache of tokenised text for all tests, away from the user's."""
    if "TINYFORMER_CACHE" not in os.environ:
        os.environ["TINYFORMER_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    os.environ.pop("WANDB_API_KEY", None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One Chromium for the tests of a module; while Playwright is there, no other event loop can run in the process."""
    with chromium() as browser:
        yield browser


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Environment variables and loggers of each test's own: a program in this process sets some."""
    with mock.patch.dict(os.environ), mock.patch.object(logging.root, "handlers", [*logging.root.handlers]):
        yield


@pytest.fixture
def native_bf16(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """A CPU that computes bf16 in hardware, or, after `native_bf16(False)`, one that does not."""

    def pretend(native: bool) -> None:
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: native)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)

    pretend(True)
    return pretend


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Program:
    """Run `train.py` or `evaluate.py` in this process, in an empty folder: `program("train.py", "seed=1 …")`."""
    monkeypatch.chdir(tmp_path)

    def run(script: str, *arguments: str, split: bool = True) -> Ended:
        words = [word for argument in arguments for word in (shlex.split(argument) if split else [argument])]
        monkeypatch.setattr(sys, "argv", [script, *words])
        monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
        GlobalHydra.instance().clear()
        capsys.readouterr()
        code: int | str | None = 0
        try:
            runpy.run_path(str(ROOT / script), run_name="__main__")
        except SystemExit as end:
            code = end.code
        printed = capsys.readouterr()
        assert isinstance(code, int)
        return Ended(code, printed.out, printed.err)

    return run


@pytest.fixture
def book(tmp_path: Path) -> Path:
    """A text of a few thousand characters, lines and all."""
    path = tmp_path / "book.txt"
    path.write_text(BOOK)
    return path


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, cache: None) -> Trained:
    """A run of 30 steps on `BOOK`, which Python starts; tests read its folder and change nothing in it."""
    from tinyformer.config.launch import compose_run
    from tinyformer.run.pipeline import train

    folder, out = tmp_path_factory.mktemp("trained"), io.StringIO()
    (folder / "book.txt").write_text(BOOK)
    overrides = f"{SMALL} {TEXT} data.test_fraction=0.1 attention=gqa position=rotary trainer.max_steps=30 "
    overrides += "optimizer.lr=1e-2 trainer.val_check_interval=15 callbacks.snapshots.every_n_steps=15"
    with contextlib.chdir(folder), contextlib.redirect_stdout(out):
        config, invocation = compose_run("train", overrides.split())
        results = train(config, folder / "run", invocation)
    return Trained(folder / "run", results, out.getvalue())


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test that starts a program or a browser is slow, but for a smoke test of each program."""
    for item in items:
        if {"program", "browser"} & {*getattr(item, "fixturenames", ())} and not item.get_closest_marker("smoke"):
            item.add_marker("slow")


def pytest_collection_finish() -> None:
    """Leave the objects of all modules, which are no garbage, out of the collections of garbage from now on."""
    gc.freeze()


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """In CI a test may be skipped for the reasons in `SKIPS` only."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("CI") != "true" or reporter is None:
        return
    reasons = {report.longrepr[2] for report in reporter.stats.get("skipped", [])}
    other = sorted(reasons - SKIPS)
    if other:
        reporter.write_line(f"skipped in CI: {other}", red=True)
        session.exitstatus = 1
