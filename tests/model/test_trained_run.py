"""`tinyformer.train`: what a run in Python returns, refuses and leaves as it was."""

import asyncio
import importlib
import logging
import os
import random
import re
import signal
import threading
import time
import warnings
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from commands import BOOK, ROOT, SMALL, TEXT, Program, results_of, weights_of
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig

import tinyformer
from tinyformer.checkpoint.file import load_raw
from tinyformer.config.errors import ConfigError

WORDS = [*SMALL.split(), *TEXT.split()]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a text."""
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text(BOOK)
    return tmp_path


def test_a_run_in_python_is_that_of_the_command_line(program: Program, place: Path) -> None:
    async def cell() -> tinyformer.TrainedRun:  # as in a notebook, whose event loop is running
        return tinyformer.train([*WORDS, "attention=gqa"])

    start = datetime.now()
    for second in range(60):  # runs of the same second
        (place / f"{start + timedelta(seconds=second):outputs/%Y-%m-%d/%H-%M-%S}").mkdir(parents=True)
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(asyncio.run, cell()).result()
    assert program("train.py", SMALL, TEXT, "attention=gqa hydra.run.dir=run").code == 0
    torch.testing.assert_close(weights_of(first.folder), weights_of("run"), rtol=0, atol=0)
    assert first.folder.parents[2] == place
    assert first.folder.name.endswith("-2")
    assert first.results == results_of(first.folder)
    assert first.results["val/loss"] == results_of("run")["val/loss"]
    assert first.best_checkpoint.exists()
    overrides = yaml.safe_load((first.folder / ".hydra" / "overrides.yaml").read_text())
    assert overrides == [*WORDS, "attention=gqa"]
    assert torch.equal(tinyformer.load(first.checkpoint).logits("the cat"), first.model.logits("the cat"))


def process_state(names: Iterable[str]) -> dict[str, Any]:
    """The settings that a caller may have made in its process, those of the loggers of these names included."""
    return {
        "random": [random.getstate(), torch.get_rng_state().tolist(), repr(np.random.get_state())],
        "torch": [torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()],
        "threads": [torch.get_num_threads(), {thread.name for thread in threading.enumerate()}],
        "environment": [dict(os.environ), Path.cwd(), list(warnings.filters)],
        "loggers": {name: (logging.getLogger(name).level, logging.getLogger(name).handlers[:]) for name in names},
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
        "hydra": [GlobalHydra.instance().hydra, HydraConfig.instance().cfg],
    }


def test_a_run_leaves_the_process_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ["matmul_precision=high", "deterministic=true", "seed=3"]
    importlib.import_module("tinyformer.run.pipeline")  # which sets up loggers, as matplotlib's import does
    with initialize_config_dir(str(ROOT / "conf"), version_base=None), warnings.catch_warnings():
        warnings.resetwarnings()
        monkeypatch.setattr(logging.getLogger("lightning.pytorch"), "level", logging.INFO)
        names = ["", *logging.Logger.manager.loggerDict]
        before = process_state(names)
        tinyformer.train([*WORDS, *settings])
        with pytest.raises(ConfigError):
            tinyformer.train([*WORDS, *settings, "model.num_heads=3"])
        after = process_state(names)
        assert {name for name, value in before.items() if value != after[name]} == set()


NO_TEST = "task=classification data.files=rows.csv data.label_column=label data.test_fraction=0.01 "
NO_TEST += "data.validation_fraction=0.3"
REFUSED = {
    "-m": "-m: tinyformer.train makes one run; call it in a loop, ",
    "seed=1,2": "seed=1,2: tinyformer.train makes one run; ",
    "--cfg": "--cfg: tinyformer.train takes overrides only, such as attention=gqa.",
    "model.num_heads=3": "model.num_heads=3: ",
    "trainer.devices=2": "trainer.devices=2: tinyformer.train uses one process; ",
    "hydra.run.dir=linked": "hydra.run.dir=linked: linked/link is a symbolic link, ",
    NO_TEST: "data.test_fraction=0.01: leaves the test split empty",
}


@pytest.mark.parametrize("word", REFUSED)
def test_what_cannot_work_is_a_sentence_and_leaves_no_folder(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("rows.csv").write_text("text,label\n" + "".join(f"the cat sees {n},{n % 2}\n" for n in range(4)))
    Path("linked").mkdir()
    Path("linked/link").symlink_to("/")
    with pytest.raises(ConfigError, match=f"^{re.escape(REFUSED[word])}") as refusal:
        tinyformer.train([*WORDS, "trainer.accelerator=cpu", *word.split()])
    assert refusal.value.__cause__ is None
    assert refusal.value.__suppress_context__
    assert capsys.readouterr() == ("", "")
    assert {path.name for path in Path().iterdir()} == {"book.txt", "rows.csv", "linked"}
    with pytest.raises(ConfigError, match="must be a list of words"):
        tinyformer.train(word)


@pytest.mark.slow
def test_ctrl_c_saves_the_run_and_the_handlers_are_the_callers() -> None:
    def interrupt() -> None:
        while not Path("run/checkpoints/last.ckpt").exists():
            time.sleep(0.01)
        signal.raise_signal(signal.SIGINT)

    handler = signal.getsignal(signal.SIGINT)
    threading.Thread(target=interrupt, daemon=True).start()
    long = ["trainer.max_steps=100000", "trainer.val_check_interval=5", "hydra.run.dir=run"]
    with pytest.raises(KeyboardInterrupt):
        tinyformer.train([*WORDS, *long])
    assert signal.getsignal(signal.SIGINT) == handler
    step = load_raw(Path("run/checkpoints/last.ckpt"))["global_step"]
    assert tinyformer.train(["resume=run", f"trainer.max_steps={step + 1}"]).results["steps"] == step + 1
