"""Shared by the benchmarks: runs of `train.py`'s config in this process, and descriptions of the machine."""

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
from omegaconf import DictConfig

from tinyformer.config.errors import config_keys, exit_code_of
from tinyformer.config.launch import CommandLine, compose_run
from tinyformer.hardware import describe_device
from tinyformer.nn import Transformer
from tinyformer.run.network import make_network

ROOT = Path(__file__).parent.parent
PACKAGES = ("torch", "lightning", "transformers", "x-transformers", "datasets", "numpy")

Result = TypeVar("Result")


def with_config(job: Callable[[DictConfig, Path, CommandLine], Result], overrides: Sequence[str]) -> Result:
    """The result of a job that is given the config of `train` with these overrides, and a temporary folder for its run.

    Raises:
        SystemExit: the config cannot work, or the job failed; the reason was printed.
    """
    results: list[Any] = []

    def run() -> None:
        config, invocation = compose_run("train", overrides)
        with tempfile.TemporaryDirectory() as folder, config_keys(config):
            results.append(job(config, Path(folder) / "run", invocation))

    code = exit_code_of(run, "train")
    if code:
        sys.exit(code)
    return results[0]


def our_network(overrides: Sequence[str], vocab_size: int) -> Transformer:
    """The network of these overrides, without data, its weights drawn from seed 0."""
    config, _ = compose_run("train", [*overrides, f"model.vocab_size={vocab_size}"])
    torch.manual_seed(0)
    return make_network(config, None)


def commit() -> str:
    """The commit that was measured."""
    return subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True).strip()


def machine(device: str) -> str:
    """The device and the number of cores."""
    return f"{describe_device(device)}, {os.cpu_count()} cores"


def versions() -> dict[str, str]:
    """The versions of Python and of the compared packages that are installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
