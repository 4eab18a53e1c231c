"""The fixtures of this folder: metrics of a run, and signal handlers that are restored after each test."""

import signal

import pytest

from tinyformer.training import RunCSVLogger
from tinyformer.training.callbacks.checkpoints import SIGNALS


@pytest.fixture(autouse=True)
def _own_signals():
    """Signal handlers as in a terminal: pytest itself may run under `nohup`, or as a background job of a script."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def logger(tmp_path):
    return RunCSVLogger(tmp_path / "metrics.csv")
