"""What the benchmarks share: runs of `train.py`'s config in this process, and where figures were measured."""

import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from tinyformer.app import run_program
from tinyformer.app.build import make_network
from tinyformer.app.config import register_resolvers
from tinyformer.nn import Transformer
from tinyformer.training.hardware import describe_device

ROOT = Path(__file__).parent.parent
PACKAGES = ("torch", "lightning", "transformers", "x-transformers", "datasets", "numpy")

Result = TypeVar("Result")


def with_config(job: Callable[[DictConfig], Result], overrides: Sequence[str]) -> Result:
    """What a job makes of the config of `train.py` with these overrides, its run's folder a temporary one.

    Raises:
        SystemExit: the config cannot work, or the job failed; why was printed.
    """
    results: list[Any] = []
    given = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        sys.argv[1:] = [*overrides, f"hydra.run.dir={folder}/run"]
        code = run_program(lambda config: results.append(job(config)), ROOT / "conf", "train")
        sys.argv[1:] = given
    if code:
        sys.exit(code)
    return results[0]


def our_network(overrides: Sequence[str], vocab_size: int) -> Transformer:
    """The network of these overrides, without data; its weights drawn from seed 0."""
    register_resolvers(ROOT / "conf")
    with initialize_config_dir(str(ROOT / "conf"), version_base=None):
        config = compose("train", overrides=[*overrides, f"model.vocab_size={vocab_size}"])
    torch.manual_seed(0)
    return make_network(config, None)


def commit() -> str:
    """The commit that was measured."""
    return subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True).strip()


def machine(device: str) -> str:
    """The device and the cores."""
    return f"{describe_device(device)}, {os.cpu_count()} cores"


def versions() -> dict[str, str]:
    """Of Python and of the packages that are compared, those that are installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
